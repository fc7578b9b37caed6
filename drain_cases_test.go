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

// Nothing is dirty any more while a write is under way that will make something so: the drain rests, and leaves the set
// to others.
func TestNothingDirtyBesideAWrite(t *testing.T) {
	simulateStuck(t, 0, nil, func(s *stuck) error {
		ctx := context.Background()
		s.faults[0].Add(blockdev.Fault{
			Purposes: []blockdev.Purpose{blockdev.ForData}, Ops: []blockdev.Op{blockdev.OpWrite}, Hang: time.Minute, Count: 1,
		})
		var group rt.WaitGroup
		group.Init(s.rt)
		var failed error
		group.Go("writer", func() { failed = s.v.WriteAt(ctx, pattern(40<<20, 4096, 1), 40<<20, 0) })
		s.rt.Sleep(time.Millisecond)
		begin := s.rt.Now()
		err := errors.Join(s.v.WriteBack(ctx), s.down())
		if took := s.rt.Now() - begin; err == nil && took > 30*time.Second {
			err = fmt.Errorf("WriteBack took %v", took)
		}
		group.Wait()
		if err := errors.Join(err, failed, s.v.WriteBack(ctx)); err != nil {
			return err
		}
		return s.state(ondisk.StateClean)
	})
}
