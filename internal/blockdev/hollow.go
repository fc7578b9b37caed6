package blockdev

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/rt"
)

// Flags of a page in the slabs.
const (
	hollowNode uint8 = 1 << iota // it was written for an index
	hollowUsed                   // read or written since NoteUse
)

// HollowOptions modify Hollow.
type HollowOptions struct {
	Name         string // default "hollow"
	LogicalBlock int    // bytes, a power of two up to 4096; default 512
	NoDiscard    bool   // discards are not supported

	// Keep says whether what a write brings is stored. Default: what is not ForData, ForWriteback or ForMoving, so that
	// the metadata of a cache is there, and the data is not.
	Keep func(r *Request) bool

	Runtime *rt.Runtime // default: the real one
}

// A HollowDevice is a disk of any size that stores only some of what is written to it, by pages and outside Go's heap. A
// write that is not stored is over at once, and its range reads as zeroes from then on. So a cache of hundreds of
// gigabytes, with the index that it has in the field, fits in memory. Requests are done within Submit, and complete
// there.
type HollowDevice struct {
	info   Info
	rt     *rt.Runtime
	keep   func(r *Request) bool
	base   *HollowDevice // what pages that are not in the table are; nil: zeroes
	clones atomic.Int64  // that have this one as their base: it does not change any more
	refs   atomic.Int64  // 1 for the open device, 1 per queue, 1 per clone; the memory goes at 0
	shut   atomic.Bool

	// Entries of the table change under mu, and are read without it: a range without pages, which is what data goes to,
	// takes no lock.
	table []uint32 // by page: what it is, and where

	mu    sync.Mutex // held for memory operations only
	slabs [][]byte
	flags []uint8  // by page
	free  []uint32 // pages that belong to nobody
	used  int      // pages ever given out
}

// Of an entry of the table; all else is the number of a page in the slabs.
const (
	hollowBase   = 0 // as the base has it
	hollowZero   = 1 // zeroes
	hollowFirst  = 2
	hollowPage   = 4096
	hollowSlab   = 4096                    // pages
	hollowEnough = hollowSlab * hollowPage // bytes of one
)

// Hollow makes a disk of size bytes, rounded down to whole pages of 4096, that reads as zeroes. Its table takes a byte per
// KiB of address space, and memory where pages are stored.
func Hollow(size int64, o HollowOptions) (*HollowDevice, error) {
	if o.Name == "" {
		o.Name = "hollow"
	}
	if o.LogicalBlock == 0 {
		o.LogicalBlock = 512
	}
	if o.Keep == nil {
		o.Keep = keepMetadata
	}
	if o.Runtime == nil {
		o.Runtime = rt.New()
	}
	size &^= hollowPage - 1
	if o.LogicalBlock < 512 || o.LogicalBlock > hollowPage || o.LogicalBlock&(o.LogicalBlock-1) != 0 || size <= 0 {
		return nil, fmt.Errorf("blockdev: hollow: bad block size %d or size %d", o.LogicalBlock, size)
	}
	d := &HollowDevice{
		info: Info{
			Name: o.Name, Size: size, LogicalBlock: o.LogicalBlock, PhysicalBlock: hollowPage, MaxTransfer: 1 << 20,
			BufferAlign: 512, CanDiscard: !o.NoDiscard, DiscardZeroes: !o.NoDiscard, Direct: true, Engine: "memory",
		},
		rt: o.Runtime, keep: o.Keep,
	}
	return d, d.open()
}

func (d *HollowDevice) open() error {
	pages := d.info.Size / hollowPage
	mem, err := mapHollow(pages * 4)
	if err != nil {
		return fmt.Errorf("blockdev: hollow: a table for %d bytes: %w", d.info.Size, err)
	}
	d.table = unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(mem))), pages)
	d.refs.Store(1)
	return nil
}

func mapHollow(n int64) ([]byte, error) {
	return unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
}

func keepMetadata(r *Request) bool {
	switch r.Purpose {
	case ForData, ForWriteback, ForMoving:
		return false
	}
	return true
}

