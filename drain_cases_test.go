package ubcache

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// fast is the latency of a disk in no hurry to be slow.
var fast = blockdev.Latency{Read: 80 * time.Microsecond, Write: 20 * time.Microsecond, Flush: 150 * time.Microsecond}

// pattern returns n bytes for offset off of a volume: each sector says where it belongs, and which version it is.
func pattern(off int64, n int, version uint64) []byte {
	p := make([]byte, n)
	for at := 0; at < n; at += 512 {
		binary.LittleEndian.PutUint64(p[at:], uint64(off)+uint64(at))
		binary.LittleEndian.PutUint64(p[at+8:], version)
		binary.LittleEndian.PutUint64(p[at+504:], ^version)
	}
	return p
}

// count puts counters on the devices, the cache first, and opens the set anew.
func (b *bench) count(mode string) ([]*blockdev.Counting, error) {
	err := b.set.Close(context.Background())
	b.set = nil
	list := []*blockdev.Counting{blockdev.NewCounting(b.cache)}
	b.cache = list[0]
	for i, d := range b.backing {
		c := blockdev.NewCounting(d)
		b.backing[i] = c
		list = append(list, c)
	}
	return list, errors.Join(err, b.open(mode))
}

// readBack reads volume 0 from its backing device.
func (b *bench) readBack(off int64, n int) ([]byte, error) {
	io, err := blockdev.NewIO(b.backing[0], 1)
	if err != nil {
		return nil, err
	}
	defer io.Close()
	p := make([]byte, n)
	for at := 0; at < n; at += 64 << 10 { // what a narrow device takes
		if err := io.ReadAt(p[at:min(at+64<<10, n)], crashOffset+off+int64(at)); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// dirtyRanges returns the dirty ranges of a volume, neighbours as one.
func dirtyRanges(v *Volume) (list []Range, err error) {
	err = v.EachState(context.Background(), 0, v.Size(), func(s BlockState, off, n int64) bool {
		switch last := len(list) - 1; {
		case s != Dirty:
		case last >= 0 && list[last].Off+list[last].Len == off:
			list[last].Len += n
		default:
			list = append(list, Range{Off: off, Len: n})
		}
		return true
	})
	return list, err
}

// A stuck is a volume of 64 MiB, half of it dirty in extents of 1 MiB, in a set with buckets of 2 MiB, while writeback is
// held: case 13.
type stuck struct {
	*bench
	v       *Volume
	from    int64 // where the dirty half begins
	cache   *blockdev.Counting
	backing *blockdev.Counting
}

const stuckBytes = 32 << 20

// simulateStuck runs fn on such a volume; below, if not nil, is put around the backing device.
func simulateStuck(t *testing.T, from int64, below func(d blockdev.Device) blockdev.Device, fn func(s *stuck) error) {
	t.Helper()
	const bucket = 2 << 20
	o := benchOptions{
		cache: 520 * bucket, bucket: bucket, block: 512, backing: []int64{64 << 20}, cacheLatency: fast, backingLatency: fast, dir: t.TempDir(), breaks: true,
	}
	simulate(t, 1, time.Hour, o, func(b *bench) error {
		if below != nil {
			b.backing[0] = below(b.backing[0])
		}
		counts, err := b.count("writeback")
		if err != nil {
			return err
		}
		s := &stuck{bench: b, v: b.volumes[0], from: from, cache: counts[0], backing: counts[1]}
		if err := errors.Join(b.attribute("sequential_cutoff", "0"), hold(s.v, true)); err != nil {
			return err
		}
		for off := from; off < from+stuckBytes; off += 1 << 20 {
			if err := s.v.WriteAt(context.Background(), pattern(off, 1<<20, 1), off, 0); err != nil {
				return err
			}
		}
		if n := s.v.Stats().DirtyBytes; n != stuckBytes {
			return fmt.Errorf("%d bytes are dirty", n)
		}
		return fn(s)
	})
}

// writeBack calls WriteBack, and sees to it that dirty data never grows meanwhile, and that not more than four times of it
// is read from the cache.
func (s *stuck) writeBack(ctx context.Context) error {
	before := s.cache.Counts(blockdev.ForWriteback, blockdev.OpRead).Bytes
	var group rt.WaitGroup
	group.Init(s.rt)
	over := false
	var grown error
	group.Go("watch", func() {
		for last := int64(stuckBytes); !over; s.rt.Sleep(time.Millisecond) {
			n := s.v.Stats().DirtyBytes
			if n > last && grown == nil {
				grown = fmt.Errorf("dirty data has grown from %d to %d bytes", last, n)
			}
			last = n
		}
	})
	err := s.v.WriteBack(ctx)
	over = true
	group.Wait()
	if grown != nil {
		return grown
	}
	if n := s.cache.Counts(blockdev.ForWriteback, blockdev.OpRead).Bytes - before; n > 4*stuckBytes {
		return fmt.Errorf("%d bytes were read from the cache, of %d dirty ones", n, stuckBytes)
	}
	return err
}

// down sees to it that all but some ranges is on the backing device, and nothing else dirty.
func (s *stuck) down(but ...Range) error {
	got, err := s.readBack(0, int(s.v.Size()))
	if err != nil {
		return err
	}
	want := make([]byte, s.v.Size())
	copy(want[s.from:], pattern(s.from, stuckBytes, 1))
	for _, r := range but {
		clear(want[r.Off : r.Off+r.Len])
	}
	for off := 0; off < len(want); off += 512 {
		if !bytes.Equal(got[off:off+512], want[off:off+512]) {
			return fmt.Errorf("offset %d of the backing device is %x, want %x", off, got[off:off+16], want[off:off+16])
		}
	}
	list, err := dirtyRanges(s.v)
	if err == nil && !slices.Equal(list, but) {
		err = fmt.Errorf("%v is dirty, want %v", list, but)
	}
	return err
}

// release clears the faults and lets writeback go on; soon nothing is dirty, and all is well.
func (s *stuck) release() error {
	for _, f := range s.faults {
		f.Clear()
	}
	if err := hold(s.v, false); err != nil {
		return err
	}
	for begin := s.rt.Now(); s.v.Stats().DirtyBytes > 0 || s.v.Stats().State != "clean"; s.rt.Sleep(time.Second) {
		if s.rt.Now()-begin > 10*time.Minute {
			return fmt.Errorf("after ten minutes %d bytes are dirty, state %s: %+v", s.v.Stats().DirtyBytes, s.v.Stats().State, s.v.v.WritebackStatus())
		}
	}
	return s.down()
}

// A narrow device refuses requests of more than 64 KiB, and does not say so.
type narrow struct{ blockdev.Device }

func (n narrow) Runtime() *rt.Runtime { return blockdev.RuntimeOf(n.Device) }

func (n narrow) NewQueue(depth int, complete func(done []*blockdev.Request)) (blockdev.Queue, error) {
	q := narrowQueue{out: blockdev.NewCompleter(n.Runtime(), complete)}
	below, err := n.Device.NewQueue(depth, func(done []*blockdev.Request) { q.out.Finish(done...) })
	q.below = below
	return q, err
}

type narrowQueue struct {
	below blockdev.Queue
	out   *blockdev.Completer
}

func (q narrowQueue) Submit(reqs []*blockdev.Request) {
	q.out.Begin(len(reqs))
	for _, r := range reqs {
		if r.Length() > 64<<10 {
			r.Err = &blockdev.IOError{Device: "narrow", Op: r.Op, Off: r.Off, Len: r.Length(), Err: unix.EINVAL}
			q.out.Finish(r)
			continue
		}
		q.below.Submit([]*blockdev.Request{r})
	}
}

func (q narrowQueue) Close() error {
	q.out.Close()
	return q.below.Close()
}

// Case 13 (a): the backing device refuses large requests; what is written back is split.
func TestWriteBackToANarrowDevice(t *testing.T) {
	simulateStuck(t, 0, func(d blockdev.Device) blockdev.Device { return narrow{d} }, func(s *stuck) error {
		if err := errors.Join(s.writeBack(context.Background()), s.down(), s.state(ondisk.StateClean)); err != nil {
			return err
		}
		// It is refused large ones while it learns, not for ever.
		if n := s.backing.Counts(blockdev.ForWriteback, blockdev.OpWrite); n.Errors > 300 || n.Bytes != stuckBytes {
			return fmt.Errorf("%+v %+v", n, s.v.v.WritebackStatus())
		}
		return nil
	})
}

// Case 13 (b): 4 KiB of the backing device are bad. All else comes down, and WriteBack says which they are.
func TestWriteBackBesideABadRange(t *testing.T) {
	for name, from := range map[string]int64{"aligned extents": 0, "unaligned extents": 7*4096 + 1536} {
		t.Run(name, func(t *testing.T) {
			simulateStuck(t, from, nil, func(s *stuck) error {
				bad := Range{Off: 5<<20 + 9*4096, Len: 4096}
				s.faults[1].Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpWrite}, Off: crashOffset + bad.Off, Len: bad.Len})
				var e *WriteBackError
				switch err := s.writeBack(context.Background()); {
				case !errors.As(err, &e):
					return fmt.Errorf("WriteBack: %v; want a *WriteBackError", err)
				case !errors.Is(err, unix.EIO) || e.Dirty != bad.Len || !slices.Equal(e.Ranges, []Range{bad}):
					return fmt.Errorf("WriteBack: %w; want only %v of it", err, bad)
				}
				if n := s.v.v.WritebackStatus(); n.WriteErrors == 0 || n.ReadErrors != 0 {
					return fmt.Errorf("%+v", n)
				}
				if err := errors.Join(s.down(bad), s.state(ondisk.StateDirty)); err != nil {
					return err
				}
				return s.release()
			})
		})
	}
}

