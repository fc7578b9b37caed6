package cacheset

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// load inserts n times at random places of two inodes, and around the borders of the dirty map: dirty and clean data,
// fills, held extents, discards, and dirty data that is made clean as writeback does it; most sectors in each at most. Several
// may run at a time.
func (w *world) load(rng *rand.Rand, n int, most uint64) error {
	s := w.set
	list := shores()
	for range n {
		inode, at := uint32(rng.IntN(2)), rng.Uint64N(3*worldSectors)
		if rng.IntN(4) == 0 {
			x := list[rng.IntN(len(list))]
			inode, at = x.inode, x.base+rng.Uint64N(shoreSectors-most)
		}
		end := min(at+1+rng.Uint64N(most), ondisk.MaxOffset)
		var in Insertion
		switch kind := rng.IntN(12); {
		case kind == 0:
			s.Lock()
			w.flush[0]++ // one count for all
			s.FlushDoneLocked(inode, w.flush[0])
			s.Unlock()
			continue
		case kind <= 2:
			in.Keys = []ondisk.Key{ondisk.NewInvalidation(inode, end, uint32(end-at))}
		case kind <= 4:
			s.Lock()
			_, _ = s.ScanDirtyLocked(inode, at, end, func(start, end uint64, p ondisk.Ptr) bool {
				in.Old = append(in.Old, ondisk.NewExtent(inode, end, uint32(end-start), p, true))
				in.Keys = append(in.Keys, ondisk.NewExtent(inode, end, uint32(end-start), p, false))
				return len(in.Keys) < 16
			})
			s.Unlock()
			in.Epoch = w.flush[0] + 1
			w.rt.Sleep(time.Duration(rng.IntN(3)) * time.Millisecond) // somebody else may write there
		default:
			dirty := kind <= 7
			in.Pinned, in.Unjournalled = true, kind == 8
			if kind >= 10 {
				in.Epoch = w.flush[0] + 1
			}
			use := bucket.ForClean
			if dirty {
				use = bucket.ForDirty
			}
			s.Lock()
			for at < end {
				p, got := s.SpaceLocked(use, inode, at, uint32(end-at), 1, 1)
				if got == 0 {
					in.Keys = append(in.Keys, ondisk.NewInvalidation(inode, end, uint32(end-at)))
					break
				}
				at += uint64(got)
				in.Keys = append(in.Keys, ondisk.NewExtent(inode, at, got, p, dirty))
			}
			s.Unlock()
		}
		if err := s.Insert(&in); err != nil {
			return err
		}
		if w.rt.Yield(); rng.IntN(4) == 0 {
			w.rt.Sleep(time.Duration(rng.IntN(200)) * time.Microsecond)
		}
	}
	return nil
}

// loads runs several loads to their end.
func (w *world) loads(seed uint64, n int, most uint64) error {
	var group rt.WaitGroup
	group.Init(w.rt)
	var failed error
	for i := range uint64(4) {
		group.Go("load", func() {
			if err := w.load(rand.New(rand.NewPCG(seed, i)), n, most); err != nil {
				failed = err
			}
		})
	}
	group.Wait()
	return failed
}

// verified holds what the verifier has found against how often it should have come to an end, and looks by itself.
func (w *world) verified(passes uint64) error {
	i := w.set.Info()
	if i.VerifyMismatches != 0 || i.Table.Anomalies != 0 || i.Buckets[bucket.Suspect] != 0 {
		w.set.Lock()
		defer w.set.Unlock()
		return fmt.Errorf("%d mismatches in %d passes, %d suspect, %v", i.VerifyMismatches, i.VerifyPasses, i.Buckets[bucket.Suspect], w.set.table.Anomalies())
	}
	if i.VerifyPasses < passes {
		return fmt.Errorf("%d passes, want %d", i.VerifyPasses, passes)
	}
	return w.recount()
}

