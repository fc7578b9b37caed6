package cacheset

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/pace"
)

// faulty starts the set again, with all nodes on the disk, on a device that can be made to fail. The nodes that are in
// memory then are few.
func (w *world) faulty() (*blockdev.Faulty, error) {
	if err := w.set.Close(context.Background()); err != nil {
		return nil, err
	}
	disk := blockdev.NewFaulty(w.dev, 1)
	w.dev = disk
	return disk, w.open()
}

// collected waits until a collection has ended, well or not, at most a minute.
func (w *world) collected() error {
	s := w.set
	s.mu.Lock()
	before := s.gc.serial
	s.triggerGCLocked()
	s.mu.Unlock()
	for until := w.rt.Now() + time.Minute; ; w.rt.Sleep(time.Millisecond) {
		s.mu.Lock()
		over := s.gc.serial > before
		s.mu.Unlock()
		if over {
			return nil
		}
		if w.rt.Now() > until {
			return errors.New("the collection does not end")
		}
	}
}

// A collection whose copies of nodes cannot be written stops the set, as any other writer of nodes does: the nodes that it
// has begun to replace would wait for ever, and with them whoever wants to change them.
func TestCollectionThatCannotWrite(t *testing.T) {
	simulate(t, 1, func(w *world) error {
		if err := w.small(); err != nil {
			return err
		}
		disk, err := w.faulty()
		if err != nil {
			return err
		}
		if err := w.set.SetGCPolicy("classic"); err != nil {
			return err
		}
		for inode := range uint32(2) { // nodes that can be fewer
			if err := w.store(inode, 0, worldSectors, "nothing", 0); err != nil {
				return err
			}
		}
		if err := w.set.Sync(); err != nil {
			return err
		}
		w.rt.Sleep(2 * time.Minute) // all keys are in their leaves on the disk
		disk.Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpWrite}, Purposes: []blockdev.Purpose{blockdev.ForBtree}})
		_ = w.collected()
		w.rt.Sleep(10 * time.Second)
		failed := w.set.Err()
		_ = w.set.Close(context.Background())
		w.set = nil
		if failed == nil {
			return errors.New("the set goes on")
		}
		return nil
	})
}

// A node that cannot be read ends a collection: it can say nothing, and who waits for it, and for the buckets that nobody
// gets meanwhile, may not wait for ever. What the exact counts have says what may be picked till the next one.
func TestCollectionThatCannotRead(t *testing.T) {
	for _, policy := range pace.Names {
		t.Run(policy, func(t *testing.T) {
			simulate(t, 1, func(w *world) error {
				if err := w.small(); err != nil {
					return err
				}
				disk, err := w.faulty()
				if err != nil {
					return err
				}
				s := w.set
				w.rt.Sleep(2 * time.Minute)
				s.mu.Lock()
				for range 4 { // those that were used have a second chance
					s.tree.Evict(0, 1000)
				}
				_, miss := s.tree.NodeAt(0, btree.Pos{Inode: 1, Sector: worldSectors / 2})
				s.mu.Unlock()
				if miss.IsZero() {
					return errors.New("the node is in memory")
				}
				remove := disk.Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpRead}, Off: int64(miss.Ptr.Sector()) * 512, Len: int64(miss.Sectors) * 512})
				if err := s.SetGCPolicy(policy); err != nil {
					return err
				}
				if err := w.collected(); err != nil {
					return fmt.Errorf("%w; %+v", err, s.GC())
				}
				g := s.GC()
				if g.Collections != 0 || g.Differences != 0 || s.Err() != nil {
					return fmt.Errorf("%+v; %w", g, s.Err())
				}
				for range 2 * s.table.NBuckets() { // the whole cache is evicted, and again
					if err := w.churn(); err != nil {
						return err
					}
				}
				if n := remove(); n == 0 {
					return errors.New("nobody has met the node")
				}
				if err := w.collected(); err != nil {
					return err
				}
				if g := s.GC(); g.Collections == 0 || g.Differences != 0 {
					return fmt.Errorf("when the node can be read: %+v", g)
				}
				return w.compare(false)
			})
		})
	}
}

// churn takes a bucket for clean data, and lets it go, within a minute.
func (w *world) churn() error {
	s := w.set
	for until := w.rt.Now() + time.Minute; w.rt.Now() < until; w.rt.Sleep(time.Millisecond) {
		s.mu.Lock()
		p, n := s.SpaceLocked(bucket.ForClean, 1, 0, s.geo.BucketSectors, s.geo.BucketSectors, 1)
		if n > 0 {
			s.LetGoLocked(p)
		}
		s.mu.Unlock()
		if n > 0 {
			return nil
		}
	}
	return errors.New("no bucket in a minute")
}

