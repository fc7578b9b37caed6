package volume

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/journal"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
	"github.com/ubcache/ubcache/internal/writeback"
)

// What requests wait for is explained by what is counted:
//
//	alone      requests are made one by one, on a set at rest: the device time
//	provoked   the same requests, or their like, while something is in their way
//
// The excess is how much longer the second took than the first, summed over the requests, each from its submission to its
// completion. It is explained by how much more the causes have counted meanwhile, summed over all causes. In a simulation
// work takes no time, so that is all there is. At least 95 % must be explained; more than all would be a moment that counts
// twice.
type stallBench struct {
	*Volume
	cache, back *blockdev.Faulty

	alone, provoked sample
}

// A sample is what requests took, and what was counted meanwhile.
type sample struct {
	took    time.Duration
	slowest time.Duration
	causes  [cacheset.StallCauses]cacheset.StallTotals
}

// A benchRequest is a request that is to be made after so long.
type benchRequest struct {
	after time.Duration
	blockdev.Request
}

func request(op blockdev.Op, off int64, n int, flags blockdev.Flags) benchRequest {
	r := blockdev.Request{Op: op, Off: off, Flags: flags}
	switch op {
	case blockdev.OpRead, blockdev.OpWrite:
		r.Buf = make([]byte, n)
	case blockdev.OpFlush:
	default:
		r.Len = int64(n)
	}
	return benchRequest{Request: r}
}

// pages are requests for n pages, each step bytes behind the one before.
func pages(op blockdev.Op, off int64, n int, step int64) (list []benchRequest) {
	for range n {
		list = append(list, request(op, off, 4096, 0))
		off += step
	}
	return list
}

func (s *sample) measure(b *stallBench, list []benchRequest) error {
	before := b.set.Stalls()
	var group rt.WaitGroup
	group.Init(b.rt)
	type timed struct {
		begin time.Duration
		blockdev.Request
	}
	q, err := b.NewQueue(64, func(done []*blockdev.Request) {
		for _, r := range done {
			took := b.rt.Now() - r.Owner.(*timed).begin
			s.took += took
			s.slowest = max(s.slowest, took)
			group.Done()
		}
	})
	if err != nil {
		return err
	}
	all := make([]*timed, len(list))
	batch := []*blockdev.Request{}
	for i := range list {
		all[i] = &timed{Request: list[i].Request}
		t := all[i]
		t.Owner = t
	}
	begin := b.rt.Now()
	for i, t := range all { // what comes at the same time comes in one batch
		if at := begin + list[i].after; at > b.rt.Now() {
			q.Submit(batch)
			batch = batch[:0:0]
			b.rt.Sleep(at - b.rt.Now())
		}
		t.begin = b.rt.Now()
		batch = append(batch, &t.Request)
		group.Add(1)
	}
	q.Submit(batch)
	group.Wait()
	for _, t := range all {
		if t.Err != nil {
			return t.Err
		}
	}
	for c, n := range b.set.Stalls() {
		s.causes[c].Count += n.Count - before[c].Count
		s.causes[c].Total += n.Total - before[c].Total
		s.causes[c].Max = n.Max
	}
	return errors.Join(err, q.Close())
}

// byThemselves makes requests one by one on a set at rest.
func (b *stallBench) byThemselves(list ...benchRequest) error {
	for _, r := range list {
		b.rt.Sleep(time.Second)
		r.after = 0
		if err := b.alone.measure(b, []benchRequest{r}); err != nil {
			return fmt.Errorf("%v: %w", &r.Request, err)
		}
	}
	b.rt.Sleep(time.Second)
	return nil
}

// inTheWay makes requests together.
func (b *stallBench) inTheWay(list ...benchRequest) error { return b.provoked.measure(b, list) }

// prepare makes requests that are not measured, one by one.
func (b *stallBench) prepare(list ...benchRequest) error {
	var s sample
	for i := range list {
		if err := s.measure(b, list[i:i+1]); err != nil {
			return err
		}
	}
	return nil
}

// hangs lets so many of some requests to a device hang for d each; 0: all.
func hangs(dev *blockdev.Faulty, p blockdev.Purpose, op blockdev.Op, d time.Duration, count int) {
	dev.Add(blockdev.Fault{Purposes: []blockdev.Purpose{p}, Ops: []blockdev.Op{op}, Hang: d, Count: count})
}

