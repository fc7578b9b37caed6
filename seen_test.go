package ubcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// openLogged opens the set anew, with a log.
func (b *bench) openLogged(to *bytes.Buffer) error {
	b.log = slog.New(slog.NewTextHandler(to, nil))
	return b.reopen("")
}

// A cache device that fails is told of at once, and then once a minute, with how often; each failure is counted.
func TestFailingCacheIsSeen(t *testing.T) {
	for _, mode := range []string{"writethrough", "writeback"} {
		t.Run(mode, func(t *testing.T) {
			simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
				var log bytes.Buffer
				if err := b.openLogged(&log); err != nil {
					return err
				}
				ctx, v := context.Background(), b.volumes[0]
				if err := errors.Join(b.attribute("cache_mode", mode), v.WriteAt(ctx, page('A'), 0, 0)); err != nil {
					return err
				}
				b.faults[0].Add(blockdev.Fault{Purposes: []blockdev.Purpose{blockdev.ForData}, Ops: []blockdev.Op{blockdev.OpWrite}})
				told := func() int { return strings.Count(log.String(), `msg="the cache device could not be written"`) }
				for i := range int64(150) {
					if err := v.WriteAt(ctx, page('B'), i*16<<10, 0); (err != nil) != (mode == "writeback") {
						return fmt.Errorf("write %d: %v", i, err)
					}
					if i == 0 && told() != 1 {
						return fmt.Errorf("the first failure is told of %d times: %s", told(), &log)
					}
					b.rt.Sleep(time.Second)
				}
				if n := told(); n != 3 || !strings.Contains(log.String(), " times=60 ") {
					return fmt.Errorf("told of %d times in 150 s: %s", n, &log)
				}
				if n := v.Stats().CacheWriteErrors; n < 150 {
					return fmt.Errorf("%d failed writes are counted", n)
				}
				return nil
			})
		})
	}
}

// A read that the cache device does not give is told of no more often.
func TestFailingCacheReadsAreSeen(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		var log bytes.Buffer
		if err := b.openLogged(&log); err != nil {
			return err
		}
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(b.attribute("cache_mode", "writeback"), b.attribute("writeback_running", "0"), v.WriteAt(ctx, page('A'), 0, 0)); err != nil {
			return err
		}
		b.faults[0].Add(blockdev.Fault{Purposes: []blockdev.Purpose{blockdev.ForData}, Ops: []blockdev.Op{blockdev.OpRead}})
		for range 50 {
			if err := v.ReadAt(ctx, page(0), 0); !isIOError(err) {
				return fmt.Errorf("dirty data that cannot be read: %v", err)
			}
		}
		if n := strings.Count(log.String(), `msg="the cache device could not be read"`); n != 1 || v.Stats().CacheReadErrors < 50 {
			return fmt.Errorf("told of %d times: %s, %+v", n, &log, v.Stats())
		}
		// Neither can it be written back.
		b.faults[0].Add(blockdev.Fault{Purposes: []blockdev.Purpose{blockdev.ForWriteback}, Ops: []blockdev.Op{blockdev.OpRead}})
		if err := v.WriteBack(ctx); err == nil || strings.Count(log.String(), `msg="dirty data could not be written back, and stays dirty"`) != 1 {
			return fmt.Errorf("%v: %s", err, &log)
		}
		return nil
	})
}

// A journal that cannot be written stops the set, and the log says so.
func TestFailingJournalIsSeen(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		var log bytes.Buffer
		if err := b.openLogged(&log); err != nil {
			return err
		}
		ctx, v := context.Background(), b.volumes[0]
		b.faults[0].Add(blockdev.Fault{Purposes: []blockdev.Purpose{blockdev.ForJournal}, Ops: []blockdev.Op{blockdev.OpWrite}})
		err := errors.Join(v.WriteAt(ctx, page('A'), 0, 0), v.Flush(ctx))
		b.rt.Sleep(3 * time.Second)
		if n := strings.Count(log.String(), `level=ERROR msg="the cache set has stopped"`); err == nil || n != 1 {
			return fmt.Errorf("%v; told of %d times: %s", err, n, &log)
		}
		b.faults[0].Clear()
		_ = b.set.Close(ctx)
		b.set = nil
		return nil
	})
}

// Writes in writeback mode that a full cache turns away are counted.
func TestDeclinedWritesAreCounted(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(b.attribute("cache_mode", "writeback"), b.attribute("writeback_running", "0"), b.attribute("sequential_cutoff", "0")); err != nil {
			return err
		}
		size := v.Size()
		for off := int64(0); off+32<<10 <= size; off += 32 << 10 {
			before := v.Stats()
			if err := v.WriteAt(ctx, bytes.Repeat([]byte{'w'}, 32<<10), off, 0); err != nil {
				return err
			}
			st, inUse := v.Stats(), b.set.Stats().InUse
			turned := st.DeclinedFull + st.DeclinedNoRoom - before.DeclinedFull - before.DeclinedNoRoom
			if grown := st.DirtyBytes-before.DirtyBytes == 32<<10; grown == (turned == 1) {
				return fmt.Errorf("at %d, %d %% in use: it is %v that the write is dirty, and %d are counted as declined", off, inUse, grown, turned)
			}
			if turned > 0 && st.DeclinedFull > 0 {
				return nil
			}
		}
		return fmt.Errorf("the cache took it all: %+v", b.set.Stats())
	})
}

// A volume that has dirty data and is not opened is named, until it is.
func TestAbsentVolumes(t *testing.T) {
	o := breakable(t)
	o.backing = []int64{8 << 20, 8 << 20}
	simulate(t, 1, time.Hour, o, func(b *bench) error {
		ctx := context.Background()
		for _, v := range b.volumes {
			if err := errors.Join(b.set.SetAttribute(ctx, v.Name(), "cache_mode", "writeback"), b.set.SetAttribute(ctx, v.Name(), "writeback_running", "0")); err != nil {
				return err
			}
		}
		if err := b.volumes[1].WriteAt(ctx, page('A'), 0, 0); err != nil {
			return err
		}
		if list := b.set.AbsentVolumes(); len(list) != 0 {
			return fmt.Errorf("open ones: %+v", list)
		}
		all := b.backing
		b.backing = nil
		if err := b.reopen(""); err != nil {
			return err
		}
		if list := b.set.AbsentVolumes(); len(list) != 1 || list[0].Dirty != 4096 || list[0].UUID != b.set.set.Slots()[1].UUID.String() || list[0].Slot != 1 {
			return fmt.Errorf("left out, one of them dirty: %+v", list)
		}
		b.backing = all
		if err := b.reopen(""); err != nil {
			return err
		}
		if list := b.set.AbsentVolumes(); len(list) != 0 {
			return fmt.Errorf("open again: %+v", list)
		}
		return nil
	})
}
