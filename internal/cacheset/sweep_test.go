package cacheset

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// put inserts 16 sectors, and returns where they lie; a fill is not journalled.
func (w *world) put(inode uint32, at uint64, fill bool) (ondisk.Ptr, error) {
	return w.putSome(inode, at, 16, fill)
}

func (w *world) putSome(inode uint32, at uint64, sectors uint32, fill bool) (ondisk.Ptr, error) {
	for {
		w.set.Lock()
		p, n := w.set.SpaceLocked(bucket.ForClean, inode, at, sectors, 1, 1)
		w.set.Unlock()
		if n == 0 {
			w.rt.Sleep(100 * time.Millisecond)
			continue
		}
		in := Insertion{Keys: []ondisk.Key{ondisk.NewExtent(inode, at+uint64(n), n, p, false)}, Pinned: true, Unjournalled: fill}
		return p, w.set.Insert(&in)
	}
}

// A stale pointer is on the disk until what covers it is there too: a sweep in between must not find its bucket
// without old pointers.
func TestSweepOverOpenKeys(t *testing.T) {
	simulate(t, 1, func(w *world) error {
		s := w.set
		old, err := w.put(0, 0, false)
		if err != nil {
			return err
		}
		w.rt.Sleep(40 * time.Second) // on the disk
		for at, good := uint64(64), true; good; at += 64 {
			if _, err := w.put(1, at, false); err != nil {
				return err
			}
			w.rt.Sleep(20 * time.Millisecond)
			s.Lock()
			good = s.GoodLocked(old)
			s.Unlock()
		}
		w.rt.Sleep(70 * time.Second) // nothing waits to be written; that the bucket was evicted is durable
		if err := s.Sync(); err != nil {
			return err
		}
		if _, err := w.put(0, 0, true); err != nil { // a miss
			return err
		}
		if err := s.sweep(); err != nil {
			return err
		}
		s.Lock()
		defer s.Unlock()
		i := s.table.Info(s.bucketOf(old))
		leaf, miss := s.tree.NodeAt(0, s.tree.Root().Low)
		if !miss.IsZero() {
			return fmt.Errorf("the leaf of sector 0 is not in memory")
		}
		if i.Gen != old.Gen() && i.Oldest == i.Gen && leaf.OpenBytes() > 0 {
			return fmt.Errorf("the pointer of generation %d is on the disk still, and the sweep has found none: %v", old.Gen(), i)
		}
		return nil
	})
}

// An ages looks at a raw disk: how old the pointers are that a start from there finds.
type ages struct {
	s    *Set
	mem  []byte
	seen int // pointers that are stale
	most uint8
}

// look holds every pointer of the nodes that can be reached, and of the entries that are needed, against what the bucket table
// says is the oldest one.
func (a *ages) look() error {
	sets, newest := a.s.journalOn(a.mem)
	for i := range sets {
		if sets[i].Seq < newest.LastSeq {
			continue
		}
		var failed error
		err := sets[i].EachKey(func(k *ondisk.Key) bool {
			if k.Ptrs() > 0 {
				failed = a.pointer(k.P[0])
			}
			return failed == nil
		})
		if err = errors.Join(err, failed); err != nil {
			return fmt.Errorf("entry %d, of %d to %d: %w", sets[i].Seq, newest.LastSeq, newest.Seq, err)
		}
	}
	return a.node(btree.Ref{Level: uint8(newest.Level), Sectors: newest.Root.Size(), Ptr: newest.Root.P[0], High: btree.MaxPos})
}

func (a *ages) pointer(p ondisk.Ptr) error {
	b, ok := a.s.table.Bucket(p)
	if !ok {
		return nil
	}
	i := a.s.table.Info(b)
	if age := ondisk.GenAfter(i.Gen, p.Gen()); age > 0 {
		a.seen++
		a.most = max(a.most, age)
		if age > i.Gen-i.Oldest {
			return fmt.Errorf("a pointer of generation %d into %v", p.Gen(), i)
		}
	}
	return nil
}

