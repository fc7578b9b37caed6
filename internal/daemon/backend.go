package daemon

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/ubcache/ubcache"
	"github.com/ubcache/ubcache/internal/control"
	"github.com/ubcache/ubcache/internal/nbd"
)

// A backend answers the control socket's questions from the running set.
type backend struct {
	version string
	started time.Time
	log     *slog.Logger
	jobs    jobs
	flash   chan struct{} // taken by who changes flash-only volumes: one at a time

	drainLimit time.Duration // for requests in flight where a volume is taken away

	mu       sync.RWMutex // guards what follows, not held while the set is asked
	set      cacheSet     // nil until it runs, as are nbd and addrs
	nbd      *nbd.Server
	addrs    []net.Addr
	volumes  []namedVolume // in the order of the exports; replaced as a whole
	stopping bool
}

type namedVolume struct {
	name string
	volume
}

func newBackend(c *Config) *backend {
	return &backend{
		version: c.Version, started: time.Now(), log: c.Log, jobs: jobs{log: c.Log}, flash: make(chan struct{}, 1), drainLimit: c.drainLimit,
	}
}

// add names a volume.
func (b *backend) add(name string, v volume) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.volumes = append(slices.Clip(b.volumes), namedVolume{name, v})
}

// remove forgets a volume.
func (b *backend) remove(name string) {
	b.jobs.forget(name)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.volumes = slices.DeleteFunc(slices.Clone(b.volumes), func(v namedVolume) bool { return v.name == name })
}

// served returns the volumes that are served.
func (b *backend) served() []namedVolume {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.volumes
}

// find returns the volume of that name.
func (b *backend) find(name string) (volume, error) {
	var known []string
	for _, v := range b.served() {
		if v.name == name {
			return v.volume, nil
		}
		known = append(known, v.name)
	}
	return nil, control.NoVolume(name, known)
}

// start lets questions be answered. stop lets nothing be changed any more, and ends the jobs.
func (b *backend) start(set cacheSet, server *nbd.Server, addrs []net.Addr) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.set, b.nbd, b.addrs = set, server, addrs
}

func (b *backend) stop() {
	b.mu.Lock()
	b.stopping = true
	b.mu.Unlock()
	b.jobs.stop()
}

// running returns the set, or why it cannot be asked, or changed.
func (b *backend) running(change bool) (cacheSet, error) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	switch {
	case b.set == nil:
		return nil, control.Starting()
	case change && b.stopping:
		return nil, control.Stopping()
	}
	return b.set, nil
}

// Status implements control.Backend.
func (b *backend) Status(context.Context) (*control.Status, error) {
	set, err := b.running(false)
	if err != nil {
		return nil, err
	}
	s := &control.Status{
		Version: b.version, PID: os.Getpid(), Started: b.started, Set: setStatus(set.Stats(), set.GC(), set.Stalls()), Volumes: []control.Volume{},
	}
	for _, a := range set.AbsentVolumes() {
		s.Set.Absent = append(s.Set.Absent, control.AbsentVolume{Slot: control.Num(a.Slot), UUID: a.UUID, Label: a.Label, DirtyBytes: control.Num(a.Dirty)})
	}
	connections := b.connections()
	for _, v := range b.served() {
		stats := v.Stats()
		o := control.Volume{
			Name: v.name, SizeBytes: control.Num(v.Size()), BlockBytes: control.Num(v.BlockSize()), Mode: stats.Mode, State: stats.State,
			NBD: b.uris(v.name), Connections: control.Num(connections[v.name]), Flash: stats.Flash, Counters: counters(&stats),
		}
		if stats.Attached {
			o.Writeback = writebackStatus(&stats.Writeback)
		}
		if j, err := b.jobs.find(v.name); err == nil {
			o.Job = j.status()
		}
		s.Volumes = append(s.Volumes, o)
	}
	s.Total = control.Sum(s.Volumes)
	return s, nil
}

// connections counts those of each export.
func (b *backend) connections() map[string]int {
	n := map[string]int{}
	for _, c := range b.nbd.Connections() {
		n[c.Export]++
	}
	return n
}

// uris says where a volume is served.
func (b *backend) uris(name string) (list []string) {
	for _, a := range b.addrs {
		list = append(list, nbd.Address{Network: a.Network(), Addr: a.String(), Export: name}.String())
	}
	return list
}

