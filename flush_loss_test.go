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

// What a failed flush of the backing device has perhaps lost there, the cache does not go on saying for as long as it
// happens to keep it: an acknowledged write reads as it was written before the flush that fails, and what it reads as
// after a later flush has succeeded stays so.
func TestCleanDataAfterAFailedFlush(t *testing.T) {
	simulate(t, 1, 10*time.Minute, breakable(t), func(b *bench) error {
		f, err := b.forget("writethrough")
		if err != nil {
			return err
		}
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(v.WriteAt(ctx, page('O'), 0, FUA), v.Flush(ctx), v.WriteAt(ctx, page('N'), 0, 0)); err != nil {
			return err
		}
		f.armed = time.Millisecond
		if err := v.Flush(ctx); err == nil || f.told != 1 {
			return fmt.Errorf("the flush did not fail: %v", err)
		}
		if err := v.Flush(ctx); err != nil {
			return err
		}
		p := make([]byte, 4096)
		if err := v.ReadAt(ctx, p, 0); err != nil {
			return err
		}
		if err := v.Detach(ctx); err != nil {
			return err
		}
		return b.expect(0, p[0])
	})
}

// Each client whose acknowledged write a failed flush has lost is told by its own flush, not the first one alone.
func TestFlushErrorOfAnotherClient(t *testing.T) {
	simulate(t, 1, 10*time.Minute, breakable(t), func(b *bench) error {
		f, err := b.forget("none")
		if err != nil {
			return err
		}
		ctx, v := context.Background(), b.volumes[0]
		other, err := blockdev.NewIO(v.Device(), 1)
		if err != nil {
			return err
		}
		defer other.Close()
		if err := errors.Join(v.WriteAt(ctx, page('O'), 0, FUA), other.WriteAt(page('N'), 0, 0)); err != nil {
			return err
		}
		b.rt.Sleep(time.Millisecond) // until then a flush may have to tell once more of what was just acknowledged
		f.armed = time.Millisecond
		if err := v.Flush(ctx); err == nil || f.told != 1 {
			return fmt.Errorf("the flush did not fail: %v", err)
		}
		if other.Flush() != nil {
			return nil
		}
		return b.expect(0, 'N')
	})
}

// A flush tells of what was lost, also if a write with FUA has met that before: who has sent that knows of its own write
// only.
func TestFlushErrorThatAFUAWriteWasTold(t *testing.T) {
	simulate(t, 1, 10*time.Minute, breakable(t), func(b *bench) error {
		f, err := b.forget("writeback")
		if err != nil {
			return err
		}
		ctx, v := context.Background(), b.volumes[0]
		err = errors.Join(hold(v, true), v.WriteAt(ctx, page('D'), 0, FUA), v.WriteAt(ctx, page('O'), 4<<20, FUA), v.WriteBack(ctx), v.WriteAt(ctx, page('D'), 0, FUA), v.Flush(ctx))
		if err != nil {
			return err
		}
		if err := v.WriteZeroes(ctx, 4<<20, 4096, 0); err != nil { // on the backing device, acknowledged
			return err
		}
		f.armed = time.Millisecond
		err = v.WriteBack(ctx) // its flush fails, and what was written is lost
		if f.told != 1 {
			return fmt.Errorf("no flush failed: %v", err)
		}
		fua := v.WriteAt(ctx, page('F'), 2<<20, FUA) // of another client
		flush := v.Flush(ctx)
		if flush != nil {
			return nil
		}
		if err := b.alone(4<<20, 0); err != nil {
			return fmt.Errorf("a flush succeeded (a write with FUA: %v), and the acknowledged zeroes are lost: %w", fua, err)
		}
		return nil
	})
}