// check holds what was counted against what the requests took. Growth of the cause that was provoked must be most of all.
func (b *stallBench) check(t *testing.T, cause cacheset.Stall) {
	t.Helper()
	excess := b.provoked.took - b.alone.took
	var explained time.Duration
	for c := range b.alone.causes {
		alone, provoked := b.alone.causes[c], b.provoked.causes[c]
		explained += provoked.Total - alone.Total
		if n := provoked.Count; n > 0 {
			t.Logf("%-15v %4d waits of %v, the longest %v; alone %d of %v", cacheset.Stall(c), n, provoked.Total, provoked.Max, alone.Count, alone.Total)
		}
	}
	share := 100 * float64(explained) / float64(excess)
	t.Logf("%v alone, %v provoked; of %v in excess %.2f %% is explained", b.alone.took, b.provoked.took, excess, share)
	if excess < 5*time.Millisecond {
		t.Errorf("an excess of %v: nothing was provoked", excess)
	}
	if share < 95 || share > 100.01 {
		t.Errorf("%v explained of an excess of %v", explained, excess)
	}
	got := b.provoked.causes[cause]
	if grown := got.Total - b.alone.causes[cause].Total; got.Count == 0 || grown < explained*8/10 {
		t.Errorf("%v has grown by %v, of %v in all", cause, grown, explained)
	}
	if got.Max > b.provoked.slowest {
		t.Errorf("%v: a wait of %v in requests of at most %v", cause, got.Max, b.provoked.slowest)
	}
}

// stallOptions say how a stallBench is made.
type stallOptions struct {
	buckets  int64 // default 4000
	bucket   int64 // bytes; default 8 KiB
	flash    int64 // bytes of a flash-only volume; 0: it has a backing device of 16 MiB
	nodes    int64 // bytes of nodes in memory
	ready    int   // buckets that are kept ready
	parallel int   // requests that a device works on at a time; 0: all
	death    bool  // the process's death loses nothing
}

// The devices' times are above StallLeast, so that they count alone too.
var (
	stallCache = blockdev.Latency{Read: 200 * time.Microsecond, Write: 300 * time.Microsecond, Flush: 400 * time.Microsecond}
	stallBack  = blockdev.Latency{Read: 2 * time.Millisecond, Write: 3 * time.Millisecond, Flush: 4 * time.Millisecond}
)

func simulateStalls(t *testing.T, seed uint64, o stallOptions, fn func(b *stallBench) error) {
	t.Helper()
	s := rt.NewSim(seed)
	s.Limit = time.Hour
	var failed error
	err := s.Run(func() { failed = o.run(s.Runtime(), fn) })
	if err := errors.Join(err, failed); err != nil {
		t.Fatal(err)
	}
}

func (o stallOptions) run(r *rt.Runtime, fn func(b *stallBench) error) error {
	ctx := context.Background()
	b := &stallBench{}
	disk := func(size int64, l blockdev.Latency) *blockdev.Faulty {
		d, err := blockdev.Memory(size, blockdev.MemoryOptions{Runtime: r})
		if err != nil {
			panic(err)
		}
		l.Parallel = o.parallel
		return blockdev.NewFaulty(blockdev.NewDelaying(d, l), 1)
	}
	if o.buckets == 0 {
		o.buckets = 4000
	}
	if o.bucket == 0 {
		o.bucket = 8 << 10
	}
	b.cache, b.back = disk(o.buckets*o.bucket, stallCache), disk(16<<20+8192, stallBack)
	if _, err := offline.Format(ctx, offline.FormatOptions{Cache: b.cache, Backing: []blockdev.Device{b.back}, Bucket: o.bucket, Block: 4096}); err != nil {
		return err
	}
	so := cacheset.Options{NodeCache: o.nodes, Buckets: bucket.Options{Ready: o.ready}}
	if o.death {
		so.Shared = journal.NewShared()
	}
	set, err := cacheset.Open(ctx, b.cache, so)
	if err != nil {
		return err
	}
	if o.flash > 0 {
		if _, err = CreateFlash(set, "flash", o.flash); err == nil {
			b.Volume, err = OpenFlash(set, "flash")
		}
	} else {
		b.Volume, err = Open(set, b.back)
	}
	if err != nil {
		return err
	}
	b.SetSequentialCutoff(0)
	err = fn(b)
	b.cache.Clear()
	b.back.Clear()
	return errors.Join(err, b.Close(), set.Close(ctx))
}

// writeback has the volume keep what is written, after a first page that makes the superblock say DIRTY.
func (b *stallBench) writeback() error {
	err := errors.Join(b.SetMode(ondisk.Writeback), b.ChangeWriteback(func(s *writeback.Settings) error { s.Running = false; return nil }))
	return errors.Join(err, b.prepare(pages(blockdev.OpWrite, 15<<20, 1, 0)...))
}