// Case 13 (c): the backing device accepts nothing. WriteBack ends, by itself or with its context.
func TestWriteBackToADeadDevice(t *testing.T) {
	all := Range{Len: stuckBytes}
	for name, fault := range map[string]blockdev.Fault{
		"that fails": {},
		"that hangs": {Hang: 3 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			simulateStuck(t, 0, nil, func(s *stuck) error {
				fault.Ops = []blockdev.Op{blockdev.OpWrite}
				s.faults[1].Add(fault)
				ctx, cancel := s.rt.WithTimeout(context.Background(), time.Minute)
				defer cancel()
				begin := s.rt.Now()
				err := s.writeBack(ctx)
				took := s.rt.Now() - begin
				want := error(unix.EIO)
				if fault.Hang > 0 {
					want = context.DeadlineExceeded
				}
				var e *WriteBackError
				switch {
				case !errors.As(err, &e) || !errors.Is(err, want) || e.Dirty != stuckBytes:
					return fmt.Errorf("WriteBack: %w; want %w", err, want)
				case took > time.Minute+time.Second:
					return fmt.Errorf("WriteBack had a minute and took %v", took)
				}
				if err := s.down(all); err != nil {
					return err
				}
				// Nobody else is held up by that.
				begin = s.rt.Now()
				if err := s.v.WriteAt(context.Background(), pattern(0, 1<<20, 1), 0, FUA); err != nil {
					return err
				}
				if err := s.v.Flush(context.Background()); err != nil {
					return err
				}
				if took := s.rt.Now() - begin; took > time.Second {
					return fmt.Errorf("a write and a flush took %v", took)
				}
				return s.release()
			})
		})
	}
}

