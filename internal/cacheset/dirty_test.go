package cacheset

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// A shore is a stretch of an inode around a border of the dirty map, and what its index should say.
type shore struct {
	inode uint32
	base  uint64
	cells []cell
}

const shoreSectors = 400

// shores are around the borders of regions and pages, around where the map ends, and far behind that.
func shores() []*shore {
	const half, end = shoreSectors / 2, maxPages * pageSectors
	bases := []uint64{
		0, regionSectors - half, pageSectors - regionSectors - half, pageSectors - half, 3*pageSectors - half,
		end - regionSectors - half, end - half, 3 * end, ondisk.MaxOffset - shoreSectors,
	}
	var list []*shore
	for i, base := range bases {
		for _, inode := range []uint32{0, 3} {
			if i%2 == 0 || inode == 3 {
				list = append(list, &shore{inode, base, make([]cell, shoreSectors)})
			}
		}
	}
	return list
}

// place stores sectors [from, to) of a shore: data that is dirty or clean, or nothing; and nothing where there is no room.
func (w *world) place(s *shore, from, to uint64, kind string) error {
	in := Insertion{Pinned: true}
	use := bucket.ForClean
	if kind == "dirty" {
		use = bucket.ForDirty
	}
	w.set.Lock()
	for at := from; at < to; {
		n := uint32(to - at)
		var p ondisk.Ptr
		got := uint32(0)
		if kind != "nothing" {
			p, got = w.set.SpaceLocked(use, s.inode, s.base+at, n, 1, 1)
		}
		c := cell{p, kind == "dirty"}
		if got > 0 {
			n = got
			in.Keys = append(in.Keys, ondisk.NewExtent(s.inode, s.base+at+uint64(n), n, p, c.dirty))
		} else {
			in.Keys = append(in.Keys, ondisk.NewInvalidation(s.inode, s.base+to, n))
		}
		for i := range uint64(n) {
			s.cells[at+i] = cell{}
			if got > 0 {
				s.cells[at+i] = cell{c.ptr.Advance(i), c.dirty}
			}
		}
		at += uint64(n)
	}
	w.set.Unlock()
	return w.set.Insert(&in)
}

// scanned returns the dirty sectors of [from, to) of an inode as ScanDirtyLocked has them. Each must come once and in order;
// stop says after how many extents to stop and go on from where it says.
func (w *world) scanned(inode uint32, from, to uint64, stop int) (map[uint64]ondisk.Ptr, error) {
	found := map[uint64]ondisk.Ptr{}
	at, last := from, from
	for at < to {
		n := 0
		var err error
		w.set.Lock()
		next, miss := w.set.ScanDirtyLocked(inode, at, to, func(start, end uint64, p ondisk.Ptr) bool {
			if start < last || start >= end || end > to {
				err = fmt.Errorf("%d to %d comes behind %d, of %d to %d", start, end, last, from, to)
			}
			last = end
			for i := start; i < end; i++ {
				found[i] = p.Advance(i - start)
			}
			n++
			return n < stop
		})
		w.set.Unlock()
		if !miss.IsZero() {
			err = w.set.ReadNode(miss)
		} else if next <= at {
			err = fmt.Errorf("a scan from %d ends at %d", at, next)
		}
		if at = next; err != nil {
			return nil, err
		}
	}
	return found, nil
}

// same holds what the set says of dirty data against the shores, and the whole index against the counts.
func (w *world) same(shores []*shore, rng *rand.Rand) error {
	for _, inode := range []uint32{0, 3} {
		want := map[uint64]ondisk.Ptr{}
		for _, s := range shores {
			for i, c := range s.cells {
				if s.inode == inode && c.dirty {
					want[s.base+uint64(i)] = c.ptr
				}
			}
		}
		if n := int64(len(want)); w.dirtyOf(inode) != n {
			return fmt.Errorf("inode %d: %d dirty sectors by account, want %d", inode, w.dirtyOf(inode), n)
		}
		ranges := [][2]uint64{{0, ondisk.MaxOffset}}
		for range 8 { // and some that begin or end within a shore
			a, b := shores[rng.IntN(len(shores))], shores[rng.IntN(len(shores))]
			from, to := a.base+rng.Uint64N(shoreSectors), b.base+1+rng.Uint64N(shoreSectors)
			ranges = append(ranges, [2]uint64{min(from, to), max(from, to)})
		}
		for _, r := range ranges {
			found, err := w.scanned(inode, r[0], r[1], []int{1, 3, 1 << 30}[rng.IntN(3)])
			if err != nil {
				return err
			}
			in := 0
			for at, p := range want {
				if at < r[0] || at >= r[1] {
					continue
				}
				in++
				if found[at] != p {
					return fmt.Errorf("sector %d of inode %d is found at %v, want %v", at, inode, found[at], p)
				}
				w.set.Lock()
				near := w.set.AnyDirtyLocked(inode, at, at+1)
				w.set.Unlock()
				if !near {
					return fmt.Errorf("sector %d of inode %d is dirty, and nothing near it", at, inode)
				}
			}
			if len(found) != in {
				return fmt.Errorf("inode %d, %v: %d dirty sectors are found, want %d", inode, r, len(found), in)
			}
		}
	}
	return w.recount()
}

func (w *world) dirtyOf(inode uint32) int64 {
	w.set.Lock()
	defer w.set.Unlock()
	return w.set.DirtyLocked(inode)
}