// Clone returns a device with the content of d as it is now, on another runtime (nil: the real one). What neither
// changes takes memory once. d takes no writes until all its clones are closed: they fail with ErrReadOnly. It must have
// no queues.
func (d *HollowDevice) Clone(r *rt.Runtime) (*HollowDevice, error) {
	if d.shut.Load() {
		return nil, ErrClosed
	}
	if r == nil {
		r = rt.New()
	}
	c := &HollowDevice{info: d.info, rt: r, keep: d.keep, base: d}
	if err := c.open(); err != nil {
		return nil, err
	}
	d.clones.Add(1)
	d.refs.Add(1)
	return c, nil
}

// Info describes the device.
func (d *HollowDevice) Info() Info { return d.info }

// Runtime returns the runtime that the device was made with.
func (d *HollowDevice) Runtime() *rt.Runtime { return d.rt }

// SetRuntime moves the device to another runtime, as from one simulation to the next. It must have no queues.
func (d *HollowDevice) SetRuntime(r *rt.Runtime) { d.rt = r }

// Stored returns how many bytes of pages are stored that the base has not.
func (d *HollowDevice) Stored() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return int64(d.used-len(d.free)) * hollowPage
}

// NoteUse begins to note which pages are read or written, for DropUnused.
func (d *HollowDevice) NoteUse() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range d.flags {
		d.flags[i] &^= hollowUsed
	}
}

// DropUnused forgets what was written for an index, and neither read nor written since NoteUse, and gives the memory back
// to the system. It is called when a set has been opened: a start reads the whole index, so that the rest are places in
// which nodes were before. Other metadata stays.
func (d *HollowDevice) DropUnused() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.clones.Load() > 0 {
		return ErrReadOnly
	}
	for i, e := range d.table {
		if e < hollowFirst || d.flags[e-hollowFirst]&(hollowNode|hollowUsed) != hollowNode {
			continue
		}
		d.free = append(d.free, e)
		atomic.StoreUint32(&d.table[i], hollowZero)
	}
	slices.Sort(d.free)
	var errs []error
	for i := 0; i < len(d.free); {
		n := 1
		for i+n < len(d.free) && d.free[i+n] == d.free[i]+uint32(n) && (int(d.free[i+n])-hollowFirst)%hollowSlab != 0 {
			n++
		}
		at := int(d.free[i] - hollowFirst)
		errs = append(errs, unix.Madvise(d.slabs[at/hollowSlab][at%hollowSlab*hollowPage:][:n*hollowPage], unix.MADV_DONTNEED))
		i += n
	}
	return errors.Join(errs...)
}

// NewQueue makes a queue; depth has no effect.
func (d *HollowDevice) NewQueue(_ int, complete func(done []*Request)) (Queue, error) {
	if d.shut.Load() {
		return nil, ErrClosed
	}
	d.refs.Add(1)
	q := &hollowQueue{dev: d}
	q.completer.init(d.rt, complete)
	return q, nil
}

// Close releases the memory once all queues and clones are closed.
func (d *HollowDevice) Close() error {
	if d.shut.Swap(true) {
		return ErrClosed
	}
	return d.release()
}

func (d *HollowDevice) release() error {
	if d.refs.Add(-1) > 0 {
		return nil
	}
	var errs []error
	for _, s := range d.slabs {
		errs = append(errs, unix.Munmap(s))
	}
	table := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(d.table))), len(d.table)*4)
	d.slabs, d.table, d.flags, d.free = nil, nil, nil, nil
	errs = append(errs, unix.Munmap(table))
	if d.base != nil {
		d.base.clones.Add(-1)
		errs = append(errs, d.base.release())
	}
	return errors.Join(errs...)
}

// do works on one request.
func (d *HollowDevice) do(r *Request) error {
	if err := d.info.Check(r); err != nil {
		return err
	}
	if r.Op.Writes() && d.clones.Load() > 0 {
		return ErrReadOnly
	}
	switch {
	case r.Op == OpFlush:
	case r.Op == OpRead:
		d.read(r.Buf, r.Off)
	case r.Op == OpWrite && d.keep(r):
		return d.write(r.Buf, r.Off, r.Purpose == ForBtree)
	default:
		return d.drop(r.Off, r.Length())
	}
	return nil
}