// Nothing is dirty any more while a write is under way that will make something so: the drain rests, and leaves the set
// to others.
func TestNothingDirtyBesideAWrite(t *testing.T) {
	for seed := range uint64(8) {
		simulate(t, seed, 10*time.Minute, breakable(t), func(b *bench) error {
			ctx, v := context.Background(), b.volumes[0]
			if err := errors.Join(b.attribute("cache_mode", "writeback"), hold(v, true), v.WriteAt(ctx, page('A'), 0, 0)); err != nil {
				return err
			}
			b.faults[0].Add(blockdev.Fault{
				Purposes: []blockdev.Purpose{blockdev.ForData}, Ops: []blockdev.Op{blockdev.OpWrite}, Hang: time.Minute, Count: 1,
			})
			var group rt.WaitGroup
			group.Init(b.rt)
			var failed error
			group.Go("writer", func() { failed = v.WriteAt(ctx, page('B'), 1<<20, 0) })
			b.rt.Sleep(time.Millisecond)
			begin := b.rt.Now()
			err := errors.Join(v.WriteBack(ctx), b.alone(0, 'A'))
			if took := b.rt.Now() - begin; err == nil && took > 30*time.Second {
				err = fmt.Errorf("WriteBack took %v", took)
			}
			group.Wait()
			return errors.Join(err, failed, v.WriteBack(ctx), b.alone(1<<20, 'B'), b.state(ondisk.StateClean))
		})
	}
}

