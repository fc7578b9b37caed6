package ubcache

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

// A request over what is being written back waits for that, not for a thousand other writes.
func TestZeroesBesideALargeBatch(t *testing.T) {
	o := breakable(t)
	o.cache, o.bucket, o.backing = 600*32<<10, 32<<10, []int64{64 << 20}
	o.breaks = false
	o.backingLatency = blockdev.Latency{Read: 8 * time.Millisecond, Write: 8 * time.Millisecond, Flush: 8 * time.Millisecond, Parallel: 1}
	simulate(t, 1, time.Hour, o, func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(b.attribute("cache_mode", "writeback"), hold(v, true)); err != nil {
			return err
		}
		for i := range int64(2000) {
			if err := v.WriteAt(ctx, page('A'), i*8192, 0); err != nil {
				return err
			}
		}
		var group rt.WaitGroup
		group.Init(b.rt)
		var failed error
		group.Go("write back", func() { failed = v.WriteBack(ctx) })
		b.rt.Sleep(50 * time.Millisecond)
		begin := b.rt.Now()
		err := v.WriteZeroes(ctx, 0, 4096, 0)
		took := b.rt.Now() - begin
		group.Wait()
		if err = errors.Join(err, failed); err == nil && took > time.Second {
			err = fmt.Errorf("zeroes over 4096 bytes took %v", took)
		}
		return err
	})
}

// A stop ends in bounded time, also where the backing device does not answer to writeback.
func TestCloseWhereWritebackHangs(t *testing.T) {
	simulate(t, 1, 2*time.Hour, breakable(t), func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(b.attribute("cache_mode", "writeback"), hold(v, true), v.WriteAt(ctx, page('A'), 0, FUA)); err != nil {
			return err
		}
		b.faults[1].Add(blockdev.Fault{Purposes: []blockdev.Purpose{blockdev.ForWriteback}, Ops: []blockdev.Op{blockdev.OpWrite}, Hang: 40 * time.Minute})
		if err := hold(v, false); err != nil {
			return err
		}
		b.rt.Sleep(5 * time.Second)
		c, cancel := b.rt.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		begin := b.rt.Now()
		err := b.set.Close(c)
		b.set = nil
		if took := b.rt.Now() - begin; took > time.Minute {
			return fmt.Errorf("Close had 5 s and took %v: %v", took, err)
		}
		return nil
	})
}