// Each cause is provoked, is the one that has grown, and explains what requests took longer.
func TestStalls(t *testing.T) {
	const read, write = blockdev.OpRead, blockdev.OpWrite
	const hang = 20 * time.Millisecond
	for _, c := range []struct {
		name  string
		cause cacheset.Stall
		stallOptions
		fn func(b *stallBench) error
	}{
		{"hits behind one another", cacheset.StallCache, stallOptions{parallel: 1, death: true}, func(b *stallBench) error {
			list := pages(read, 0, 32, 8192)
			return errors.Join(b.prepare(list...), b.byThemselves(list...), b.inTheWay(list...))
		}},
		{"hits of many pieces", cacheset.StallCache, stallOptions{death: true}, func(b *stallBench) error {
			if err := b.prepare(pages(read, 0, 32, 4096)...); err != nil {
				return err
			}
			list := []benchRequest{request(read, 0, 16*4096, 0), request(read, 16*4096, 16*4096, 0)}
			err := b.byThemselves(list...)
			hangs(b.cache, blockdev.ForData, read, hang, 7)
			return errors.Join(err, b.inTheWay(list...))
		}},
		{"placed writes", cacheset.StallCache, stallOptions{death: true}, func(b *stallBench) error {
			list := pages(write, 0, 32, 8192)
			err := errors.Join(b.writeback(), b.prepare(list...), b.byThemselves(list...))
			hangs(b.cache, blockdev.ForData, write, hang, 0)
			return errors.Join(err, b.inTheWay(list...))
		}},
		{"misses", cacheset.StallBacking, stallOptions{death: true}, func(b *stallBench) error {
			err := b.byThemselves(pages(read, 0, 32, 8192)...)
			hangs(b.back, blockdev.ForData, read, hang, 0)
			return errors.Join(err, b.inTheWay(pages(read, 1<<20, 32, 8192)...))
		}},
		{"writes to both devices", cacheset.StallBacking, stallOptions{death: true}, func(b *stallBench) error {
			err := b.byThemselves(pages(write, 0, 32, 8192)...)
			hangs(b.back, blockdev.ForData, write, hang, 0)
			return errors.Join(err, b.inTheWay(pages(write, 1<<20, 32, 8192)...))
		}},
		{"writes to both devices, a slow cache", cacheset.StallCache, stallOptions{death: true}, func(b *stallBench) error {
			err := b.byThemselves(pages(write, 0, 32, 8192)...)
			hangs(b.cache, blockdev.ForData, write, hang, 0)
			return errors.Join(err, b.inTheWay(pages(write, 1<<20, 32, 8192)...))
		}},
		{"flushes of the backing device", cacheset.StallBacking, stallOptions{death: true}, func(b *stallBench) error {
			flush := request(blockdev.OpFlush, 0, 0, 0)
			err := errors.Join(b.byThemselves(append(pages(write, 0, 1, 0), flush)...))
			b.back.Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpFlush}, Hang: hang})
			flush.after = 10 * time.Millisecond
			return errors.Join(err, b.inTheWay(append(pages(write, 4096, 1, 0), flush)...))
		}},
		{"flushes that wait for the journal", cacheset.StallJournalWrite, stallOptions{death: true}, func(b *stallBench) error {
			flush := request(blockdev.OpFlush, 0, 0, 0)
			err := errors.Join(b.writeback(), b.byThemselves(append(pages(write, 0, 1, 0), flush)...))
			hangs(b.cache, blockdev.ForJournal, write, hang, 0)
			flush.after = time.Millisecond
			return errors.Join(err, b.inTheWay(append(pages(write, 0, 1, 0), flush)...))
		}},
		{"writes with FUA", cacheset.StallJournalWrite, stallOptions{death: true}, func(b *stallBench) error {
			list := []benchRequest{request(write, 0, 4096, blockdev.FUA), request(write, 8192, 4096, blockdev.FUA)}
			err := errors.Join(b.writeback(), b.byThemselves(list...))
			hangs(b.cache, blockdev.ForJournal, write, hang, 0)
			return errors.Join(err, b.inTheWay(list...))
		}},
		{"acknowledgements, where nothing outlasts the process", cacheset.StallJournalWrite, stallOptions{}, func(b *stallBench) error {
			list := pages(write, 0, 8, 8192)
			err := errors.Join(b.writeback(), b.byThemselves(list...))
			hangs(b.cache, blockdev.ForJournal, write, hang, 0)
			return errors.Join(err, b.inTheWay(list...))
		}},
		{"invalidations before an overwrite", cacheset.StallJournalWrite, stallOptions{death: true}, func(b *stallBench) error {
			list := pages(write, 0, 4, 8192)
			err := b.prepare(list...)
			b.rt.Sleep(time.Minute) // the keys go to the disk
			err = errors.Join(err, b.byThemselves(list...))
			b.rt.Sleep(time.Minute)
			hangs(b.cache, blockdev.ForJournal, write, hang, 0)
			return errors.Join(err, b.inTheWay(list...))
		}},
		{"more keys than the journal takes", cacheset.StallJournalSpace, stallOptions{death: true, ready: 1000}, func(b *stallBench) error {
			list := pages(write, 0, 1000, 8192)
			err := errors.Join(b.writeback(), b.prepare(list...), b.byThemselves(list...))
			hangs(b.cache, blockdev.ForJournal, write, hang, 0)
			return errors.Join(err, b.inTheWay(list...))
		}},
		{"writes to the same page", cacheset.StallOverlap, stallOptions{death: true}, func(b *stallBench) error {
			list := pages(write, 0, 16, 0)
			err := errors.Join(b.writeback(), b.byThemselves(list...))
			hangs(b.cache, blockdev.ForData, write, hang, 1)
			return errors.Join(err, b.inTheWay(list...))
		}},
		{"the set's lock, before and after the device", cacheset.StallLock, stallOptions{death: true}, func(b *stallBench) error {
			list := func(miss int64, after time.Duration) (list []benchRequest) {
				list = append(pages(read, 0, 4, 8192), pages(read, miss, 4, 8192)...)
				list = append(list, pages(write, 1<<20, 4, 8192)...)
				list = append(list, request(write, 2<<20, 4096, blockdev.FUA), request(blockdev.OpFlush, 0, 0, 0))
				for i := range list {
					list[i].after = after
				}
				return list
			}
			err := errors.Join(b.writeback(), b.prepare(list(3<<20, 0)...), b.byThemselves(list(4<<20, 0)...), b.byThemselves(list(5<<20, 0)...))
			var group rt.WaitGroup
			group.Init(b.rt)
			for _, at := range []time.Duration{10 * time.Millisecond, 100*time.Millisecond + 100*time.Microsecond} {
				group.Go("holder", func() {
					b.rt.Sleep(at)
					b.set.Lock()
					b.rt.Sleep(hang)
					b.set.Unlock()
				})
			}
			err = errors.Join(err, b.inTheWay(append(list(6<<20, 11*time.Millisecond), list(7<<20, 100*time.Millisecond)...)...))
			group.Wait()
			return err
		}},
		{"buckets, while generations are written", cacheset.StallGens, stallOptions{death: true}, func(b *stallBench) error {
			list := pages(write, 0, 400, 8192)
			err := errors.Join(b.writeback(), b.prepare(list...), b.byThemselves(list...))
			hangs(b.cache, blockdev.ForPrio, write, hang, 0)
			return errors.Join(err, b.inTheWay(list...))
		}},
		{"buckets, until there are some to reuse", cacheset.StallAllocation, stallOptions{death: true, buckets: 600, bucket: 64 << 10, flash: 24 << 20}, func(b *stallBench) error {
			const all = 24 << 20 / 4096
			rng := rand.New(rand.NewPCG(1, 1))
			some := func(n int) (list []benchRequest) {
				for _, page := range rng.Perm(all)[:n] {
					list = append(list, request(write, int64(page)*4096, 4096, 0))
				}
				return list
			}
			b.set.SetMoving(false)
			if err := errors.Join(b.prepare(pages(write, 0, all, 4096)...), b.byThemselves(some(4)...)); err != nil {
				return err
			}
			// Of each bucket some is dirty still, and only the mover can change that.
			for b.prepare(some(1)...) == nil {
			}
			hangs(b.cache, blockdev.ForMoving, read, 5*hang, 0)
			hangs(b.cache, blockdev.ForPrio, write, hang, 0)
			b.set.SetMoving(true)
			err := b.inTheWay(some(4)...)
			// A batch each: the one with what was moved.
			if n := b.provoked.causes[cacheset.StallGens]; err == nil && n.Total < 4*hang {
				err = fmt.Errorf("%v of waits for generations", n.Total)
			}
			return err
		}},
		{"nodes that are not in memory", cacheset.StallNode, stallOptions{death: true, nodes: 32 << 10, buckets: 6000}, func(b *stallBench) error {
			// One page here and one there: 340 keys fill a leaf.
			if err := b.prepare(pages(read, 0, 2000, 8192)...); err != nil {
				return err
			}
			var list []benchRequest
			for i := range int64(16) {
				r := request(read, i*125*8192, 4096, 0)
				r.after = time.Duration(i) * time.Second
				list = append(list, r)
				if err := errors.Join(b.prepare(r), b.byThemselves(r)); err != nil {
					return err
				}
			}
			hangs(b.cache, blockdev.ForBtree, read, hang, 0)
			return b.inTheWay(list...)
		}},
		{"a leaf that has to be split", cacheset.StallSplit, stallOptions{death: true, ready: 1000}, func(b *stallBench) error {
			// More than twice what a leaf has room for, all where no key is yet.
			err := errors.Join(b.writeback(), b.byThemselves(pages(write, 8<<20, 900, 8192)...))
			hangs(b.cache, blockdev.ForBtree, write, 10*hang, 0)
			return errors.Join(err, b.inTheWay(pages(write, 0, 900, 8192)...))
		}},
		{"a collection that keeps requests out", cacheset.StallGate, stallOptions{death: true, nodes: 32 << 10, buckets: 6000}, func(b *stallBench) error {
			list := pages(read, 0, 8, 250*8192)
			if err := errors.Join(b.prepare(pages(read, 0, 2000, 8192)...), b.byThemselves(list...), b.set.SetGCPolicy("classic")); err != nil {
				return err
			}
			hangs(b.cache, blockdev.ForBtree, read, hang, 0)
			b.set.TriggerGC()
			for i := range list {
				list[i].after = 30 * time.Millisecond
			}
			err := b.inTheWay(list...)
			if n := b.set.GC().TotalHold; n < 5*hang {
				err = errors.Join(err, fmt.Errorf("the index was held for %v", n))
			}
			return err
		}},
		{"buckets, while a collection keeps them", cacheset.StallAllocation, stallOptions{death: true, nodes: 32 << 10, buckets: 2000}, func(b *stallBench) error {
			err := errors.Join(b.writeback(), b.prepare(pages(write, 0, 1000, 8192)...), b.byThemselves(pages(write, 8<<20, 8, 8192)...),
				b.set.SetGCPolicy("classic"))
			b.set.TuneGC(func(t *cacheset.GCTuning) { t.MinNodes, t.Sleep = 1, 5*hang })
			b.set.TriggerGC()
			return errors.Join(err, b.inTheWay(pages(write, 9<<20, 900, 4096)...))
		}},
		{"dirty data on its way down", cacheset.StallWriteback, stallOptions{death: true}, func(b *stallBench) error {
			err := errors.Join(b.writeback(), b.prepare(pages(write, 0, 2, 1<<20)...), b.byThemselves(request(blockdev.OpWriteZeroes, 0, 4096, 0)))
			hangs(b.back, blockdev.ForWriteback, write, hang, 0)
			var group rt.WaitGroup
			group.Init(b.rt)
			var failed error
			group.Go("writeback", func() { failed = b.WriteBack(context.Background()) })
			zeroes := request(blockdev.OpWriteZeroes, 1<<20, 4096, 0)
			zeroes.after = 10 * time.Millisecond
			err = errors.Join(err, b.inTheWay(zeroes))
			group.Wait()
			return errors.Join(err, failed)
		}},
		{"the superblock that says dirty", cacheset.StallSuperblock, stallOptions{death: true}, func(b *stallBench) error {
			list := pages(write, 0, 4, 8192)
			err := errors.Join(b.writeback(), b.byThemselves(list...), b.WriteBack(context.Background()))
			b.rt.Sleep(time.Minute)
			hangs(b.back, blockdev.ForSuperblock, write, hang, 0)
			return errors.Join(err, b.inTheWay(list...))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			simulateStalls(t, 1, c.stallOptions, func(b *stallBench) error {
				if err := c.fn(b); err != nil {
					return err
				}
				b.check(t, c.cause)
				return nil
			})
		})
	}
}