// A write to the cache that takes long does not keep what it covers from being written back, nor what is beside it.
func TestWriteBackBesideAWrite(t *testing.T) {
	for _, n := range []int64{4096, 128 << 10} { // with its batch, and by itself
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			simulateStuck(t, 0, nil, func(s *stuck) error {
				ctx := context.Background()
				s.faults[0].Add(blockdev.Fault{
					Purposes: []blockdev.Purpose{blockdev.ForData}, Ops: []blockdev.Op{blockdev.OpWrite}, Hang: time.Minute, Count: 1,
				})
				var group rt.WaitGroup
				group.Init(s.rt)
				var failed error
				begin := s.rt.Now()
				late := Range{Off: 512 << 10, Len: n}
				group.Go("writer", func() { failed = s.v.WriteAt(ctx, pattern(late.Off, int(n), 1), late.Off, 0) })
				s.rt.Sleep(time.Millisecond)
				err := errors.Join(s.v.WriteBack(ctx), s.down())
				if took := s.rt.Now() - begin; err == nil && took > 30*time.Second {
					err = fmt.Errorf("WriteBack took %v", took)
				}
				group.Wait()
				if err = errors.Join(err, failed); err != nil {
					return err
				}
				list, err := dirtyRanges(s.v)
				if err == nil && !slices.Equal(list, []Range{late}) {
					err = fmt.Errorf("%v is dirty, want what came later, %v", list, late)
				}
				return err
			})
		})
	}
}

// A discard that takes long is waited for: what it covers is dirty until it is done.
func TestWriteBackBesideADiscard(t *testing.T) {
	simulateStuck(t, 0, nil, func(s *stuck) error {
		ctx := context.Background()
		s.faults[1].Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpDiscard}, Hang: time.Minute, Count: 1})
		var group rt.WaitGroup
		group.Init(s.rt)
		var failed error
		begin := s.rt.Now()
		group.Go("discard", func() { failed = s.v.Discard(ctx, 512<<10, 64<<10) })
		group.Go("watch", func() {
			s.rt.Sleep(30 * time.Second)
			if list, err := dirtyRanges(s.v); err != nil || !slices.Equal(list, []Range{{Off: 512 << 10, Len: 64 << 10}}) {
				failed = errors.Join(err, fmt.Errorf("while the discard hangs, %v is dirty", list))
			}
		})
		s.rt.Sleep(time.Millisecond)
		err := s.v.WriteBack(ctx)
		if took := s.rt.Now() - begin; err == nil && (took < time.Minute || s.v.Stats().DirtyBytes > 0) {
			err = fmt.Errorf("WriteBack returned after %v, when %d bytes were dirty", took, s.v.Stats().DirtyBytes)
		}
		group.Wait()
		return errors.Join(err, failed)
	})
}

// A range that cannot be written back is told of also where others become dirty all the time.
func TestWriteBackOfABadRangeUnderLoad(t *testing.T) {
	simulateStuck(t, 0, nil, func(s *stuck) error {
		ctx := context.Background()
		bad := Range{Off: 3<<20 + 8192, Len: 4096}
		s.faults[1].Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpWrite}, Off: crashOffset + bad.Off, Len: bad.Len})
		var group rt.WaitGroup
		group.Init(s.rt)
		over, failed := false, error(nil)
		group.Go("writer", func() {
			for n := int64(0); !over && failed == nil; n++ {
				off := 33<<20 + n*37%4096*4096
				failed = s.v.WriteAt(ctx, pattern(off, 4096, 1), off, 0)
				s.rt.Sleep(time.Millisecond)
			}
		})
		ctx, cancel := s.rt.WithTimeout(ctx, time.Minute)
		defer cancel()
		err := s.v.WriteBack(ctx)
		over = true
		group.Wait()
		var e *WriteBackError
		if !errors.As(err, &e) || !errors.Is(err, unix.EIO) || !slices.Contains(e.Ranges, bad) {
			err = fmt.Errorf("WriteBack: %w; want %v", err, bad)
		} else {
			err = nil
		}
		return errors.Join(err, failed)
	})
}

