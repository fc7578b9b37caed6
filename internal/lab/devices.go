package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

// An Opener makes the devices of one run.
type Opener = func(ctx context.Context, r *rt.Runtime) (*Devices, error)

// dataOffset is where the data of the backing device begins, in bytes: it is so much larger than the volume.
const dataOffset = 8 << 10

// MemoryDevices are new ones in memory for each run.
func MemoryDevices(cacheBytes, backingBytes int64) Opener {
	return func(_ context.Context, r *rt.Runtime) (*Devices, error) {
		cache, err := blockdev.Memory(cacheBytes, blockdev.MemoryOptions{Name: "cache in memory", Runtime: r})
		if err != nil {
			return nil, err
		}
		backing, err := blockdev.Memory(dataOffset+backingBytes, blockdev.MemoryOptions{Name: "backing device in memory", Runtime: r})
		if err != nil {
			return nil, errors.Join(err, cache.Close())
		}
		return &Devices{
			Cache: cache, Backing: backing, Blank: true,
			Release: func() error { return errors.Join(cache.Close(), backing.Close()) },
		}, nil
	}
}

// FileDevices are new files in a folder for each run, which are removed after it.
func FileDevices(dir string, cacheBytes, backingBytes int64) Opener {
	return func(_ context.Context, r *rt.Runtime) (_ *Devices, err error) {
		own, err := os.MkdirTemp(dir, "ubcache-bench-")
		if err != nil {
			return nil, err
		}
		d := &Devices{Blank: true}
		d.Release = func() error {
			var errs []error
			for _, dev := range []blockdev.Device{d.Cache, d.Backing} {
				if dev != nil {
					errs = append(errs, dev.Close())
				}
			}
			return errors.Join(append(errs, os.RemoveAll(own))...)
		}
		defer func() {
			if err != nil {
				err = errors.Join(err, d.Release())
			}
		}()
		for _, f := range []struct {
			name string
			size int64
			to   *blockdev.Device
		}{{"cache.img", cacheBytes, &d.Cache}, {"backing.img", dataOffset + backingBytes, &d.Backing}} {
			path := filepath.Join(own, f.name)
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				return nil, err
			}
			if err := os.Truncate(path, f.size); err != nil {
				return nil, err
			}
			if *f.to, err = blockdev.Open(path, blockdev.Options{Runtime: r}); err != nil {
				return nil, err
			}
		}
		return d, nil
	}
}

// RealDevices are two that exist; what they hold is lost.
func RealDevices(cache, backing string) Opener {
	return func(_ context.Context, r *rt.Runtime) (*Devices, error) {
		c, err := blockdev.Open(cache, blockdev.Options{Runtime: r})
		if err != nil {
			return nil, err
		}
		b, err := blockdev.Open(backing, blockdev.Options{Runtime: r})
		if err != nil {
			return nil, errors.Join(err, c.Close())
		}
		return &Devices{Cache: c, Backing: b, Release: func() error { return errors.Join(c.Close(), b.Close()) }}, nil
	}
}

// Models reads names of latency models: one for both devices, or CACHE,BACKING. See blockdev.LatencyPreset.
func Models(names string) (cache, backing blockdev.Latency, err error) {
	c, b, two := strings.Cut(names, ",")
	if !two {
		b = c
	}
	if cache, err = blockdev.LatencyPreset(c); err != nil {
		return cache, backing, fmt.Errorf("cache device: %w", err)
	}
	if backing, err = blockdev.LatencyPreset(b); err != nil {
		return cache, backing, fmt.Errorf("backing device: %w", err)
	}
	return cache, backing, nil
}

// Delayed makes devices as slow as models say, on top of what they are.
func Delayed(open Opener, cache, backing blockdev.Latency) Opener {
	return func(ctx context.Context, r *rt.Runtime) (*Devices, error) {
		d, err := open(ctx, r)
		if err == nil {
			d.Cache, d.Backing = blockdev.NewDelaying(d.Cache, cache), blockdev.NewDelaying(d.Backing, backing)
		}
		return d, err
	}
}
