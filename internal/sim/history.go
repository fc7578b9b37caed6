package sim

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
)

// A Volume is what a History must know of a volume.
type Volume struct {
	Size  int64 // bytes
	Block int   // bytes
	Zero  bool  // reads as zeroes before the first write; otherwise as Fill says

	// Loose: of what a cut or a kill may have left of a block, each read may return another, until it is written again.
	Loose bool
}

// A History knows what was done to some volumes, in which order as far as the callers can know, and so what a read
// may return. See the package comment for the rules.
//
// Its methods may be called by several goroutines at once, simulated or not: no lock is held where a simulation
// could switch.
type History struct {
	mu      sync.Mutex
	now     uint64 // counts beginnings and ends
	frozen  bool
	volumes []*volume
	ops     []op     // by number; number 0 is what was there at first
	reading []uint64 // when the reads that are under way began
}

type opKind uint8

const (
	opWrite opKind = iota
	opZeroes
	opDiscard
	opCrash
)

func (k opKind) String() string {
	return [...]string{"write", "write zeroes", "discard", "crash"}[k]
}

// An op is one operation that changes something.
type op struct {
	kind       opKind
	volume     int
	first, n   int64 // blocks
	start, end uint64
	fua        bool
}

func (o *op) covers(volume int, block int64) bool {
	return o.kind == opWrite && o.volume == volume && block >= o.first && block-o.first < o.n
}

type volume struct {
	Volume
	blocks  [][]entry // nil: nothing has happened to the block
	flushed uint64    // when the last flush that was acknowledged was sent
}

const never = math.MaxUint64

// An entry is an operation on one block, with what reads have told about its place in the order. It took effect
// before effect, and was still what the block held after held. Of two entries, a took effect before b if
// a.effect < b.held. So both cannot be true of a pair; if a is read with a start after b.effect when
// a.effect < b.held, the read is wrong. (These are the zones of Gibbons and Korach, "Testing shared memories".)
type entry struct {
	op     uint64
	value  uint64 // if it is not wild
	effect uint64 // the first end of the operation and of the reads that returned it; never: not yet
	held   uint64 // the last start of the operation and of those reads
	end    uint64 // when it was acknowledged; 0: not
	stable bool   // durable by itself: FUA, or it was there after a power cut

	// Wild ones are discards and crashes: they may have left one of several values, which one the first read tells.
	wild  bool
	bound bool // it is value
	from  choice
	// after a kill: what the power cut that comes next may leave instead, if no flush comes before
	uncertain choice
	past      []entry // before the crash, for messages
}

// A choice is what a wild entry may have left.
type choice struct {
	any    bool // whatever the block ever held, or zeroes
	values []uint64
}

func (c *choice) add(value uint64) {
	if !slices.Contains(c.values, value) {
		c.values = append(c.values, value)
	}
}

func (c *choice) join(o choice) {
	c.any = c.any || o.any
	for _, v := range o.values {
		c.add(v)
	}
}

// NewHistory returns the history of volumes to which nothing was done.
func NewHistory(volumes ...Volume) *History {
	h := &History{now: 1, ops: make([]op, 1)}
	for _, v := range volumes {
		if v.Block < sector || v.Block%sector != 0 || v.Size%int64(v.Block) != 0 {
			panic(fmt.Sprintf("sim: bad volume %+v", v))
		}
		h.volumes = append(h.volumes, &volume{Volume: v, blocks: make([][]entry, v.Size/int64(v.Block))})
	}
	return h
}

// Clone returns a copy that goes its own way.
func (h *History) Clone() *History {
	h.mu.Lock()
	defer h.mu.Unlock()
	c := &History{now: h.now, frozen: h.frozen, ops: slices.Clone(h.ops)}
	for _, v := range h.volumes {
		w := &volume{Volume: v.Volume, flushed: v.flushed, blocks: slices.Clone(v.blocks)}
		for i, list := range w.blocks {
			w.blocks[i] = slices.Clone(list) // the choices never change
		}
		c.volumes = append(c.volumes, w)
	}
	return c
}

// Freeze is the moment of the crash: nothing counts any more, until Crashed.
func (h *History) Freeze() {
	h.mu.Lock()
	h.frozen = true
	h.mu.Unlock()
}

