package cacheset

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

func TestChoose(t *testing.T) {
	g := ondisk.Geometry{BlockSectors: 1, NodeSectors: 16, BucketSectors: 16}
	room := (16*512 - ondisk.BSetHeaderBytes) / 8 // words
	full := room / keyWords * 2 / 3               // live keys of a node at 2/3
	of := func(part, stale float64) seen {
		return seen{live: int(part * float64(full)), words: keyWords*int(part*float64(full)) + int(stale*float64(room))}
	}
	must := of(0.9, 0)
	must.must = true
	old := of(0.2, 0.5)
	old.stale = true
	for i, c := range []struct {
		run    []seen
		always bool
		want   int
	}{
		{[]seen{of(0, 0)}, false, 0},
		{[]seen{of(1, 0), of(1, 0), of(1, 0), of(1, 0)}, false, 0},
		{[]seen{of(0.5, 0), of(0.45, 0)}, false, 2},
		{[]seen{of(0.5, 0), of(0.55, 0)}, false, 0},
		{[]seen{of(0.5, 0), of(0.55, 0), of(0.9, 0)}, false, 3},
		{[]seen{of(0.7, 0), of(0.7, 0), of(0.7, 0), of(0.7, 0)}, false, 4}, // 2.8
		{[]seen{of(0.1, 0), of(0.1, 0), of(1, 0), of(1, 0)}, false, 4},
		{[]seen{of(0.1, 0), of(0.1, 0), of(1.5, 0), of(1.5, 0)}, false, 3}, // all four: more than what is swapped at once
		{[]seen{of(1.2, 0), of(0.1, 0), of(0.1, 0)}, false, 3},
		{[]seen{of(1.2, 0), of(0.1, 0)}, false, 0},
		{[]seen{must}, false, 1},
		{[]seen{must, of(1, 0)}, false, 1},
		{[]seen{must, of(0.05, 0)}, false, 2},
		{[]seen{old, of(1, 0)}, false, 1},
		{[]seen{of(0.1, 1.5), of(0.1, 1.5)}, false, 0}, // too much at once
		{[]seen{of(1, 0), of(1, 0), of(0.9, 0)}, true, 3},
		{[]seen{of(1, 0)}, true, 0},
	} {
		if got := choose(&g, c.run, c.always); got != c.want {
			t.Errorf("case %d: %d nodes, want %d", i, got, c.want)
		}
	}
	if mostlyStale(100, 650, 1000) != true || mostlyStale(100, 590, 1000) || mostlyStale(0, 100, 1000) {
		t.Error("mostlyStale")
	}
}

// The sets of B 9.5, and ones whose pools are nearly gone: wherever a sweep without a rest can be over before the lag is
// 80, it is, and it rests wherever there is time.
func TestSweepIsOverInTime(t *testing.T) {
	const node = 256 << 10
	read := time.Second * node / 1_300_000_000
	for _, c := range []struct {
		name  string
		nodes int
		cycle time.Duration // of the pool: a step of the lag
		first int           // lag at the beginning
	}{
		{"375 GB", 5876, 2500 * time.Millisecond, 48},
		{"375 GB, 1000 buckets left", 5876, 250 * time.Millisecond, 48},
		{"375 GB, 200 buckets left", 5876, 50 * time.Millisecond, 48},
		{"375 GB, late", 5876, 250 * time.Millisecond, 72},
		{"6 TB", 144330, 41 * time.Second, 48},
		{"6 TB, a tenth of the pool", 144330, 4 * time.Second, 48},
		{"6 TB, a fortieth", 144330, time.Second, 48},
		{"evicted once", 5876, time.Second, 3},
	} {
		now := time.Duration(0)
		lag := func() int { return c.first + int(now/c.cycle) }
		rests := time.Duration(0)
		for done := range c.nodes {
			r := sweepRest(c.first, lag(), done, c.nodes)
			if r < 0 || r > sweepPause {
				t.Fatalf("%s: a rest of %v", c.name, r)
			}
			rests += r
			now += read + r
		}
		t.Logf("%s: over after %v, of that %v at rest, at a lag of %d", c.name, now, rests, lag())
		if lag() >= 80 {
			t.Errorf("%s: over at a lag of %d", c.name, lag())
		}
		if time.Duration(c.nodes)*(read+sweepPause) < c.cycle*time.Duration(80-c.first)/2 && rests < sweepPause*time.Duration(c.nodes)*9/10 {
			t.Errorf("%s: rested %v only, though there was time", c.name, rests)
		}
	}
	if sweepRest(48, 80, 1, 2) != 0 || sweepRest(90, 90, 1, 2) != 0 {
		t.Error("a rest at a lag of 80")
	}
}

