package volume

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
	"github.com/ubcache/ubcache/internal/writeback"
)

// A drained is a volume in writeback mode, in a simulation, whose writeback is held.
type drained struct {
	*Volume
	io    *blockdev.IO
	back  *blockdev.MemoryDevice
	fault *blockdev.Faulty // the backing device's
}

// simulateDrained runs fn on such a volume of 8 MiB; its blocks may be larger than those of its set, which has buckets of
// 8 KiB and blocks of 512 bytes.
func simulateDrained(t *testing.T, block int64, fn func(d *drained) error) {
	t.Helper()
	s := rt.NewSim(1)
	s.Limit = time.Hour
	var failed error
	err := s.Run(func() {
		ctx := context.Background()
		disk := func(size int64, o blockdev.MemoryOptions) *blockdev.MemoryDevice {
			o.Runtime = s.Runtime()
			d, err := blockdev.Memory(size, o)
			if err != nil {
				panic(err)
			}
			return d
		}
		cache, back := disk(4000*8<<10, blockdev.MemoryOptions{}), disk(8<<20+8192, blockdev.MemoryOptions{LogicalBlock: int(block)})
		for _, o := range []offline.FormatOptions{{Cache: cache, Bucket: 8 << 10, Block: 512}, {Backing: []blockdev.Device{back}, Block: block}} {
			if _, failed = offline.Format(ctx, o); failed != nil {
				return
			}
		}
		set, err := cacheset.Open(ctx, cache, cacheset.Options{})
		if err != nil {
			failed = err
			return
		}
		fault := blockdev.NewFaulty(back, 1)
		v, err := Open(set, fault)
		if err != nil {
			failed = err
			return
		}
		io, err := blockdev.NewIO(v, 8)
		if err != nil {
			failed = err
			return
		}
		v.SetSequentialCutoff(0)
		failed = errors.Join(v.SetMode(ondisk.Writeback), v.ChangeWriteback(func(s *writeback.Settings) error { s.Running = false; return nil }))
		if failed == nil {
			failed = fn(&drained{v, io, back, fault})
		}
		failed = errors.Join(failed, io.Close(), v.Close(), set.Close(ctx))
	})
	if err := errors.Join(err, failed); err != nil {
		t.Fatal(err)
	}
}

// below returns what the backing device has at an offset of the volume.
func (d *drained) below(off int64, n int) []byte { return d.back.Bytes()[8192+off:][:n] }

// skew makes what comes next lie elsewhere in its bucket: so many sectors further on.
func (d *drained) skew(sectors uint32) error {
	s := d.set
	s.Lock()
	defer s.Unlock()
	p, n := s.SpaceLocked(bucket.ForDirty, d.inode, 0, sectors, 1, 1)
	if n != sectors {
		return fmt.Errorf("room for %d sectors", n)
	}
	s.LetGoLocked(p)
	return nil
}

// Blocks of the backing device are larger than those of the set, and lie in two buckets: whatever the rate, they are
// written back as a whole.
func TestWriteBackOfLargeBlocks(t *testing.T) {
	for _, rate := range []int64{1, 3, 101, writeback.MaxRate} {
		t.Run(fmt.Sprint(rate), func(t *testing.T) {
			simulateDrained(t, 4096, func(d *drained) error {
				if err := d.skew(3); err != nil {
					return err
				}
				data := make([]byte, 128<<10)
				for i := range data {
					data[i] = byte(i/512) | 1
				}
				if err := d.io.WriteAt(data, 0, 0); err != nil {
					return err
				}
				err := d.ChangeWriteback(func(s *writeback.Settings) error {
					s.Running, s.RateMinimum, s.Delay = true, uint32(min(rate, 1<<20)), 0
					return nil
				})
				if err != nil {
					return err
				}
				if err := d.SetWritebackRate(rate); err != nil {
					return err
				}
				for d.DirtySectors() > 0 {
					d.rt.Sleep(time.Second)
				}
				if n := d.WritebackStatus().Errors; n > 0 || !bytes.Equal(d.below(0, len(data)), data) {
					return fmt.Errorf("not all is on the backing device; %d errors", n)
				}
				return nil
			})
		})
	}
}

// What finds no room in the cache after all goes to the backing device: nothing older may come down over it.
func TestWriteBackBesideAWriteWithoutRoom(t *testing.T) {
	simulateDrained(t, 512, func(d *drained) error {
		data := bytes.Repeat([]byte{1}, 8192)
		if err := d.io.WriteAt(data, 0, 0); err != nil {
			return err
		}
		write := []blockdev.Op{blockdev.OpWrite}
		d.fault.Add(blockdev.Fault{Ops: write, Purposes: []blockdev.Purpose{blockdev.ForWriteback}, Hang: 2 * time.Second})
		d.fault.Add(blockdev.Fault{Ops: write, Purposes: []blockdev.Purpose{blockdev.ForData}, Hang: time.Second})
		q, err := d.NewQueue(1, func([]*blockdev.Request) {})
		if err != nil {
			return err
		}
		conf := d.use()
		o := d.newOp(q.(*queue), &blockdev.Request{Op: blockdev.OpWrite, Buf: bytes.Repeat([]byte{2}, 4096)}, conf, accepted, false)
		d.unuse(conf)
		w := o.span()
		d.set.Lock()
		d.ranges.beginWriteLocked(w) // as op.write and op.back do
		d.ranges.toCacheLocked(w, true)
		d.set.Unlock()
		var group rt.WaitGroup
		group.Init(d.rt)
		var failed error
		group.Go("write", func() {
			failed = o.instead(w)
			d.set.Lock()
			d.ranges.endWriteLocked(w)
			d.set.Unlock()
		})
		d.rt.Sleep(time.Millisecond)
		err = d.WriteBack(context.Background())
		group.Wait()
		d.putOp(o)
		if err := errors.Join(err, failed, q.Close()); err != nil {
			return err
		}
		copy(data, bytes.Repeat([]byte{2}, 4096))
		if !bytes.Equal(d.below(0, len(data)), data) {
			return fmt.Errorf("the backing device has %d and %d, want 2 and 1", d.below(0, 1), d.below(4096, 1))
		}
		return nil
	})
}

func TestFailuresInOrder(t *testing.T) {
	at := func(bounds ...uint64) (list []failure) {
		for i := 0; i < len(bounds); i += 2 {
			list = append(list, failure{span: span{bounds[i], bounds[i+1]}})
		}
		return list
	}
	got := inOrder(at(40, 48, 8, 16, 16, 24, 4, 9, 10, 12, 60, 70, 48, 50))
	if want := at(4, 24, 40, 50, 60, 70); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	for _, c := range []struct {
		before, now []failure
		want        bool
	}{
		{at(), at(0, 8), false},
		{at(0, 8), at(8, 16), false},
		{at(8, 16), at(0, 8), false},
		{at(0, 8, 16, 24), at(8, 16, 23, 30), true},
		{at(0, 8, 16, 24, 100, 200), at(8, 16, 24, 30, 50, 60), false},
		{at(0, 100), at(20, 30), true},
	} {
		if got := again(c.before, c.now); got != c.want {
			t.Errorf("%v, then %v: %v", c.before, c.now, got)
		}
	}
}