// What is dirty is found wherever it lies, once and in order, and counted exactly; also after a restart.
func TestDirtyMap(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			simulate(t, seed, func(w *world) error {
				rng := rand.New(rand.NewPCG(seed, 5))
				shores := shores()
				most := []uint64{3, 16, 80, shoreSectors / 2}[seed%4]
				kinds := []string{"dirty", "dirty", "clean", "nothing"}
				for n := range 1500 {
					s := shores[rng.IntN(len(shores))]
					from := rng.Uint64N(shoreSectors - most)
					if err := w.place(s, from, from+1+rng.Uint64N(most), kinds[rng.IntN(len(kinds))]); err != nil {
						return err
					}
					if rng.IntN(150) == 0 {
						if err := w.same(shores, rng); err != nil {
							return fmt.Errorf("after %d: %w", n, err)
						}
					}
					if rng.IntN(400) == 0 {
						if err := w.reopen(); err != nil {
							return err
						}
						if err := w.same(shores, rng); err != nil {
							return fmt.Errorf("after %d and a restart: %w", n, err)
						}
					}
				}
				for _, s := range shores { // until nothing is left
					if err := w.place(s, 0, shoreSectors, "nothing"); err != nil {
						return err
					}
				}
				return w.same(shores, rng)
			})
		})
	}
}

// The scan for dirty data lets others have the lock: it looks at a bounded number of extents, and of regions.
func TestScanDirtyIsBounded(t *testing.T) {
	const regions, extents = 64, 3000
	simulate(t, 1, func(w *world) error {
		// The first region has many extents, one for two sectors, and few of them dirty; the others have one each.
		first := &shore{cells: make([]cell, extents)}
		for at := uint64(0); at < extents; at++ {
			kind := []string{"clean", "nothing"}[at%2]
			if at%100 == 0 {
				kind = "dirty"
			}
			if err := w.place(first, at, at+1, kind); err != nil {
				return err
			}
		}
		for r := range uint64(regions) {
			if err := w.place(&shore{base: (r + 1) * regionSectors, cells: make([]cell, 1)}, 0, 1, "dirty"); err != nil {
				return err
			}
		}
		found, holds := 0, 0
		for at, end := uint64(0), uint64(regions+1)*regionSectors; at < end; holds++ {
			n := 0
			w.set.Lock()
			next, miss := w.set.ScanDirtyLocked(0, at, end, func(uint64, uint64, ondisk.Ptr) bool {
				n++
				return true
			})
			w.set.Unlock()
			if !miss.IsZero() {
				if err := w.set.ReadNode(miss); err != nil {
					return err
				}
			}
			if next-at > 2*dirtyScan && at < extents-2*dirtyScan || n > 16 {
				return fmt.Errorf("one hold of the lock looks from %d to %d and finds %d extents", at, next, n)
			}
			at, found = next, found+n
		}
		if found != extents/100+regions {
			return fmt.Errorf("%d dirty extents in %d holds of the lock", found, holds)
		}
		return nil
	})
}

// What is dirty of a retired slot goes, wherever it lies, and its buckets can be used again; also what was left of it by a
// crash in between.
func TestDeadKeysGo(t *testing.T) {
	simulate(t, 1, func(w *world) error {
		list := shores()
		live := list[:0:0]
		err := w.set.ChangeSlots(func(slots []ondisk.UUIDEntry) error {
			slots[0] = ondisk.UUIDEntry{UUID: ondisk.UUID{1}, Flags: ondisk.UUIDFlashOnly, Sectors: 1 << 40}
			slots[3] = ondisk.UUIDEntry{UUID: ondisk.UUID{3}, Flags: ondisk.UUIDFlashOnly, Sectors: 1 << 40}
			return nil
		})
		if err != nil {
			return err
		}
		for _, s := range list {
			if err := w.place(s, 100, 300, "dirty"); err != nil {
				return err
			}
			if s.inode == 0 {
				live = append(live, s)
			}
		}
		before := w.set.Info().Dirty
		err = w.set.ChangeSlots(func(slots []ondisk.UUIDEntry) error {
			slots[3] = ondisk.UUIDEntry{UUID: ondisk.RetiredUUID}
			return nil
		})
		for tries := 0; err == nil && w.dirtyOf(3) > 0; tries++ {
			if w.rt.Sleep(1e9); tries > 100 {
				err = fmt.Errorf("%d sectors are dirty still", w.dirtyOf(3))
			}
		}
		if err != nil {
			return err
		}
		if after := w.set.Info().Dirty; after != uint64(w.dirtyOf(0)) || after >= before {
			return fmt.Errorf("%d dirty sectors, before it were %d; %d are another's", after, before, w.dirtyOf(0))
		}
		if err := w.same(live, rand.New(rand.NewPCG(1, 1))); err != nil {
			return err
		}
		if err := w.set.Close(context.Background()); err != nil {
			return err
		}
		if err := w.open(); err != nil {
			return err
		}
		return w.same(live, rand.New(rand.NewPCG(1, 1)))
	})
}

// Of a bucket whose counts are in doubt too much may be discounted; what is dirty is found nevertheless.
func TestDirtyMapInDoubt(t *testing.T) {
	var m dirtyMap
	m.add(0, 8, 1)
	m.add(0, 24, -1)
	m.add(16, 8, 1)
	if at, ok := m.next(0); !ok || at > 16 {
		t.Errorf("dirty data at 16; found at %d, %v", at, ok)
	}
}
