package ubcache

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/journal"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/volume"
)

// Options say what Open opens, and how. The zero value of each field but the cache device is its default.
type Options struct {
	Cache string // path of the cache device: a block device or a file

	// CacheDevice is instead of Cache, for use inside this module. Close leaves it open.
	CacheDevice blockdev.Device

	// RuntimeDir is a folder in memory (in /run, or $XDG_RUNTIME_DIR) for the journal entry that is not on disk yet:
	// with it the death of the process loses nothing acknowledged, and writes need not wait for the journal to be
	// acknowledged. Default: none, so that each write waits.
	RuntimeDir string

	// Volumes are what will be opened on the set. Their backing devices are judged first: where one is refused, nothing
	// is written to any device.
	Volumes []VolumeOptions

	NodeCache int64        // bytes of the index kept in memory, at most; default 256 MiB
	Engine    string       // "uring" or "pread"; default: uring where the system has it
	Logger    *slog.Logger // default: none

	broken   cacheset.Broken // rules not to keep: for tests
	restless bool            // work in the background never rests: for tests
}

// A CacheSet is a running cache set.
type CacheSet struct {
	opt    Options
	set    *cacheset.Set
	cache  blockdev.Device
	owned  bool // the cache device is ours to close
	shared *journal.Shared

	growing sync.Mutex // one flash-only volume at a time

	mu      sync.Mutex
	volumes []*Volume
	opening map[string]bool
	closed  bool
}

// Open starts the set on a cache device, and initialises one that was only formatted. When it returns, the set is
// recovered, and serves. Errors match those of this package where there is one.
func Open(ctx context.Context, o Options) (_ *CacheSet, err error) {
	s := &CacheSet{opt: o, cache: o.CacheDevice, opening: map[string]bool{}}
	defer func() {
		if err != nil {
			s.release()
		}
	}()
	if s.cache == nil {
		if o.Cache == "" {
			return nil, errors.New("no cache device is given")
		}
		if s.cache, err = blockdev.Open(o.Cache, blockdev.Options{Engine: o.Engine, Logger: o.Logger}); err != nil {
			return nil, err
		}
		s.owned = true
	}
	if err := judge(s.cache, o.Volumes); err != nil {
		return nil, err
	}
	opt := cacheset.Options{NodeCache: o.NodeCache, Logger: o.Logger, Broken: o.broken, Restless: o.restless}
	if o.RuntimeDir != "" {
		if s.shared, err = openShared(s.cache, o.RuntimeDir); err != nil {
			return nil, err
		}
		if opt.Boot, err = journal.BootID(); err != nil {
			return nil, err
		}
		opt.Shared = s.shared
	}
	if s.set, err = cacheset.Open(ctx, s.cache, opt); err != nil {
		return nil, err
	}
	return s, nil
}