// empty reports whether none of the pages of a range is stored.
func (d *HollowDevice) empty(off, n int64) bool {
	for i := off / hollowPage; i*hollowPage < off+n; i++ {
		switch e := atomic.LoadUint32(&d.table[i]); {
		case e >= hollowFirst:
			return false
		case e == hollowBase && d.base != nil && !d.base.empty(i*hollowPage, hollowPage):
			return false
		}
	}
	return true
}

// page returns what is stored of a page, nil for zeroes. d.mu is held; a base does not change.
func (d *HollowDevice) page(i int64) []byte {
	switch e := d.table[i]; {
	case e >= hollowFirst:
		return d.at(e)
	case e == hollowBase && d.base != nil:
		return d.base.page(i)
	}
	return nil
}

func (d *HollowDevice) at(e uint32) []byte {
	n := int(e - hollowFirst)
	return d.slabs[n/hollowSlab][n%hollowSlab*hollowPage:][:hollowPage]
}

func (d *HollowDevice) read(p []byte, off int64) {
	if d.empty(off, int64(len(p))) {
		clear(p)
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for len(p) > 0 {
		skip := off % hollowPage
		n := min(int64(len(p)), hollowPage-skip)
		if b := d.page(off / hollowPage); b != nil {
			d.use(off/hollowPage, 0)
			copy(p[:n], b[skip:])
		} else {
			clear(p[:n])
		}
		p, off = p[n:], off+n
	}
}

// own returns a page that is the device's own, with what was in it; if whole, it is about to be overwritten. d.mu is held.
func (d *HollowDevice) own(i int64, whole bool) ([]byte, error) {
	if e := d.table[i]; e >= hollowFirst {
		return d.at(e), nil
	}
	old := d.page(i)
	e := uint32(d.used) + hollowFirst
	if n := len(d.free); n > 0 {
		e, d.free = d.free[n-1], d.free[:n-1]
	} else {
		if d.used == len(d.slabs)*hollowSlab {
			slab, err := mapHollow(hollowEnough)
			if err != nil {
				return nil, fmt.Errorf("blockdev: hollow: %w", err)
			}
			d.slabs = append(d.slabs, slab)
		}
		d.used++
		d.flags = append(d.flags, 0)
	}
	b := d.at(e)
	d.flags[e-hollowFirst] = hollowUsed
	switch {
	case whole:
	case old != nil:
		copy(b, old)
	default:
		clear(b) // it may have been another's
	}
	atomic.StoreUint32(&d.table[i], e)
	return b, nil
}

// use notes that a page is used, and what for.
func (d *HollowDevice) use(i int64, flags uint8) {
	if e := d.table[i]; e >= hollowFirst {
		d.flags[e-hollowFirst] |= flags | hollowUsed
	}
}

func (d *HollowDevice) write(p []byte, off int64, node bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for len(p) > 0 {
		skip := off % hollowPage
		n := min(int64(len(p)), hollowPage-skip)
		b, err := d.own(off/hollowPage, n == hollowPage)
		if err != nil {
			return err
		}
		copy(b[skip:], p[:n])
		flags := uint8(0)
		if node {
			flags = hollowNode
		}
		d.use(off/hollowPage, flags)
		p, off = p[n:], off+n
	}
	return nil
}

// drop makes a range zeroes.
func (d *HollowDevice) drop(off, n int64) error {
	if d.empty(off, n) {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for end := off + n; off < end; {
		i, skip := off/hollowPage, off%hollowPage
		m := min(end-off, hollowPage-skip)
		off += m
		switch {
		case d.page(i) == nil:
		case m < hollowPage:
			b, err := d.own(i, false)
			if err != nil {
				return err
			}
			clear(b[skip : skip+m])
		default:
			if e := d.table[i]; e >= hollowFirst {
				d.free = append(d.free, e)
			}
			atomic.StoreUint32(&d.table[i], hollowZero)
		}
	}
	return nil
}

type hollowQueue struct {
	completer
	dev *HollowDevice
}

func (q *hollowQueue) Submit(reqs []*Request) {
	if !q.begin(len(reqs)) {
		q.refuse(reqs, ErrClosed)
		return
	}
	for _, r := range reqs {
		r.Err = q.dev.do(r)
	}
	q.finish(reqs...)
}

func (q *hollowQueue) Close() error {
	if !q.close() {
		return ErrClosed
	}
	return q.dev.release()
}
