package cacheset

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// A zeroing looks at each uuid array that is written, before it is: where it zeroes slots, the disk has no key of theirs.
type zeroing struct {
	blockdev.Device
	w     *world
	dead  map[uint32]bool // slots that are to be zeroed
	freed int
	err   error
}

func (z *zeroing) Runtime() *rt.Runtime { return z.w.rt }

func (z *zeroing) NewQueue(depth int, complete func(done []*blockdev.Request)) (blockdev.Queue, error) {
	q, err := z.Device.NewQueue(depth, complete)
	return &zeroingQueue{q, z}, err
}

type zeroingQueue struct {
	blockdev.Queue
	z *zeroing
}

func (q *zeroingQueue) Submit(reqs []*blockdev.Request) {
	for _, r := range reqs {
		if r.Purpose == blockdev.ForUUID && r.Op == blockdev.OpWrite {
			q.z.look(r.Buf)
		}
	}
	q.Queue.Submit(reqs)
}

// look looks at the raw disk: at all sets of all leaves that can be reached, whatever hides what, and at the journal.
func (z *zeroing) look(array []byte) {
	s := z.w.set
	free := map[uint32]bool{}
	for i := range z.dead {
		if e, err := ondisk.DecodeUUIDEntry(array, int(i), false); err == nil && e.Unused() {
			free[i] = true
		}
	}
	z.freed = max(z.freed, len(free))
	if len(free) == 0 || z.err != nil {
		return
	}
	mem := z.Device.(*blockdev.MemoryDevice).Bytes()
	sets, newest := s.journalOn(mem)
	for i := range sets {
		if sets[i].Seq < newest.LastSeq {
			continue
		}
		z.err = errors.Join(z.err, sets[i].EachKey(func(k *ondisk.Key) bool {
			if free[k.Inode()] {
				z.err = fmt.Errorf("entry %d, of %d to %d, has %v of a slot that is zeroed", sets[i].Seq, newest.LastSeq, newest.Seq, k)
			}
			return z.err == nil
		}))
	}
	z.node(mem, newest.Root, int(newest.Level), free)
}

// journalOn returns the entries of the journal that a disk has, and the newest one.
func (s *Set) journalOn(mem []byte) (sets []ondisk.JSet, newest ondisk.JSet) {
	g := &s.geo
	for _, b := range s.super.D[:s.super.NJournal] {
		at := int64(g.BucketStart(b)) * ondisk.SectorSize
		for end := at + g.BucketBytes(); at < end; {
			j, err := ondisk.DecodeJSet(mem[at:end], g)
			if err != nil {
				break
			}
			if sets = append(sets, j); j.Seq > newest.Seq {
				newest = j
			}
			at += (int64(j.Bytes()) + int64(g.BlockBytes()) - 1) / int64(g.BlockBytes()) * int64(g.BlockBytes())
		}
	}
	return sets, newest
}

// node looks at a node as the disk has it, and at what it refers to. What is stale in memory may be good on the disk.
func (z *zeroing) node(mem []byte, key ondisk.Key, level int, free map[uint32]bool) {
	s := z.w.set
	at := int64(key.P[0].Sector()) * ondisk.SectorSize
	n := ondisk.DecodeNode(mem[at:at+int64(key.Size())*ondisk.SectorSize], &s.geo, &key)
	if n.Err != nil {
		return // of a pointer that was freed long ago
	}
	freed := map[ondisk.Ptr]bool{}
	var kids []ondisk.Key
	for i := range n.Sets {
		_ = n.Sets[i].EachKey(func(k *ondisk.Key) bool {
			switch {
			case level == 0 && free[k.Inode()]:
				z.err = fmt.Errorf("set %d of the leaf at sector %d has %v of a slot that is zeroed", i, key.P[0].Sector(), k)
			case level > 0 && k.IsFreeing():
				freed[ondisk.MakePtr(k.P[0].Gen()-1, k.P[0].Sector(), 0)] = true
			case level > 0:
				kids = append(kids, *k)
			}
			return true
		})
	}
	for _, k := range kids {
		if !freed[k.P[0]] {
			z.node(mem, k, level-1, free)
		}
	}
}