// A client that comes back after its connection was closed is told what it would have been told on that.
func TestFlushErrorAfterAReconnect(t *testing.T) {
	simulate(t, 1, 10*time.Minute, breakable(t), func(b *bench) error {
		f, err := b.forget("none")
		if err != nil {
			return err
		}
		ctx, v := context.Background(), b.volumes[0]
		client, err := blockdev.NewIO(v.Device(), 1)
		if err != nil {
			return err
		}
		if err := errors.Join(client.WriteAt(page('N'), 0, 0), v.WriteAt(ctx, page('N'), 4<<20, 0)); err != nil {
			return err
		}
		b.rt.Sleep(time.Millisecond) // until then a flush may have to tell once more of what was just acknowledged
		f.armed = time.Millisecond
		if err := v.Flush(ctx); err == nil {
			return errors.New("the flush did not fail")
		}
		if err := client.Close(); err != nil {
			return err
		}
		for _, want := range []bool{true, false} {
			if client, err = blockdev.NewIO(v.Device(), 1); err != nil {
				return err
			}
			told := client.Flush() != nil
			if err := errors.Join(client.Close(), v.Flush(ctx)); err != nil {
				return err
			}
			if told != want {
				return fmt.Errorf("it is told: %v, want %v", told, want)
			}
		}
		return nil
	})
}

// What is acknowledged while a flush is under way that fails, the flush behind it answers for. What is not acknowledged by
// then fails.
func TestWriteBesideAFailingFlush(t *testing.T) {
	for _, after := range []time.Duration{time.Microsecond, 10 * time.Millisecond} {
		simulate(t, 1, 10*time.Minute, breakable(t), func(b *bench) error {
			f, err := b.forget("none")
			if err != nil {
				return err
			}
			ctx, v := context.Background(), b.volumes[0]
			if err := errors.Join(v.WriteAt(ctx, page('O'), 0, FUA), v.WriteAt(ctx, page('O'), 4<<20, 0)); err != nil {
				return err
			}
			b.rt.Sleep(time.Millisecond)
			f.armed = after
			var group rt.WaitGroup
			group.Init(b.rt)
			group.Go("flush", func() { _ = v.Flush(ctx) })
			b.rt.Sleep(100 * time.Nanosecond)
			written := v.WriteAt(ctx, page('N'), 0, 0)
			group.Wait()
			if f.told != 1 {
				return errors.New("the flush did not fail")
			}
			later := after > time.Millisecond
			if (written == nil) != later {
				return fmt.Errorf("the write: %w; should it be acknowledged? %v", written, later)
			}
			if flushed := v.Flush(ctx); flushed == nil && later {
				return fmt.Errorf("a flush succeeded behind the write; %w", b.expect(0, 'N'))
			}
			return v.Flush(ctx) // once more is enough
		})
	}
}

// What a failed flush has made void in the index goes, and what was read meanwhile is not filled.
func TestVoidKeysGo(t *testing.T) {
	simulate(t, 1, 10*time.Minute, breakable(t), func(b *bench) error {
		f, err := b.forget("writethrough")
		if err != nil {
			return err
		}
		ctx, v := context.Background(), b.volumes[0]
		const pages = 500
		for i := range int64(pages) {
			if err := v.WriteAt(ctx, page('N'), i*8192, 0); err != nil {
				return err
			}
		}
		s, inode := b.set.set, v.v.Inode()
		losing := func() bool {
			s.Lock()
			defer s.Unlock()
			return s.LosingLocked(inode)
		}
		live := s.Info().Live
		f.armed = time.Millisecond
		if err := v.Flush(ctx); err == nil || !losing() {
			return fmt.Errorf("the flush: %w; there is something void: %v", err, losing())
		}
		cached := 0
		err = v.EachState(ctx, 0, pages*8192, func(s BlockState, _, _ int64) bool {
			if s != Uncached {
				cached++
			}
			return true
		})
		if err != nil || cached > 0 {
			return fmt.Errorf("%d parts are cached: %w", cached, err)
		}
		b.rt.Sleep(time.Minute)
		if now := s.Info().Live; losing() || now > live-pages*8 {
			return fmt.Errorf("there is something void: %v; %d sectors were live, and %d are", losing(), live, now)
		}
		return nil
	})
}
