package cacheset

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// A world is a set in a simulation, and what its index should say: a cell for each sector of two inodes.
type world struct {
	rt    *rt.Runtime
	dev   blockdev.Device
	opt   Options // of the next start
	set   *Set
	cells [2][]cell
	in    Insertion
	flush [2]uint64 // number of the last flush of each inode's backing device
}

type cell struct {
	ptr   ondisk.Ptr // 0: not cached
	dirty bool
}

const (
	worldSectors = 3000
	worldBucket  = 8 << 10
	worldSize    = 513 * worldBucket
)

// simulate runs fn on a fresh set.
func simulate(t *testing.T, seed uint64, fn func(w *world) error) {
	t.Helper()
	simulateWith(t, seed, Options{}, fn)
}

func simulateWith(t *testing.T, seed uint64, o Options, fn func(w *world) error) {
	t.Helper()
	if o.NodeCache == 0 {
		o.NodeCache = 32 << 10
	}
	s := rt.NewSim(seed)
	s.Limit = 10 * time.Hour
	var failed error
	err := s.Run(func() {
		o.noMove = true // the cells say where
		w := &world{rt: s.Runtime(), opt: o}
		dev, err := blockdev.Memory(worldSize, blockdev.MemoryOptions{Runtime: w.rt})
		if err != nil {
			panic(err)
		}
		w.dev = dev
		for i := range w.cells {
			w.cells[i] = make([]cell, worldSectors)
		}
		ctx := context.Background()
		if _, failed = offline.Format(ctx, offline.FormatOptions{Cache: dev, Bucket: worldBucket, Block: 512}); failed == nil {
			failed = w.open()
		}
		if failed == nil {
			failed = fn(w)
		}
		if w.set != nil {
			if err := w.set.Close(ctx); failed == nil {
				failed = err
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if failed != nil {
		t.Fatalf("seed %d: %v", seed, failed)
	}
}

func (w *world) open() (err error) {
	w.set, err = Open(context.Background(), w.dev, w.opt)
	return err
}

// reopen stops the set and starts it again.
func (w *world) reopen() error {
	if err := w.set.Close(context.Background()); err != nil {
		return err
	}
	w.flush = [2]uint64{} // holds do not outlive the set; numbers begin anew
	return w.open()
}

// store inserts sectors [from, to) of an inode: data that is dirty or clean, or nothing.
func (w *world) store(inode uint32, from, to uint64, kind string, epoch uint64) error {
	w.in.Keys = w.in.Keys[:0]
	w.in.Epoch, w.in.Unjournalled, w.in.Pinned = epoch, kind == "fill", true
	w.set.Lock()
	for at := from; at < to; {
		use := bucket.ForClean
		if kind == "dirty" {
			use = bucket.ForDirty
		}
		var p ondisk.Ptr
		n := uint32(0)
		if kind != "nothing" {
			p, n = w.set.SpaceLocked(use, inode, at, uint32(to-at), 1, 1)
		}
		if n == 0 {
			n = uint32(to - at)
			w.in.Keys = append(w.in.Keys, ondisk.NewInvalidation(inode, to, n))
		} else {
			w.in.Keys = append(w.in.Keys, ondisk.NewExtent(inode, at+uint64(n), n, p, kind == "dirty"))
		}
		at += uint64(n)
	}
	keys := append([]ondisk.Key(nil), w.in.Keys...)
	w.set.Unlock()
	if err := w.set.Insert(&w.in); err != nil {
		return err
	}
	for i := range keys {
		k := &keys[i]
		for s := k.Start(); s < k.End(); s++ {
			w.cells[inode][s] = cell{}
			if k.Ptrs() > 0 {
				w.cells[inode][s] = cell{k.P[0].Advance(s - k.Start()), k.Dirty()}
			}
		}
	}
	return nil
}

// compare holds the index and the accounts against the model. Clean data may be gone; restarted says that pointers
// that waited for a flush are gone, too.
func (w *world) compare(restarted bool) error {
	for inode := range w.cells {
		dirty := int64(0)
		for at := uint64(0); at < worldSectors; {
			w.set.Lock()
			p, miss := w.set.LookupLocked(uint32(inode), at, worldSectors)
			good := miss.IsZero() && p.Cached && w.set.GoodLocked(p.Ptr)
			w.set.Unlock()
			if !miss.IsZero() {
				if err := w.set.ReadNode(miss); err != nil {
					return err
				}
				continue
			}
			for ; at < p.End; at++ {
				c := &w.cells[inode][at]
				is := cell{}
				if good {
					is = cell{p.Ptr.Advance(at - p.Start), p.Dirty}
				}
				if is != *c && (c.dirty || is != cell{}) {
					return fmt.Errorf("sector %d of inode %d is %v, want %v", at, inode, is, *c)
				}
				if is == (cell{}) {
					*c = cell{} // evicted
				}
				if is.dirty {
					dirty++
				}
			}
		}
		w.set.Lock()
		counted := w.set.DirtyLocked(uint32(inode))
		w.set.Unlock()
		if counted != dirty {
			return fmt.Errorf("inode %d: %d dirty sectors by account, %d in the index", inode, counted, dirty)
		}
	}
	return w.recount()
}

// recount walks the whole index and compares with the exact counts.
func (w *world) recount() error {
	s := w.set
	for {
		var err error
		s.mu.Lock()
		if err = s.tree.Check(); err == nil {
			err = s.table.Check()
		}
		if err != nil {
			s.mu.Unlock()
			return err
		}
		if n := s.table.Stats().Anomalies; n > 0 {
			s.mu.Unlock()
			return fmt.Errorf("%d anomalies: %v", n, s.table.Anomalies())
		}
		r := s.table.NewRecount(0, 1<<32-1)
		next, miss := s.tree.Scan(btree.Pos{}, btree.MaxPos, 1<<30, func(x btree.Extent) bool {
			if x.HasPtr() {
				r.Add(x.Ptr, uint32(x.Size), x.Dirty())
			}
			return true
		})
		if next == btree.MaxPos {
			r.Compare(0, func(b, live, dirty uint32) {
				err = fmt.Errorf("%v: %d live and %d dirty by a walk", s.table.Info(b), live, dirty)
			}, nil)
			s.mu.Unlock()
			return err
		}
		s.mu.Unlock()
		if err := s.ReadNode(miss); err != nil {
			return err
		}
		s.opt.NodeCache = 8 << 20 // so that the walk comes to its end
	}
}

// flushed says that the backing device of an inode was flushed.
func (w *world) flushed(inode uint32) {
	w.flush[inode]++
	w.set.Lock()
	w.set.FlushDoneLocked(inode, w.flush[inode]+1)
	w.set.Unlock()
}

// nap lets time pass until nodes are written for their age. Where nothing rests, little is enough, and all that would end.
func (w *world) nap() {
	if w.opt.Restless {
		w.rt.Sleep(10 * time.Millisecond)
		return
	}
	w.rt.Sleep(time.Minute)
}

func (w *world) epoch(inode uint32) uint64 { return w.flush[inode] + 1 }

func TestRandomInserts(t *testing.T) { randomInserts(t, Options{}) }

// The same while the index is walked, rewritten and coalesced all the time.
func TestRandomInsertsWithoutRest(t *testing.T) { randomInserts(t, Options{Restless: true}) }

func randomInserts(t *testing.T, o Options) {
	seeds := 12
	if testing.Short() {
		seeds = 3
	}
	for seed := range uint64(seeds) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			simulateWith(t, seed, o, func(w *world) error {
				rng := rand.New(rand.NewPCG(seed, 0))
				most := 1 + rng.Uint64N(60) // sectors of an insertion
				kinds := []string{"clean", "fill", "nothing", "held"}
				if seed%3 != 0 {
					kinds = append(kinds, "dirty")
				}
				for n := range 6000 {
					inode := uint32(rng.IntN(2))
					from := rng.Uint64N(worldSectors - most)
					to := from + 1 + rng.Uint64N(most)
					kind, epoch := kinds[rng.IntN(len(kinds))], uint64(0)
					if kind == "held" {
						kind, epoch = "clean", w.epoch(inode)
					}
					if kind == "fill" { // as the volume has it: never over what is there
						for s := from; s < to; s++ {
							if w.cells[inode][s] != (cell{}) {
								kind = "clean"
							}
						}
					}
					if err := w.store(inode, from, to, kind, epoch); err != nil {
						return err
					}
					switch {
					case rng.IntN(200) == 0:
						w.flushed(inode)
					case rng.IntN(400) == 0:
						w.nap()
					case rng.IntN(1000) == 0:
						if err := w.compare(false); err != nil {
							return fmt.Errorf("after %d: %w", n, err)
						}
					case rng.IntN(2000) == 0:
						if err := w.reopen(); err != nil {
							return err
						}
						if err := w.compare(true); err != nil {
							return fmt.Errorf("after %d and a restart: %w", n, err)
						}
					}
				}
				if err := w.compare(false); err != nil {
					return err
				}
				if err := w.reopen(); err != nil {
					return err
				}
				return w.compare(true)
			})
		})
	}
}

// Case 21: an older extent, and newer ones in its middle, at its start, at its end, and over the whole; with a reload
// after each.
func TestOverlappingExtents(t *testing.T) {
	for _, kinds := range [][2]string{{"clean", "clean"}, {"dirty", "dirty"}, {"dirty", "clean"}, {"clean", "dirty"}, {"dirty", "nothing"}} {
		t.Run(kinds[0]+" below "+kinds[1], func(t *testing.T) {
			simulate(t, 1, func(w *world) error {
				steps := []struct {
					from, to uint64
					kind     string
				}{{128, 256, kinds[0]}, {188, 196, kinds[1]}, {128, 136, kinds[1]}, {248, 256, kinds[1]}, {128, 256, kinds[1]}}
				for i, s := range steps {
					if err := w.store(0, s.from, s.to, s.kind, 0); err != nil {
						return err
					}
					if err := w.compare(false); err != nil {
						return fmt.Errorf("step %d: %w", i, err)
					}
					if err := w.reopen(); err != nil {
						return err
					}
					if err := w.compare(true); err != nil {
						return fmt.Errorf("step %d, reloaded: %w", i, err)
					}
				}
				return nil
			})
		})
	}
}