// No key of a retired slot is left on the disk when the slot is zeroed, while others are used; and then it can be had.
func TestZeroedSlotsHaveNoKeys(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			simulate(t, seed, func(w *world) error {
				z := &zeroing{Device: w.dev, w: w, dead: map[uint32]bool{}}
				w.dev = z
				if err := w.reopen(); err != nil {
					return err
				}
				rng := rand.New(rand.NewPCG(seed, 3))
				list := shores()
				err := w.set.ChangeSlots(func(slots []ondisk.UUIDEntry) error {
					for i := range 4 {
						slots[i] = ondisk.UUIDEntry{UUID: ondisk.UUID{byte(i + 1)}, Flags: ondisk.UUIDFlashOnly, Sectors: 1 << 40}
					}
					return nil
				})
				live := list[:0:0]
				for i := 0; i < 400 && err == nil; i++ {
					s := list[rng.IntN(len(list))]
					from := rng.Uint64N(shoreSectors - 30)
					err = w.place(s, from, from+1+rng.Uint64N(30), []string{"dirty", "clean", "clean", "nothing"}[rng.IntN(4)])
				}
				for _, s := range list {
					if s.inode == 0 {
						live = append(live, s)
					}
				}
				if seed%2 == 0 && err == nil {
					err = w.reopen() // so that the leaves have what they have on the disk
				}
				if err != nil {
					return err
				}
				z.dead[3], z.dead[1] = true, true
				err = w.set.ChangeSlots(func(slots []ondisk.UUIDEntry) error {
					slots[3].UUID, slots[1].UUID = ondisk.RetiredUUID, ondisk.RetiredUUID
					return nil
				})
				for i := 0; i < 3000 && err == nil && w.set.Info().SlotsFreed < 2; i++ { // others go on
					s := live[rng.IntN(len(live))]
					from := rng.Uint64N(shoreSectors - 30)
					err = w.place(s, from, from+1+rng.Uint64N(30), []string{"dirty", "clean", "nothing"}[rng.IntN(3)])
					w.rt.Sleep(time.Duration(rng.IntN(2000)) * time.Microsecond)
				}
				switch {
				case err != nil:
					return err
				case z.err != nil:
					return z.err
				case z.freed != 2 || w.set.Info().SlotsFreed != 2:
					return fmt.Errorf("%d slots were zeroed, %d freed", z.freed, w.set.Info().SlotsFreed)
				}
				if n := w.dirtyOf(3); n != 0 {
					return fmt.Errorf("%d sectors of the slot are dirty", n)
				}
				if err := w.same(live, rng); err != nil {
					return err
				}
				if err := w.reopen(); err != nil {
					return err
				}
				return w.same(live, rng)
			})
		})
	}
}

// What is left of a removal when the set stops is removed after the next start.
func TestRemovalGoesOn(t *testing.T) {
	simulate(t, 1, func(w *world) error {
		s := &shore{inode: 3, base: 1000, cells: make([]cell, shoreSectors)}
		err := w.set.ChangeSlots(func(slots []ondisk.UUIDEntry) error {
			slots[3] = ondisk.UUIDEntry{UUID: ondisk.UUID{3}, Flags: ondisk.UUIDFlashOnly, Sectors: 1 << 40}
			return nil
		})
		for at := uint64(0); at < shoreSectors && err == nil; at += 2 {
			err = w.place(s, at, at+1, []string{"dirty", "clean"}[at/2%2])
		}
		if err == nil {
			err = w.set.ChangeSlots(func(slots []ondisk.UUIDEntry) error {
				slots[3].UUID = ondisk.RetiredUUID
				return nil
			})
		}
		if err != nil {
			return err
		}
		if err := w.set.Close(context.Background()); err != nil {
			return err
		}
		if n := w.set.Info().SlotsFreed; n != 0 {
			return fmt.Errorf("it was over before the set was stopped")
		}
		if err := w.open(); err != nil {
			return err
		}
		if !w.set.WaitSlot() {
			return errors.New("no slot")
		}
		for n := 0; w.set.Info().SlotsFreed == 0; n++ {
			if w.rt.Sleep(time.Second); n > 100 {
				return errors.New("it does not go on")
			}
		}
		return w.recount()
	})
}