// Whatever requests wait for, together and in each other's way, is counted, and once: with devices that count alone too, the
// causes add up to what requests take.
func TestStallsAddUp(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			o := stallOptions{buckets: 1000, nodes: 64 << 10, parallel: int(seed % 3 * 4), death: seed%2 == 0}
			simulateStalls(t, seed, o, func(b *stallBench) error { return addUp(t, b, seed) })
		})
	}
}

func addUp(t *testing.T, b *stallBench, seed uint64) error {
	rng := rand.New(rand.NewPCG(seed, 9))
	ops := []blockdev.Op{
		blockdev.OpRead, blockdev.OpRead, blockdev.OpRead, blockdev.OpWrite, blockdev.OpWrite, blockdev.OpWrite, blockdev.OpFlush,
		blockdev.OpWriteZeroes, blockdev.OpDiscard,
	}
	purposes := []blockdev.Purpose{blockdev.ForData, blockdev.ForJournal, blockdev.ForBtree, blockdev.ForPrio, blockdev.ForWriteback, blockdev.ForSuperblock}
	modes := []ondisk.CacheMode{ondisk.Writeback, ondisk.Writethrough, ondisk.Writearound, ondisk.Writeback}
	for round, mode := range modes {
		if err := b.SetMode(mode); err != nil {
			return err
		}
		for _, d := range []*blockdev.Faulty{b.cache, b.back} {
			d.Clear()
			for _, p := range purposes {
				d.Add(blockdev.Fault{Purposes: []blockdev.Purpose{p}, Prob: 0.2, Hang: time.Duration(1+rng.IntN(50)) * time.Millisecond})
			}
		}
		var list []benchRequest
		var at time.Duration
		for range 1000 {
			if rng.IntN(8) == 0 {
				at += time.Duration(rng.IntN(20)) * time.Millisecond
			}
			op := ops[rng.IntN(len(ops))]
			r := request(op, rng.Int64N(1000)*4096, (1+rng.IntN(4))*4096, 0)
			if op == blockdev.OpWrite && rng.IntN(8) == 0 {
				r.Flags = blockdev.FUA
			}
			r.after = at
			list = append(list, r)
		}
		var s sample
		if err := s.measure(b, list); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		var explained time.Duration
		for c, n := range s.causes {
			explained += n.Total
			if n.Count > 0 {
				t.Logf("%-15v %5d waits of %v", cacheset.Stall(c), n.Count, n.Total)
			}
		}
		share := 100 * float64(explained) / float64(s.took)
		t.Logf("%v: %.2f %% of %v", mode, share, s.took)
		if share < 95 || share > 100 {
			t.Errorf("%v: %v is explained of %v", mode, explained, s.took)
		}
	}
	return nil
}