// small fills both inodes with extents of one sector, no two of which can be one.
func (w *world) small() error {
	for _, at := range rand.New(rand.NewPCG(1, 1)).Perm(worldSectors / 2) {
		for inode := range uint32(2) {
			if err := w.store(inode, uint64(2*at), uint64(2*at+1), "dirty", 0); err != nil {
				return err
			}
		}
	}
	return nil
}

// nodes counts the nodes of the tree by a walk.
func (w *world) nodes() (total int, err error) {
	s := w.set
	s.mu.Lock()
	defer s.mu.Unlock()
	for level := 0; level <= int(s.tree.Root().Level); level++ {
		for at := (btree.Pos{}); ; {
			n, miss := s.tree.NodeAt(level, at)
			if n != nil {
				total++
				at = n.Ref().High
				continue
			}
			if miss.IsZero() {
				break
			}
			s.mu.Unlock()
			err := s.ReadNode(miss)
			s.mu.Lock()
			if err != nil {
				return 0, err
			}
		}
	}
	return total, nil
}

// After a large discard the index is as small as what is left needs, without anybody asking for it: here one leaf, which
// is the root. What is left is what it was, and the same after a restart.
func TestIndexShrinksAfterDiscard(t *testing.T) {
	for _, keep := range []uint64{200, 20} { // one sector of so many
		t.Run(fmt.Sprint(keep), func(t *testing.T) {
			simulate(t, 1, func(w *world) error {
				if err := w.small(); err != nil {
					return err
				}
				before, err := w.nodes()
				if err != nil {
					return err
				}
				for inode := range uint32(2) {
					for at := uint64(0); at < worldSectors; at += keep {
						if err := w.store(inode, at+2, min(at+keep, worldSectors), "nothing", 0); err != nil {
							return err
						}
					}
				}
				w.rt.Sleep(2 * time.Minute)
				after, err := w.nodes()
				if err != nil {
					return err
				}
				if err := w.compare(false); err != nil {
					return err
				}
				i := w.set.Info()
				t.Logf("%d nodes, then %d; %d coalesced, %d rewritten, the tree lowered %d times, %d sweeps, %d nodes swept",
					before, after, i.NodesCoalesced, i.NodesStale, i.TreesLowered, i.Table.Sweeps, i.NodesSwept)
				keys := int(2 * worldSectors / keep)
				want := btree.Coalesced(w.set.Geometry(), keys)
				if want > 1 {
					want++ // the root
				}
				if before < 8 || after > want || i.NodesCoalesced == 0 || want == 1 && i.TreesLowered == 0 {
					return fmt.Errorf("%d nodes of %d are left, %d are enough for %d keys", after, before, want, keys)
				}
				if i.Index.Nodes != after || i.Index.Keys != keys {
					return fmt.Errorf("by the last sweep: %+v", i.Index)
				}
				if err := w.reopen(); err != nil {
					return err
				}
				return w.compare(true)
			})
		})
	}
}

// Where nothing went, nothing is walked.
func TestNoSweepWithoutNeed(t *testing.T) {
	simulate(t, 1, func(w *world) error {
		if err := w.small(); err != nil {
			return err
		}
		if err := w.small(); err != nil { // overwrites
			return err
		}
		w.rt.Sleep(10 * time.Minute)
		if i := w.set.Info(); i.NodesSwept != 0 {
			return fmt.Errorf("%d nodes swept", i.NodesSwept)
		}
		return nil
	})
}