func writebackStatus(w *ubcache.WritebackStats) *control.Writeback {
	return &control.Writeback{
		Running: w.Running, Draining: w.Draining, Detaching: w.Detaching, AtMax: w.AtMax,
		Rate: control.Num(w.Rate), Target: control.Num(w.Target), Dirty: control.Num(w.Dirty), Proportional: control.Num(w.Proportional),
		Integral: control.Num(w.Integral), Change: control.Num(w.Change), NextIO: control.Num(w.NextIO.Milliseconds()),
		KeysDone: control.Num(w.KeysDone), KeysFailed: control.Num(w.KeysFailed), Errors: control.Num(w.Errors),
	}
}

func setStatus(s ubcache.SetStats, gc ubcache.GCStats, stalls []ubcache.Stall) control.Set {
	waits := map[string]control.Stall{}
	for _, w := range stalls {
		waits[w.Cause] = control.Stall{Count: control.Num(w.Count), Total: control.Num(w.Total.Microseconds()), Max: control.Num(w.Max.Microseconds())}
	}
	return control.Set{
		UUID: s.UUID, Failed: s.Failed, BucketBytes: control.Num(s.BucketSize), BlockBytes: control.Num(s.BlockSize), InUsePercent: control.Num(s.InUse),
		Buckets: control.Buckets{
			Total: control.Num(s.Buckets), Available: control.Num(s.Empty + s.Clean + s.Ready),
			Empty: control.Num(s.Empty), Clean: control.Num(s.Clean), Ready: control.Num(s.Ready),
			Dirty: control.Num(s.Dirty), Metadata: control.Num(s.Metadata), Pinned: control.Num(s.Pinned),
			Fixed: control.Num(s.Fixed), Suspect: control.Num(s.Suspect),
		},
		CachedBytes: control.Num(s.LiveBytes), DirtyBytes: control.Num(s.DirtyBytes),
		Btree: control.Btree{
			Nodes: control.Num(s.Nodes), Bytes: control.Num(s.NodeBytes), Depth: control.Num(s.TreeDepth), Reads: control.Num(s.NodeReads),
			Appends: control.Num(s.NodeAppends), Rewrites: control.Num(s.NodeRewrites), Splits: control.Num(s.Splits),
			Sweeps: control.Num(s.Sweeps), Swept: control.Num(s.NodesSwept), Coalesced: control.Num(s.NodesCoalesced), Stale: control.Num(s.NodesStale),
			Lowered: control.Num(s.TreesLowered), RoomWaits: control.Num(s.RoomWaits),
			TreeNodes: control.Num(s.IndexNodes), Keys: control.Num(s.IndexKeys), UsedPercent: control.Num(s.IndexUsedPercent),
		},
		Journal: control.Journal{
			Entries: control.Num(s.JournalEntries), Keys: control.Num(s.JournalKeys), Bytes: control.Num(s.JournalBytes),
			Replayed: control.Num(s.ReplayedKeys), Mapped: control.Num(s.MappedEntries),
		},
		Batches: control.Num(s.Batches), Evicted: control.Num(s.Evicted), NoBucket: control.Num(s.NoBucket), MaxLag: control.Num(s.MaxLag),
		Discarded: control.Num(s.DiscardedBuckets), DiscardedBytes: control.Num(s.DiscardedBytes), DiscardErrors: control.Num(s.DiscardErrors),
		MovedBytes: control.Num(s.MovedBytes), MovedBuckets: control.Num(s.MovedBuckets),
		Verified: control.Num(s.Verifications), Mismatches: control.Num(s.Mismatches), Stalls: waits,
		Collection: control.Collection{
			Policy: gc.Policy, Running: gc.Running, Count: control.Num(gc.Collections), Last: control.Num(gc.Last.Milliseconds()),
			Longest: control.Num(gc.Longest.Milliseconds()), Total: control.Num(gc.Total.Milliseconds()), Interval: control.Num(gc.Interval.Milliseconds()),
			Nodes: control.Num(gc.Nodes), Holds: control.Num(gc.Holds), LongestHold: control.Num(gc.LongestHold.Microseconds()),
			TotalHold: control.Num(gc.TotalHold.Microseconds()), Differences: control.Num(gc.Differences),
		},
	}
}

