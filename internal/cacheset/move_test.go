package cacheset

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// A scatter is dirty data of two inodes, a sector here and there, that lies in buckets which have little of it left: each
// bucket has some of all leaves, and each leaf some of all buckets.
type scatter struct {
	w    *world
	io   *blockdev.IO
	data map[[2]uint64]uint64 // version of each sector of an inode
}

const scatterBuckets = 300

// content is what a sector has.
func (x *scatter) content(at [2]uint64) []byte {
	return bytes.Repeat([]byte(fmt.Sprintf("%04d %10d ", at[0], at[1])), 32)
}

// scattered makes one with so many sectors left in each bucket, with the nodes on the disk and few of them in memory.
func (w *world) scattered(disk *blockdev.Faulty, left int) (*scatter, error) {
	io, err := blockdev.NewIO(disk, 4)
	if err != nil {
		return nil, err
	}
	x := &scatter{w: w, io: io, data: map[[2]uint64]uint64{}}
	rng := rand.New(rand.NewPCG(3, 3))
	places := rng.Perm(scatterBuckets * 16)
	for _, i := range places {
		if err := x.write([2]uint64{uint64(i % 2), uint64(i)}); err != nil {
			return nil, err
		}
	}
	for n, i := range places {
		if n%16 >= left {
			if err := x.drop([2]uint64{uint64(i % 2), uint64(i)}); err != nil {
				return nil, err
			}
		}
	}
	w.rt.Sleep(2 * time.Minute)
	return x, w.set.Sync()
}

func (x *scatter) write(at [2]uint64) error {
	s := x.w.set
	for range 1000 {
		s.Lock()
		p, n := s.SpaceLocked(bucket.ForDirty, uint32(at[0]), at[1], 1, 1, 1)
		s.Unlock()
		if n == 0 {
			x.w.rt.Sleep(10 * time.Millisecond)
			continue
		}
		if err := x.io.WriteAt(x.content(at), int64(p.Sector())*ondisk.SectorSize, 0); err != nil {
			return err
		}
		in := Insertion{Keys: []ondisk.Key{ondisk.NewExtent(uint32(at[0]), at[1]+1, 1, p, true)}, Pinned: true}
		x.data[at] = 1
		return s.Insert(&in)
	}
	return fmt.Errorf("no room for %v: %+v", at, s.Info())
}

func (x *scatter) drop(at [2]uint64) error {
	in := Insertion{Keys: []ondisk.Key{ondisk.NewInvalidation(uint32(at[0]), at[1]+1, 1)}}
	delete(x.data, at)
	return x.w.set.Insert(&in)
}

// check reads all that should be there.
func (x *scatter) check(skip func(at [2]uint64) bool) error {
	s := x.w.set
	got := make([]byte, ondisk.SectorSize)
	for inode := range uint64(2) {
		for i := range uint64(scatterBuckets * 16) {
			at := [2]uint64{inode, i}
			_, want := x.data[at]
			if skip(at) {
				continue
			}
			for {
				s.Lock()
				p, miss := s.LookupLocked(uint32(inode), i, i+1)
				held := miss.IsZero() && p.Cached && s.HoldLocked(p.Ptr)
				s.Unlock()
				if !miss.IsZero() {
					if err := s.ReadNode(miss); err != nil {
						return err
					}
					continue
				}
				if held != want || held && !p.Dirty {
					return fmt.Errorf("%v: cached %v and dirty %v, want %v", at, held, p.Dirty, want)
				}
				if held {
					err := x.io.ReadAt(got, int64(p.Ptr.Sector())*ondisk.SectorSize)
					s.Lock()
					s.LetGoLocked(p.Ptr)
					s.Unlock()
					if err != nil || !bytes.Equal(got, x.content(at)) {
						return fmt.Errorf("%v reads as %q: %w", at, got[:16], err)
					}
				}
				break
			}
		}
	}
	return nil
}

// still stops moving, waits until the pass that is under way has ended, and says whose pins are left: those of the buckets
// that take data, and no others.
func (w *world) still() error {
	s := w.set
	s.SetMoving(false)
	for n := 0; ; n++ {
		s.Lock()
		moving := s.moving
		s.Unlock()
		if !moving {
			break
		}
		if n > 60_000 {
			return errors.New("a pass of the mover does not end")
		}
		w.rt.Sleep(time.Millisecond)
	}
	s.Lock()
	defer s.Unlock()
	open := map[uint32]uint32{}
	for i := range s.open {
		for _, o := range s.open[i].list {
			if o.held {
				open[o.bucket]++
			}
		}
	}
	for b := s.super.FirstBucket; uint32(b) < s.table.NBuckets(); b++ {
		i := s.table.Info(uint32(b))
		if i.Category != bucket.Meta && i.Pins != open[i.Bucket] {
			return fmt.Errorf("%v, with %d of them for what takes data", i, open[i.Bucket])
		}
	}
	return nil
}