// Coalescing leaves buckets alone that others may need, and gives up what it has begun when others wait: with the reserve
// half gone it does nothing, and goes on when there is more.
func TestCoalescingLeavesTheReserve(t *testing.T) {
	simulate(t, 1, func(w *world) error {
		if err := w.small(); err != nil {
			return err
		}
		s := w.set
		s.mu.Lock()
		var taken []uint32
		for s.table.CanSpare(1) || s.table.CanAllocate() > 16 {
			b, _, ok := s.table.Allocate(bucket.ForMeta)
			if !ok {
				break
			}
			taken = append(taken, b)
		}
		s.mu.Unlock()
		n, _ := s.tree.NodeAt(0, btree.Pos{})
		for n == nil {
			_, miss := s.tree.NodeAt(0, btree.Pos{})
			if err := s.ReadNode(miss); err != nil {
				return err
			}
			n, _ = s.tree.NodeAt(0, btree.Pos{})
		}
		left := s.table.CanAllocate()
		if done, err := s.replace(false, n); done || err != nil || s.table.CanAllocate() < left {
			return fmt.Errorf("done %v, %w, %d buckets, %d before", done, err, s.table.CanAllocate(), left)
		}
		if n.Busy() {
			return fmt.Errorf("the node is still being rewritten")
		}
		for _, b := range taken {
			s.mu.Lock()
			s.table.Return(b)
			s.refill.Signal()
			s.mu.Unlock()
		}
		w.rt.Sleep(time.Second)
		s.mu.Lock()
		s.needMeta++ // somebody waits
		s.mu.Unlock()
		if done, err := s.replace(false, n); done || err != nil {
			return fmt.Errorf("while somebody waits: done %v, %w", done, err)
		}
		s.mu.Lock()
		s.needMeta--
		s.mu.Unlock()
		if n.Gone() {
			return nil
		}
		if done, err := s.replace(false, n); !done || err != nil {
			return fmt.Errorf("with buckets: done %v, %w", done, err)
		}
		return w.compare(false)
	})
}

// Lookups and insertions go on while the index is rewritten and coalesced under them, with few nodes in memory and on a
// device that takes its time.
func TestCoalescingUnderLoad(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			simulateWith(t, seed, Options{Restless: true}, func(w *world) error {
				if err := w.slow(); err != nil {
					return err
				}
				if err := w.small(); err != nil {
					return err
				}
				const clients = 6
				var g rt.WaitGroup
				g.Init(w.rt)
				var failed error
				for c := range uint64(clients) {
					g.Go("client", func() {
						if err := w.client(seed, c, clients); err != nil {
							failed = err
						}
					})
				}
				g.Wait()
				if failed != nil {
					return failed
				}
				i := w.set.Info()
				t.Logf("%d coalesced, %d rewritten, %d sweeps, %d nodes swept, tree lowered %d times", i.NodesCoalesced, i.NodesStale, i.Table.Sweeps, i.NodesSwept, i.TreesLowered)
				if i.NodesCoalesced < 20 || i.Table.Sweeps < 3 {
					return fmt.Errorf("%d nodes coalesced in %d sweeps", i.NodesCoalesced, i.Table.Sweeps)
				}
				return w.compare(false)
			})
		})
	}
}

