package daemon

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ubcache/ubcache"
	"github.com/ubcache/ubcache/internal/blockdev"
)

// A fakeSet is a cacheSet whose volumes are disks in memory, and that notes what is done with it.
type fakeSet struct {
	mu      sync.Mutex
	log     []string // "open", "volume a", "close a", "close"
	options ubcache.Options
	volumes map[string]*fakeVolume
	attrs   map[string]map[string]string // by object; those that begin with "stats" are read-only

	failOpen, failClose error
	failVolume          string        // the name of one that does not open
	opening, closing    chan struct{} // opening and closing wait for these, if not nil, or for the context
	stuck               bool          // closing does not mind the context
	wrap                func(blockdev.Device) blockdev.Device

	absent                           []ubcache.AbsentVolume
	flash                            []ubcache.FlashVolume
	failCreate, failGrow, failDelete error
	failCloseVolume                  error
}

func newFakeSet() *fakeSet {
	return &fakeSet{volumes: map[string]*fakeVolume{}, attrs: map[string]map[string]string{
		"set":   {"congested": "0.0k", "stats_total/cache_hits": "7"},
		"cache": {"nbuckets": "64"},
	}}
}

func (f *fakeSet) note(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.log = append(f.log, fmt.Sprintf(format, args...))
}

func (f *fakeSet) notes() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.log)
}