// What goes on in the background counts for nobody: copies to the cache after the answer, writeback, the writing of nodes
// and generations.
func TestStallsOfTheBackground(t *testing.T) {
	simulateStalls(t, 1, stallOptions{death: true}, func(b *stallBench) error {
		if err := b.prepare(pages(blockdev.OpRead, 8<<20, 1, 0)...); err != nil { // so that the index is in memory
			return err
		}
		hangs(b.cache, blockdev.ForData, blockdev.OpWrite, time.Second, 0) // fills
		hangs(b.back, blockdev.ForWriteback, blockdev.OpWrite, time.Second, 0)
		for _, p := range []blockdev.Purpose{blockdev.ForBtree, blockdev.ForPrio, blockdev.ForJournal} {
			hangs(b.cache, p, blockdev.OpWrite, time.Second, 0)
		}
		var s sample
		want := b.set.Stalls()
		if err := s.measure(b, pages(blockdev.OpRead, 0, 100, 8192)); err != nil {
			return err
		}
		b.rt.Sleep(time.Minute)
		back := &want[cacheset.StallBacking]
		back.Count, back.Total = back.Count+100, back.Total+100*stallBack.Read
		if n := b.Stats(); b.set.Stalls() != want || n.FillsSkipped > 0 {
			t.Errorf("reads took %v, and all has come to %+v\nwant %+v; %d were not copied to the cache", s.took, b.set.Stalls(), want, n.FillsSkipped)
		}
		b.cache.Clear()
		err := errors.Join(b.writeback(), b.prepare(pages(blockdev.OpWrite, 0, 100, 8192)...))
		before := b.set.Stalls()
		hangs(b.cache, blockdev.ForJournal, blockdev.OpWrite, time.Second, 0)
		err = errors.Join(err, b.WriteBack(context.Background()))
		b.rt.Sleep(time.Minute)
		if now := b.set.Stalls(); now != before || b.DirtySectors() > 0 {
			t.Errorf("%d sectors are dirty; %+v\nbefore writeback %+v", b.DirtySectors(), now, before)
		}
		return err
	})
}
