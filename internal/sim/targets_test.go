package sim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

// A plain target passes all on to a device.
type plain struct {
	io    *blockdev.IO
	block int
}

func newPlain(dev blockdev.Device, block int) (*plain, error) {
	io, err := blockdev.NewIO(dev, 8)
	return &plain{io: io, block: block}, err
}

func (p *plain) Size() int64                                         { return p.io.Device().Info().Size }
func (p *plain) BlockSize() int                                      { return p.block }
func (p *plain) ReadAt(_ context.Context, b []byte, off int64) error { return p.io.ReadAt(b, off) }
func (p *plain) Flush(context.Context) error                         { return p.io.Flush() }
func (p *plain) Discard(_ context.Context, off, n int64) error       { return p.io.Discard(off, n) }
func (p *plain) WriteAt(_ context.Context, b []byte, off int64, fua bool) error {
	return p.io.WriteAt(b, off, flags(fua))
}

func (p *plain) WriteZeroes(_ context.Context, off, n int64, fua bool) error {
	return p.io.WriteZeroes(off, n, flags(fua))
}

func flags(fua bool) blockdev.Flags {
	if fua {
		return blockdev.FUA
	}
	return 0
}

// A broken target does something else where a function is set.
type broken struct {
	*plain
	read    func(p []byte, off int64) error
	write   func(p []byte, off int64, fua bool) error
	flush   func() error
	discard func(off, n int64) error
	zeroes  func(off, n int64, fua bool) error
}

func (b *broken) ReadAt(ctx context.Context, p []byte, off int64) error {
	if b.read != nil {
		return b.read(p, off)
	}
	return b.plain.ReadAt(ctx, p, off)
}

func (b *broken) WriteAt(ctx context.Context, p []byte, off int64, fua bool) error {
	if b.write != nil {
		return b.write(p, off, fua)
	}
	return b.plain.WriteAt(ctx, p, off, fua)
}

func (b *broken) Flush(ctx context.Context) error {
	if b.flush != nil {
		return b.flush()
	}
	return b.plain.Flush(ctx)
}

func (b *broken) Discard(ctx context.Context, off, n int64) error {
	if b.discard != nil {
		return b.discard(off, n)
	}
	return b.plain.Discard(ctx, off, n)
}

func (b *broken) WriteZeroes(ctx context.Context, off, n int64, fua bool) error {
	if b.zeroes != nil {
		return b.zeroes(off, n, fua)
	}
	return b.plain.WriteZeroes(ctx, off, n, fua)
}

const diskSize = 128 << 10

// small is a loop over one plain volume on one disk, small enough for hundreds of cuts a second.
func small(seed uint64) Loop {
	return broke(seed, nil)
}

// broke is small with a volume that a function has damaged; it is given the plain one that it changes.
func broke(seed uint64, damage func(e *Env, b *broken) error) Loop {
	open := func(_ context.Context, e *Env) (*System, error) {
		p, err := newPlain(e.Devices[0], 512)
		if err != nil {
			return nil, err
		}
		b := &broken{plain: p}
		s := &System{Targets: []Target{b}, Close: func(context.Context) error { return errors.Join(p.io.Flush(), p.io.Close()) }, Own: b}
		if damage != nil {
			if err := damage(e, b); err != nil {
				return nil, errors.Join(err, p.io.Close())
			}
		}
		return s, nil
	}
	v := Volume{Size: diskSize, Block: 512}
	return Loop{
		Seed: seed, Step: 5, Disks: []Disk{{Size: diskSize}}, Volumes: []Volume{v},
		Workload: Workload{Requests: 100},
		Prepare: func(_ context.Context, e *Env) error {
			return FillDevice(e.Devices[0], 0, 0, v)
		},
		Build: open, Reopen: open,
	}
}

// A cached target is a write-back cache in a file of the runtime directory: what is acknowledged is there, a flush
// moves it to the device. It serves one request at a time.
type cached struct {
	*plain
	r    *rt.Runtime
	mu   rt.Mutex
	file *os.File
	has  map[int64]bool // blocks that are newer in the file
	path string
	// forget keeps the file elsewhere, so that the death of the process loses it
	forget bool
}