// Who waits for a bucket for dirty data, where all is dirty, is told so: after the collections that could help, or when
// there is nothing that one could find. So it is when the policy is changed under who waits.
func TestFullUnderAPolicy(t *testing.T) {
	for _, policy := range append(pace.Names, "changed") {
		t.Run(policy, func(t *testing.T) {
			simulate(t, 1, func(w *world) error {
				first := policy
				if policy == "changed" {
					first = "classic"
				}
				s := w.set
				if err := s.SetGCPolicy(first); err != nil {
					return err
				}
				if err := w.fill(); err != nil {
					return err
				}
				for try := range 3 {
					begin := w.rt.Now()
					over := false
					w.rt.Go("change", func() {
						for i := 0; policy == "changed" && !over; i++ {
							_ = s.SetGCPolicy([]string{"exact", "classic"}[i%2])
							w.rt.Sleep(time.Second)
						}
					})
					err := w.within(time.Minute, func() error {
						s.mu.Lock()
						s.WantSpaceLocked(true)
						s.mu.Unlock()
						err := s.WaitSpace()
						s.mu.Lock()
						s.WantSpaceLocked(false)
						s.mu.Unlock()
						return err
					})
					over = true
					if !errors.Is(err, ErrNoSpace) {
						return fmt.Errorf("try %d: after %v: %w; %v", try, w.rt.Now()-begin, err, s.table.Counts())
					}
				}
				return nil
			})
		})
	}
}

// fill makes all of the cache dirty, by one sector of each bucket.
func (w *world) fill() error {
	s := w.set
	in := Insertion{Pinned: true}
	last := w.rt.Now()
	for at := uint64(1); w.rt.Now()-last < 20*time.Second; {
		s.mu.Lock()
		p, n := s.SpaceLocked(bucket.ForDirty, 1, at, s.geo.BucketSectors, s.geo.BucketSectors, 1)
		s.mu.Unlock()
		if n == 0 {
			w.rt.Sleep(10 * time.Millisecond)
			continue
		}
		in.Keys = append(in.Keys[:0], ondisk.NewExtent(1, at+1, 1, p, true))
		if err := s.Insert(&in); err != nil {
			return err
		}
		at, last = at+2, w.rt.Now()
	}
	return nil
}

// within runs fn; an error says that it took longer.
func (w *world) within(d time.Duration, fn func() error) error {
	over := false
	var err error
	w.rt.Go("within", func() {
		err = fn()
		over = true
	})
	for until := w.rt.Now() + d; !over; w.rt.Sleep(10 * time.Millisecond) {
		if w.rt.Now() > until {
			return errors.New("it is not over")
		}
	}
	return err
}

// A set is closed in the middle of a collection although nodes have to be rewritten for that, and no bucket is ready for
// their copies: the collection is given up, and what it left unknown forbids nothing.
func TestCloseWhileCollecting(t *testing.T) {
	for _, policy := range pace.Names {
		t.Run(policy, func(t *testing.T) {
			simulate(t, 1, func(w *world) error {
				if err := w.small(); err != nil {
					return err
				}
				s := w.set
				s.TuneGC(func(t *GCTuning) { t.MinNodes, t.Sleep = 1, time.Minute })
				s.Arrived(1)
				if err := s.SetGCPolicy(policy); err != nil {
					return err
				}
				s.TriggerGC()
				w.rt.Sleep(time.Second)
				s.mu.Lock()
				if !s.gc.under {
					s.mu.Unlock()
					return errors.New("no collection")
				}
				var taken []uint32
				for {
					b, _, ok := s.table.Allocate(bucket.ForMeta)
					if !ok {
						break
					}
					taken = append(taken, b)
				}
				n, _ := s.tree.NodeAt(0, btree.Pos{})
				if n == nil {
					s.mu.Unlock()
					return errors.New("the first leaf is not in memory")
				}
				s.queueLocked(n, true)
				for _, b := range taken {
					s.table.Return(b)
				}
				s.mu.Unlock()
				w.set = nil
				return w.within(5*time.Minute, func() error { return s.Close(context.Background()) })
			})
		})
	}
}

