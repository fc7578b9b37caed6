package ubcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

// A forgetful device, which makes one flush at a time, fails one when armed: what was written since the last one is lost,
// and it says so once only.
type forgetful struct {
	blockdev.Device
	mem       *blockdev.MemoryDevice
	armed     time.Duration // how long the flush takes that will fail; 0: none
	told      int
	unflushed []before
	writes    int                       // that there were
	flushes   map[*blockdev.Request]int // under way: the writes before; also those under way, which makes the device better than it is
	failing   bool                      // a flush is under way that will fail; others come after it
	behind    []func()
}

// before is what there was before a write.
type before struct {
	n    int // number of the write
	off  int64
	data []byte
}

func newForgetful(dev blockdev.Device) *forgetful {
	f := &forgetful{Device: dev, flushes: map[*blockdev.Request]int{}}
	for below := dev; f.mem == nil; {
		if m, ok := below.(*blockdev.MemoryDevice); ok {
			f.mem = m
			break
		}
		below = below.(interface{ Unwrap() blockdev.Device }).Unwrap()
	}
	return f
}

func (f *forgetful) Runtime() *rt.Runtime    { return blockdev.RuntimeOf(f.Device) }
func (f *forgetful) Unwrap() blockdev.Device { return f.Device }

// flushedTo says that a flush that so many writes came before has succeeded.
func (f *forgetful) flushedTo(n int) {
	f.unflushed = slices.DeleteFunc(f.unflushed, func(b before) bool { return b.n <= n })
}

// lose undoes what was written since the last flush.
func (f *forgetful) lose() {
	for i := len(f.unflushed) - 1; i >= 0; i-- {
		copy(f.mem.Bytes()[f.unflushed[i].off:], f.unflushed[i].data)
	}
	f.unflushed = nil
}

func (f *forgetful) NewQueue(depth int, complete func(done []*blockdev.Request)) (blockdev.Queue, error) {
	q := &forgetfulQueue{f: f, up: blockdev.NewCompleter(f.Runtime(), complete)}
	var err error
	q.below, err = f.Device.NewQueue(depth, func(done []*blockdev.Request) {
		for _, r := range done {
			if r.Op == blockdev.OpFlush && r.Err == nil {
				f.flushedTo(f.flushes[r])
			}
			delete(f.flushes, r)
		}
		q.up.Finish(done...)
	})
	return q, err
}

type forgetfulQueue struct {
	f     *forgetful
	up    *blockdev.Completer
	below blockdev.Queue
}

func (q *forgetfulQueue) Submit(reqs []*blockdev.Request) {
	f := q.f
	if !q.up.Begin(len(reqs)) {
		for _, r := range reqs {
			r.Err = blockdev.ErrClosed
		}
		q.up.Finish(reqs...)
		return
	}
	var pass []*blockdev.Request
	for _, r := range reqs {
		switch {
		case r.Op == blockdev.OpFlush && f.armed > 0:
			d := f.armed
			f.armed, f.failing = 0, true
			f.Runtime().AfterFunc(d, func() {
				f.lose()
				f.told++
				r.Err = unix.EIO
				q.up.Finish(r)
				f.failing = false
				for _, fn := range f.behind {
					fn()
				}
				f.behind = nil
			})
			continue
		case r.Op == blockdev.OpFlush && f.failing:
			f.behind = append(f.behind, func() {
				f.flushes[r] = f.writes
				q.below.Submit([]*blockdev.Request{r})
			})
			continue
		case r.Op == blockdev.OpFlush:
			f.flushes[r] = f.writes
		case r.Op.Writes() && r.Flags&blockdev.FUA == 0:
			f.writes++
			f.unflushed = append(f.unflushed, before{f.writes, r.Off, bytes.Clone(f.mem.Bytes()[r.Off:][:r.Length()])})
		}
		pass = append(pass, r)
	}
	if len(pass) > 0 {
		q.below.Submit(pass)
	}
}

func (q *forgetfulQueue) Close() error {
	if !q.up.Close() {
		return blockdev.ErrClosed
	}
	return q.below.Close()
}

// forget puts a forgetful device in the place of the first backing device.
func (b *bench) forget(mode string) (*forgetful, error) {
	err := b.set.Close(context.Background())
	b.set = nil
	f := newForgetful(b.backing[0])
	b.backing[0] = f
	return f, errors.Join(err, b.open(mode))
}

