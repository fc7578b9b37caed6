package ubcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/journal"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
	"github.com/ubcache/ubcache/internal/sim"
)

// deadKeys looks at a cache device as it is on the disk: no slot that is free has a key of its inode in any set of a leaf
// that can be reached, hidden by a later one or not, with a pointer or without, nor in a journal entry that is needed. It
// returns how many slots are retired.
func deadKeys(ctx context.Context, dev blockdev.Device) (retired int, err error) {
	found := map[uint32]string{}
	s, err := offline.Open(ctx, dev, offline.Options{EachNode: func(ref offline.NodeRef, n *ondisk.Node) {
		for i := range n.Sets {
			if ref.Level == 0 {
				_ = n.Sets[i].EachKey(func(k *ondisk.Key) bool {
					found[k.Inode()] = fmt.Sprintf("key %v in set %d of the node at sector %d", k, i, ref.Sector())
					return true
				})
			}
		}
	}})
	if s != nil {
		defer s.Close()
	}
	if err != nil {
		return 0, err
	}
	io, err := blockdev.NewIO(dev, 1)
	if err != nil {
		return 0, err
	}
	defer io.Close()
	rec, err := journal.Read(ctx, journal.Source{IO: io, Geometry: s.Geo, Buckets: s.Super.D[:s.Super.NJournal]})
	if err != nil {
		return 0, err
	}
	err = rec.EachKey(ctx, func(seq uint64, k *ondisk.Key) error {
		found[k.Inode()] = fmt.Sprintf("key %v in journal entry %d", k, seq)
		return nil
	})
	for i := range s.Slots {
		if what := found[uint32(i)]; what != "" && s.Slots[i].Unused() {
			err = errors.Join(err, fmt.Errorf("slot %d is free: %s", i, what))
		}
		if s.Slots[i].Retired() {
			retired++
		}
	}
	return retired, err
}

// Volumes come and go as often as one likes: each takes a slot that another one had, and shows nothing of that one. A set
// with buckets of 64 KiB has 512 slots.
func TestSlotsForEver(t *testing.T) {
	const size, bucket, rounds = 1 << 20, 64 << 10, 2000
	o := benchOptions{cache: 700 * bucket, bucket: bucket, block: 4096, backing: []int64{size}, backingLatency: fast, mode: "writeback"}
	var disk *blockdev.MemoryDevice
	simulate(t, 1, 100*time.Hour, o, func(b *bench) error {
		ctx := context.Background()
		if n := len(b.set.set.Slots()); n != 512 {
			return fmt.Errorf("%d slots", n)
		}
		p, got := make([]byte, 4096), make([]byte, size-crashOffset)
		used := map[uint32]int{}
		for n := range rounds {
			name := "v0"
			var v *Volume
			if n%2 == 0 {
				if v = b.set.Volume(name); v == nil {
					var err error
					if v, err = b.set.OpenVolume(ctx, VolumeOptions{Name: name, BackingDevice: b.backing[0]}); err != nil {
						return fmt.Errorf("round %d: attach: %w", n, err)
					}
				}
			} else {
				name = fmt.Sprint("flash-", n)
				_, err := b.set.CreateFlash(ctx, name, int64(len(got)))
				if err == nil {
					v, err = b.set.OpenVolume(ctx, VolumeOptions{Name: name, Flash: name})
				}
				if err == nil {
					err = v.ReadAt(ctx, got, 0)
				}
				if err != nil {
					return fmt.Errorf("round %d: %w", n, err)
				}
				if at := bytes.IndexFunc(got, func(r rune) bool { return r != 0 }); at >= 0 {
					return fmt.Errorf("round %d: a new volume in slot %d has data at byte %d", n, v.v.Inode(), at)
				}
			}
			used[v.v.Inode()]++
			for i := range 4 { // clean and dirty data, here and there
				off := int64((n*7+i*61)%200) * 4096
				copy(p, pattern(off, len(p), uint64(n)))
				if err := errors.Join(v.WriteAt(ctx, p, off, 0), v.ReadAt(ctx, got[:32<<10], off/2&^4095)); err != nil {
					return fmt.Errorf("round %d: %w", n, err)
				}
			}
			var err error
			if n%2 == 0 {
				if err = v.Detach(ctx); err == nil {
					err = b.set.CloseVolume(ctx, name)
				}
			} else {
				if err = b.set.CloseVolume(ctx, name); err == nil {
					err = b.set.DeleteFlash(ctx, name)
				}
			}
			if err != nil {
				return fmt.Errorf("round %d: detach: %w", n, err)
			}
		}
		if err := waitFreed(b.rt, b.set); err != nil {
			return err
		}
		b.rt.Sleep(time.Second) // the last array is durable
		t.Logf("%d slots had volumes, the first of them %d", len(used), used[0])
		if i := b.set.set.Info(); i.SlotsFreed != rounds || i.Live != 0 || i.Dirty != 0 {
			return fmt.Errorf("%d slots were freed, %d sectors are live, %d dirty", i.SlotsFreed, i.Live, i.Dirty)
		}
		disk = b.cache.(*blockdev.MemoryDevice)
		return nil
	})
	if disk == nil {
		return
	}
	disk.SetRuntime(rt.New())
	if _, err := deadKeys(context.Background(), disk); err != nil {
		t.Error(err)
	}
}