func (a *ages) node(ref btree.Ref) error {
	key := ref.Key()
	at := int64(ref.Ptr.Sector()) * ondisk.SectorSize
	b := a.mem[at : at+int64(ref.Sectors)*ondisk.SectorSize]
	var failed error
	if ref.Level == 0 {
		n, err := btree.Parse(&a.s.geo, ref, b)
		if err != nil {
			return err
		}
		n.EachExtent(func(x *btree.Extent) {
			if x.HasPtr() && failed == nil {
				failed = a.pointer(x.Ptr)
			}
		})
		if failed != nil {
			return fmt.Errorf("%v: %w", ref, failed)
		}
		return nil
	}
	d := ondisk.DecodeNode(b, &a.s.geo, &key)
	if d.Err != nil {
		return d.Err
	}
	freed := map[ondisk.Ptr]bool{}
	var kids []btree.Ref
	for i := range d.Sets {
		err := d.Sets[i].EachKey(func(k *ondisk.Key) bool {
			if k.IsFreeing() {
				freed[ondisk.MakePtr(k.P[0].Gen()-1, k.P[0].Sector(), 0)] = true
			} else {
				kids = append(kids, btree.Ref{Level: ref.Level - 1, Sectors: k.Size(), Ptr: k.P[0], High: btree.Pos{Inode: k.Inode(), Sector: k.End()}})
			}
			failed = a.pointer(k.P[0])
			return failed == nil
		})
		if err = errors.Join(err, failed); err != nil {
			return fmt.Errorf("%v: %w", ref, err)
		}
	}
	kids = slices.DeleteFunc(kids, func(r btree.Ref) bool { return freed[r.Ptr] })
	slices.SortFunc(kids, func(x, y btree.Ref) int {
		if x.High.Less(y.High) {
			return -1
		}
		return 1
	})
	low := ref.Low
	for _, r := range kids {
		r.Low = low
		low = r.High
		if err := a.node(r); err != nil {
			return err
		}
	}
	return nil
}

// At no moment has the disk a pointer that is older than the bucket table knows of, whatever a sweep has seen or not while nodes
// were split, rewritten, coalesced, read again and freed under it: a kernel would take what is old enough for new.
func TestSweepsForgetNothing(t *testing.T) {
	seeds := uint64(3)
	if testing.Short() {
		seeds = 1
	}
	var lowered atomic.Uint64
	t.Cleanup(func() {
		if lowered.Load() == 0 {
			t.Error("no tree was lowered")
		}
	})
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			simulateWith(t, seed, Options{Restless: true, NodeCache: 2 << 10, markKeys: []int{1, 7, 50}[seed%3]}, func(w *world) error {
				mem := w.dev.(*blockdev.MemoryDevice)
				w.dev = blockdev.NewDelaying(mem, blockdev.Latency{Read: 60 * time.Microsecond, Write: 40 * time.Microsecond, Flush: 100 * time.Microsecond, Jitter: 0.9, Parallel: 8})
				if err := w.reopen(); err != nil {
					return err
				}
				a := &ages{s: w.set, mem: mem.Bytes()}
				rng := rand.New(rand.NewPCG(seed, 9))
				for n := range 20_000 {
					most := uint64(200_000)
					if n/4000%2 == 1 {
						most = 2000 // many nodes become few, and are no more
					}
					if n%8000 == 4000 { // and the root goes for its only child
						in := Insertion{}
						for i := range uint32(2) {
							for end := uint64(dropMost); end < 200_000+dropMost; end += dropMost {
								in.Keys = append(in.Keys, ondisk.NewInvalidation(i, end, dropMost))
							}
						}
						if err := w.set.Insert(&in); err != nil {
							return err
						}
					}
					if _, err := w.putSome(uint32(rng.IntN(2)), rng.Uint64N(most), 1+uint32(rng.IntN(3)), rng.IntN(2) == 0); err != nil {
						return err
					}
					if n%3 == 0 {
						w.rt.Sleep(time.Duration(rng.IntN(300)) * time.Microsecond)
					}
					if rng.IntN(20) > 0 {
						continue
					}
					w.set.Lock()
					err := a.look()
					w.set.evictLocked()
					w.set.Unlock()
					if err != nil {
						return fmt.Errorf("after %d: %w", n, err)
					}
				}
				i := w.set.Info()
				t.Logf("%d stale pointers were looked at, the oldest %d generations behind; %d sweeps, %d nodes rewritten, %d coalesced, %d split, %d read, %d trees lowered", a.seen, a.most, i.Table.Sweeps, i.NodeRewrites, i.NodesCoalesced, i.NodeSplits, i.NodeReads, i.TreesLowered)
				if a.most < 2 || i.Table.Sweeps < 20 || i.NodesCoalesced == 0 || i.NodeSplits == 0 || i.NodeReads == 0 {
					return errors.New("that is too little to say anything")
				}
				lowered.Add(i.TreesLowered)
				return w.recount()
			})
		})
	}
}
