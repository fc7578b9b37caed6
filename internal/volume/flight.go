package volume

import (
	"cmp"
	"slices"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// A flight is a batch of dirty data on its way to the backing device. It is used again and again.
type flight struct {
	w       *drainer
	list    []extent // in key order; their buckets are held
	sectors uint64
	seq     uint64 // journal entry that has to be durable, so that all keys of the list are
	run     func() // f.fly

	io     group
	runs   []run
	pieces []span // of the writes under way
	in     cacheset.Insertion
	old    []ondisk.Key
	keys   []ondisk.Key

	bad                     []failure
	readErrors, writeErrors int
}

// An extent is a dirty range and where it lies in the cache.
type extent struct {
	start, end uint64
	ptr        ondisk.Ptr
}

// A run is a stretch of neighbouring extents, which one write brings to the backing device. Kernels may leave a part of
// one of its blocks dirty, if the set's are smaller; the rest of the block then is what the backing device has.
type run struct {
	span
	from, to int  // in flight.list
	partial  bool // of a block of the backing device only a part is dirty
	buf      *blockdev.Buffer
}

func newFlight(w *drainer) *flight {
	f := &flight{w: w}
	f.run = f.fly
	f.io.init(w.v, &w.full[0], &w.full[1])
	return f
}

// fullFor reports whether the batch has as much as it may. It ends at a block of the backing device: what the cache has
// of one in two buckets comes down together.
func (f *flight) fullFor(sectors uint64) bool {
	n := len(f.list)
	return n > 0 && f.w.v.up(f.list[n-1].end) == f.list[n-1].end && (f.sectors >= sectors || n >= f.w.batch)
}

// fly writes the batch back.
//
// Order (F 11, 16; F1, V3 of B 9.3): the data is read, its buckets held; its keys are durable, or a power cut would bring
// back what they cover, clean perhaps, over what is on the backing device then; the data is written to the backing
// device; the backing device is flushed; the keys are marked clean, in the journal too, where the index still says what
// was read.
func (f *flight) fly() {
	w := f.w
	v := w.v
	f.bad, f.keys, f.old = f.bad[:0], f.keys[:0], f.old[:0]
	f.readErrors, f.writeErrors = 0, 0
	begin := v.rt.Now()
	f.split()
	f.read()
	before := v.flushErrors()
	if err := v.set.WaitDurable(f.seq); err == nil {
		f.write()
	} else {
		f.fail(span{f.list[0].start, f.list[len(f.list)-1].end}, err)
	}
	if f.gather(); len(f.keys) > 0 && v.set.Broken()&cacheset.SkipF1 == 0 {
		if err := v.flushSince(before); err != nil {
			f.fail(span{f.list[0].start, f.list[len(f.list)-1].end}, err)
			f.keys = f.keys[:0]
		}
	}
	in := &f.in
	in.Keys, in.Old = f.keys, f.old[:len(f.keys)]
	in.Unjournalled = v.set.Broken()&(cacheset.SkipJ1|cacheset.SkipV3) != 0
	err := v.set.Insert(in) // the set logs why it has stopped
	var meant uint64
	for i := range in.Old {
		meant += uint64(in.Old[i].Size())
	}
	for i := range f.runs {
		f.runs[i].buf.Release()
	}
	f.runs = f.runs[:0]

	var times uint64 // to be told of, when the lock is free
	var bad error
	defer func() { v.tell(warnWriteback, times, bad) }()
	v.set.Lock()
	defer v.set.Unlock()
	if len(f.bad) > 0 {
		times, bad = v.warnedLocked(warnWriteback), f.bad[0].err
	}
	if err == nil {
		v.newest = max(v.newest, in.Seq)
		w.stats.KeysDone += uint64(len(in.Old))
		w.stats.Sectors += meant
		w.pass.cleaned += in.Replaced
		if in.Replaced < meant {
			w.stats.KeysFailed++
		}
	}
	if len(f.list) >= w.batch || f.sectors >= uint64(w.batch)*flightMax/flightMost {
		w.measuredLocked(v.rt.Now() - begin)
	}
	if f.writeErrors == 0 {
		w.takenLocked()
	}
	w.stats.ReadErrors += uint64(f.readErrors)
	w.stats.WriteErrors += uint64(f.writeErrors)
	for _, b := range f.bad {
		w.noteLocked(b.span, b.err)
	}
	w.landLocked(f)
}

// split groups the extents to runs, which begin and end with blocks of the backing device.
func (f *flight) split() {
	v := f.w.v
	v.set.Lock()
	most := f.w.most
	v.set.Unlock()
	for i := range f.list {
		x := &f.list[i]
		from, to := v.down(x.start), v.up(x.end)
		partial := from != x.start || to != x.end
		if n := len(f.runs); n > 0 {
			if r := &f.runs[n-1]; from < r.end || from == r.end && to-r.start <= most {
				r.end, r.to, r.partial = to, i+1, r.partial || partial
				continue
			}
		}
		f.runs = append(f.runs, run{span: span{from, to}, from: i, to: i + 1, partial: partial})
	}
	for i := range f.runs {
		r := &f.runs[i]
		r.buf = v.pool.Get(int(r.end-r.start) * ondisk.SectorSize)
	}
}

// part returns the memory of a part of a run.
func (r *run) part(from, to uint64) []byte {
	return r.buf.Data[(from-r.start)*ondisk.SectorSize : (to-r.start)*ondisk.SectorSize]
}

// carryOut makes the I/Os of the group, and returns their errors as one.
func (f *flight) carryOut() error {
	for from, n := 0, len(f.io.parts); from < n; from += sliceMost {
		f.io.to = f.w.queues()
		f.io.runSome(from, min(from+sliceMost, n))
	}
	return f.io.end()
}

// read reads the runs from the cache.
func (f *flight) read() {
	f.complete()
	f.io.reset()
	for i := range f.runs {
		r := &f.runs[i]
		for j := r.from; j < r.to; j++ {
			x := &f.list[j]
			f.io.add(true, blockdev.Request{
				Op: blockdev.OpRead, Off: int64(x.ptr.Sector()) * ondisk.SectorSize, Buf: r.part(x.start, x.end), Purpose: blockdev.ForWriteback,
			})
		}
	}
	if f.carryOut() == nil {
		return
	}
	v := f.w.v
	for j := range f.list {
		if err := f.io.parts[j].Err; err != nil {
			// The rest of the backing device's block, which another extent may have, cannot be written either.
			x := &f.list[j]
			f.fail(span{v.down(x.start), v.up(x.end)}, err)
			f.readErrors++
		}
	}
}

// complete reads what is not dirty of the runs that have such parts.
func (f *flight) complete() {
	f.io.reset()
	for i := range f.runs {
		if r := &f.runs[i]; r.partial {
			f.io.add(false, blockdev.Request{Op: blockdev.OpRead, Off: backOff(r.start), Buf: r.part(r.start, r.end), Purpose: blockdev.ForWriteback})
		}
	}
	if f.carryOut() == nil {
		return
	}
	n := 0
	for i := range f.runs {
		if r := &f.runs[i]; r.partial {
			if err := f.io.parts[n].Err; err != nil {
				f.fail(r.span, err)
				f.readErrors++
			}
			n++
		}
	}
}

// write writes the runs to the backing device, but for what could not be read.
func (f *flight) write() {
	f.io.reset()
	f.pieces = f.pieces[:0]
	for i := range f.runs {
		r := &f.runs[i]
		f.eachGood(r.span, func(s span) {
			f.pieces = append(f.pieces, s)
			f.io.add(false, f.request(r, s))
		})
	}
	if f.carryOut() == nil {
		return
	}
	var refused []refusal
	for i, s := range f.pieces {
		if err := f.io.parts[i].Err; err != nil {
			refused = append(refused, refusal{s, err})
		}
	}
	at := 0
	for _, s := range refused {
		for f.runs[at].end <= s.start {
			at++
		}
		f.halve(&f.runs[at], s)
	}
}

type refusal struct {
	span
	err error
}

func (f *flight) request(r *run, s span) blockdev.Request {
	return blockdev.Request{Op: blockdev.OpWrite, Off: backOff(s.start), Buf: r.part(s.start, s.end), Purpose: blockdev.ForWriteback}
}

// halve tries what the backing device has refused in halves, down to the smallest writes: it may take no large ones, or
// a part of it is bad. If it takes the halves, writes are no larger from then on. The cuts lie at multiples of the
// smallest write on the device, so that what is left is no more than what is bad.
func (f *flight) halve(r *run, s refusal) {
	grid := max(pieceLeast, f.w.v.unit())
	first := f.w.v.first % grid
	mid := first + ((s.start+s.end)/2-first)/grid*grid
	if mid <= s.start {
		mid += grid
	}
	if mid >= s.end || f.writeErrors >= halveMost || f.w.v.stop.Err() != nil {
		f.fail(s.span, s.err)
		f.writeErrors++
		return
	}
	whole := true
	for _, part := range []span{{s.start, mid}, {mid, s.end}} {
		f.io.reset()
		f.io.add(false, f.request(r, part))
		if err := f.io.run(); err != nil {
			whole = false
			f.halve(r, refusal{part, err})
		}
	}
	if whole {
		f.w.v.set.Lock()
		f.w.most, f.w.smooth = min(f.w.most, max(mid-s.start, s.end-mid)), 0
		f.w.v.set.Unlock()
	}
}

// halveMost is how many bad pieces of a batch are looked for: a device may refuse all there is.
const halveMost = 64

// pieceLeast is the smallest write that is tried in parts, in sectors.
const pieceLeast = 8

// fail notes that a range could not be brought down.
func (f *flight) fail(s span, err error) {
	f.bad = append(f.bad, failure{s, err})
}

// eachGood calls fn with the parts of a range that have not failed.
func (f *flight) eachGood(s span, fn func(s span)) {
	for _, b := range f.bad { // in order, where there are several
		if b.end <= s.start || b.start >= s.end {
			continue
		}
		if b.start > s.start {
			fn(span{s.start, b.start})
		}
		if s.start = b.end; s.start >= s.end {
			return
		}
	}
	fn(s)
}

// gather makes the keys of what was written.
func (f *flight) gather() {
	slices.SortFunc(f.bad, func(a, b failure) int { return cmp.Compare(a.start, b.start) })
	inode := f.w.v.inode
	for i := range f.list {
		x := &f.list[i]
		f.eachGood(span{x.start, x.end}, func(s span) {
			n, p := uint32(s.end-s.start), x.ptr.Advance(s.start-x.start)
			f.keys = append(f.keys, ondisk.NewExtent(inode, s.end, n, p, false))
			f.old = append(f.old, ondisk.NewExtent(inode, s.end, n, p, true))
		})
	}
}