// Who finds no slot waits for those that are retired, and no longer than there are some. What cannot be read keeps its slot
// and not the others.
func TestWaitForSlot(t *testing.T) {
	simulate(t, 1, func(w *world) error {
		f := blockdev.NewFaulty(w.dev, 1)
		w.dev = f
		if err := w.reopen(); err != nil {
			return err
		}
		fill := func(id ondisk.UUID) error {
			return w.set.ChangeSlots(func(slots []ondisk.UUIDEntry) error {
				for i := range slots {
					slots[i] = ondisk.UUIDEntry{UUID: id}
				}
				return nil
			})
		}
		if err := fill(ondisk.UUID{9}); err != nil {
			return err
		}
		if w.set.WaitSlot() {
			return errors.New("a slot where none is retired")
		}
		if err := fill(ondisk.RetiredUUID); err != nil {
			return err
		}
		if !w.set.WaitSlot() {
			return errors.New("no slot although all were retired")
		}
		if slots := w.set.Slots(); slices.ContainsFunc(slots, func(e ondisk.UUIDEntry) bool { return !e.Unused() }) {
			return errors.New("a slot is not free")
		}
		// Many keys, so that leaves are read again, which fails.
		for inode := range uint32(2) {
			s := &shore{inode: inode, cells: make([]cell, 20000)}
			for at := uint64(0); at < 2600; at += 2 {
				if err := w.place(s, at, at+1, "clean"); err != nil {
					return err
				}
			}
		}
		if err := errors.Join(fill(ondisk.UUID{9}), w.reopen()); err != nil {
			return err
		}
		w.rt.Sleep(2 * dirtyAge) // what was replayed is written by then
		w.set.Lock()
		for range 3 { // a node that was used lately stays at first, and one with children
			w.set.tree.Evict(0, 1000)
		}
		n, leaf := w.set.tree.NodeAt(0, btree.Pos{})
		w.set.Unlock()
		if n != nil || leaf.Level != 0 || leaf.High.Inode != 0 {
			return fmt.Errorf("the first leaf is %v, in memory: %v", leaf, n != nil)
		}
		remove := f.Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpRead}, Off: int64(leaf.Ptr.Sector()) * 512, Len: int64(leaf.Sectors) * 512})
		if err := fill(ondisk.RetiredUUID); err != nil {
			return err
		}
		if !w.set.WaitSlot() {
			return errors.New("no slot although most have nothing")
		}
		w.rt.Sleep(10 * time.Second)
		left := func() (n int) {
			for _, e := range w.set.Slots() {
				if e.Retired() {
					n++
				}
			}
			return n
		}
		if n := left(); n != 1 || !w.set.Slots()[0].Retired() {
			return fmt.Errorf("%d slots are retired while a leaf of the first cannot be read", n)
		}
		if remove() == 0 {
			return errors.New("nothing was read")
		}
		w.rt.Sleep(2 * dropRetry)
		if n := left(); n != 0 {
			return fmt.Errorf("%d slots are retired still", n)
		}
		return w.recount()
	})
}

// A leaf has an inode as long as it has any key of it.
func TestNodeHas(t *testing.T) {
	simulate(t, 1, func(w *world) error {
		s := &shore{inode: 2, cells: make([]cell, 8)}
		has := func() bool {
			w.set.Lock()
			defer w.set.Unlock()
			n, _ := w.set.tree.NodeAt(0, btree.Pos{Inode: 2})
			return n.Has(2)
		}
		for i, inode := range []uint32{1, 3, 2} {
			s := &shore{inode: inode, cells: make([]cell, 8)}
			if err := w.place(s, 0, 8, "clean"); err != nil {
				return err
			}
			if has() != (i == 2) {
				return fmt.Errorf("with a key of inode %d: %v", inode, has())
			}
		}
		if err := w.place(s, 0, 8, "nothing"); err != nil {
			return err
		}
		if !has() {
			return errors.New("what hides a key is none")
		}
		return nil
	})
}
