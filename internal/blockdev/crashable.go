package blockdev

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"

	"github.com/ubcache/ubcache/internal/rt"
)

// Power supplies Crashables, all of which lose it at the same moment. The zero value never fails.
type Power struct {
	limit atomic.Int64 // operations left after which the power fails, plus those done; 0: no limit
	ops   atomic.Int64
	off   atomic.Bool
}

// CutAfter makes the power fail after n more operations that change something: writes, writes of zeroes, discards
// and flushes, on whichever device. The next one, and everything after it, fails with ErrPowerCut.
func (p *Power) CutAfter(n int) { p.limit.Store(p.ops.Load() + int64(n) + 1) }

// Cut makes the power fail now.
func (p *Power) Cut() { p.off.Store(true) }

// IsCut reports whether the power has failed. After CutAfter(n), that is when an operation has been refused.
func (p *Power) IsCut() bool { return p.off.Load() }

// Ops returns how many operations that change something have been accepted.
func (p *Power) Ops() int { return int(p.ops.Load()) }

// admit decides about one request.
func (p *Power) admit(op Op) bool {
	if p.off.Load() {
		return false
	}
	if op == OpRead {
		return true
	}
	n := p.ops.Add(1)
	if limit := p.limit.Load(); limit > 0 && n >= limit {
		p.off.Store(true)
		p.ops.Add(-1)
		return false
	}
	return true
}

// Strength says how much a crash may do to the writes that were not yet durable.
type Strength int

const (
	Prefix    Strength = iota // nothing: all that the device accepted is there
	Reordered                 // any of them are there, put down in any order
	Torn                      // as Reordered, and of each that is there perhaps only some sectors
)

func (s Strength) String() string {
	if s >= Prefix && s <= Torn {
		return [...]string{"prefix", "reordered", "torn"}[s]
	}
	return fmt.Sprintf("strength %d", int(s))
}

// Crashable is a disk with a volatile cache, whose power can be cut. Beside the device below, which shows what a
// running program sees, it keeps what is certain to outlast a crash, and the writes that are not:
//
//	          submitted                  completed, then a flush
//	write ------------------> volatile ---------------------------> durable
//	FUA write ------------------------------ completed -----------> durable
//
//	Crash: a new device = durable + what Strength leaves of volatile
//
// A flush makes those writes durable that had completed when it was submitted, when it completes itself.
// Discards and writes of zeroes are writes of zeroes here.
type Crashable struct {
	layer
	power   *Power
	barrier func(data []byte) bool

	mu       rt.Mutex
	durable  *MemoryDevice
	touched  map[int64]struct{} // the chunks of durable that may differ from zero
	volatile []*volatileWrite   // in the order of submission
	dead     int                // those in the list that are durable, or nowhere
	clock    uint64             // counts completions
}

// chunk is the unit in which Crash copies the durable image.
const chunk = 64 << 10

// A volatileWrite is a write that a crash may undo.
type volatileWrite struct {
	off       int64
	size      int64
	data      []byte // nil: zeroes
	completed uint64 // when, by Crashable.clock; 0: not yet
	durable   bool   // to be removed from the list
	over      []bool // sectors that a later write has made durable otherwise; nil: none
}

// CrashableOptions modify NewCrashable.
type CrashableOptions struct {
	Power *Power // default: the device's own
	// Barrier, if not nil, tells of a write whether it is one: when it has completed it is durable, whole, and so is all
	// that had completed when it was submitted.
	Barrier func(data []byte) bool
}

// NewCrashable wraps dev, whose content is taken to be durable. It keeps a copy of it in memory, so huge devices
// should be new MemoryDevices, which need no copying.
func NewCrashable(dev Device, o CrashableOptions) (*Crashable, error) {
	c := &Crashable{layer: newLayer(dev), power: o.Power, barrier: o.Barrier, touched: map[int64]struct{}{}}
	if c.power == nil {
		c.power = new(Power)
	}
	c.mu.Init(c.rt)
	var err error
	if c.durable, err = c.newImage(); err != nil {
		return nil, err
	}
	if m, ok := innermost(dev).(*MemoryDevice); ok && !m.written.Load() {
		return c, nil
	}
	if err := c.copyFrom(dev); err != nil {
		return nil, errors.Join(err, c.durable.Close())
	}
	return c, nil
}

// newImage makes an empty device like the one below.
func (c *Crashable) newImage() (*MemoryDevice, error) {
	i := c.Info()
	return Memory(i.Size, MemoryOptions{
		Name: i.Name, LogicalBlock: i.LogicalBlock, PhysicalBlock: i.PhysicalBlock, BufferAlign: i.BufferAlign,
		NoDiscard: !i.CanDiscard, Rotational: i.Rotational, Runtime: c.rt,
	})
}