// begun waits until a pass is under way, for some time.
func (w *world) begun() {
	for range 1000 {
		w.set.Lock()
		moving := w.set.moving
		w.set.Unlock()
		if moving {
			return
		}
		w.rt.Sleep(100 * time.Microsecond)
	}
}

// leaf returns a leaf that is not in memory any more, the one of a position.
func (w *world) leaf(at btree.Pos) (btree.Ref, error) {
	s := w.set
	for range 100 {
		s.Lock()
		n, miss := s.tree.NodeAt(0, at)
		if n != nil {
			s.tree.Forget(n)
		}
		s.Unlock()
		if n == nil && miss.Level == 0 {
			return miss, nil
		}
		if n == nil {
			if err := s.ReadNode(miss); err != nil {
				return miss, err
			}
		}
		w.rt.Sleep(time.Second)
	}
	return btree.Ref{}, errors.New("the leaf stays in memory")
}

// A node that cannot be read keeps its own data where it is, and nothing else: what has been gathered before it is moved,
// what lies behind it, and what other inodes have.
func TestMovingPassesANodeThatCannotBeRead(t *testing.T) {
	for name, at := range map[string]btree.Pos{"first": {}, "middle": {Inode: 1, Sector: 100}, "last": {Inode: 1, Sector: scatterBuckets * 16}} {
		t.Run(name, func(t *testing.T) {
			simulate(t, 1, func(w *world) error {
				disk, err := w.faulty()
				if err != nil {
					return err
				}
				x, err := w.scattered(disk, 2)
				if err != nil {
					return err
				}
				bad, err := w.leaf(at)
				if err != nil {
					return err
				}
				disk.Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpRead}, Off: int64(bad.Ptr.Sector()) * ondisk.SectorSize, Len: worldBucket})
				lost := func(at [2]uint64) bool {
					p := btree.Pos{Inode: uint32(at[0]), Sector: at[1]}
					return !p.Less(bad.Low) && p.Less(bad.High)
				}
				there := 0
				for at := range x.data {
					if !lost(at) {
						there++
					}
				}
				w.set.SetMoving(true)
				w.rt.Sleep(5 * time.Minute)
				if err := w.still(); err != nil {
					return err
				}
				i := w.set.Info()
				t.Logf("%v cannot be read; of %d extents elsewhere %d were moved, in %d passes; %v", bad, there, i.MovedKeys, i.MovePasses, i.Buckets)
				if i.MovedKeys < 200 || i.MoveErrors == 0 || i.MovePasses > 200 { // 256 without the fault, then there is space enough
					return fmt.Errorf("of %d extents elsewhere %d were moved, in %d passes", there, i.MovedKeys, i.MovePasses)
				}
				return x.check(lost)
			})
		})
	}
}

// What cannot be moved is soon in the emptiest buckets. Passes that have no room but for those pass them over, when space is short, and
// try again later, when it can be read.
func TestMovingPassesBucketsThatStayFull(t *testing.T) {
	simulate(t, 1, func(w *world) error {
		disk, err := w.faulty()
		if err != nil {
			return err
		}
		x, err := w.scattered(disk, 2)
		if err != nil {
			return err
		}
		bad, err := w.leaf(btree.Pos{})
		if err != nil {
			return err
		}
		in := map[uint32]bool{} // buckets that have to stay
		w.set.Lock()
		for at := range x.data {
			if p := (btree.Pos{Inode: uint32(at[0]), Sector: at[1]}); p.Less(bad.High) {
				w.set.Unlock()
				if err := w.set.ReadNode(bad); err != nil {
					return err
				}
				w.set.Lock()
				p, miss := w.set.LookupLocked(uint32(at[0]), at[1], at[1]+1)
				if !miss.IsZero() {
					w.set.Unlock()
					return fmt.Errorf("%v is not in memory", miss)
				}
				in[w.set.bucketOf(p.Ptr)] = true
			}
		}
		w.set.Unlock()
		if bad, err = w.leaf(btree.Pos{}); err != nil {
			return err
		}
		disk.Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpRead}, Off: int64(bad.Ptr.Sector()) * ondisk.SectorSize, Len: worldBucket})
		dirty := func() (n int) {
			w.set.Lock()
			defer w.set.Unlock()
			for b := range w.set.table.NBuckets() {
				if w.set.table.Info(b).Dirty > 0 {
					n++
				}
			}
			return n
		}
		want := func(yes bool) {
			w.set.Lock()
			w.set.WantSpaceLocked(yes)
			w.set.Unlock()
		}
		want(true)
		w.set.SetMoving(true)
		w.rt.Sleep(time.Minute)
		packed := (len(x.data) + 15) / 16
		stuck := dirty()
		disk.Clear()
		w.rt.Sleep(2 * moveStuck)
		want(false)
		t.Logf("%d buckets have what cannot be moved, all would take %d; %d were left, and %d when it could be read", len(in), packed, stuck, dirty())
		if len(in) < 100 || stuck > len(in)+packed || dirty() > packed*3/2 {
			return fmt.Errorf("%d buckets, then %d", stuck, dirty())
		}
		return errors.Join(w.still(), x.check(func([2]uint64) bool { return false }))
	})
}