// Whatever goes on, the verifier finds what is counted, exactly: at any time, in one walk or several, with nodes that come
// and go, and over restarts.
func TestVerifyWhileThingsChange(t *testing.T) {
	seeds := 24
	if testing.Short() {
		seeds = 4
	}
	for seed := range uint64(seeds) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			simulate(t, seed, func(w *world) error {
				w.opt = Options{Restless: true, noMove: true, NodeCache: []int64{20 << 10, 32 << 10, 64 << 10, 8 << 20}[seed%4]}
				w.opt.verifyKeys = []int{1, 20, 300}[seed%3] // so that much happens in the middle of a walk
				if seed%5 == 1 {
					w.opt.verifyWindow = 200
				}
				// What is read and written takes its time.
				w.dev = blockdev.NewDelaying(w.dev, blockdev.Latency{Read: 80 * time.Microsecond, Write: 20 * time.Microsecond, Flush: 150 * time.Microsecond, Jitter: 0.5, Parallel: 8})
				splits := uint64(0)
				for life := range uint64(3) {
					if err := w.reopen(); err != nil {
						return err
					}
					if err := w.loads(seed*3+life, 600, []uint64{2, 4, 30, 60}[seed/2%4]); err != nil {
						return err
					}
					splits += w.set.Info().NodeRewrites
					cache := w.set.opt.NodeCache
					if err := w.verified(1); err != nil {
						return fmt.Errorf("life %d: %w", life, err)
					}
					w.set.opt.NodeCache = cache // the recount has changed it
				}
				if i := w.set.Info(); splits == 0 || i.Table.Evicted == 0 || i.Dirty == 0 || i.NodeReads == 0 && seed%8 < 2 {
					return fmt.Errorf("not much has happened: %d rewrites, %+v", splits, i)
				}
				return nil
			})
		})
	}
}

// victim returns a bucket of data that is wanted, and a place in the index that points into it.
func (w *world) victim(dirty bool) (b uint32, x btree.Extent) {
	s := w.set
	_, _ = s.tree.Scan(btree.Pos{}, btree.MaxPos, 1<<30, func(e btree.Extent) bool {
		if e.HasPtr() && e.Dirty() == dirty && s.GoodLocked(e.Ptr) {
			i := s.table.Info(s.bucketOf(e.Ptr))
			if want := map[bool]bucket.Category{false: bucket.Clean, true: bucket.Dirty}[dirty]; i.Category == want && i.Live < s.geo.BucketSectors {
				b, x = i.Bucket, e
			}
		}
		return b == 0
	})
	return b, x
}

// miscount makes the count of a bucket wrong, in the table alone.
func (w *world) miscount(b uint32, live, dirty int32) {
	var d bucket.Deltas
	d.Add(b, w.set.table.Gen(b), live, dirty)
	w.set.table.Apply(&d, w.set.journal.OpenLocked(), true)
}

// quiet fills the set a little, with the whole index in memory, and nothing going on.
func (w *world) quiet() error {
	w.opt.NodeCache = 8 << 20
	if err := w.reopen(); err != nil {
		return err
	}
	if err := w.loads(1, 100, 20); err != nil {
		return err
	}
	w.rt.Sleep(2 * time.Minute)
	return w.set.Verify(context.Background())
}

// A bucket counted wrong is found, whichever way; nothing of it is given up, and too high a count stays. The next pass
// trusts it again if its counts are right then.
func TestVerifyFindsAWrongBucket(t *testing.T) {
	for _, c := range []struct {
		name        string
		live, dirty int32
		trusted     bool
	}{
		{"too low", -1, 0, true},
		{"empty", -1 << 20, 0, true}, // all that is live
		{"clean", 0, -1 << 20, true}, // all that is dirty
		{"too high", 1, 0, false},
		{"dirty too high", 0, 1, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			simulate(t, 1, func(w *world) error {
				if err := w.quiet(); err != nil {
					return err
				}
				s, ctx := w.set, context.Background()
				s.Lock()
				b, x := w.victim(c.name == "clean")
				was := s.table.Info(b)
				w.miscount(b, max(c.live, -int32(was.Live)), max(c.dirty, -int32(was.Dirty)))
				wrong := s.table.Info(b)
				s.Unlock()
				if b == 0 || wrong.Live == was.Live && wrong.Dirty == was.Dirty {
					return fmt.Errorf("no victim: %v, %v", was, wrong)
				}

				err := s.Verify(ctx)
				var m *MismatchError
				if !errors.As(err, &m) || m.Count != 1 || !strings.Contains(err.Error(), fmt.Sprintf("bucket %d ", b)) ||
					!strings.Contains(err.Error(), fmt.Sprintf("the index has %d live and %d dirty sectors", was.Live, was.Dirty)) {
					return fmt.Errorf("the pass says: %w", err)
				}
				s.Lock()
				now, good := s.table.Info(b), s.GoodLocked(x.Ptr)
				s.Unlock()
				if now.Category != bucket.Suspect || now.Gen != was.Gen || !good || now.Live != max(was.Live, wrong.Live) || now.Dirty != max(was.Dirty, wrong.Dirty) {
					return fmt.Errorf("%v is %v after the pass", was, now)
				}
				if i := s.Info(); i.VerifyMismatches != 1 || i.Buckets[bucket.Suspect] != 1 {
					return fmt.Errorf("%+v", i)
				}

				// The bucket rests, though all others are wanted.
				if err := w.loads(2, 300, 40); err != nil {
					return err
				}
				s.Lock()
				now = s.table.Info(b)
				s.Unlock()
				if now.Category != bucket.Suspect || now.Gen != was.Gen {
					return fmt.Errorf("%v is %v under load", was, now)
				}
				err = s.Verify(ctx)
				i := s.Info()
				if c.trusted && (err != nil || i.VerifyTrusted != 1 || i.Buckets[bucket.Suspect] != 0) {
					return fmt.Errorf("not trusted again: %w; %+v", err, i)
				}
				if !c.trusted && (err == nil || i.VerifyTrusted != 0 || i.Buckets[bucket.Suspect] != 1) {
					return fmt.Errorf("trusted: %w; %+v", err, i)
				}
				// A start counts anew.
				if err := w.reopen(); err != nil {
					return err
				}
				return w.set.Verify(ctx)
			})
		})
	}
}

