// Package made brings sets into states that they do not come to soon, in simulated time, cuts their power there and returns
// what is left: for tests that open it with the engine, and for those that hand it to a real kernel.
package made

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/journal"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
	"github.com/ubcache/ubcache/internal/volume"
)

// A Left is what a power cut, or a stop, has left of a set with one volume.
type Left struct {
	Name    string
	Cache   *blockdev.MemoryDevice // on the real runtime
	Backing *blockdev.MemoryDevice // nil: the volume is the flash-only one Flash
	Flash   string
	Info    cacheset.Info // of the set, just before

	Uses, Pool int // of Reused: how often a bucket was handed out, and how many buckets there were for that

	sectors []version
}

// A version is which writes of a sector count: the newest that was flushed, and the newest that was sent. empty is the one
// that was a discard; at first that is number 0.
type version struct{ flushed, sent, empty uint64 }

// Verify says whether content is what the volume may hold: of each sector the newest flushed write, or a later one.
func (l *Left) Verify(content []byte) error {
	if len(content) < len(l.sectors)*ondisk.SectorSize {
		return fmt.Errorf("%s: %d bytes of %d", l.Name, len(content), len(l.sectors)*ondisk.SectorSize)
	}
	want := make([]byte, ondisk.SectorSize)
	for i, v := range l.sectors {
		got := content[i*ondisk.SectorSize:][:ondisk.SectorSize]
		n := binary.LittleEndian.Uint64(got[8:])
		put(want, uint64(i), n)
		if n == 0 {
			n = v.empty
		} else if n == v.empty {
			n = v.sent + 1
		}
		if n < v.flushed || n > v.sent || string(got) != string(want) {
			return fmt.Errorf("%s: sector %d reads as %x..., version %d; %+v", l.Name, i, got[:24], n, v)
		}
	}
	return nil
}

// Close lets the memory go.
func (l *Left) Close() {
	l.Cache.Close()
	if l.Backing != nil {
		l.Backing.Close()
	}
}

// put fills a sector with what write n of it has; 0: nothing.
func put(p []byte, sector, n uint64) {
	clear(p)
	if n == 0 {
		return
	}
	for i := 0; i < len(p); i += 16 {
		binary.LittleEndian.PutUint64(p[i:], sector)
		binary.LittleEndian.PutUint64(p[i+8:], n)
	}
}

// A plan says how a set is made.
type plan struct {
	cache, bucket, backing int64 // backing 0: a flash-only volume of flash bytes
	flash                  int64
	options                cacheset.Options
}

// A maker has a set that runs in a simulation.
type maker struct {
	rt      *rt.Runtime
	set     *cacheset.Set
	v       *volume.Volume
	io      *blockdev.IO
	power   *blockdev.Power
	disks   []*blockdev.Crashable
	faults  *blockdev.Faulty // of the cache
	sectors []version
	buf     []byte
	cutting bool // errors are no news any more
}

var fast = blockdev.Latency{Read: 80 * time.Microsecond, Write: 20 * time.Microsecond, Flush: 150 * time.Microsecond, Jitter: 0.3, Parallel: 8}

// run makes a set as p says and has fn use it. fn cuts the power, or else the set is stopped.
func run(seed uint64, p plan, fn func(m *maker) ([]*Left, error)) (left []*Left, err error) {
	s := rt.NewSim(seed)
	s.Limit = 24 * time.Hour
	serr := s.Run(func() {
		m := &maker{rt: s.Runtime(), power: new(blockdev.Power)}
		left, err = m.run(p, fn)
	})
	return left, errors.Join(err, serr)
}