// Whatever comes in the middle of a pass (it is turned off, the device fails, nodes cannot be read, data is overwritten or
// dropped, buckets run short, the set is closed, an inode is given up) no bucket stays pinned, and all data is where the index says.
func TestMovingDisturbed(t *testing.T) {
	seeds := uint64(8)
	if testing.Short() {
		seeds = 4
	}
	var failed atomic.Uint64
	t.Cleanup(func() {
		if failed.Load() == 0 {
			t.Error("nothing has failed")
		}
	})
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			simulate(t, seed, func(w *world) error { return w.disturb(t, rand.New(rand.NewPCG(seed, 7)), &failed) })
		})
	}
}

func (w *world) disturb(t *testing.T, rng *rand.Rand, errs *atomic.Uint64) error {
	w.dev = blockdev.NewDelaying(w.dev, blockdev.Latency{Read: time.Millisecond, Write: 200 * time.Microsecond, Flush: time.Millisecond, Jitter: 0.5, Parallel: 8})
	w.opt.NodeCache = 1 << 10 // nodes have to be read all the time
	disk, err := w.faulty()
	if err != nil {
		return err
	}
	x, err := w.scattered(disk, 4)
	if err != nil {
		return err
	}
	all := func([2]uint64) bool { return false }
	passes, extents, failed := uint64(0), uint64(0), uint64(0)
	note := func() {
		i := w.set.Info()
		passes, extents, failed = passes+i.MovePasses, extents+i.MovedKeys, failed+i.MoveErrors
	}
	at := func() [2]uint64 { i := rng.IntN(scatterBuckets * 16); return [2]uint64{uint64(i % 2), uint64(i)} }
	for range 60 {
		for range rng.IntN(1000) {
			if rng.IntN(3000) < 4200-2*len(x.data) { // some 1,350 are left of them, one in five of the sectors of their buckets
				err = x.write(at())
			} else {
				err = x.drop(at())
			}
			if err != nil {
				return err
			}
		}
		w.rt.Sleep(40 * time.Second) // nodes that are on the disk do not stay in memory
		what := rng.IntN(7)
		f := blockdev.Fault{Prob: rng.Float64() / 4, Ops: []blockdev.Op{blockdev.Op(rng.IntN(2))}, Purposes: []blockdev.Purpose{blockdev.ForMoving}}
		if what == 0 {
			disk.Add(f)
		}
		w.set.SetMoving(true)
		w.begun()
		w.rt.Sleep(time.Duration(rng.IntN(20_000)/(1+rng.IntN(10))) * time.Microsecond)
		switch what {
		case 1:
			f.Ops, f.Purposes = []blockdev.Op{blockdev.OpRead}, []blockdev.Purpose{blockdev.ForBtree}
			disk.Add(f)
		case 2:
			w.set.SetMoving(false)
		case 3:
			note()
			if err := w.reopen(); err != nil {
				return err
			}
		case 4:
			w.set.Lock()
			w.set.WantSpaceLocked(true)
			w.set.Unlock()
		}
		if what == 1 {
			w.rt.Sleep(time.Duration(rng.IntN(100)) * time.Millisecond)
			disk.Clear()
		}
		for range rng.IntN(20) {
			if err := x.drop(at()); err != nil {
				return err
			}
		}
		w.set.Lock()
		if w.set.needSpace > 0 {
			w.set.WantSpaceLocked(false)
		}
		w.set.Unlock()
		if err := w.still(); err != nil {
			return err
		}
		disk.Clear()
		if rng.IntN(10) == 0 {
			if err := x.check(all); err != nil {
				return err
			}
		}
	}
	if err := x.check(all); err != nil {
		return err
	}
	w.set.SetMoving(true)
	w.begun()
	w.rt.Sleep(time.Duration(rng.IntN(20)) * time.Millisecond)
	retired := func(slots []ondisk.UUIDEntry) error { slots[1].UUID = ondisk.RetiredUUID; return nil }
	if err := w.set.ChangeSlots(retired); err != nil {
		return err
	}
	w.set.Lock()
	w.set.dead.Signal()
	w.set.Unlock()
	for n := 0; w.set.Slots()[1].Retired(); n++ {
		if w.rt.Sleep(time.Second); n > 600 {
			return errors.New("the slot is not freed")
		}
	}
	if err := w.still(); err != nil {
		return err
	}
	for at := range x.data {
		if at[0] == 1 {
			delete(x.data, at)
		}
	}
	if note(); passes < 10 || extents < 500 {
		return fmt.Errorf("%d passes, %d extents, %d errors", passes, extents, failed)
	}
	errs.Add(failed)
	t.Logf("%d passes, %d extents, %d errors", passes, extents, failed)
	return errors.Join(x.check(all), w.recount())
}