// A doubt that comes up while a walk is on is not over with it.
func TestVerifyTrustsLater(t *testing.T) {
	simulate(t, 1, func(w *world) error {
		if err := w.quiet(); err != nil {
			return err
		}
		s := w.set
		s.Lock()
		b, _ := w.victim(false)
		c := s.table.NewRecount(0, s.table.NBuckets())
		k := &count{s: s, counts: c, missed: new(MismatchError), doubts: s.table.Stats().Anomalies}
		i := s.table.Info(b)
		s.table.Doubt(b, i.Live, i.Dirty, "for the test")
		k.soundLocked(b, i.Live, i.Dirty)
		now := s.table.Info(b)
		s.Unlock()
		if now.Category != bucket.Suspect {
			return fmt.Errorf("%v", now)
		}
		if err := s.Verify(context.Background()); err != nil {
			return err
		}
		s.Lock()
		defer s.Unlock()
		if now = s.table.Info(b); now.Category != bucket.Clean {
			return fmt.Errorf("%v", now)
		}
		return nil
	})
}

// The dirty maps are held against the index too: a region that writeback would not look at, a sum that a detach goes by.
func TestVerifyFindsWrongDirtyData(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(m *dirtyMap, region uint64)
		count uint64
		again bool // the next pass finds the same: it was too high
	}{
		"sum too low":     {func(m *dirtyMap, _ uint64) { m.total-- }, 1, false},
		"sum too high":    {func(m *dirtyMap, _ uint64) { m.total++ }, 1, true},
		"region too low":  {func(m *dirtyMap, r uint64) { m.pages[r/pageRegions].regions[r%pageRegions] = 0 }, 1, false},
		"region too high": {func(m *dirtyMap, r uint64) { m.pages[r/pageRegions].regions[r%pageRegions]++ }, 1, true},
		"nothing there":   {func(m *dirtyMap, _ uint64) { m.add(7*pageSectors+8, 8, 1) }, 3, true},
		"page too low":    {func(m *dirtyMap, r uint64) { m.pages[r/pageRegions].total = 0 }, 1, false},
		"no page":         {func(m *dirtyMap, r uint64) { m.pages[r/pageRegions] = nil }, 2, false},
	} {
		t.Run(name, func(t *testing.T) {
			simulate(t, 1, func(w *world) error {
				if err := w.quiet(); err != nil {
					return err
				}
				sh := &shore{inode: 3, base: 5*pageSectors + 40*regionSectors, cells: make([]cell, 16)}
				if err := w.place(sh, 0, 16, "dirty"); err != nil {
					return err
				}
				s, ctx := w.set, context.Background()
				if err := s.Verify(ctx); err != nil {
					return err
				}
				s.Lock()
				c.spoil(&s.dirty[3], sh.base/regionSectors)
				s.Unlock()
				var m *MismatchError
				if err := s.Verify(ctx); !errors.As(err, &m) || m.Count != c.count || !strings.Contains(err.Error(), "slot 3 has") {
					return fmt.Errorf("want %d: %w", c.count, err)
				}
				s.Lock()
				at, ok := s.dirty[3].next(sh.base)
				total := s.dirty[3].total
				s.Unlock()
				if !ok || at > sh.base || total < 16 {
					return fmt.Errorf("dirty data from %d on, %v, of %d sectors", at, ok, total)
				}
				if err := s.Verify(ctx); (err != nil) != c.again {
					return fmt.Errorf("the next pass: %w", err)
				}
				return nil
			})
		})
	}
}

