package ubcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/writeback"
)

// alone reports what the backing device itself has at an offset of the volume.
func (b *bench) alone(off int64, want byte) error {
	io, err := blockdev.NewIO(b.backing[0], 1)
	if err != nil {
		return err
	}
	defer io.Close()
	got := make([]byte, 4096)
	if err := io.ReadAt(got, crashOffset+off); err != nil {
		return err
	}
	if !bytes.Equal(got, page(want)) {
		return fmt.Errorf("the backing device has %q at %d, want %q", got[0], off, want)
	}
	return nil
}

// super returns the superblock on the backing device.
func (b *bench) super() (*ondisk.Superblock, error) { return readSuper(b.backing[0]) }

func (b *bench) state(want ondisk.State) error {
	sb, err := b.super()
	if err == nil && sb.State() != want {
		err = fmt.Errorf("the state is %v, want %v", sb.State(), want)
	}
	return err
}

// hold stops writeback, or lets it go on.
func hold(v *Volume, yes bool) error {
	return v.v.ChangeWriteback(func(s *writeback.Settings) error {
		s.Running = !yes
		return nil
	})
}

// A write in writeback mode is in the cache alone, the state says so, and WriteBack brings it down.
func TestWriteback(t *testing.T) {
	simulate(t, 1, 10*time.Minute, breakable(t), func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(b.attribute("cache_mode", "writeback"), b.state(ondisk.StateClean), hold(v, true)); err != nil {
			return err
		}
		for off := int64(0); off < 1<<20; off += 8192 {
			if err := v.WriteAt(ctx, page('A'), off, 0); err != nil {
				return err
			}
		}
		if err := errors.Join(v.Flush(ctx), b.state(ondisk.StateDirty), b.alone(0, 0), b.expect(0, 'A')); err != nil {
			return err
		}
		if n := v.Stats().DirtyBytes; n != 1<<19 {
			return fmt.Errorf("%d bytes are dirty", n)
		}
		if err := v.WriteBack(ctx); err != nil {
			return err
		}
		if n := v.Stats().DirtyBytes; n != 0 {
			return fmt.Errorf("%d bytes are dirty after all was written back", n)
		}
		for off := int64(0); off < 1<<20; off += 8192 {
			if err := errors.Join(b.alone(off, 'A'), b.expect(off, 'A')); err != nil {
				return err
			}
		}
		return b.state(ondisk.StateClean)
	})
}

// A detach ends with a device that says that it is not attached, and has all the data.
func TestDetach(t *testing.T) {
	simulate(t, 1, 10*time.Minute, breakable(t), func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		if err := b.attribute("cache_mode", "writeback"); err != nil {
			return err
		}
		for off := int64(0); off < 1<<20; off += 4096 {
			if err := v.WriteAt(ctx, page('A'), off, 0); err != nil {
				return err
			}
		}
		if err := v.Detach(ctx); err != nil {
			return err
		}
		if err := errors.Join(b.state(ondisk.StateNone), b.alone(0, 'A'), b.expect(4096, 'A')); err != nil {
			return err
		}
		if err := errors.Join(v.WriteAt(ctx, page('B'), 0, 0), b.expect(0, 'B'), b.alone(0, 'B')); err != nil {
			return err
		}
		if err := v.Detach(ctx); !errors.Is(err, ErrDetached) {
			return fmt.Errorf("a second detach: %v", err)
		}
		return errors.Join(b.reopen(""), b.expect(0, 'B'), b.expect(8192, 'A'), b.oneSlot())
	})
}