func (m *maker) run(p plan, fn func(m *maker) ([]*Left, error)) (left []*Left, err error) {
	ctx := context.Background()
	disk := func(size int64) (*blockdev.Faulty, error) {
		dev, err := blockdev.Memory(size, blockdev.MemoryOptions{Runtime: m.rt})
		if err != nil {
			return nil, err
		}
		c, err := blockdev.NewCrashable(blockdev.NewDelaying(dev, fast), blockdev.CrashableOptions{Power: m.power})
		if err != nil {
			return nil, err
		}
		m.disks = append(m.disks, c)
		return blockdev.NewFaulty(c, 1), nil
	}
	if m.faults, err = disk(p.cache); err != nil {
		return nil, err
	}
	format := offline.FormatOptions{Cache: m.faults, Bucket: p.bucket, Block: ondisk.SectorSize}
	if p.backing > 0 {
		dev, err := disk(p.backing)
		if err != nil {
			return nil, err
		}
		format.Backing = []blockdev.Device{dev}
	}
	if _, err := offline.Format(ctx, format); err != nil {
		return nil, err
	}
	p.options.Shared = journal.NewShared()
	if m.set, err = cacheset.Open(ctx, m.faults, p.options); err != nil {
		return nil, err
	}
	if p.backing > 0 {
		m.v, err = volume.Open(m.set, format.Backing[0])
	} else if _, err = volume.CreateFlash(m.set, "flash", p.flash); err == nil {
		m.v, err = volume.OpenFlash(m.set, "flash")
	}
	if err == nil {
		m.io, err = blockdev.NewIO(m.v, 16)
	}
	if err == nil {
		m.sectors = make([]version, m.v.Info().Size/ondisk.SectorSize)
		left, err = fn(m)
		m.cutting = err == nil
		_ = m.io.Close()
	}
	if m.v != nil {
		err = m.unless(err, m.v.Close())
	}
	return left, m.unless(err, m.set.Close(ctx))
}

// unless is err, or what came after it, unless the power was cut on purpose.
func (m *maker) unless(err, after error) error {
	if err == nil && !m.cutting && !m.power.IsCut() {
		return after
	}
	return err
}

// write writes n sectors of the volume, sector on, once more.
func (m *maker) write(sector, n int) error {
	m.buf = append(m.buf[:0], make([]byte, n*ondisk.SectorSize)...)
	for i := range n {
		v := &m.sectors[sector+i]
		v.sent++
		put(m.buf[i*ondisk.SectorSize:][:ondisk.SectorSize], uint64(sector+i), v.sent)
	}
	return m.io.WriteAt(m.buf, int64(sector)*ondisk.SectorSize, 0)
}

// discard discards n sectors of the volume, sector on.
func (m *maker) discard(sector, n int) error {
	for i := range n {
		v := &m.sectors[sector+i]
		v.sent++
		v.empty = v.sent
	}
	return m.io.Discard(int64(sector)*ondisk.SectorSize, int64(n)*ondisk.SectorSize)
}

// flush is a flush, after which all that was written counts.
func (m *maker) flush() error {
	if err := m.io.Flush(); err != nil {
		return err
	}
	for i := range m.sectors {
		m.sectors[i].flushed = m.sectors[i].sent
	}
	return nil
}

// cut cuts the power and returns what each strength leaves.
func (m *maker) cut(name string, seed uint64, strengths ...blockdev.Strength) (left []*Left, err error) {
	info := m.set.Info()
	m.power.Cut()
	for _, s := range strengths {
		l := &Left{Name: name + "-" + s.String(), Info: info, sectors: append([]version(nil), m.sectors...)}
		rng := rand.New(rand.NewPCG(seed, uint64(s)))
		if l.Cache, err = m.disks[0].Crash(rng, s); err != nil {
			return nil, err
		}
		if len(m.disks) > 1 {
			if l.Backing, err = m.disks[1].Crash(rng, s); err != nil {
				return nil, err
			}
		} else {
			l.Flash = "flash"
		}
		l.Cache.SetRuntime(rt.New())
		if l.Backing != nil {
			l.Backing.SetRuntime(rt.New())
		}
		left = append(left, l)
	}
	return left, nil
}

// Strengths are all there are.
var Strengths = []blockdev.Strength{blockdev.Prefix, blockdev.Reordered, blockdev.Torn}