// Case 09 (b) and (d) in small: dirty data that the cache device does not give is not written back, nor read, and its
// neighbours are; it comes down when the cache gives it, or when it is written anew.
func TestWriteBackOfUnreadableData(t *testing.T) {
	simulateStuck(t, 0, nil, func(s *stuck) error {
		ctx := context.Background()
		bad := Range{Off: 6 << 20, Len: 1 << 20} // an extent, its beginning
		sector := uint64(crashOffset+bad.Off) / 512
		s.set.set.Lock()
		p, _ := s.set.set.LookupLocked(s.v.v.Inode(), sector, sector+8)
		s.set.set.Unlock()
		s.faults[0].Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpRead}, Off: int64(p.Ptr.Sector())*512 + 4096, Len: 512})
		var e *WriteBackError
		err := s.v.WriteBack(ctx)
		if !errors.As(err, &e) || !errors.Is(err, unix.EIO) || len(e.Ranges) != 1 {
			return fmt.Errorf("WriteBack: %w; want %v", err, bad)
		}
		// It may have been taken in two parts.
		if r := e.Ranges[0]; r.Off < bad.Off || r.Off > bad.Off+4096 || r.Off+r.Len <= bad.Off+4096 || r.Off+r.Len > bad.Off+bad.Len || e.Dirty != r.Len {
			return fmt.Errorf("WriteBack: %w; want a part of %v", err, bad)
		}
		bad = e.Ranges[0]
		if n := s.v.v.WritebackStatus(); n.ReadErrors == 0 || n.WriteErrors != 0 {
			return fmt.Errorf("%+v", n)
		}
		if err := errors.Join(s.down(bad), s.state(ondisk.StateDirty)); err != nil {
			return err
		}
		before := s.v.Stats().CacheReadErrors
		got := make([]byte, 8192)
		if err := s.v.ReadAt(ctx, got, bad.Off); err == nil {
			return fmt.Errorf("data that is nowhere reads as %x", got[:16])
		}
		if n := s.v.Stats().CacheReadErrors; n == before {
			return errors.New("the failed read is not counted")
		}
		if err := s.v.WriteAt(ctx, pattern(bad.Off, 8192, 1), bad.Off, 0); err != nil {
			return err
		}
		if err := s.v.WriteBack(ctx); err != nil {
			return err
		}
		return errors.Join(s.down(), s.state(ondisk.StateClean))
	})
}

// A flush of the backing device that fails cleans nothing, and the next client that flushes is told; so is nobody after
// that, when all is written again.
func TestWriteBackWhereAFlushFails(t *testing.T) {
	simulateStuck(t, 0, nil, func(s *stuck) error {
		ctx := context.Background()
		s.faults[1].Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpFlush}})
		var e *WriteBackError
		if err := s.writeBack(ctx); !errors.As(err, &e) || !errors.Is(err, unix.EIO) || e.Dirty != stuckBytes {
			return fmt.Errorf("WriteBack: %w", err)
		}
		if list, err := dirtyRanges(s.v); err != nil || !slices.Equal(list, []Range{{Len: stuckBytes}}) {
			return fmt.Errorf("%v is dirty: %w", list, err)
		}
		s.faults[1].Clear()
		if err := s.v.Flush(ctx); !errors.Is(err, unix.EIO) {
			return fmt.Errorf("the next flush: %v; want the error", err)
		}
		if err := errors.Join(s.v.Flush(ctx), s.v.WriteBack(ctx), s.down()); err != nil {
			return err
		}
		return s.v.Flush(ctx)
	})
}

// A superblock that cannot say CLEAN when it should says so later.
func TestCleanIsTriedAgain(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(b.attribute("cache_mode", "writeback"), v.WriteAt(ctx, page('A'), 0, 0), b.state(ondisk.StateDirty)); err != nil {
			return err
		}
		remove := b.faults[1].Add(blockdev.Fault{Purposes: []blockdev.Purpose{blockdev.ForSuperblock}, Ops: []blockdev.Op{blockdev.OpWrite}, Count: 1})
		b.rt.Sleep(3 * time.Minute)
		if n := remove(); n != 1 {
			return fmt.Errorf("%d writes failed", n)
		}
		return errors.Join(b.alone(0, 'A'), b.state(ondisk.StateClean))
	})
}