// retired returns how many slots are retired.
func (b *bench) retired() (n int) {
	for _, e := range b.set.set.Slots() {
		if e.Retired() {
			n++
		}
	}
	return n
}

// A movable is a volume that is detached and attached again under a load.
type movable struct {
	target
	mu     rt.Mutex
	moved  rt.Cond
	users  int
	moving bool
}

func newMovable(r *rt.Runtime, v *Volume) *movable {
	m := &movable{target: target{v}}
	m.mu.Init(r)
	m.moved.Init(&m.mu)
	return m
}

func (m *movable) use(fn func() error) error {
	m.mu.Lock()
	for m.moving {
		m.moved.Wait()
	}
	m.users++
	m.mu.Unlock()
	err := fn()
	m.mu.Lock()
	m.users--
	m.moved.Broadcast()
	m.mu.Unlock()
	return err
}

func (m *movable) ReadAt(ctx context.Context, p []byte, off int64) error {
	return m.use(func() error { return m.target.ReadAt(ctx, p, off) })
}

func (m *movable) WriteAt(ctx context.Context, p []byte, off int64, fua bool) error {
	return m.use(func() error { return m.target.WriteAt(ctx, p, off, fua) })
}

func (m *movable) Flush(ctx context.Context) error {
	return m.use(func() error { return m.target.Flush(ctx) })
}

func (m *movable) Discard(ctx context.Context, off, n int64) error {
	return m.use(func() error { return m.target.Discard(ctx, off, n) })
}

func (m *movable) WriteZeroes(ctx context.Context, off, n int64, fua bool) error {
	return m.use(func() error { return m.target.WriteZeroes(ctx, off, n, fua) })
}

// move has the volume replaced by what fn returns, while nobody uses it.
func (m *movable) move(fn func(v *Volume) (*Volume, error)) error {
	m.mu.Lock()
	for m.moving {
		m.moved.Wait()
	}
	m.moving = true
	m.mu.Unlock()
	// Requests that came before the detach are under way still.
	v, err := fn(m.Volume)
	m.mu.Lock()
	if err == nil {
		m.target = target{v}
	}
	m.moving = false
	m.moved.Broadcast()
	m.mu.Unlock()
	return err
}

// quiet waits until no request is under way.
func (m *movable) quiet() {
	m.mu.Lock()
	for m.users > 0 {
		m.moved.Wait()
	}
	m.mu.Unlock()
}