// copyFrom makes the durable image equal to dev.
func (c *Crashable) copyFrom(dev Device) error {
	in, err := NewIO(dev, 1)
	if err != nil {
		return err
	}
	size := dev.Info().Size
	buf := make([]byte, chunk)
	for off := int64(0); off < size; off += chunk {
		p := buf[:min(chunk, size-off)]
		if err := in.ReadAt(p, off); err != nil {
			return errors.Join(err, in.Close())
		}
		if !isZero(p) {
			c.store(off, p)
		}
	}
	return in.Close()
}

// Power returns what supplies the device.
func (c *Crashable) Power() *Power { return c.power }

// CutPowerAfter is Power().CutAfter, and returns c.
func (c *Crashable) CutPowerAfter(n int) *Crashable {
	c.power.CutAfter(n)
	return c
}

// Unflushed returns how many writes a crash could undo now.
func (c *Crashable) Unflushed() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.volatile) - c.dead
}

// Close closes the device below and drops the durable image; what Crash returned stays.
func (c *Crashable) Close() error {
	err := c.Device.Close()
	if e := c.durable.Close(); err == nil {
		err = e
	}
	return err
}

// Crash returns a new device with what a crash at this moment could leave, chosen by rng: the same state and the
// same random numbers give the same device. c itself is not affected, so there may be many crashes of one state;
// cut the power first where requests are still coming in. The caller closes the new device.
func (c *Crashable) Crash(rng *rand.Rand, strength Strength) (*MemoryDevice, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.durable.shut.Load() {
		return nil, ErrClosed
	}
	after, err := c.newImage()
	if err != nil {
		return nil, err
	}
	for i := range c.touched {
		off := i * chunk
		copy(after.mem[off:], c.durable.mem[off:min(off+chunk, c.Info().Size)])
	}
	after.written.Store(true)
	var kept []*volatileWrite
	share := rng.Float64() // some crashes keep nearly all, some hardly anything
	for _, w := range c.volatile {
		if !w.durable && (strength == Prefix || rng.Float64() < share) {
			kept = append(kept, w)
		}
	}
	if strength != Prefix {
		rng.Shuffle(len(kept), func(i, j int) { kept[i], kept[j] = kept[j], kept[i] })
	}
	for _, w := range kept {
		var there func(sector int) bool
		if strength == Torn && rng.IntN(2) == 0 {
			there = tear(rng, int(w.size)/c.Info().LogicalBlock)
		}
		w.apply(after.mem, c.Info().LogicalBlock, there)
	}
	return after, nil
}

// tear decides which of n sectors of a write are there: the first few, the last few, or any.
func tear(rng *rand.Rand, n int) func(int) bool {
	cut := rng.IntN(n + 1)
	switch rng.IntN(3) {
	case 0:
		return func(i int) bool { return i < cut }
	case 1:
		return func(i int) bool { return i >= cut }
	}
	return func(int) bool { return rng.IntN(2) == 0 }
}

// apply puts those sectors of w into the image that have not been overwritten for good and for which there, if
// any, is true.
func (w *volatileWrite) apply(image []byte, sector int, there func(sector int) bool) {
	for i, at := 0, int64(0); at < w.size; i, at = i+1, at+int64(sector) {
		if w.over != nil && w.over[i] || there != nil && !there(i) {
			continue
		}
		to := image[w.off+at:][:sector]
		if w.data == nil {
			clear(to)
		} else {
			copy(to, w.data[at:])
		}
	}
}

// store puts data into the durable image. c.mu is held, or nobody else knows c.
func (c *Crashable) store(off int64, data []byte) {
	copy(c.durable.mem[off:], data)
	c.touch(off, int64(len(data)))
}

func (c *Crashable) touch(off, n int64) {
	for i := off / chunk; i*chunk < off+n; i++ {
		c.touched[i] = struct{}{}
	}
}

// settle moves w to the durable image. c.mu is held.
func (c *Crashable) settle(w *volatileWrite) {
	w.durable = true
	switch {
	case w.data == nil && w.over == nil:
		c.durable.zero(w.off, w.size) // nothing to touch: what is zero by default needs no copy
	case w.over == nil:
		c.store(w.off, w.data)
	default:
		w.apply(c.durable.mem, c.Info().LogicalBlock, nil)
		c.touch(w.off, w.size)
	}
	w.data = nil
}

