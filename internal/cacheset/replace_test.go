package cacheset

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// old returns the keys that the model has for the sectors [from, to) of an inode, if they are dirty.
func (w *world) old(inode uint32, from, to uint64) (keys []ondisk.Key) {
	cells := w.cells[inode]
	for at := from; at < to; {
		end := at + 1
		for c := cells[at]; end < to && cells[end] == (cell{c.ptr.Advance(end - at), c.dirty}) && w.set.bucketOf(cells[end].ptr) == w.set.bucketOf(c.ptr); {
			end++
		}
		if c := cells[at]; c.dirty {
			keys = append(keys, ondisk.NewExtent(inode, end, uint32(end-at), c.ptr, true))
		}
		at = end
	}
	return keys
}

// replace puts keys in the place of old ones, whatever the index says by now: the same place, clean or dirty, or another.
func (w *world) replace(old []ondisk.Key, kind string) error {
	in := Insertion{Pinned: kind == "moved"}
	var want uint64
	hits, misses := 0, 0
	for _, k := range old {
		for at := k.Start(); at < k.End(); {
			p, n := k.P[0].Advance(at-k.Start()), k.End()-at
			if kind == "moved" {
				w.set.Lock()
				q, got := w.set.SpaceLocked(bucket.ForDirty, k.Inode(), at, uint32(n), 1, 2)
				w.set.Unlock()
				if got == 0 {
					break
				}
				p, n = q, uint64(got)
			}
			in.Keys = append(in.Keys, ondisk.NewExtent(k.Inode(), at+n, uint32(n), p, kind != "clean"))
			in.Old = append(in.Old, ondisk.NewExtent(k.Inode(), k.End(), k.Size(), k.P[0], true))
			for i := range n {
				c := &w.cells[k.Inode()][at+i]
				if *c != (cell{k.P[0].Advance(at + i - k.Start()), true}) {
					misses++
					continue
				}
				hits++
				*c = cell{p.Advance(i), kind != "clean"}
				want++
			}
			at += n
		}
	}
	w.set.Lock()
	open := w.set.journal.OpenLocked()
	w.set.Unlock()
	if err := w.set.Insert(&in); err != nil {
		return err
	}
	if in.Replaced != want {
		return fmt.Errorf("%d sectors were replaced, want %d of %d", in.Replaced, want, hits+misses)
	}
	if want > 0 && in.Seq < open { // V3, J1 of B 9.3
		return fmt.Errorf("what was replaced is in journal entry %d; %d was open before", in.Seq, open)
	}
	return nil
}

// What takes the place of old keys does so where the index says still what they say, sector by sector, however it has
// changed meanwhile: in front, behind, in the middle, all of it, and back again.
func TestRandomReplaces(t *testing.T) {
	seeds := 8
	if testing.Short() {
		seeds = 3
	}
	for seed := range uint64(seeds) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			simulate(t, seed, func(w *world) error {
				rng := rand.New(rand.NewPCG(seed, 9))
				most := []uint64{2, 6, 16, 60}[seed%4]
				store := func(inode uint32, from, to uint64, kinds ...string) error {
					return w.store(inode, from, to, kinds[rng.IntN(len(kinds))], 0)
				}
				for n := range 2500 {
					inode := uint32(rng.IntN(2))
					from := rng.Uint64N(worldSectors - most)
					if err := store(inode, from, from+1+rng.Uint64N(most), "dirty", "dirty", "clean", "nothing"); err != nil {
						return err
					}
					if n%2 == 0 {
						continue
					}
					from = rng.Uint64N(worldSectors - 2*most)
					to := from + 1 + rng.Uint64N(2*most)
					old := w.old(inode, from, to)
					for range rng.IntN(4) { // changes somewhere in or around it
						a := from + rng.Uint64N(to-from)
						if err := store(inode, a, min(a+1+rng.Uint64N(most), worldSectors), "dirty", "clean", "nothing"); err != nil {
							return err
						}
					}
					for range 1 + rng.IntN(2) { // the second time it is too late
						if err := w.replace(old, []string{"clean", "clean", "moved"}[rng.IntN(3)]); err != nil {
							return fmt.Errorf("after %d: %w", n, err)
						}
					}
					if rng.IntN(500) == 0 {
						if err := w.compare(false); err != nil {
							return fmt.Errorf("after %d: %w", n, err)
						}
					}
					if rng.IntN(800) == 0 {
						if err := w.reopen(); err != nil {
							return err
						}
						if err := w.compare(true); err != nil {
							return fmt.Errorf("after %d and a restart: %w", n, err)
						}
					}
				}
				if n := w.set.Info().Buckets[bucket.Pinned]; int(n) > uses*openBuckets(w.set.geo.NBuckets) {
					return fmt.Errorf("%d buckets are pinned at rest", n)
				}
				return w.compare(false)
			})
		})
	}
}

// The same in order: an old extent of 16 sectors, of which one part has changed.
func TestReplaceBesideChanges(t *testing.T) {
	changes := map[string][][2]uint64{
		"nothing": nil, "in front": {{96, 104}}, "behind": {{108, 116}}, "in the middle": {{103, 105}}, "all": {{90, 120}},
		"at both ends": {{96, 102}, {110, 113}}, "every other sector": {{100, 101}, {102, 103}, {104, 105}, {106, 107}, {108, 109}, {110, 111}},
	}
	for name, parts := range changes {
		for _, kind := range []string{"dirty", "clean", "nothing"} {
			t.Run(name+" "+kind, func(t *testing.T) {
				simulate(t, 1, func(w *world) error {
					if err := w.store(0, 80, 128, "dirty", 0); err != nil {
						return err
					}
					old := w.old(0, 100, 112)
					for _, p := range parts {
						if err := w.store(0, p[0], p[1], kind, 0); err != nil {
							return err
						}
					}
					if err := w.replace(old, "clean"); err != nil {
						return err
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
}