func counters(v *ubcache.VolumeStats) control.Counters {
	c := control.Counters{
		DirtyBytes: control.Num(v.DirtyBytes),
		Requests: control.Requests{
			Reads: control.Num(v.Reads), ReadBytes: control.Num(v.ReadBytes), Writes: control.Num(v.Writes), WrittenBytes: control.Num(v.WrittenBytes),
			Flushes: control.Num(v.Flushes), Discards: control.Num(v.Discards), Zeroes: control.Num(v.Zeroes),
		},
		Cache: control.Cache{
			Hits: control.Num(v.Hits), Misses: control.Num(v.Misses), MissCollisions: control.Num(v.MissCollisions),
			FillsSkipped: control.Num(v.FillsSkipped), Waits: control.Num(v.InvalidationWaits), ReadRaces: control.Num(v.ReadRaces), ReadErrors: control.Num(v.CacheReadErrors),
			WriteErrors: control.Num(v.CacheWriteErrors), NoRoom: control.Num(v.NoRoom),
		},
		Bypassed: control.Bypassed{
			ReadHits: control.Num(v.BypassHits), ReadMisses: control.Num(v.BypassMisses), Bytes: control.Num(v.BypassedBytes),
			ByReason: map[string]control.Number{
				"sequential": control.Num(v.BypassSequential), "cache_full": control.Num(v.BypassFull),
				"mode": control.Num(v.BypassMode), "unaligned": control.Num(v.BypassUnaligned),
			},
		},
	}
	if !v.Flash {
		c.Declined = map[string]control.Number{"in_use": control.Num(v.DeclinedFull), "no_room": control.Num(v.DeclinedNoRoom)}
	}
	c.Cache.HitRatioPercent = c.Cache.HitRatio()
	return c
}

// Objects implements control.Backend.
func (b *backend) Objects(context.Context) ([]string, error) {
	set, err := b.running(false)
	if err != nil {
		return nil, err
	}
	return set.Objects(), nil
}

// Attributes implements control.Backend.
func (b *backend) Attributes(_ context.Context, object string) ([]control.Attribute, error) {
	set, err := b.running(false)
	if err != nil {
		return nil, err
	}
	attributes, err := set.Attributes(object)
	if err != nil {
		return nil, attributeError(set, object, "", "", err)
	}
	list := make([]control.Attribute, len(attributes))
	for i, a := range attributes {
		list[i] = control.Attribute{Name: a.Name, Value: a.Value, Writable: a.Writable}
	}
	return list, nil
}

// Attribute implements control.Backend.
func (b *backend) Attribute(_ context.Context, object, name string) (string, error) {
	set, err := b.running(false)
	if err != nil {
		return "", err
	}
	value, err := set.Attribute(object, name)
	return value, attributeError(set, object, name, "", err)
}

// SetAttribute implements control.Backend. What makes an export, ends one, or takes long, is done here.
func (b *backend) SetAttribute(ctx context.Context, object, name, value string) error {
	set, err := b.running(true)
	if err != nil {
		return err
	}
	v, _ := b.find(object)
	switch flash := v != nil && v.Stats().Flash; {
	case name == "detach" && v != nil && !flash:
		_, err := b.StartJob(ctx, object, control.Detach)
		return err
	case name == "unregister" && flash:
		unique, err := ubcache.FlashName(set.FlashVolumes(), v.Stats().Slot)
		if err == nil {
			_, err = b.DeleteFlash(ctx, unique, false)
		}
		return err
	case name == "flash_vol_create" && object == "set":
		return b.flashVolCreate(ctx, set, value)
	case name == "size" && flash:
		unlock, err := b.lockFlash(ctx)
		if err != nil {
			return err
		}
		defer unlock()
	}
	return attributeError(set, object, name, value, set.SetAttribute(ctx, object, name, value))
}

// attributeError gives an error of a set the form of the control socket, with what there is instead.
func attributeError(set cacheSet, object, name, value string, err error) error {
	var bad *ubcache.ValueError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ubcache.ErrNoObject):
		return control.NoObject(object, set.Objects())
	case errors.Is(err, ubcache.ErrNoAttribute):
		var known []string
		list, _ := set.Attributes(object)
		for _, a := range list {
			known = append(known, a.Name)
		}
		return control.NoAttribute(object, name, known)
	case errors.Is(err, ubcache.ErrReadOnlyAttribute):
		return control.ReadOnly(object, name)
	case errors.Is(err, ubcache.ErrDetached):
		return control.Detached(object)
	case errors.As(err, &bad):
		return control.BadValue(object, name, value, bad.Want)
	}
	return err
}
