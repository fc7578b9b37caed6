package ubcache

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// A bench is a set on memory devices, made and used in a simulation.
type bench struct {
	rt      *rt.Runtime
	cache   blockdev.Device
	backing []blockdev.Device
	set     *CacheSet
	volumes []*Volume
	dir     string
	nodes   int64
	log     *slog.Logger // of the sets that are opened from then on

	// Where the bench can break, of the devices that it began with, the cache first.
	power  *blockdev.Power
	disks  []*blockdev.Crashable
	faults []*blockdev.Faulty
}

type benchOptions struct {
	cache, bucket  int64
	block          int64 // default: Format's
	backing        []int64
	cacheLatency   blockdev.Latency
	backingLatency blockdev.Latency
	mode           string
	dir            string
	nodes          int64 // of memory for nodes; default: Open's
	breaks         bool  // the power can be cut, and devices fail
}

// breakable is a small set on fast disks that can break, with one volume.
func breakable(t *testing.T) benchOptions {
	fast := blockdev.Latency{Read: 80 * time.Microsecond, Write: 20 * time.Microsecond, Flush: 150 * time.Microsecond}
	return benchOptions{
		cache: 600 * crashBucket, bucket: crashBucket, backing: []int64{8 << 20}, cacheLatency: fast, backingLatency: fast,
		dir: t.TempDir(), breaks: true,
	}
}