// What is written back stays dirty when a flush of anybody's fails between its being written and its own flush: the
// device says once only what it has lost.
func TestForeignFlushErrorWhileWritingBack(t *testing.T) {
	o := breakable(t)
	simulate(t, 1, 10*time.Minute, o, func(b *bench) error {
		f, err := b.forget("writeback")
		if err != nil {
			return err
		}
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(hold(v, true), v.WriteAt(ctx, page('D'), 0, FUA), v.Flush(ctx)); err != nil {
			return err
		}
		if err := v.WriteZeroes(ctx, 4<<20, 4096, 0); err != nil { // so that the next flush goes to the backing device
			return err
		}
		f.armed = 100 * time.Millisecond
		var group rt.WaitGroup
		group.Init(b.rt)
		var told error
		group.Go("flush", func() { told = v.Flush(ctx) })
		b.rt.Sleep(10 * time.Millisecond)
		_ = v.WriteBack(ctx)
		group.Wait()
		if told == nil || f.told != 1 {
			return fmt.Errorf("the case did not come about: %v, %d", told, f.told)
		}
		if v.Stats().DirtyBytes > 0 {
			return nil // right: another try is to come
		}
		return b.alone(0, 'D') // its only copy now
	})
}

// Without a runtime directory a write is acknowledged when the journal has it, also one for whose end there was no room in
// the cache: what of it is dirty is nowhere else.
func TestKillAfterAWriteThatFoundRoomInPart(t *testing.T) {
	o := breakable(t)
	o.dir = ""
	simulate(t, 1, 10*time.Minute, o, func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		err := errors.Join(b.attribute("cache_mode", "writeback"), b.attribute("sequential_cutoff", "0"), hold(v, true), v.WriteAt(ctx, page('x'), 6<<20, FUA))
		if err != nil {
			return err
		}
		// No more buckets become ready.
		b.faults[0].Add(blockdev.Fault{Purposes: []blockdev.Purpose{blockdev.ForPrio}, Ops: []blockdev.Op{blockdev.OpWrite}, Hang: 20 * time.Second})
		const large = 64 << 10
		for off := int64(0); off+large <= 4<<20; off += large {
			if err := v.WriteAt(ctx, bytes.Repeat([]byte{'A'}, large), off, 0); err != nil {
				return err
			}
			var dirty int64
			err := v.EachState(ctx, off, large, func(s BlockState, _, n int64) bool {
				if s == Dirty {
					dirty += n
				}
				return true
			})
			if err != nil {
				return err
			}
			if dirty == 0 || dirty == large {
				continue
			}
			// The process dies: all that it gave to the system is there.
			if err := b.cut(blockdev.Prefix); err != nil {
				return err
			}
			for at := off; at < off+large; at += 4096 {
				if err := b.expect(at, 'A'); err != nil {
					return fmt.Errorf("of a write that was acknowledged, %d bytes of it in the cache alone: %w", dirty, err)
				}
			}
			return nil
		}
		return errors.New("no write found room for a part of it")
	})
}

// Data that is dirty and not flushed lies over clean data that is; what comes over both goes to the backing device alone.
// After a power cut the cache must not say the old clean data, which the backing device does not have any more.
func TestPowerCutBehindAWriteAroundDirtyData(t *testing.T) {
	over := map[string]func(v *Volume) error{
		"discard": func(v *Volume) error { return v.Discard(context.Background(), 0, 4096) },
		"zeroes":  func(v *Volume) error { return v.WriteZeroes(context.Background(), 0, 4096, 0) },
	}
	for name, fn := range over {
		t.Run(name, func(t *testing.T) {
			simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
				ctx, v := context.Background(), b.volumes[0]
				err := errors.Join(b.attribute("cache_mode", "writeback"), v.WriteAt(ctx, page('A'), 0, FUA), v.WriteBack(ctx), v.Flush(ctx),
					hold(v, true), v.WriteAt(ctx, page('B'), 0, 0), fn(v), b.cut(blockdev.Prefix))
				if err != nil {
					return err
				}
				got := make([]byte, 4096)
				clean := false
				if err := b.volumes[0].EachState(ctx, 0, 4096, func(s BlockState, _, _ int64) bool { clean = s == Clean; return true }); err != nil {
					return err
				}
				if err := b.volumes[0].ReadAt(ctx, got, 0); err != nil {
					return err
				}
				if clean {
					return b.alone(0, got[0])
				}
				return nil
			})
		})
	}
}