// Frozen reports whether Freeze was called.
func (h *History) Frozen() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.frozen
}

// tick returns the time of something that happens now.
func (h *History) tick() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.now++
	return h.now
}

// beginRead notes that a read is sent, and returns when.
func (h *History) beginRead() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.now++
	h.reading = append(h.reading, h.now)
	return h.now
}

// endRead notes that a read has ended, however.
func (h *History) endRead(start uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if i := slices.Index(h.reading, start); i >= 0 {
		h.reading = slices.Delete(h.reading, i, i+1) // the first is the oldest
	}
}

// list returns the entries of a block. h.mu is held.
func (v *volume) list(block int64) []entry {
	if v.blocks[block] == nil {
		first := entry{value: 0, effect: 1, held: 1, end: 1, stable: true}
		if v.Zero {
			first.value = zeroes
		}
		v.blocks[block] = append(make([]entry, 0, 4), first)
	}
	return v.blocks[block]
}

// begin notes that an operation is sent, and returns its number.
func (h *History) begin(kind opKind, vol int, first, n int64, fua bool) uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.now++
	number := uint64(len(h.ops))
	h.ops = append(h.ops, op{kind: kind, volume: vol, first: first, n: n, start: h.now, fua: fua})
	if h.frozen {
		return number
	}
	v := h.volumes[vol]
	for b := first; b < first+n; b++ {
		list := v.list(b)
		if len(list) >= 12 {
			list = v.prune(list, h.reading)
		}
		e := entry{op: number, value: number, effect: never, held: h.now}
		switch kind {
		case opZeroes:
			e.value = zeroes
		case opDiscard:
			e.wild, e.from.any = true, true
		}
		v.blocks[b] = append(list, e)
	}
	return number
}

// end notes the reply. An operation that failed may take effect at any time, or never.
func (h *History) end(number uint64, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.now++
	if h.frozen || err != nil {
		return
	}
	o := &h.ops[number]
	o.end = h.now
	v := h.volumes[o.volume]
	for b := o.first; b < o.first+o.n; b++ {
		list := v.blocks[b]
		for i := range list {
			if e := &list[i]; e.op == number && e.end == 0 {
				e.end, e.effect, e.stable = h.now, min(e.effect, h.now), o.fua
			}
		}
	}
}

// flushed notes the reply to a flush.
func (h *History) flushed(vol int, start uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.now++
	if v := h.volumes[vol]; !h.frozen {
		v.flushed = max(v.flushed, start)
	}
}

// durable reports whether a power cut leaves e or something newer.
func (v *volume) durable(e *entry) bool {
	return e.stable || e.end != 0 && e.end < v.flushed
}

// prune removes entries that neither a crash nor a read, one of those under way included, can bring back.
func (v *volume) prune(list []entry, reading []uint64) []entry {
	oldest := uint64(never)
	if len(reading) > 0 {
		oldest = reading[0]
	}
	counts := func(e *entry) bool { return v.durable(e) && e.effect < oldest }
	var kept []entry
	for i := range list {
		if !v.overtaken(list, i, counts) {
			kept = append(kept, list[i])
		}
	}
	return kept
}

// overtaken reports whether an entry of those that count took effect after list[i].
func (v *volume) overtaken(list []entry, i int, counts func(*entry) bool) bool {
	for j := range list {
		if j != i && list[i].effect < list[j].held && counts(&list[j]) {
			return true
		}
	}
	return false
}

// read checks what a read that began at start has returned.
func (h *History) read(vol int, first int64, p []byte, start uint64) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.now++
	if h.frozen {
		return nil
	}
	v := h.volumes[vol]
	for b := range int64(len(p) / v.Block) {
		if err := h.readBlock(vol, first+b, p[b*int64(v.Block):][:v.Block], start); err != nil {
			return err
		}
	}
	return nil
}

func (h *History) readBlock(vol int, block int64, p []byte, start uint64) error {
	v := h.volumes[vol]
	value, wrong := identify(p, vol, block)
	if wrong != "" {
		return h.violation(vol, block, start, wrong)
	}
	if v.blocks[block] == nil && (value == zeroes) == v.Zero && (value == 0 || v.Zero) {
		return nil
	}
	list := v.list(block)
	at, n := -1, 0
	for i := range list {
		if h.mayLeave(&list[i], vol, block, value) && possible(list, i, start, h.now) {
			at = i
			n++
		}
	}
	switch n {
	case 0:
		return h.violation(vol, block, start, name(value))
	case 1:
		e := &list[at]
		e.effect, e.held = min(e.effect, h.now), max(e.held, start)
		if e.wild && e.end != 0 && start > e.end && !(v.Loose && h.ops[e.op].kind == opCrash) {
			e.bound, e.value = true, value
		}
	}
	return nil // of several, who knows which one it was
}