// simulate runs fn in a simulation on a set as o says.
func simulate(t *testing.T, seed uint64, limit time.Duration, o benchOptions, fn func(b *bench) error) {
	t.Helper()
	if raced && testing.Short() {
		t.Skip("the race detector sees nothing in a simulation; without it this runs")
	}
	s := rt.NewSim(seed)
	s.Limit = limit
	var failed error
	err := s.Run(func() {
		b := &bench{rt: s.Runtime(), dir: o.dir, nodes: o.nodes, power: new(blockdev.Power)}
		disk := func(size int64, l blockdev.Latency) blockdev.Device {
			m, err := blockdev.Memory(size, blockdev.MemoryOptions{Runtime: b.rt})
			if err != nil {
				panic(err)
			}
			d := blockdev.Device(m)
			if l != (blockdev.Latency{}) {
				d = blockdev.NewDelaying(d, l)
			}
			if !o.breaks {
				return d
			}
			c, err := blockdev.NewCrashable(d, blockdev.CrashableOptions{Power: b.power})
			if err != nil {
				panic(err)
			}
			f := blockdev.NewFaulty(c, seed)
			b.disks, b.faults = append(b.disks, c), append(b.faults, f)
			return f
		}
		b.cache = disk(o.cache, o.cacheLatency)
		for _, size := range o.backing {
			b.backing = append(b.backing, disk(size, o.backingLatency))
		}
		ctx := context.Background()
		_, failed = offline.Format(ctx, offline.FormatOptions{Cache: b.cache, Backing: b.backing, Bucket: o.bucket, Block: o.block})
		if failed == nil {
			failed = b.open(o.mode)
		}
		if failed == nil {
			failed = fn(b)
		}
		if b.set != nil {
			if err := b.set.Close(ctx); failed == nil {
				failed = err
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if failed != nil {
		t.Fatal(failed)
	}
}

func (b *bench) open(mode string) (err error) {
	ctx := context.Background()
	if b.set, err = Open(ctx, Options{CacheDevice: b.cache, RuntimeDir: b.dir, NodeCache: b.nodes, Logger: b.log}); err != nil {
		return err
	}
	b.volumes = nil
	for i, dev := range b.backing {
		name := fmt.Sprint("v", i)
		v, err := b.set.OpenVolume(ctx, VolumeOptions{Name: name, BackingDevice: dev})
		if err != nil {
			return err
		}
		b.volumes = append(b.volumes, v)
		if mode != "" {
			if err := b.set.SetAttribute(ctx, name, "cache_mode", mode); err != nil {
				return err
			}
		}
	}
	return nil
}

func (b *bench) reopen(mode string) error {
	if err := b.set.Close(context.Background()); err != nil {
		return err
	}
	b.set = nil
	return b.open(mode)
}

// left returns what is left of the devices when the power is cut now.
func (b *bench) left(strength blockdev.Strength) ([]blockdev.Device, error) {
	b.power.Cut()
	rng := rand.New(rand.NewPCG(1, uint64(strength)))
	var left []blockdev.Device
	for _, d := range b.disks {
		m, err := d.Crash(rng, strength)
		if err != nil {
			return nil, err
		}
		m.SetRuntime(b.rt)
		left = append(left, m)
	}
	return left, nil
}

// cut cuts the power and opens what is left. What was in memory is gone, the runtime directory too.
func (b *bench) cut(strength blockdev.Strength) error {
	left, err := b.left(strength)
	if err != nil {
		return err
	}
	_ = b.set.Close(context.Background()) // without power it fails
	b.set, b.dir = nil, ""
	b.cache, b.backing = left[0], left[1:]
	return b.open("")
}

// attribute sets one of the first volume's.
func (b *bench) attribute(name, value string) error {
	return b.set.SetAttribute(context.Background(), b.volumes[0].Name(), name, value)
}

// page returns 4 KiB of one byte.
func page(c byte) []byte { return bytes.Repeat([]byte{c}, 4096) }

// expect reads 4 KiB of the first volume, which should be of that byte.
func (b *bench) expect(off int64, want byte) error {
	got := make([]byte, 4096)
	if err := b.volumes[0].ReadAt(context.Background(), got, off); err != nil {
		return err
	}
	if !bytes.Equal(got, page(want)) {
		return fmt.Errorf("offset %d reads as %q..., want %q", off, got[:8], want)
	}
	return nil
}

// storeDirty stores data in the cache alone, as a kernel does in writeback mode.
func storeDirty(set *CacheSet, v *Volume, off int64, p []byte) error {
	io, err := blockdev.NewIO(set.cache, 1)
	if err != nil {
		return err
	}
	defer io.Close()
	s, inode := set.set, v.v.Inode()
	at, end := uint64(crashOffset+off)/512, uint64(crashOffset+off+int64(len(p)))/512
	for at < end {
		s.Lock()
		ptr, n := s.SpaceLocked(bucket.ForDirty, inode, at, uint32(end-at), 1, 99)
		s.Unlock()
		if n == 0 {
			s.Runtime().Sleep(100 * time.Millisecond)
			continue
		}
		if err := io.WriteAt(p[:n*512], int64(ptr.Sector())*512, 0); err != nil {
			return err
		}
		at, p = at+uint64(n), p[n*512:]
		in := cacheset.Insertion{Keys: []ondisk.Key{ondisk.NewExtent(inode, at, n, ptr, true)}, Pinned: true}
		if err := s.Insert(&in); err != nil {
			return err
		}
	}
	return s.Sync()
}

// Case 12: a write that goes round the cache meets a read.
func TestReadBesideWriteAround(t *testing.T) {
	for _, mode := range []string{"writearound", "writethrough"} {
		t.Run(mode, func(t *testing.T) {
			o := benchOptions{
				cache: 16 << 20, bucket: 8 << 10, backing: []int64{8 << 20}, mode: mode,
				backingLatency: blockdev.Latency{Read: 12 * time.Millisecond, Write: 25 * time.Millisecond, Jitter: 1},
				cacheLatency:   blockdev.Latency{Read: 100 * time.Microsecond, Write: 100 * time.Microsecond, Flush: 100 * time.Microsecond, Jitter: 0.5},
			}
			simulate(t, 1, time.Hour, o, func(b *bench) error {
				v := b.volumes[0]
				if mode == "writethrough" { // and the writes are so large that they are bypassed
					if err := b.set.SetAttribute(context.Background(), "v0", "sequential_cutoff", "512k"); err != nil {
						return err
					}
				}
				return writeAndRead(b, v)
			})
		})
	}
}

// writeAndRead alternates two patterns and reads each back, beside a reader without pause.
func writeAndRead(b *bench, v *Volume) error {
	ctx := context.Background()
	var group rt.WaitGroup
	group.Init(b.rt)
	var over bool
	var low, high uint64 // the reader may see any round from low to high
	var failed error
	group.Go("reader", func() {
		p := make([]byte, 4096)
		for !over && failed == nil {
			from := low
			if err := v.ReadAt(ctx, p, 0); err != nil {
				failed = err
				return
			}
			if n := binary.LittleEndian.Uint64(p); n < from || n > high {
				failed = fmt.Errorf("a read that began in round %d returned round %d, the newest is %d", from, n, high)
			}
			b.rt.Yield()
		}
	})
	data, back := make([]byte, 1<<20), make([]byte, 4096)
	for round := uint64(1); round <= 2000 && failed == nil; round++ {
		for at := 0; at < len(data); at += 4096 {
			binary.LittleEndian.PutUint64(data[at:], round)
		}
		high = round
		if err := v.WriteAt(ctx, data, 0, 0); err != nil {
			return err
		}
		low = round
		off := int64(round%256) * 4096
		if err := v.ReadAt(ctx, back, off); err != nil {
			return err
		}
		if n := binary.LittleEndian.Uint64(back); n != round {
			return fmt.Errorf("round %d was acknowledged; offset %d reads as round %d", round, off, n)
		}
	}
	over = true
	group.Wait()
	if failed != nil {
		return failed
	}
	if s := v.Stats(); s.BypassMode+s.BypassSequential < 1900 || s.MissCollisions == 0 {
		return fmt.Errorf("the case did not come about: %+v", s)
	}
	if err := b.reopen(""); err != nil {
		return err
	}
	for off := int64(0); off < 1<<20; off += 4096 {
		if err := b.volumes[0].ReadAt(ctx, back, off); err != nil {
			return err
		}
		if n := binary.LittleEndian.Uint64(back); n != 2000 {
			return fmt.Errorf("after reopening offset %d reads as round %d", off, n)
		}
	}
	return nil
}

// Case 18 (a) and (d): after a flush and an orderly stop nothing is dirty, and a flush of a set that is clean writes
// nothing to the backing data.
func TestCleanStopAndStart(t *testing.T) {
	o := benchOptions{cache: 16 << 20, bucket: 8 << 10, backing: []int64{8 << 20}}
	simulate(t, 1, time.Hour, o, func(b *bench) error {
		ctx := context.Background()
		v := b.volumes[0]
		p := bytes.Repeat([]byte("ubcache!"), 8192)
		if err := v.WriteAt(ctx, p, 0, 0); err != nil {
			return err
		}
		if err := v.Flush(ctx); err != nil {
			return err
		}
		before := b.rt.Now()
		if err := b.reopen(""); err != nil {
			return err
		}
		if took := b.rt.Now() - before; took > time.Second {
			return fmt.Errorf("stop and start took %v", took)
		}
		v = b.volumes[0]
		switch s := v.Stats(); {
		case s.State != "clean" || s.DirtyBytes != 0:
			return fmt.Errorf("state %s, %d bytes dirty", s.State, s.DirtyBytes)
		case b.set.Stats().ReplayedKeys != 0:
			return fmt.Errorf("%d keys had to be replayed after an orderly stop", b.set.Stats().ReplayedKeys)
		}
		if err := v.Flush(ctx); err != nil {
			return err
		}
		got := make([]byte, len(p))
		if err := v.ReadAt(ctx, got, 0); err != nil {
			return err
		}
		if s := v.Stats(); !bytes.Equal(got, p) || s.Hits != 1 || s.Misses != 0 {
			return fmt.Errorf("what was written is not in the cache after a stop: %+v", s)
		}
		return nil
	})
}

// Case 20 (a): the smallest journal, 32 writers, ten minutes: there is never a pause of five seconds.
func TestSmallestJournalNeverPauses(t *testing.T) {
	length := 10 * time.Minute
	if testing.Short() {
		length = 10 * time.Second
	}
	o := benchOptions{
		cache: 513 * 8 << 10, bucket: 8 << 10, backing: []int64{3 << 20, 2 << 20}, dir: t.TempDir(),
		cacheLatency:   blockdev.Latency{Read: 400 * time.Microsecond, Write: 2 * time.Millisecond, Flush: 4 * time.Millisecond, Jitter: 0.5, Parallel: 8},
		backingLatency: blockdev.Latency{Read: 4 * time.Millisecond, Write: 8 * time.Millisecond, Flush: 8 * time.Millisecond, Jitter: 0.5, Parallel: 16},
	}
	simulate(t, 1, time.Hour, o, func(b *bench) error {
		ctx := context.Background()
		var group rt.WaitGroup
		group.Init(b.rt)
		last, longest := b.rt.Now(), time.Duration(0)
		end := b.rt.Now() + length
		var failed error
		var done int
		for w := range 32 {
			group.Go("writer", func() {
				rng := rand.New(rand.NewPCG(7, uint64(w)))
				p := make([]byte, 4096)
				for failed == nil && b.rt.Now() < end {
					v := b.volumes[rng.IntN(2)]
					n := 512 * (1 + rng.Int64N(8))
					off := rng.Int64N(v.Size()-n) &^ 511
					var flags WriteFlags
					if rng.IntN(16) == 0 {
						flags = FUA
					}
					if err := v.WriteAt(ctx, p[:n], off, flags); err != nil {
						failed = err
					}
					now := b.rt.Now()
					longest = max(longest, now-last)
					last = now
					done++
				}
			})
		}
		group.Wait()
		t.Logf("%d writes, longest pause %v, %+v", done, longest, b.set.Stats())
		if failed == nil && longest >= 5*time.Second {
			failed = fmt.Errorf("a pause of %v", longest)
		}
		return failed
	})
}
