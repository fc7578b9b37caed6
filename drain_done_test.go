package ubcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

// When WriteBack returns without an error, what was dirty at its begin is on the backing device, also where there always
// is some write near it under way.
func TestWriteBackBesideABusyNeighbour(t *testing.T) {
	o := breakable(t)
	o.cache, o.bucket = 600*64<<10, 64<<10
	simulate(t, 1, 10*time.Minute, o, func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(b.attribute("cache_mode", "writeback"), b.attribute("sequential_cutoff", "0"), hold(v, true)); err != nil {
			return err
		}
		if err := v.WriteAt(ctx, bytes.Repeat([]byte{'A'}, 64<<10), 0, FUA); err != nil {
			return err
		}
		if err := v.WriteAt(ctx, bytes.Repeat([]byte{'A'}, 64<<10), 4<<20, FUA); err != nil { // something that can be cleaned
			return err
		}
		// One write to the cache is slow; what it covers is 512 bytes.
		b.faults[0].Add(blockdev.Fault{
			Purposes: []blockdev.Purpose{blockdev.ForData}, Ops: []blockdev.Op{blockdev.OpWrite}, Hang: 10 * time.Second, Count: 1,
		})
		var group rt.WaitGroup
		group.Init(b.rt)
		var failed error
		group.Go("write", func() { failed = v.WriteAt(ctx, page('B')[:512], 0, 0) })
		b.rt.Sleep(100 * time.Millisecond)
		err := v.WriteBack(ctx)
		var lost error
		if err == nil {
			lost = b.alone(4096, 'A')
		}
		group.Wait()
		if lost != nil {
			return fmt.Errorf("WriteBack has returned nil: %w", lost)
		}
		return failed
	})
}

// A device that takes its time, and a request that covers all that is dirty, are no reason to give up.
func TestWriteBackBesideASlowRequest(t *testing.T) {
	what := map[string]func(b *bench, v *Volume) error{
		"zeroes": func(b *bench, v *Volume) error {
			b.faults[1].Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpWriteZeroes}, Hang: 3 * time.Second, Count: 1})
			return v.WriteZeroes(context.Background(), 0, 4096, 0)
		},
		"write": func(b *bench, v *Volume) error {
			for _, f := range b.faults {
				f.Add(blockdev.Fault{
					Purposes: []blockdev.Purpose{blockdev.ForData}, Ops: []blockdev.Op{blockdev.OpWrite}, Hang: 3 * time.Second, Count: 1,
				})
			}
			return v.WriteAt(context.Background(), page('B'), 0, 0)
		},
	}
	for name, slow := range what {
		for _, call := range []string{"WriteBack", "Detach"} {
			t.Run(call+" beside "+name, func(t *testing.T) {
				simulate(t, 1, 10*time.Minute, breakable(t), func(b *bench) error {
					ctx, v := context.Background(), b.volumes[0]
					if err := errors.Join(b.attribute("cache_mode", "writeback"), hold(v, true), v.WriteAt(ctx, page('A'), 0, FUA)); err != nil {
						return err
					}
					var group rt.WaitGroup
					group.Init(b.rt)
					var failed, err error
					if call == "WriteBack" {
						group.Go("request", func() { failed = slow(b, v) })
						b.rt.Sleep(100 * time.Millisecond)
						err = v.WriteBack(ctx)
					} else {
						// A read that came before keeps the detach from beginning to write back until the request has come.
						b.faults[1].Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpRead}, Hang: 200 * time.Millisecond, Count: 1})
						group.Go("read", func() { _ = v.ReadAt(ctx, make([]byte, 512), 3<<20) })
						b.rt.Sleep(10 * time.Millisecond)
						group.Go("detach", func() { err = v.Detach(ctx) })
						b.rt.Sleep(10 * time.Millisecond)
						failed = slow(b, v)
					}
					group.Wait()
					return errors.Join(err, failed)
				})
			})
		}
	}
}

// A block that is written again and again keeps nothing else from being done.
func TestWriteBackBesideAHotBlock(t *testing.T) {
	simulate(t, 1, 10*time.Minute, breakable(t), func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(b.attribute("cache_mode", "writeback"), hold(v, true), v.WriteAt(ctx, page('A'), 0, FUA)); err != nil {
			return err
		}
		var group rt.WaitGroup
		group.Init(b.rt)
		over := false
		var failed error
		for range 2 {
			group.Go("writer", func() {
				for !over && failed == nil {
					failed = v.WriteAt(ctx, page('A'), 0, 0)
				}
			})
		}
		b.rt.Sleep(100 * time.Millisecond)
		err := v.WriteBack(ctx)
		over = true
		group.Wait()
		return errors.Join(err, failed)
	})
}