// mayLeave reports whether e can have left that value.
func (h *History) mayLeave(e *entry, vol int, block int64, value uint64) bool {
	if !e.wild || e.bound {
		return e.value == value
	}
	return h.among(e.from, vol, block, value)
}

func (h *History) among(c choice, vol int, block int64, value uint64) bool {
	if slices.Contains(c.values, value) {
		return true
	}
	if !c.any {
		return false
	}
	if value == zeroes {
		return true
	}
	if value == 0 {
		return !h.volumes[vol].Zero
	}
	return value < uint64(len(h.ops)) && h.ops[value].covers(vol, block)
}

// possible reports whether a read from start to end may have returned list[at].
func possible(list []entry, at int, start, end uint64) bool {
	effect, held := min(list[at].effect, end), max(list[at].held, start)
	for i := range list {
		if o := &list[i]; i != at && effect < o.held && o.effect < held {
			return false
		}
	}
	return true
}

// A Violation is a read that returned what it must not.
type Violation struct {
	Volume int
	Block  int64
	Found  string
	Want   string   // what would have been right
	Log    []string // what is known of the block
}

func (v *Violation) Error() string {
	s := fmt.Sprintf("block %d of volume %d holds %s; right would be %s", v.Block, v.Volume, v.Found, v.Want)
	for _, l := range v.Log {
		s += "\n\t" + l
	}
	return s
}

func isViolation(err error) bool {
	var v *Violation
	return errors.As(err, &v)
}

// violation makes a Violation of a read that began at start. h.mu is held.
func (h *History) violation(vol int, block int64, start uint64, found string) error {
	x := &Violation{Volume: vol, Block: block, Found: found}
	v := h.volumes[vol]
	list := v.list(block)
	var want []string
	for i := range list {
		e := &list[i]
		if possible(list, i, start, h.now) {
			want = append(want, e.values())
		}
		for p := range e.past {
			x.Log = append(x.Log, "before: "+h.text(v, &e.past[p]))
		}
		x.Log = append(x.Log, h.text(v, e))
	}
	slices.Sort(want)
	x.Want = strings.Join(slices.Compact(want), ", or ")
	if list[0].op != 0 && list[0].past == nil {
		x.Log = append([]string{"(of what came before these nothing can be left)"}, x.Log...)
	}
	x.Log = append(x.Log, fmt.Sprintf("the read: %d to %d", start, h.now))
	return x
}

// values says what e may have left.
func (e *entry) values() string {
	switch {
	case !e.wild || e.bound:
		return name(e.value)
	case e.from.any:
		return "anything it ever held"
	}
	var all []string
	for _, v := range e.from.values {
		all = append(all, name(v))
	}
	return strings.Join(all, ", or ")
}

// text is one line about e.
func (h *History) text(v *volume, e *entry) string {
	if e.op == 0 {
		return "at first: " + e.values()
	}
	o := h.ops[e.op]
	s := fmt.Sprintf("%v %d: sent at %d", o.kind, e.op, o.start)
	if o.kind == opCrash {
		s = fmt.Sprintf("%v at %d", o.kind, o.start)
	}
	switch {
	case e.end == 0:
		s += ", no reply"
	case o.kind != opCrash:
		s += fmt.Sprintf(", acknowledged at %d", e.end)
	}
	if o.fua {
		s += ", FUA"
	}
	if e.end != 0 && !e.stable && e.end < v.flushed {
		s += fmt.Sprintf(", flushed (flush sent at %d)", v.flushed)
	}
	if e.effect != never && e.effect != e.end {
		s += fmt.Sprintf(", read at %d", e.effect)
	}
	if e.held > o.start {
		s += fmt.Sprintf(", last read by a read sent at %d", e.held)
	}
	if o.kind != opWrite {
		s += ": " + e.values()
	}
	return s
}
