package volume

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/journal"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
	"github.com/ubcache/ubcache/internal/writeback"
)

func TestRoute(t *testing.T) {
	write := routing{data: true}
	flash := routing{flash: true}
	with := func(r routing, change func(r *routing)) routing {
		change(&r)
		return r
	}
	dirty := func(r *routing) { r.dirty = true }
	room := func(r *routing) { r.dirty, r.dirtyRoom = true, true }
	for _, c := range []struct {
		name string
		routing
		want route
	}{
		{"a write", write, routeThrough},
		{"a write where there is room for dirty data", with(write, func(r *routing) { r.dirtyRoom = true }), routeThrough},
		{"a bypassed write", with(write, func(r *routing) { r.why = bypassSequential }), routeAround},
		{"a write in mode none", with(write, func(r *routing) { r.why = bypassMode }), routeAround},
		{"zeroes or a discard", routing{why: bypassMode}, routeAround},
		{"zeroes, however accepted", routing{}, routeAround},
		{"a write over dirty data", with(write, room), routeBack},
		{"a bypassed write over dirty data", with(with(write, room), func(r *routing) { r.why = bypassMode }), routeBack},
		{"a write over dirty data in a full cache", with(write, dirty), routeAroundDirty},
		{"zeroes over dirty data", with(routing{why: bypassMode}, room), routeAroundDirty},
		{"zeroes over dirty data in a full cache", with(routing{why: bypassMode}, dirty), routeAroundDirty},
		{"a flash-only write", with(flash, func(r *routing) { r.data = true }), routeBack},
		{"a flash-only write in a full cache", with(with(flash, dirty), func(r *routing) { r.data, r.why = true, bypassFull }), routeBack},
		{"a flash-only discard", with(flash, func(r *routing) { r.why = bypassMode }), routeBack},
	} {
		if got := c.route(); got != c.want {
			t.Errorf("%s: route %d, want %d", c.name, got, c.want)
		}
	}
}

// simulateVolume runs fn on a volume with blocks of 4 KiB and a queue of it, in a simulation.
func simulateVolume(t *testing.T, buckets int64, fn func(v *Volume, q *queue) error) {
	t.Helper()
	simulateTraced(t, buckets, func(v *Volume, q *queue, _ *blockdev.TraceLog) error { return fn(v, q) })
}

// simulateTraced is simulateVolume with a log of what is written to the journal and written back. The process's death
// loses nothing.
func simulateTraced(t *testing.T, buckets int64, fn func(v *Volume, q *queue, log *blockdev.TraceLog) error) {
	t.Helper()
	s := rt.NewSim(1)
	s.Limit = time.Hour
	var failed error
	err := s.Run(func() {
		ctx := context.Background()
		disk := func(size int64) blockdev.Device {
			d, err := blockdev.Memory(size, blockdev.MemoryOptions{Runtime: s.Runtime()})
			if err != nil {
				panic(err)
			}
			return d
		}
		cache, back := disk(buckets*8<<10), disk(8<<20)
		o := offline.FormatOptions{Cache: cache, Backing: []blockdev.Device{back}, Bucket: 8 << 10, Block: 4096}
		if _, failed = offline.Format(ctx, o); failed != nil {
			return
		}
		log := blockdev.NewTraceLog(s.Runtime())
		trace := func(dev blockdev.Device, p blockdev.Purpose) blockdev.Device {
			return blockdev.NewTracing(dev, log, blockdev.TraceOptions{
				Done: true, Only: func(r *blockdev.Request) bool { return r.Op == blockdev.OpWrite && r.Purpose == p },
			})
		}
		set, err := cacheset.Open(ctx, trace(cache, blockdev.ForJournal), cacheset.Options{Shared: journal.NewShared()})
		if err != nil {
			failed = err
			return
		}
		v, err := Open(set, trace(back, blockdev.ForWriteback))
		if err != nil {
			failed = err
			return
		}
		q, err := v.NewQueue(1, func([]*blockdev.Request) {})
		if err != nil {
			failed = err
			return
		}
		failed = errors.Join(fn(v, q.(*queue), log), q.Close(), v.Close(), set.Close(ctx))
	})
	if err := errors.Join(err, failed); err != nil {
		t.Fatal(err)
	}
}

// fillDirty inserts dirty keys until more than so many percent of the buckets are in use.
func fillDirty(v *Volume, percent int) error {
	for at, tries := uint64(1<<20), 0; tries < 20; at += 16 {
		v.set.Lock()
		if v.set.InUseLocked() > percent {
			v.set.Unlock()
			return nil
		}
		p, n := v.set.SpaceLocked(bucket.ForDirty, v.inode, at, 16, 1, 1)
		v.set.Unlock()
		if n == 0 {
			v.rt.Sleep(time.Second)
			tries++
			continue
		}
		tries = 0
		in := cacheset.Insertion{Keys: []ondisk.Key{ondisk.NewExtent(v.inode, at+uint64(n), n, p, true)}, Pinned: true}
		if err := v.set.Insert(&in); err != nil {
			return err
		}
	}
	return errors.New("no more buckets for dirty data")
}