// submitted notes a write. c.mu is held.
func (c *Crashable) submitted(r *Request) *volatileWrite {
	w := &volatileWrite{off: r.Off, size: r.Length()}
	if r.Op == OpWrite {
		w.data = bytes.Clone(r.Buf)
	}
	c.volatile = append(c.volatile, w)
	return w
}

// completed notes the end of a write. c.mu is held.
func (c *Crashable) completed(r *Request, w *volatileWrite, barrier bool) {
	switch {
	case r.Err != nil:
		w.durable = true // it is nowhere
		c.dead++
	case r.Flags&FUA == 0 && !barrier:
		c.clock++
		w.completed = c.clock
	default:
		c.settle(w)
		c.override(w)
		c.dead++
	}
	if c.dead > 64 && c.dead > len(c.volatile)/2 {
		c.compact()
	}
}

// override keeps completed writes that are older than w, which has become durable before them, from coming back
// over it.
func (c *Crashable) override(w *volatileWrite) {
	sector := int64(c.Info().LogicalBlock)
	for _, old := range c.volatile {
		if old == w {
			break
		}
		from, to := max(old.off, w.off), min(old.off+old.size, w.off+w.size)
		if old.durable || old.completed == 0 || from >= to {
			continue
		}
		if old.over == nil {
			old.over = make([]bool, old.size/sector)
		}
		for at := from; at < to; at += sector {
			old.over[(at-old.off)/sector] = true
		}
	}
}

// flushed makes durable what had completed by then. c.mu is held.
func (c *Crashable) flushed(then uint64) {
	for _, w := range c.volatile {
		if !w.durable && w.completed != 0 && w.completed <= then {
			c.settle(w)
		}
	}
	c.compact()
}

// compact removes from the list what a crash cannot undo. c.mu is held.
func (c *Crashable) compact() {
	c.volatile = slices.DeleteFunc(c.volatile, func(w *volatileWrite) bool { return w.durable })
	c.dead = 0
}

// A crashOp is what a Crashable keeps of a request under way; it stands in for the submitter's Owner.
type crashOp struct {
	owner   any
	write   *volatileWrite
	barrier bool
	then    uint64 // of a flush or a barrier: the clock when it was submitted
}

// NewQueue makes a queue whose writes a crash may undo.
func (c *Crashable) NewQueue(depth int, complete func(done []*Request)) (Queue, error) {
	q := &crashQueue{c: c}
	q.init(&c.layer, complete)
	below, err := c.Device.NewQueue(depth, q.passedBack)
	if err != nil {
		return nil, err
	}
	q.below = below
	c.durable.refs.Add(1)
	return q, nil
}

type crashQueue struct {
	layerQueue
	c *Crashable
}

func (q *crashQueue) Close() error {
	err := q.layerQueue.Close()
	if err == nil {
		err = q.c.durable.release()
	}
	return err
}

func (q *crashQueue) Submit(reqs []*Request) {
	if !q.begin(len(reqs)) {
		q.refuse(reqs, ErrClosed)
		return
	}
	c := q.c
	info := c.Info()
	var pass, refused []*Request
	c.mu.Lock()
	for _, r := range reqs {
		if r.Err = info.Check(r); r.Err == nil && !c.power.admit(r.Op) {
			r.Err = ErrPowerCut
		}
		if r.Err != nil {
			refused = append(refused, r)
			continue
		}
		op := &crashOp{owner: r.Owner, then: c.clock}
		if r.Op.Writes() {
			op.write = c.submitted(r)
			op.barrier = r.Op == OpWrite && c.barrier != nil && c.barrier(r.Buf)
		}
		r.Owner = op
		pass = append(pass, r)
	}
	c.mu.Unlock()
	if len(pass) > 0 {
		q.below.Submit(pass)
	}
	if len(refused) > 0 {
		q.finish(refused...)
	}
}

func (q *crashQueue) passedBack(done []*Request) {
	q.c.mu.Lock()
	for _, r := range done {
		op := r.Owner.(*crashOp)
		r.Owner = op.owner
		switch {
		case op.write != nil:
			if op.barrier && r.Err == nil {
				q.c.flushed(op.then)
			}
			q.c.completed(r, op.write, op.barrier)
		case r.Op == OpFlush && r.Err == nil:
			q.c.flushed(op.then)
		}
	}
	q.c.mu.Unlock()
	q.finish(done...)
}

func isZero(p []byte) bool {
	for len(p) > 0 && p[0] == 0 {
		p = p[1:]
	}
	return len(p) == 0
}