// Without being asked the set verifies itself once a week, counted from the start.
func TestVerifyOnceAWeek(t *testing.T) {
	for _, c := range []struct {
		sleep time.Duration
		want  uint64
	}{{verifyEvery - time.Hour, 0}, {verifyEvery + time.Hour, 1}} {
		s := rt.NewSim(1)
		s.Limit = 1000 * time.Hour
		err := s.Run(func() {
			set := &Set{rt: s.Runtime()}
			set.mu.Init(set.rt)
			set.verify.wake.Init(&set.mu)
			var cancel context.CancelFunc
			set.stop, cancel = context.WithCancel(context.Background())
			set.opt.VerifyEvery = newSet(set.memory(t), Options{}).opt.VerifyEvery
			due := uint64(0)
			set.rt.Go("verifier", func() {
				for set.verifyDue(set.opt.VerifyEvery) {
					due++
				}
			})
			set.rt.Sleep(c.sleep)
			if due != c.want {
				t.Errorf("%d passes after %v", due, c.sleep)
			}
			cancel()
			set.rt.Sleep(time.Second)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// memory returns a device for a set that is never opened.
func (s *Set) memory(t *testing.T) blockdev.Device {
	dev, err := blockdev.Memory(1<<20, blockdev.MemoryOptions{Runtime: s.rt})
	if err != nil {
		t.Fatal(err)
	}
	return dev
}

// Nodes that have to be read are read at a pace; a pass beside requests that never end comes to its end, however little
// of the index there is room for.
func TestVerifyUnderLoad(t *testing.T) {
	simulate(t, 1, func(w *world) error {
		w.opt.NodeCache = 20 << 10 // two nodes or three, of twenty
		w.dev = blockdev.NewDelaying(w.dev, blockdev.Latency{Read: 80 * time.Microsecond, Write: 20 * time.Microsecond, Flush: 150 * time.Microsecond, Jitter: 0.5, Parallel: 8})
		if err := w.reopen(); err != nil {
			return err
		}
		if err := w.loads(1, 2000, 3); err != nil {
			return err
		}
		w.set.Lock()
		for inode := range uint32(4) {
			w.set.FlushDoneLocked(inode, w.flush[0]+2)
		}
		w.set.Unlock()
		w.rt.Sleep(time.Minute) // nodes are written, and can go
		var group rt.WaitGroup
		group.Init(w.rt)
		over := false
		var failed error
		for i := range uint64(3) {
			group.Go("load", func() {
				for n := uint64(0); !over && failed == nil; n++ {
					failed = w.load(rand.New(rand.NewPCG(i, n)), 10, 3)
				}
			})
		}
		before, begin := w.set.Info().NodeReads, w.rt.Now()
		err := w.set.Verify(context.Background())
		took, reads := w.rt.Now()-begin, w.set.Info().NodeReads-before
		over = true
		group.Wait()
		if err != nil || failed != nil {
			return errors.Join(err, failed)
		}
		if reads < 10 {
			return fmt.Errorf("%d nodes were read: the index is in memory: %+v", reads, w.set.Info())
		}
		if took > time.Minute || took < 5*time.Millisecond {
			return fmt.Errorf("the pass took %v", took)
		}
		return w.verified(1)
	})
}

// What a pass cannot read ends it; who waits is told so, and the next one is made from the beginning. The end of a wait
// does not end the pass, and the end of the set does.
func TestVerifyInterrupted(t *testing.T) {
	simulate(t, 1, func(w *world) error {
		if err := w.loads(1, 2000, 3); err != nil {
			return err
		}
		f := blockdev.NewFaulty(blockdev.NewDelaying(w.dev, blockdev.Latency{Read: time.Millisecond, Parallel: 8}), 1)
		w.dev, w.opt.NodeCache = f, 20<<10
		if err := w.reopen(); err != nil {
			return err
		}
		w.rt.Sleep(time.Minute)
		s, ctx := w.set, context.Background()
		read := errors.New("no such sector")
		f.Add(blockdev.Fault{Purposes: []blockdev.Purpose{blockdev.ForBtree}, Ops: []blockdev.Op{blockdev.OpRead}, Err: read})
		if err := s.Verify(ctx); !errors.Is(err, read) {
			return fmt.Errorf("with a device that reads nothing: %w", err)
		}
		f.Clear()
		short, cancel := w.rt.WithTimeout(ctx, time.Millisecond)
		defer cancel()
		if err := s.Verify(short); !errors.Is(err, context.DeadlineExceeded) {
			return fmt.Errorf("for a millisecond: %w", err)
		}
		if err := s.Verify(ctx); err != nil {
			return err
		}
		if n := s.Info().VerifyPasses; n != 2 {
			return fmt.Errorf("%d passes, want the one that was not waited for, and the one that was", n)
		}
		var late error
		over := false
		w.rt.Go("waits", func() {
			late = s.Verify(ctx)
			over = true
		})
		w.rt.Sleep(2 * time.Millisecond)
		if err := w.reopen(); err != nil {
			return err
		}
		if w.rt.Sleep(time.Second); !over || !errors.Is(late, ErrClosed) {
			return fmt.Errorf("a pass when the set is closed: %v, %w", over, late)
		}
		return w.set.Verify(ctx)
	})
}
