package volume

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A Config is what a request goes by.
type Config struct {
	Mode ondisk.CacheMode

	// Strict crash stability: see the package's comment. Else the kernel's order.
	Strict bool

	// SequentialCutoff is from how many bytes of a stream on requests go round the cache; 0: never.
	SequentialCutoff int64
}

// DefaultSequentialCutoff is the kernel's.
const DefaultSequentialCutoff = 4 << 20

// A conf is a Config that requests hold. Each request takes one and keeps it to its end, so that none sees half a
// change: it is never changed, another takes its place.
type conf struct {
	Config
	detaching bool // nothing is added to the cache, no data becomes dirty
	detached  bool // the backing device is all there is
	users     atomic.Int64
}

// use takes the present configuration.
func (v *Volume) use() *conf {
	for {
		c := v.config.Load()
		c.users.Add(1)
		if v.config.Load() == c {
			return c
		}
		v.unuse(c) // nobody waits for what comes to it now
	}
}

// unuse lets a configuration go.
func (v *Volume) unuse(c *conf) {
	if c.users.Add(-1) == 0 && v.config.Load() != c {
		v.set.Lock()
		v.ranges.ended.Broadcast()
		v.set.Unlock()
	}
}

// publish puts another configuration in the place of the present one, as change has it, unless change says no. It reports
// what change said.
func (v *Volume) publish(change func(c *conf) bool) bool {
	v.set.Lock()
	defer v.set.Unlock()
	old := v.config.Load()
	c := &conf{Config: old.Config, detaching: old.detaching, detached: old.detached}
	if !change(c) {
		return false
	}
	v.dropReplacedLocked()
	v.replaced = append(v.replaced, old)
	v.config.Store(c)
	return true
}

// dropReplacedLocked forgets replaced configurations that no request goes by.
func (v *Volume) dropReplacedLocked() {
	v.replaced = slices.DeleteFunc(v.replaced, func(c *conf) bool { return c.users.Load() == 0 })
}

// drain waits for the requests that go by configurations that were replaced. v.changing is not held: a request may be
// waiting for it.
func (v *Volume) drain(ctx context.Context) error {
	v.set.Lock()
	defer v.set.Unlock()
	for {
		v.dropReplacedLocked()
		if len(v.replaced) == 0 {
			return nil
		}
		if err := v.ranges.ended.WaitContext(ctx); err != nil {
			return err
		}
	}
}

// Config returns what requests go by now.
func (v *Volume) Config() Config { return v.config.Load().Config }

// drainLimit is how long a change waits for the requests that came before it.
const drainLimit = 20 * time.Second

// SetMode changes the mode, also in the superblock. On return no request goes by the old one any more.
func (v *Volume) SetMode(m ondisk.CacheMode) error {
	if err := v.storeMode(m); err != nil {
		return err
	}
	return v.drainSoon()
}

func (v *Volume) storeMode(m ondisk.CacheMode) error {
	v.changing.Lock()
	defer v.changing.Unlock()
	if !v.flash && v.super.Load().CacheMode() != m {
		super := *v.super.Load()
		super.SetCacheMode(m)
		if err := v.storeSuper(&super); err != nil {
			return err
		}
	}
	v.publish(func(c *conf) bool { c.Mode = m; return true })
	return nil
}

// drainSoon is drain for changes that nobody waits for longer than some seconds.
func (v *Volume) drainSoon() error {
	ctx, cancel := v.rt.WithTimeout(v.stop, drainLimit)
	defer cancel()
	if err := v.drain(ctx); err != nil {
		return fmt.Errorf("the change is made, but requests that came before it are still under way: %w", err)
	}
	return nil
}

// SetStrict changes the crash stability. When it becomes strict, the backing device is flushed first, since clean
// keys have not waited for that until now.
func (v *Volume) SetStrict(strict bool) error {
	v.publish(func(c *conf) bool { c.Strict = strict; return true })
	if err := v.drainSoon(); err != nil || !strict || v.flash {
		return err
	}
	if err := v.flushBacking(); err != nil {
		return err
	}
	return v.set.Sync() // invalidations that nobody waited for
}

// SetSequentialCutoff changes from how many bytes on streams go round the cache; 0: never.
func (v *Volume) SetSequentialCutoff(bytes int64) {
	v.publish(func(c *conf) bool { c.SequentialCutoff = bytes; return true })
}