// open is Config.open.
func (f *fakeSet) open(ctx context.Context, o ubcache.Options) (cacheSet, error) {
	if f.opening != nil {
		select {
		case <-f.opening:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if f.failOpen != nil {
		return nil, f.failOpen
	}
	f.options = o
	f.note("open")
	return f, nil
}

func (f *fakeSet) OpenVolume(_ context.Context, o ubcache.VolumeOptions) (volume, error) {
	if o.Name == f.failVolume {
		return nil, errors.New("no such thing")
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.volumes[o.Name] != nil {
		return nil, fmt.Errorf("there is a volume %q already", o.Name)
	}
	mem, err := blockdev.Memory(1<<20, blockdev.MemoryOptions{LogicalBlock: 4096})
	if err != nil {
		return nil, err
	}
	v := &fakeVolume{options: o, dev: mem, note: f.note}
	if o.Flash != "" {
		for _, fv := range f.flash {
			if fv.Label == o.Flash || strconv.Itoa(fv.Slot) == o.Flash {
				v.slot = fv.Slot
			}
		}
	}
	if f.wrap != nil {
		v.dev = f.wrap(mem)
	}
	f.volumes[o.Name] = v
	f.attrs[o.Name] = map[string]string{"cache_mode": "[writethrough] writeback", "label": o.Name, "stats_total/bypassed": "0.0k"}
	f.log = append(f.log, "volume "+o.Name)
	return v, nil
}

func (f *fakeSet) Close(ctx context.Context) error {
	if f.closing != nil {
		select {
		case <-f.closing:
		case <-ctx.Done():
			if f.stuck {
				<-f.closing
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(f.volumes)) {
		f.volumes[name].dev.Close()
		f.note("close %s", name)
	}
	f.note("close")
	return f.failClose
}

func (f *fakeSet) Stats() ubcache.SetStats {
	return ubcache.SetStats{
		UUID: "11111111-0000-4000-8000-000000000001", BucketSize: 512 << 10, BlockSize: 4096, Buckets: 1 << 50, InUse: 12,
		Empty: 1, Clean: 2, Dirty: 3, Metadata: 4, Ready: 5, Pinned: 6, Fixed: 7, Suspect: 8, LiveBytes: 9, DirtyBytes: 10,
		Nodes: 11, NodeBytes: 12, JournalEntries: 13, JournalKeys: 14, JournalBytes: 15, Batches: 16, Evicted: 17,
		TreeDepth: 18, NodeReads: 19, NodeAppends: 20, NodeRewrites: 21, Splits: 22, NoBucket: 23, MaxLag: 24, ReplayedKeys: 25, MappedEntries: 26, Failed: "why",
		Sweeps: 27, NodesSwept: 28, NodesCoalesced: 29, NodesStale: 30, TreesLowered: 31, RoomWaits: 32, IndexNodes: 33, IndexKeys: 34, IndexUsedPercent: 35,
		DiscardedBuckets: 37, DiscardedBytes: 38, DiscardErrors: 39, MovedBytes: 40, MovedBuckets: 41, Verifications: 42, Mismatches: 43,
	}
}

func (f *fakeSet) GC() ubcache.GCStats {
	return ubcache.GCStats{
		Policy: "some", Running: true, Collections: 1, Last: 2 * time.Millisecond, Longest: 3 * time.Millisecond, Total: 4 * time.Millisecond,
		Interval: 5 * time.Millisecond, Nodes: 6, Holds: 7, LongestHold: 8 * time.Microsecond, TotalHold: 9 * time.Microsecond, Differences: 10,
	}
}

func (f *fakeSet) Stalls() []ubcache.Stall {
	return []ubcache.Stall{{Cause: "one", Count: 44, Total: 45 * time.Microsecond, Max: 46 * time.Microsecond}, {Cause: "another"}}
}

func (f *fakeSet) AbsentVolumes() []ubcache.AbsentVolume { return f.absent }

func (f *fakeSet) Objects() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Sorted(maps.Keys(f.attrs))
}

func (f *fakeSet) Attributes(object string) ([]ubcache.Attribute, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.attrs[object] == nil {
		return nil, fmt.Errorf("%w: %q", ubcache.ErrNoObject, object)
	}
	var list []ubcache.Attribute
	for _, name := range slices.Sorted(maps.Keys(f.attrs[object])) {
		list = append(list, ubcache.Attribute{Name: name, Value: f.attrs[object][name], Writable: name[:5] != "stats"})
	}
	return list, nil
}

func (f *fakeSet) Attribute(object, name string) (string, error) {
	list, err := f.Attributes(object)
	for _, a := range list {
		if a.Name == name {
			return a.Value, nil
		}
	}
	if err == nil {
		err = fmt.Errorf("%w: %q", ubcache.ErrNoAttribute, name)
	}
	return "", err
}

func (f *fakeSet) SetAttribute(ctx context.Context, object, name, value string) error {
	if _, err := f.Attribute(object, name); err != nil {
		return err
	}
	switch {
	case name[:5] == "stats":
		return fmt.Errorf("%w: %q", ubcache.ErrReadOnlyAttribute, name)
	case value == "bad":
		return fmt.Errorf("set: %w", &ubcache.ValueError{Attribute: name, Value: value, Want: "something else"})
	case value == "broken":
		return errors.New("the superblock could not be written")
	}
	if name == "flash_vol_create" {
		_, label, _ := strings.Cut(value, " ")
		_, err := f.CreateFlash(ctx, label, 1<<20)
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.attrs[object][name] = value
	return nil
}

func (f *fakeSet) CloseVolume(_ context.Context, name string) error {
	if f.failCloseVolume != nil {
		return f.failCloseVolume
	}
	f.mu.Lock()
	v := f.volumes[name]
	delete(f.volumes, name)
	delete(f.attrs, name)
	f.mu.Unlock()
	v.dev.Close()
	f.note("close %s", name)
	return nil
}

func (f *fakeSet) FlashVolumes() []ubcache.FlashVolume {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.flash)
}

func (f *fakeSet) CreateFlash(_ context.Context, label string, size int64) (int, error) {
	if f.failCreate != nil {
		return 0, f.failCreate
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	slot := 5
	for _, v := range f.flash {
		if v.Label == label {
			return 0, fmt.Errorf("%w: %q", ubcache.ErrFlashExists, label)
		}
		slot = max(slot, v.Slot+1)
	}
	f.flash = append(f.flash, ubcache.FlashVolume{Slot: slot, Label: label, Size: size})
	return slot, nil
}

func (f *fakeSet) GrowFlash(_ context.Context, name string, size int64) error {
	if f.failGrow != nil {
		return f.failGrow
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	i := slices.IndexFunc(f.flash, func(v ubcache.FlashVolume) bool { return v.Label == name })
	if size < f.flash[i].Size {
		return fmt.Errorf("%w: it has %d bytes already", ubcache.ErrFlashSize, f.flash[i].Size)
	}
	f.flash[i].Size = size
	return nil
}

func (f *fakeSet) DeleteFlash(_ context.Context, name string) error {
	if f.failDelete != nil {
		return f.failDelete
	}
	f.note("delete %s", name)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.flash = slices.DeleteFunc(f.flash, func(v ubcache.FlashVolume) bool {
		return v.Label == name || v.Label == "" && strconv.Itoa(v.Slot) == name
	})
	return nil
}

// A fakeVolume says of its first three quarters of a MiB that they are clean, clean again, and dirty, and of the
// rest that it is uncached.
type fakeVolume struct {
	options ubcache.VolumeOptions
	dev     blockdev.Device
	slot    int
	note    func(format string, args ...any)

	detached atomic.Bool
	dirty    atomic.Int64  // above 20 bytes
	end      chan error    // what WriteBack and Detach wait for and return; nil: they are done at once
	deaf     chan struct{} // if not nil, they wait for this too when they are cancelled
}

func (v *fakeVolume) WriteBack(ctx context.Context) error { return v.work(ctx, "flush") }

func (v *fakeVolume) Detach(ctx context.Context) error {
	err := v.work(ctx, "detach")
	v.detached.Store(err == nil)
	return err
}

func (v *fakeVolume) work(ctx context.Context, what string) error {
	v.note("%s %s begins", what, v.options.Name)
	defer v.note("%s %s ends", what, v.options.Name)
	if v.end == nil {
		return nil
	}
	select {
	case err := <-v.end:
		return err
	case <-ctx.Done():
		if v.deaf != nil {
			<-v.deaf
		}
		return fmt.Errorf("waiting: %w", ctx.Err())
	}
}

func (v *fakeVolume) Size() int64             { return v.dev.Info().Size }
func (v *fakeVolume) BlockSize() int          { return 4096 }
func (v *fakeVolume) Device() blockdev.Device { return v.dev }

func (v *fakeVolume) Stats() ubcache.VolumeStats {
	s := ubcache.VolumeStats{
		Flash: v.options.Flash != "", Slot: v.slot,
		Hits: 1, Misses: 2, BypassHits: 3, BypassMisses: 4, BypassedBytes: 5, BypassSequential: 6, BypassFull: 7, BypassMode: 8, BypassUnaligned: 9,
		MissCollisions: 10, ReadRaces: 11, Reads: 12, Writes: 13, Flushes: 14, Discards: 15, Zeroes: 16, ReadBytes: 17, WrittenBytes: 18,
		CacheReadErrors: 19, DirtyBytes: 20 + v.dirty.Load(), FillsSkipped: 21, InvalidationWaits: 22, CacheWriteErrors: 33, NoRoom: 34, DeclinedFull: 35, DeclinedNoRoom: 36, Mode: "writeback", State: "dirty",
	}
	if !s.Flash && !v.detached.Load() {
		s.Attached = true
		s.Writeback = ubcache.WritebackStats{
			Running: true, Draining: true, Rate: 23, Target: 24, Dirty: 25, Proportional: -26, Integral: 27, Change: -28, NextIO: 29 * time.Millisecond,
			KeysDone: 30, KeysFailed: 31, Errors: 32,
		}
	}
	return s
}

func (v *fakeVolume) EachState(_ context.Context, off, n int64, fn func(s ubcache.BlockState, off, n int64) bool) error {
	const quarter = 256 << 10
	for end := off + n; off < end; {
		part := min(quarter-off%quarter, end-off)
		if !fn([]ubcache.BlockState{ubcache.Clean, ubcache.Clean, ubcache.Dirty, ubcache.Uncached}[off/quarter], off, part) {
			break
		}
		off += part
	}
	return nil
}
