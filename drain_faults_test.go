package ubcache

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// A leaf that cannot be read keeps the dirty data that others name from being written back neither before nor behind it.
func TestWriteBackAroundABadLeaf(t *testing.T) {
	simulate(t, 1, 10*time.Minute, breakable(t), func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(b.attribute("cache_mode", "writeback"), hold(v, true)); err != nil {
			return err
		}
		const n, step = 7000, 1024
		for i := range int64(n) {
			if err := v.WriteAt(ctx, page('A')[:512], i*step, 0); err != nil {
				return err
			}
		}
		err := b.set.Close(ctx)
		b.set = nil
		if err != nil {
			return err
		}
		if b.set, err = Open(ctx, Options{CacheDevice: b.cache, RuntimeDir: b.dir, NodeCache: 64 << 10}); err != nil {
			return err
		}
		if v, err = b.set.OpenVolume(ctx, VolumeOptions{Name: "v0", BackingDevice: b.backing[0]}); err != nil {
			return err
		}
		b.volumes = []*Volume{v}
		if err := hold(v, true); err != nil {
			return err
		}
		s := b.set.set
		at := uint64(crashOffset+n/2*step) / 512
		s.Lock()
		_, miss := s.LookupLocked(v.v.Inode(), at, at+8)
		for i := uint64(0); miss.IsZero() && i < 2500; i++ {
			at += 2
			_, miss = s.LookupLocked(v.v.Inode(), at, at+8)
		}
		s.Unlock()
		if miss.IsZero() || miss.Level > 0 {
			return fmt.Errorf("no leaf is missing: %v", miss)
		}
		b.faults[0].Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpRead}, Off: int64(miss.Ptr.Sector()) * 512, Len: int64(miss.Sectors) * 512})
		c, cancel := b.rt.WithTimeout(ctx, time.Minute)
		defer cancel()
		if err := v.WriteBack(c); err == nil {
			return errors.New("WriteBack could read a leaf that is bad")
		}
		if dirty, bad := v.Stats().DirtyBytes, int64(miss.High.Sector-miss.Low.Sector)*512; dirty > bad {
			return fmt.Errorf("%d bytes are dirty still; what the leaf has is %d at most", dirty, bad)
		}
		return nil
	})
}

// WriteBack and Detach end when their context does, whatever hangs.
func TestWriteBackIsBounded(t *testing.T) {
	for _, call := range []string{"WriteBack", "Detach"} {
		for name, f := range map[string]blockdev.Fault{
			"superblock": {Purposes: []blockdev.Purpose{blockdev.ForSuperblock}, Ops: []blockdev.Op{blockdev.OpWrite}, Hang: 10 * time.Minute},
			"flush":      {Ops: []blockdev.Op{blockdev.OpFlush}, Hang: 10 * time.Minute},
			"writes":     {Ops: []blockdev.Op{blockdev.OpWrite}, Hang: 10 * time.Minute},
		} {
			t.Run(call+" "+name, func(t *testing.T) {
				simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
					ctx, v := context.Background(), b.volumes[0]
					if err := errors.Join(b.attribute("cache_mode", "writeback"), hold(v, true), v.WriteAt(ctx, page('A'), 0, FUA)); err != nil {
						return err
					}
					b.faults[1].Add(f)
					c, cancel := b.rt.WithTimeout(ctx, 5*time.Second)
					defer cancel()
					begin := b.rt.Now()
					var err error
					if call == "WriteBack" {
						err = v.WriteBack(c)
					} else {
						err = v.Detach(c)
					}
					took := b.rt.Now() - begin
					b.faults[1].Clear()
					b.rt.Sleep(11 * time.Minute)
					if err == nil || took > 20*time.Second {
						return fmt.Errorf("%s had 5 s and took %v: %v", call, took, err)
					}
					return nil
				})
			})
		}
	}
}

// What is over dirty data, and the old data, are not both lost when somebody else's flush fails meanwhile.
func TestForeignFlushErrorBesideZeroesOverDirtyData(t *testing.T) {
	simulate(t, 1, 10*time.Minute, breakable(t), func(b *bench) error {
		f, err := b.forget("none")
		if err != nil {
			return err
		}
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(v.WriteAt(ctx, page('O'), 0, FUA), b.attribute("cache_mode", "writeback"), hold(v, true)); err != nil {
			return err
		}
		if err := errors.Join(v.WriteAt(ctx, page('D'), 0, FUA), v.Flush(ctx)); err != nil {
			return err
		}
		if err := v.WriteZeroes(ctx, 4<<20, 4096, 0); err != nil { // so that the next flush goes to the backing device
			return err
		}
		b.rt.Sleep(time.Millisecond) // so that it counts as acknowledged before the flush
		f.armed = 100 * time.Millisecond
		var group rt.WaitGroup
		group.Init(b.rt)
		var told error
		group.Go("flush", func() { told = v.Flush(ctx) })
		b.rt.Sleep(10 * time.Millisecond)
		err = v.WriteZeroes(ctx, 0, 4096, 0)
		group.Wait()
		if told == nil || f.told != 1 {
			return fmt.Errorf("the case did not come about: %v, %d", told, f.told)
		}
		if err != nil {
			return nil // told
		}
		if b.expect(0, 0) == nil || b.expect(0, 'D') == nil {
			return nil
		}
		return errors.Join(errors.New("the write was acknowledged"), b.expect(0, 0))
	})
}

// WriteBack of a detached volume returns, although a change of its mode could not be stored.
func TestWriteBackOfADetachedVolume(t *testing.T) {
	simulate(t, 1, 10*time.Minute, breakable(t), func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		if err := v.Detach(ctx); err != nil {
			return err
		}
		b.faults[1].Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpWrite}, Err: unix.EIO})
		err := v.v.SetMode(ondisk.Writeback)
		b.faults[1].Clear()
		if err == nil {
			return errors.New("the mode was stored")
		}
		ctx, cancel := b.rt.WithTimeout(ctx, 5*time.Minute)
		defer cancel()
		return v.WriteBack(ctx)
	})
}