// judge says which of the backing devices cannot be volumes of the set on a cache device. It reads only.
func judge(cache blockdev.Device, volumes []VolumeOptions) error {
	if len(volumes) == 0 {
		return nil
	}
	set, err := readSuper(cache)
	if err != nil {
		return err
	}
	var errs []error
	for _, v := range volumes {
		if v.Flash != "" {
			continue
		}
		dev := v.BackingDevice
		if dev == nil {
			if dev, err = blockdev.Open(v.Backing, blockdev.Options{ReadOnly: true, NoLock: true}); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		sb, err := readSuper(dev)
		if err == nil {
			_, err = volume.Accept(sb, dev.Info(), set.SetUUID, uint32(set.BlockSize))
		}
		if v.BackingDevice == nil {
			err = errors.Join(err, dev.Close())
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func readSuper(dev blockdev.Device) (*ondisk.Superblock, error) {
	io, err := blockdev.NewIO(dev, 1)
	if err != nil {
		return nil, err
	}
	sb, err := cacheset.ReadSuperblock(io)
	return sb, errors.Join(err, io.Close())
}

// openShared opens the mapping that belongs to the set on a device.
func openShared(dev blockdev.Device, dir string) (*journal.Shared, error) {
	sb, err := readSuper(dev)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	return journal.OpenShared(filepath.Join(dir, sb.SetUUID.String()+".journal"))
}

// release closes what is ours.
func (s *CacheSet) release() error {
	var errs []error
	if s.shared != nil {
		errs = append(errs, s.shared.Close())
		s.shared = nil
	}
	if s.owned && s.cache != nil {
		errs = append(errs, s.cache.Close())
		s.cache = nil
	}
	return errors.Join(errs...)
}

// Verify counts the whole index again beside whatever goes on, and compares: the live and dirty sectors of every bucket,
// and the dirty data of every volume. The set does so by itself once a week. It reads every node that is not in memory, 16
// MiB a second, and returns when it is through; the end of ctx ends the wait, not the verification.
//
// An error names what was different: an error of ours, or of the memory. Nothing is lost by it: the greater count stays,
// and the buckets rest, till a later verification finds them right, or the next start. Writing to the attribute trigger_verify
// does the same.
func (s *CacheSet) Verify(ctx context.Context) error { return s.set.Verify(ctx) }

// UUID returns the set's uuid.
func (s *CacheSet) UUID() string { return s.set.UUID().String() }

// Err returns why the set has stopped by itself, nil if it has not: after a failed write of its metadata nothing is
// acknowledged any more.
func (s *CacheSet) Err() error { return s.set.Err() }

// VolumeOptions say which volume OpenVolume opens: that of a backing device, or a flash-only one.
type VolumeOptions struct {
	Name    string // by which it is called; unique among the set's open volumes, and neither "set" nor "cache"
	Backing string // path of the backing device

	// BackingDevice is instead of Backing, for use inside this module. It stays open.
	BackingDevice blockdev.Device

	Flash string // label or slot number of a flash-only volume
}

// OpenVolume opens a volume. A backing device that was formatted for this set, or for none, is attached to it now, and
// so is one that was run without its cache since: what the cache had of it is void then.
func (s *CacheSet) OpenVolume(_ context.Context, o VolumeOptions) (*Volume, error) {
	if o.Name == "" || o.Name == objectSet || o.Name == objectCache {
		return nil, fmt.Errorf("%q cannot be the name of a volume", o.Name)
	}
	if err := s.claim(o.Name); err != nil {
		return nil, err
	}
	v, err := s.openVolume(o)
	s.mu.Lock()
	delete(s.opening, o.Name)
	closed := s.closed
	if err == nil && !closed {
		s.volumes = append(s.volumes, v)
	}
	s.mu.Unlock()
	switch {
	case err != nil:
		return nil, err
	case closed: // meanwhile
		return nil, errors.Join(ErrClosed, v.close())
	}
	return v, nil
}

// claim reserves a volume's name.
func (s *CacheSet) claim(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return ErrClosed
	}
	if s.opening[name] || slices.ContainsFunc(s.volumes, func(v *Volume) bool { return v.name == name }) {
		return fmt.Errorf("there is a volume %q already", name)
	}
	s.opening[name] = true
	return nil
}

func (s *CacheSet) openVolume(o VolumeOptions) (_ *Volume, err error) {
	v := &Volume{name: o.Name}
	defer func() {
		if err != nil && v.backing != nil {
			_ = v.backing.Close()
		}
	}()
	if o.Flash != "" {
		v.v, err = volume.OpenFlash(s.set, o.Flash)
	} else {
		dev := o.BackingDevice
		if dev == nil {
			if dev, err = blockdev.Open(o.Backing, blockdev.Options{Engine: s.opt.Engine, Logger: s.opt.Logger}); err != nil {
				return nil, err
			}
			v.backing = dev
		}
		v.v, err = volume.Open(s.set, dev)
	}
	if err != nil {
		return nil, err
	}
	io, err := blockdev.NewIO(v.v, volumeDepth)
	if err != nil {
		_ = v.v.Close()
		return nil, err
	}
	v.io.Store(io)
	return v, nil
}

// Volume returns the open volume of that name, nil if there is none.
func (s *CacheSet) Volume(name string) *Volume {
	for _, v := range s.Volumes() {
		if v.name == name {
			return v
		}
	}
	return nil
}

// Volumes returns the open volumes, in the order in which they were opened.
func (s *CacheSet) Volumes() []*Volume {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.volumes)
}

// Close stops the set: the backing devices are flushed, and the index is brought to the disk, so that the next start
// has nothing to replay. ctx bounds that: what is not written by then is replayed from the journal at the next start, and
// a device that does not answer is left alone, after some seconds more. Queues of the volumes must be closed before.
func (s *CacheSet) Close(ctx context.Context) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return ErrClosed
	}
	s.closed = true
	volumes := s.volumes
	s.mu.Unlock()
	var errs []error
	for _, v := range volumes {
		errs = append(errs, s.closeVolume(ctx, v))
	}
	err := s.set.Close(ctx)
	errs = append(errs, err)
	if !errors.Is(err, cacheset.ErrHangs) { // else the device still has what it was asked, and memory of ours
		errs = append(errs, s.release())
	}
	return errors.Join(errs...)
}