// Source: B 1.2.
func TestBypass(t *testing.T) {
	const block = 4096
	through := Config{Mode: ondisk.Writethrough}
	around := Config{Mode: ondisk.Writearound}
	none := Config{Mode: ondisk.ModeNone}
	cutoff := Config{Mode: ondisk.Writethrough, SequentialCutoff: 4 * block}
	read := func(off int64, n int) blockdev.Request {
		return blockdev.Request{Op: blockdev.OpRead, Off: off, Buf: make([]byte, n)}
	}
	write := func(off int64, n int) blockdev.Request {
		return blockdev.Request{Op: blockdev.OpWrite, Off: off, Buf: make([]byte, n)}
	}
	rules := []struct {
		name string
		req  blockdev.Request
		conf Config
		want bypass
	}{
		{"a read", read(0, block), through, accepted},
		{"a write", write(0, block), through, accepted},
		{"a discard", blockdev.Request{Op: blockdev.OpDiscard, Len: block}, through, bypassMode},
		{"zeroes", blockdev.Request{Op: blockdev.OpWriteZeroes, Len: block}, through, bypassMode},
		{"a read, writearound", read(0, block), around, accepted},
		{"a write, writearound", write(0, block), around, bypassMode},
		{"a read, none", read(0, block), none, bypassMode},
		{"a write, none", write(0, block), none, bypassMode},
		{"a read of less than a block", read(0, 512), through, bypassUnaligned},
		{"a read in the middle of one", read(512, block), through, bypassUnaligned},
		{"a read that is large", read(0, 4*block), cutoff, bypassSequential},
		{"a write that is large", write(0, 4*block), cutoff, bypassSequential},
		{"a read that is not so large", read(0, 3*block), cutoff, accepted},
		{"a large read without a cutoff", read(0, 64*block), through, accepted},
	}
	simulateVolume(t, 600, func(v *Volume, q *queue) error {
		for _, c := range rules {
			v.set.Lock()
			q.seq, v.stats = sequencer{}, Stats{}
			got := q.bypassLocked(&c.req, &conf{Config: c.conf}, v.rt.Now())
			s := v.stats
			v.set.Unlock()
			if got != c.want {
				t.Errorf("%s: %d, want %d", c.name, got, c.want)
			}
			data := c.req.Op == blockdev.OpRead || c.req.Op == blockdev.OpWrite
			want := Stats{}
			if data && c.want != accepted {
				want.Bypassed = uint64(c.req.Length()) / ondisk.SectorSize
				for reason, n := range map[bypass]*uint64{
					bypassMode: &want.BypassMode, bypassUnaligned: &want.BypassUnaligned, bypassSequential: &want.BypassSequential,
				} {
					if reason == c.want {
						*n = 1
					}
				}
			}
			if s != want {
				t.Errorf("%s is counted as %+v, want %+v", c.name, s, want)
			}
		}
		return nil
	})
}

// Nothing is added to a cache nearly all of which holds what is needed.
func TestBypassFull(t *testing.T) {
	simulateVolume(t, 4000, func(v *Volume, q *queue) error {
		r := blockdev.Request{Op: blockdev.OpRead, Buf: make([]byte, 4096)}
		for _, c := range []struct {
			percent int
			want    bypass
		}{{cutoffAdd - 1, accepted}, {cutoffAdd, bypassFull}} {
			if err := fillDirty(v, c.percent); err != nil {
				return err
			}
			v.set.Lock()
			got, inUse := q.bypassLocked(&r, &conf{Config: Config{Mode: ondisk.Writethrough}}, v.rt.Now()), v.set.InUseLocked()
			v.set.Unlock()
			if got != c.want {
				t.Errorf("%d percent in use: %d, want %d", inUse, got, c.want)
			}
		}
		return nil
	})
}

// Where partial stripes are expensive, what would go round the cache does not if its stripe has dirty data.
func TestPartialStripes(t *testing.T) {
	simulateVolume(t, 4000, func(v *Volume, q *queue) error {
		if err := v.SetMode(ondisk.Writeback); err != nil {
			return err
		}
		if err := v.ChangeWriteback(func(s *writeback.Settings) error { s.Running = false; return nil }); err != nil {
			return err
		}
		io, err := blockdev.NewIO(v, 1)
		if err != nil {
			return err
		}
		defer io.Close()
		if err := io.WriteAt(make([]byte, 4096), 0, 0); err != nil {
			return err
		}
		v.back.info.OptimalIO = 192 << 10
		if n := stripeSectors(&v.back.info); n != 22*192<<10/512 {
			t.Errorf("a stripe of %d sectors", n)
		}
		for _, c := range []struct {
			expensive bool
			off       int64
			want      route
		}{{false, 8192, routeAround}, {true, 8192, routeBack}, {true, 6 << 20, routeAround}} {
			v.back.info.PartialStripe = c.expensive
			conf := v.use()
			o := v.newOp(q, &blockdev.Request{Op: blockdev.OpWrite, Off: c.off, Buf: make([]byte, 4096)}, conf, bypassSequential, false)
			v.unuse(conf)
			v.set.Lock()
			way, _, err := o.decideLocked(o.span())
			v.set.Unlock()
			v.putOp(o)
			if err != nil {
				return err
			}
			if way != c.want {
				t.Errorf("%+v: route %d", c, way)
			}
		}
		return nil
	})
}
