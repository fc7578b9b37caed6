package lab

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"time"

	"github.com/ubcache/ubcache"
	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

const (
	fieldFillDepth = 64 // writes at a time while an image is filled
	fillRounds     = 16 // after each, memory of nodes that are no more is let go
	setUUID        = "f1e1d000-0000-4000-8000-000000000001"
)

// FillFacts say what a cache was filled with, and what that took.
type FillFacts struct {
	Writes     int64   // requests
	Nodes      int     // of the index
	LiveBytes  int64   // cached
	UsedBytes  int64   // of the cache that is neither empty nor free
	InUse      float64 // percent of the cache that these are
	ImageBytes int64   // that is stored of its metadata
	RealTime   time.Duration
}

// An image is a filled cache and its backing device.
type image struct {
	cache, backing *blockdev.HollowDevice
	facts          FillFacts
}

func (m *image) close() {
	if m.cache != nil {
		_ = m.cache.Close()
	}
	if m.backing != nil {
		_ = m.backing.Close()
	}
}

// clone returns devices with the image's content.
func (m *image) clone(r *rt.Runtime) (*image, error) {
	var c image
	var err error
	if c.cache, err = m.cache.Clone(r); err == nil {
		c.backing, err = m.backing.Clone(r)
	}
	if err != nil {
		c.close()
		return nil, err
	}
	return &c, nil
}

// simulate runs fn in a simulation of that seed.
func simulate(seed uint64, fn func(r *rt.Runtime) error) error {
	s := rt.NewSim(seed)
	s.Livelock = math.MaxUint64 // all of a fill may happen at one instant
	var err error
	rerr := s.Run(func() { err = fn(s.Runtime()) })
	return errors.Join(rerr, err)
}

// fillImage formats the devices, and fills the cache. It does so in a simulation in which devices take no time, so that
// the same image comes of it always.
func fillImage(ctx context.Context, f *Field, progress func(percent int)) (m *image, err error) {
	begin := time.Now()
	m = new(image)
	defer func() {
		if err != nil {
			m.close()
		}
	}()
	err = simulate(f.Seed, func(r *rt.Runtime) (err error) {
		if m.cache, err = blockdev.Hollow(f.Cache, blockdev.HollowOptions{Name: "cache", Runtime: r}); err != nil {
			return err
		}
		if m.backing, err = blockdev.Hollow(f.Backing, blockdev.HollowOptions{Name: "backing", Runtime: r}); err != nil {
			return err
		}
		_, err = ubcache.Format(context.Background(), ubcache.FormatOptions{
			CacheDevice: m.cache, BackingDevices: []blockdev.Device{m.backing}, BucketSize: f.Bucket, BlockSize: f.Block,
			CacheMode: f.Mode, SetUUID: setUUID,
		})
		if err != nil || f.FillNodes == 0 && f.FillBytes == 0 {
			return err
		}
		return m.fill(ctx, f, r, progress)
	})
	if err != nil {
		return m, err
	}
	m.facts.ImageBytes = m.cache.Stored()
	m.facts.RealTime = time.Since(begin)
	return m, nil
}

// withSet opens a set and its volume for fn.
func withSet(f *Field, cache, backing blockdev.Device, fn func(set *ubcache.CacheSet, v *ubcache.Volume) error) (err error) {
	dir, err := os.MkdirTemp("", "ubcache-field-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	ctx := context.Background() // when the caller's ends, requests stop coming, and the set is closed as usual
	set, err := ubcache.Open(ctx, ubcache.Options{CacheDevice: cache, RuntimeDir: dir, NodeCache: f.NodeCache})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, set.Close(ctx)) }()
	v, err := set.OpenVolume(ctx, ubcache.VolumeOptions{Name: fieldVolume, BackingDevice: backing})
	if err != nil {
		return err
	}
	// The reports are of kernels: their order of a write's parts, and random requests that are never taken for sequential ones.
	err = errors.Join(
		set.SetAttribute(ctx, fieldVolume, "crash_stability", "kernel"),
		set.SetAttribute(ctx, fieldVolume, "sequential_cutoff", "0"),
	)
	if err != nil {
		return err
	}
	return fn(set, v)
}

const fieldVolume = "volume"

// fill writes until the index is as large as the field wants it. Now and then the set is closed and opened again, and the
// image rid of what the index does not need.
func (m *image) fill(ctx context.Context, f *Field, r *rt.Runtime, progress func(percent int)) error {
	pool := blockdev.NewPool(blockdev.PoolOptions{})
	defer pool.Trim(0)
	rng := rand.New(rand.NewPCG(f.Seed, 0x66696c6c))
	jobs := []Job{{Size: f.FillSize, Depth: fieldFillDepth}}
	look := min(max(f.Cache/int64(f.FillSize)/512, 1), 1<<16)
	last := -1
	for round := 1; round <= fillRounds; round++ {
		err := m.shrunk(f, func(set *ubcache.CacheSet, v *ubcache.Volume) error {
			return newLoad(r, v, f.File, pool).run(ctx, jobs, rng, func(*fieldRequest) bool {
				if m.facts.Writes++; m.facts.Writes%look != 0 {
					return true
				}
				part := f.filled(set.Stats())
				if percent := int(100 * min(part, 1)); percent > last {
					last = percent
					progress(percent)
				}
				return part < float64(round)/fillRounds
			})
		})
		if err != nil {
			return err
		}
	}
	return m.shrunk(f, func(set *ubcache.CacheSet, _ *ubcache.Volume) error {
		s := set.Stats()
		m.facts.Nodes, m.facts.LiveBytes = s.Nodes, s.LiveBytes
		m.facts.UsedBytes = int64(s.Buckets-s.Empty-s.Ready) * s.BucketSize
		m.facts.InUse = 100 * float64(m.facts.UsedBytes) / float64(f.Cache)
		return nil
	})
}

// shrunk is withSet; what the start of the set does not read of the index goes.
func (m *image) shrunk(f *Field, fn func(set *ubcache.CacheSet, v *ubcache.Volume) error) error {
	m.cache.NoteUse()
	return withSet(f, m.cache, m.backing, func(set *ubcache.CacheSet, v *ubcache.Volume) error {
		if err := m.cache.DropUnused(); err != nil {
			return err
		}
		return fn(set, v)
	})
}

// filled returns which part of the fill is done; 1: all of it.
func (f *Field) filled(s ubcache.SetStats) (part float64) {
	if f.FillNodes > 0 {
		part = float64(s.Nodes) / float64(f.FillNodes)
	}
	if f.FillBytes > 0 {
		part = max(part, float64(s.LiveBytes)/float64(f.FillBytes))
	}
	return part
}