const volumeDepth = 64 // blocking calls at a time

// A Volume is an open volume of a set.
type Volume struct {
	name    string
	v       *volume.Volume
	io      atomic.Pointer[blockdev.IO]
	backing blockdev.Device // ours to close

	mu     sync.Mutex
	old    []*blockdev.IO // of a smaller volume
	closed bool
}

func (v *Volume) close() error {
	err := errors.Join(v.closeIO(), v.v.Close())
	if v.backing != nil {
		err = errors.Join(err, v.backing.Close())
	}
	if err != nil {
		return fmt.Errorf("volume %q: %w", v.name, err)
	}
	return nil
}

// WriteFlags modify a write.
type WriteFlags uint8

// FUA makes a write durable before it returns.
const FUA WriteFlags = 1

func (f WriteFlags) device() blockdev.Flags {
	if f&FUA != 0 {
		return blockdev.FUA
	}
	return 0
}

// Name returns what the volume was opened as.
func (v *Volume) Name() string { return v.name }

// Size returns the size in bytes.
func (v *Volume) Size() int64 { return v.v.Info().Size }

// BlockSize returns the unit of offsets and lengths of writes, in bytes.
func (v *Volume) BlockSize() int { return v.v.Info().LogicalBlock }

// Device returns the volume as a device: batches and queues, for front ends inside this module.
func (v *Volume) Device() blockdev.Device { return v.v }

// ReadAt fills p from byte offset off. Neither needs to be aligned. ctx ends what has not begun: a request once made
// runs to its end, so that p is the caller's again when ReadAt returns.
func (v *Volume) ReadAt(ctx context.Context, p []byte, off int64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return v.io.Load().ReadAt(p, off)
}

// WriteAt stores p at byte offset off. Both off and len(p) are multiples of BlockSize; otherwise it returns
// ErrUnaligned and stores nothing. p may be reused after return.
//
// The data is readable on return, and survives a power cut once Flush returns, or at once with FUA. Concurrent calls
// are safe; overlapping ones land one after the other, in some order. For ctx see ReadAt.
func (v *Volume) WriteAt(ctx context.Context, p []byte, off int64, flags WriteFlags) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return v.io.Load().WriteAt(p, off, flags.device())
}

// Flush makes durable all writes that had returned when it was called. If it fails, any of them may be lost that no Flush
// before has made durable, and so may those of others; the next Flush does not tell of that again.
func (v *Volume) Flush(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return v.io.Load().Flush()
}

// Discard says that n bytes at off are not needed any more; what they read as afterwards is not said. Both are
// multiples of BlockSize.
func (v *Volume) Discard(ctx context.Context, off, n int64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return v.io.Load().Discard(off, n)
}

// WriteZeroes makes n bytes at off read as zeroes. Both are multiples of BlockSize.
func (v *Volume) WriteZeroes(ctx context.Context, off, n int64, flags WriteFlags) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return v.io.Load().WriteZeroes(off, n, flags.device())
}

// A BlockState says where the data of a part of a volume is.
type BlockState uint8

// The states.
const (
	Uncached BlockState = iota // on the backing device alone; of a flash-only volume: nowhere, it reads as zeroes
	Clean                      // in the cache too
	Dirty                      // in the cache, and newer there
)

// EachState calls fn with the parts of a range of bytes, in order, until fn returns false. Parts next to each other
// may have the same state. ctx ends it between two parts.
func (v *Volume) EachState(ctx context.Context, off, n int64, fn func(s BlockState, off, n int64) bool) error {
	err := v.v.EachState(off, n, func(cached, dirty bool, off, n int64) bool {
		s := Uncached
		switch {
		case dirty:
			s = Dirty
		case cached:
			s = Clean
		}
		return ctx.Err() == nil && fn(s, off, n)
	})
	return errors.Join(err, ctx.Err())
}