// client stores and looks up in its own part of each inode.
func (w *world) client(seed, c, clients uint64) error {
	rng := rand.New(rand.NewPCG(seed, c))
	part := uint64(worldSectors) / clients
	in := Insertion{Pinned: true}
	for range 400 {
		inode := uint32(rng.IntN(2))
		at := c*part + rng.Uint64N(part-8)
		n := 1 + rng.Uint64N(8)
		if rng.IntN(3) == 0 {
			for s := at; s < at+n; {
				w.set.Lock()
				p, miss := w.set.LookupLocked(inode, s, s+1)
				good := miss.IsZero() && p.Cached && w.set.GoodLocked(p.Ptr)
				w.set.Unlock()
				if !miss.IsZero() {
					if err := w.set.ReadNode(miss); err != nil {
						return err
					}
					continue
				}
				if c := w.cells[inode][s]; c.dirty && (!good || p.Ptr != c.ptr) || good && p.Ptr != c.ptr {
					return fmt.Errorf("sector %d of inode %d is %+v, want %v", s, inode, p, c)
				}
				s++
			}
			continue
		}
		in.Keys = in.Keys[:0]
		var p ondisk.Ptr
		var got uint32
		dirty := rng.IntN(2) == 0
		if rng.IntN(2) == 0 {
			kind := bucket.ForClean
			if dirty {
				kind = bucket.ForDirty
			}
			w.set.Lock()
			p, got = w.set.SpaceLocked(kind, inode, at, uint32(n), 1, uint32(c))
			w.set.Unlock()
		}
		k := ondisk.NewInvalidation(inode, at+n, uint32(n))
		if got > 0 {
			n = uint64(got)
			k = ondisk.NewExtent(inode, at+n, got, p, dirty)
		}
		in.Keys = append(in.Keys, k)
		if err := w.set.Insert(&in); err != nil {
			return err
		}
		for s := range n {
			w.cells[inode][at+s] = cell{}
			if got > 0 {
				w.cells[inode][at+s] = cell{p.Advance(s), dirty}
			}
		}
		w.rt.Sleep(time.Duration(rng.IntN(300)) * time.Microsecond)
	}
	return nil
}

// slow starts the set again, on a device that takes its time.
func (w *world) slow() error {
	dev := w.dev
	w.dev = blockdev.NewDelaying(dev, blockdev.Latency{Read: 80 * time.Microsecond, Write: 20 * time.Microsecond, Flush: 150 * time.Microsecond, Jitter: 0.5, Parallel: 8})
	return w.reopen()
}

// A sweep leaves nothing in memory that it has read only to look at.
func TestSweepForgets(t *testing.T) {
	simulateWith(t, 1, Options{NodeCache: 8 << 20}, func(w *world) error {
		if err := w.small(); err != nil {
			return err
		}
		if err := w.reopen(); err != nil {
			return err
		}
		s := w.set
		s.mu.Lock()
		for range 100 {
			s.tree.Evict(0, 100)
		}
		before := s.tree.Nodes()
		s.mu.Unlock()
		if err := s.sweep(); err != nil {
			return err
		}
		w.rt.Sleep(time.Second)
		if i := s.Info(); i.Index.Nodes < 8 || i.Nodes > before+2*runNodes+tidiers { // a run that is looked at, and one that was; what tidiers have
			return fmt.Errorf("%d of %d nodes are in memory, %d before", i.Nodes, i.Index.Nodes, before)
		}
		return w.compare(false)
	})
}

// Leaves are split beside the insertions, which wait for none as long as a leaf holds less than twice what fits in a node:
// on a disk that takes 20 µs for a write and 150 for a flush, at a hundred thousand insertions a second, there is time for
// that.
func TestInsertionsDoNotWaitForSplits(t *testing.T) {
	for _, think := range []int{60, 20} {
		t.Run(fmt.Sprint(think), func(t *testing.T) {
			simulateWith(t, 1, Options{NodeCache: 8 << 20}, func(w *world) error {
				if err := w.slow(); err != nil {
					return err
				}
				rng := rand.New(rand.NewPCG(2, 2))
				var longest, begin time.Duration
				start := w.rt.Now()
				for range 12000 {
					inode, at := uint32(rng.IntN(2)), rng.Uint64N(worldSectors/2)*2
					kind := "dirty"
					if rng.IntN(6) == 0 {
						kind = "nothing"
					}
					begin = w.rt.Now()
					if err := w.store(inode, at, at+1, kind, 0); err != nil {
						return err
					}
					longest = max(longest, w.rt.Now()-begin)
					w.rt.Sleep(time.Duration(rng.IntN(think)) * time.Microsecond)
				}
				i := w.set.Info()
				t.Logf("%.0f a second; longest wait %v; %d splits, %d rewrites, %d waits for room in a leaf",
					12000/(w.rt.Now()-start).Seconds(), longest, i.NodeSplits, i.NodeRewrites, i.RoomWaits)
				if i.NodeSplits < 5 || i.RoomWaits > 0 {
					return fmt.Errorf("%d splits, and %d insertions waited for one", i.NodeSplits, i.RoomWaits)
				}
				return nil
			})
		})
	}
}