// What is counted is counted since the start, whatever the policies were; it does not go with one of them.
func TestCollectionTotals(t *testing.T) {
	simulate(t, 1, func(w *world) error {
		s := w.set
		var before GCStats
		for _, policy := range []string{"classic", Exact, "paced", Exact, "reclaim"} {
			if err := s.SetGCPolicy(policy); err != nil {
				return err
			}
			if policy != Exact {
				for range 40 {
					if err := w.churn(); err != nil {
						return err
					}
				}
				if err := w.collected(); err != nil {
					return err
				}
			}
			g := s.GC()
			if g.Looked < before.Looked || g.Looked == before.Looked && policy != Exact || g.Differences != 0 {
				return fmt.Errorf("%s: %+v, before %+v", policy, g, before)
			}
			before = g
		}
		return nil
	})
}

// In a simulation the allocator is held up, to choose victims, for as long as the buckets that are looked at take the kernel,
// in however many parts that is done.
func TestLooksTakeTheirTime(t *testing.T) {
	simulate(t, 1, func(w *world) error {
		s := w.set
		if err := s.SetGCPolicy("classic"); err != nil {
			return err
		}
		var held time.Duration
		over := false
		w.rt.Go("watch", func() {
			for !over {
				s.mu.Lock()
				if s.gc.held {
					held += time.Microsecond
				}
				s.mu.Unlock()
				w.rt.Sleep(time.Microsecond)
			}
		})
		for range 200 {
			if err := w.churn(); err != nil {
				return err
			}
		}
		over = true
		g := s.GC()
		want := time.Duration(g.Looked) * lookTime
		if g.Collections > 0 { // at its beginning and its end
			want += time.Duration(2*g.Collections) * bucket.MarkSlice * lookTime
		}
		if g.Looked == 0 || held < want*9/10 || held > want*11/10 {
			return fmt.Errorf("held up for %v, %d looks take %v", held, g.Looked, want)
		}
		return nil
	})
}

// While a policy looks at all buckets nobody gets one, nor who waited for one before and is woken meanwhile.
func TestNobodyAllocatesWhileBucketsAreHeld(t *testing.T) {
	simulate(t, 1, func(w *world) error {
		if err := w.slow(); err != nil {
			return err
		}
		s := w.set
		if err := s.SetGCPolicy("classic"); err != nil {
			return err
		}
		s.mu.Lock()
		for ok := true; ok; {
			_, _, ok = s.table.Allocate(bucket.ForMeta)
		}
		got := false
		w.rt.Go("waits", func() {
			s.mu.Lock()
			list, err := s.takeMetaLocked(true, 1)
			got = err == nil
			for _, p := range list {
				s.table.Return(s.bucketOf(p))
			}
			s.mu.Unlock()
		})
		for s.needMeta == 0 || !s.batching { // generations are on their way, then there are buckets
			s.mu.Unlock()
			w.rt.Sleep(time.Microsecond)
			s.mu.Lock()
		}
		s.gc.held = true
		early := got
		s.mu.Unlock()
		w.rt.Sleep(time.Second)
		s.mu.Lock()
		held := got
		s.gc.held = false
		s.gc.free.Broadcast()
		s.mu.Unlock()
		w.rt.Sleep(time.Second)
		if early || held || !got {
			return fmt.Errorf("got a bucket before: %v, while they were held: %v, after: %v", early, held, got)
		}
		return nil
	})
}

// A collection rewrites the nodes that the kernel's does: those with a pointer older than ten generations, and those with more
// bad keys than good ones. A parent of which a few nodes were split is none.
func TestCollectionRewritesWhatIsOld(t *testing.T) {
	simulate(t, 1, func(w *world) error {
		s := w.set
		if err := w.small(); err != nil { // leaves are split, one at a time
			return err
		}
		w.rt.Sleep(2 * time.Minute)
		if err := s.SetGCPolicy("classic"); err != nil {
			return err
		}
		before := s.Info()
		if before.Root.Level == 0 || before.NodeSplits == 0 {
			return fmt.Errorf("%d splits, the root is %v", before.NodeSplits, before.Root)
		}
		if err := w.collected(); err != nil {
			return err
		}
		if after := s.Info(); after.NodesStale > before.NodesStale || after.MaxLag > sweepOld {
			return fmt.Errorf("%d nodes rewritten; lag %d", after.NodesStale-before.NodesStale, after.MaxLag)
		}
		return w.compare(false)
	})
}