func newCached(e *Env, forget bool) (*cached, error) {
	p, err := newPlain(e.Devices[0], 512)
	if err != nil {
		return nil, err
	}
	c := &cached{plain: p, r: e.Runtime, has: map[int64]bool{}, forget: forget, path: filepath.Join(e.Dir, "blocks")}
	c.mu.Init(e.Runtime)
	if c.file, err = os.OpenFile(c.path, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, err
	}
	if forget {
		os.Remove(c.path)
	}
	// an entry is a block and one byte that says that it is there
	for b := range p.Size() / 512 {
		var there [1]byte
		if _, err := c.file.ReadAt(there[:], p.Size()+b); err == nil && there[0] == 1 {
			c.has[b] = true
		}
	}
	return c, nil
}

func (c *cached) lock() func() {
	c.mu.Lock()
	return c.mu.Unlock
}

func (c *cached) ReadAt(ctx context.Context, p []byte, off int64) error {
	defer c.lock()()
	if err := c.plain.ReadAt(ctx, p, off); err != nil {
		return err
	}
	for at := 0; at < len(p); at += 512 {
		if b := (off + int64(at)) / 512; c.has[b] {
			if _, err := c.file.ReadAt(p[at:][:512], b*512); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *cached) WriteAt(ctx context.Context, p []byte, off int64, fua bool) error {
	unlock := c.lock()
	for at := 0; at < len(p); at += 512 {
		b := (off + int64(at)) / 512
		_, err := c.file.WriteAt(p[at:][:512], b*512)
		_, err2 := c.file.WriteAt([]byte{1}, c.Size()+b)
		if err := errors.Join(err, err2); err != nil {
			return err
		}
		c.has[b] = true
	}
	unlock()
	c.r.Yield()
	if fua {
		return c.Flush(ctx)
	}
	return nil
}

func (c *cached) WriteZeroes(ctx context.Context, off, n int64, fua bool) error {
	return c.WriteAt(ctx, make([]byte, n), off, fua)
}

func (c *cached) Discard(context.Context, int64, int64) error { return nil }

func (c *cached) Flush(ctx context.Context) error {
	defer c.lock()()
	p := make([]byte, 512)
	for b := range c.Size() / 512 {
		if !c.has[b] {
			continue
		}
		if _, err := c.file.ReadAt(p, b*512); err != nil {
			return err
		}
		if err := c.plain.WriteAt(ctx, p, b*512, false); err != nil {
			return err
		}
	}
	if err := c.plain.Flush(ctx); err != nil {
		return err
	}
	clear(c.has)
	_, err := c.file.WriteAt(make([]byte, c.Size()/512), c.Size())
	return err
}

// cachedLoop is a loop over a cached target.
func cachedLoop(seed uint64, forget bool) Loop {
	l := small(seed)
	l.Build = func(_ context.Context, e *Env) (*System, error) {
		c, err := newCached(e, forget)
		if err != nil {
			return nil, err
		}
		return &System{Targets: []Target{c}, Close: func(ctx context.Context) error {
			return errors.Join(c.Flush(ctx), c.file.Close(), c.io.Close())
		}}, nil
	}
	l.Reopen = l.Build
	return l
}

// twoVolumes is a loop over two plain volumes of different blocks.
func twoVolumes(seed uint64) Loop {
	l := small(seed)
	l.Disks = []Disk{{Size: diskSize}, {Size: diskSize, Options: blockdev.MemoryOptions{LogicalBlock: 4096, Name: "coarse"}}}
	l.Volumes = []Volume{{Size: diskSize, Block: 512}, {Size: diskSize, Block: 4096, Zero: true}}
	l.Build = func(_ context.Context, e *Env) (*System, error) {
		s := &System{}
		var plains []*plain
		for i, d := range e.Devices {
			p, err := newPlain(d, l.Volumes[i].Block)
			if err != nil {
				return nil, err
			}
			plains = append(plains, p)
			s.Targets = append(s.Targets, p)
		}
		s.Close = func(context.Context) error {
			var err error
			for i, p := range plains {
				if e := errors.Join(p.io.Flush(), p.io.Close()); e != nil {
					err = errors.Join(err, fmt.Errorf("volume %d: %w", i, e))
				}
			}
			return err
		}
		return s, nil
	}
	l.Reopen = l.Build
	return l
}

func runtimeOf(p *plain) *rt.Runtime { return blockdev.RuntimeOf(p.io.Device()) }