// reuseLoop is a loop whose volumes are detached and attached now and then. In between their slots are a flash-only
// volume's, which is deleted.
func reuseLoop(seed uint64, broken cacheset.Broken) sim.Loop {
	l := crashLoop(seed, "writeback")
	o := opening{mode: "writeback", drain: fastDrain, broken: broken, restless: true}
	open := func(ctx context.Context, e *sim.Env) (*sim.System, error) {
		s, err := o.open(ctx, e)
		if err != nil {
			return nil, err
		}
		for i, t := range s.Targets {
			s.Targets[i] = newMovable(e.Runtime, t.(target).Volume)
		}
		set := s.Own.(crashSet).set
		if len(set.FlashVolumes()) > 0 { // the last life did not come to that
			if err := set.DeleteFlash(ctx, "guest"); err != nil {
				return nil, errors.Join(err, s.Close(ctx))
			}
		}
		return s, nil
	}
	l.Build, l.Reopen = open, open
	l.Between = func(ctx context.Context, e *sim.Env, s *sim.System, n int) error {
		const every = 15
		if n%every != every-1 {
			return nil
		}
		i := n / every % 2
		m, set := s.Targets[i].(*movable), s.Own.(crashSet).set
		return m.move(func(v *Volume) (*Volume, error) {
			if err := v.Detach(ctx); err != nil {
				return nil, err
			}
			m.quiet()
			if err := set.CloseVolume(ctx, v.name); err != nil {
				return nil, err
			}
			if n/every%3 > 0 { // else it is attached while its keys are being removed
				if err := waitFreed(e.Runtime, set); err != nil {
					return nil, err
				}
				if err := guest(ctx, set); err != nil {
					return nil, err
				}
			}
			v, err := set.OpenVolume(ctx, VolumeOptions{Name: "volume" + strconv.Itoa(i), BackingDevice: e.Devices[1+i]})
			if err != nil {
				return nil, err
			}
			return v, fastDrain(v.v)
		})
	}
	l.Check = func(ctx context.Context, r sim.Rest) error {
		if err := checkAtRest(ctx, r); err != nil {
			return err
		}
		_, err := deadKeys(ctx, r.Images[0])
		return err
	}
	return l
}

// waitFreed waits until no slot is retired.
func waitFreed(r *rt.Runtime, set *CacheSet) error {
	b := bench{set: set}
	for n := 0; b.retired() > 0; n++ {
		if err := set.Err(); err != nil {
			return err
		}
		if r.Sleep(time.Millisecond); n > 10000 {
			return errors.New("a slot is retired for ten seconds")
		}
	}
	return nil
}

// guest makes a flash-only volume, which must be empty, writes to it, and deletes it.
func guest(ctx context.Context, set *CacheSet) error {
	const size = 256 << 10
	if _, err := set.CreateFlash(ctx, "guest", size); err != nil {
		return err
	}
	v, err := set.OpenVolume(ctx, VolumeOptions{Name: "guest", Flash: "guest"})
	if err != nil {
		return err
	}
	p := make([]byte, size)
	if err := v.ReadAt(ctx, p, 0); err != nil {
		return err
	}
	if !bytes.Equal(p, make([]byte, size)) {
		return fmt.Errorf("a new volume in slot %d has data", v.v.Inode())
	}
	for off := int64(0); off < size; off += 64 << 10 {
		if err := v.WriteAt(ctx, bytes.Repeat([]byte{0xdd}, 16<<10), off, FUA); err != nil {
			return err
		}
	}
	if err := set.CloseVolume(ctx, "guest"); err != nil {
		return err
	}
	return set.DeleteFlash(ctx, "guest")
}

// TestReusedSlotsPowerCuts cuts the power of a set whose slots go from one volume to another.
func TestReusedSlotsPowerCuts(t *testing.T) {
	for _, seed := range sim.Seeds(1) {
		l := reuseLoop(seed, 0)
		l.Step = crashStep(40)
		l.Run(t)
		l.Lives, l.Step = 3, crashStep(200)
		l.Run(t)
		l.Kill, l.Lives = true, 2
		l.Run(t)
	}
}
