package ubcache

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/sim"
	"github.com/ubcache/ubcache/internal/volume"
)

// The geometry of the crash loops: 8 KiB buckets, 513 of them, blocks of 512 bytes, a journal of four buckets, and two
// volumes that do not fit in together.
const (
	crashBucket = 8 << 10
	crashCache  = 513 * crashBucket
	crashOffset = 8 << 10
)

var crashSizes = []int64{3 << 20, 2 << 20}

// A target is a volume as the simulation wants it.
type target struct{ *Volume }

func (t target) WriteAt(ctx context.Context, p []byte, off int64, fua bool) error {
	return t.Volume.WriteAt(ctx, p, off, flagsOf(fua))
}

func (t target) WriteZeroes(ctx context.Context, off, n int64, fua bool) error {
	return t.Volume.WriteZeroes(ctx, off, n, flagsOf(fua))
}

func flagsOf(fua bool) WriteFlags {
	if fua {
		return FUA
	}
	return 0
}

// crashSet is what a life of the simulation runs: a set with all its volumes.
type crashSet struct{ set *CacheSet }

// An opening is how a life opens its set and the volumes.
type opening struct {
	mode   string
	order  string                       // crash_stability; "": the default
	flash  bool                         // with a flash-only volume, beside the others
	drain  func(v *volume.Volume) error // sets how dirty data is written back; nil: as usual
	broken cacheset.Broken

	restless bool   // work in the background never rests
	policy   string // gc_policy; "": the default
}

func (o opening) open(ctx context.Context, e *sim.Env) (*sim.System, error) {
	set, err := Open(ctx, Options{CacheDevice: e.Devices[0], RuntimeDir: e.Dir, NodeCache: 64 << 10, broken: o.broken, restless: o.restless})
	if err != nil {
		return nil, err
	}
	s := &sim.System{Own: crashSet{set}}
	s.Close = func(ctx context.Context) error { return set.Close(ctx) }
	if o.policy != "" {
		if err := set.SetAttribute(ctx, "set", "gc_policy", o.policy); err != nil {
			_ = set.Close(ctx)
			return nil, err
		}
	}
	if err := o.volumes(ctx, e, set, s); err != nil {
		_ = set.Close(ctx)
		return nil, err
	}
	return s, nil
}

// volumes opens the volumes.
func (o opening) volumes(ctx context.Context, e *sim.Env, set *CacheSet, s *sim.System) error {
	for i, dev := range e.Devices[1:] {
		name := "volume" + strconv.Itoa(i)
		v, err := set.OpenVolume(ctx, VolumeOptions{Name: name, BackingDevice: dev})
		if err != nil {
			return err
		}
		if err := set.SetAttribute(ctx, name, "cache_mode", o.mode); err != nil {
			return err
		}
		if o.order != "" {
			if err := set.SetAttribute(ctx, name, "crash_stability", o.order); err != nil {
				return err
			}
		}
		if o.drain != nil {
			if err := o.drain(v.v); err != nil {
				return err
			}
		}
		s.Targets = append(s.Targets, target{v})
	}
	if !o.flash {
		return nil
	}
	v, err := set.OpenVolume(ctx, VolumeOptions{Name: "flash", Flash: "flash"})
	if err == nil {
		s.Targets = append(s.Targets, target{v})
	}
	return err
}

func openCrash(ctx context.Context, e *sim.Env, mode string) (*sim.System, error) {
	return opening{mode: mode}.open(ctx, e)
}

// flashLoop is a loop with a flash-only volume, all of whose data is dirty: the cache has the only copy.
func flashLoop(seed uint64) sim.Loop {
	l := withFlash(crashLoop(seed, "writethrough"), 1<<20)
	l.Build = opening{mode: "writethrough", flash: true}.open
	l.Reopen = l.Build
	return l
}

// withFlash adds a flash-only volume to a loop, which has to open it.
func withFlash(l sim.Loop, size int64) sim.Loop {
	l.Volumes = append(l.Volumes, sim.Volume{Size: size, Block: 512, Zero: true})
	prepare := l.Prepare
	l.Prepare = func(ctx context.Context, e *sim.Env) error {
		if err := prepare(ctx, e); err != nil {
			return err
		}
		set, err := Open(ctx, Options{CacheDevice: e.Devices[0]})
		if err != nil {
			return err
		}
		_, err = set.CreateFlash(ctx, "flash", size)
		if cerr := set.Close(ctx); err == nil {
			err = cerr
		}
		return err
	}
	return l
}

// TestFlashOnlyPowerCuts cuts the power of a set with a flash-only volume.
func TestFlashOnlyPowerCuts(t *testing.T) {
	for _, seed := range sim.Seeds(1) {
		l := flashLoop(seed)
		l.Step = crashStep(29)
		l.Run(t)
		l.Lives, l.Step = 3, crashStep(150)
		l.Run(t)
	}
}

// crashLoop returns a loop over two volumes in one mode. Where the mode is "changing", each volume changes it now and
// then.
func crashLoop(seed uint64, mode string) sim.Loop { return loopOver(seed, mode, crashSizes...) }

// loopOver returns a loop over volumes of these sizes in one mode.
func loopOver(seed uint64, mode string, sizes ...int64) sim.Loop {
	first := mode
	if mode == "changing" {
		first = "writethrough"
	}
	l := sim.Loop{
		Seed:     seed,
		Disks:    []sim.Disk{{Size: crashCache}},
		Workload: sim.Workload{Requests: 300},
		Prepare: func(ctx context.Context, e *sim.Env) error {
			o := offline.FormatOptions{Cache: e.Devices[0], Backing: e.Devices[1:], Bucket: crashBucket, Block: 512, SetUUID: ondisk.UUID{1, 2, 3}}
			if _, err := offline.Format(ctx, o); err != nil {
				return err
			}
			for i, size := range sizes {
				if err := sim.FillDevice(e.Devices[i+1], crashOffset, i, sim.Volume{Size: size, Block: 512}); err != nil {
					return err
				}
			}
			return fillCache(ctx, e, first)
		},
		Build:  opening{mode: first}.open,
		Reopen: opening{mode: first}.open,
		Stir: func(ctx context.Context, e *sim.Env, s *sim.System) error {
			// Twice all over, with fills that evict: the volumes do not fit in.
			rng := rand.New(rand.NewPCG(e.Seed, 1))
			buf := make([]byte, 64<<10)
			for range 100 {
				t := s.Targets[rng.IntN(len(s.Targets))]
				off := rng.Int64N(t.Size()-int64(len(buf))) &^ 511
				if err := t.ReadAt(ctx, buf, off); err != nil {
					return err
				}
			}
			return s.Targets[0].Flush(ctx)
		},
		Check: checkAtRest,
		Alone: backingAlone,
	}
	for _, size := range sizes {
		l.Disks = append(l.Disks, sim.Disk{Size: size + crashOffset})
		l.Volumes = append(l.Volumes, sim.Volume{Size: size, Block: 512})
	}
	if mode == "changing" {
		modes := []string{"writethrough", "writearound", "none"}
		l.Between = func(ctx context.Context, e *sim.Env, s *sim.System, n int) error {
			if n%20 != 10 {
				return nil
			}
			return s.Own.(crashSet).set.SetAttribute(ctx, "volume"+strconv.Itoa(n/20%len(sizes)), "cache_mode", modes[n/40%3])
		}
	}
	return l
}

// fillCache reads until the cache is nearly full and stops, so that what the load overwrites is durably cached.
func fillCache(ctx context.Context, e *sim.Env, mode string) error {
	s, err := openCrash(ctx, e, mode)
	if err != nil {
		return err
	}
	buf := make([]byte, 48<<10)
	for i, t := range s.Targets {
		for off := int64(0); off+int64(len(buf)) <= t.Size()*3/5; off += int64(len(buf)) {
			if err := t.ReadAt(ctx, buf, off); err != nil {
				return err
			}
		}
		if err := s.Targets[i].Flush(ctx); err != nil {
			return err
		}
	}
	return s.Close(ctx)
}

// checkAtRest looks at what is on the disks with the offline checker, which shares no code with the engine.
func checkAtRest(ctx context.Context, r sim.Rest) error {
	var all []blockdev.Device
	for _, d := range r.Images[1:] {
		all = append(all, d)
	}
	s, _, err := offline.Check(ctx, r.Images[0], all, offline.CheckOptions{})
	if s != nil {
		defer s.Close()
	}
	if err != nil {
		return err
	}
	for _, f := range s.Report.Findings() {
		// A kernel may write CLEAN before it is true, we never do (F 10).
		if f.Severity > offline.Harmless || f.Code == offline.DirtyUnderClean {
			return fmt.Errorf("check: %s", f.String())
		}
	}
	return nil
}

// backingAlone returns the data of each backing device whose superblock says that nothing of it is in the cache alone.
func backingAlone(r sim.Rest) ([][]byte, error) {
	var volumes [][]byte
	for _, d := range r.Images[1:] {
		sb, err := readSuper(d)
		if err != nil {
			return nil, err
		}
		var p []byte
		if state := sb.State(); state == ondisk.StateClean || state == ondisk.StateNone {
			p = d.Bytes()[sb.DataOffset()*ondisk.SectorSize:]
		}
		volumes = append(volumes, p)
	}
	return volumes, nil
}

// crashStep is every how many operations the power is cut. With UBCACHE_EVERY_CUT set ("make long") it is each.
func crashStep(usual int) int {
	switch {
	case os.Getenv("UBCACHE_EVERY_CUT") != "":
		return 1
	case testing.Short():
		return 60 * usual
	}
	return usual
}

// crashModes returns the modes to try: in short tests the last, which has all.
func crashModes(modes ...string) []string {
	if testing.Short() {
		return modes[len(modes)-1:]
	}
	return modes
}

// TestPowerCuts cuts the power at every fifth operation of a load, in each mode.
func TestPowerCuts(t *testing.T) {
	for _, mode := range crashModes("writethrough", "writearound", "none", "changing") {
		t.Run(mode, func(t *testing.T) {
			for _, seed := range sim.Seeds(1) {
				l := crashLoop(seed, mode)
				l.Step = crashStep(12)
				begin := time.Now()
				l.Run(t)
				t.Logf("seed %d: %v", seed, time.Since(begin))
			}
		})
	}
}

// TestReadsWhileRunning runs loads to their end: each block is linearizable, and a stop loses nothing.
func TestReadsWhileRunning(t *testing.T) {
	for _, mode := range crashModes("writethrough", "writearound", "changing") {
		t.Run(mode, func(t *testing.T) {
			seeds := 20
			if testing.Short() {
				seeds = 2
			}
			for _, seed := range sim.Seeds(seeds) {
				l := crashLoop(seed, mode)
				l.Most = -1
				l.Run(t)
			}
		})
	}
}

// TestKills kills the process at operations of a load: what was acknowledged is there.
func TestKills(t *testing.T) {
	for _, seed := range sim.Seeds(1) {
		l := crashLoop(seed, "changing")
		l.Kill, l.Step = true, crashStep(25)
		l.Run(t)
	}
}

// TestLivesInARow lets a set die several times, each time while it recovers or soon after.
func TestLivesInARow(t *testing.T) {
	for _, seed := range sim.Seeds(1) {
		l := crashLoop(seed, "changing")
		l.Lives, l.Step = 4, crashStep(60)
		l.Run(t)
	}
}

// TestKillsWithoutRuntimeDir kills the process where it has no folder in memory: writes wait for the journal.
func TestKillsWithoutRuntimeDir(t *testing.T) {
	for _, seed := range sim.Seeds(1) {
		l := dirtyLoop(seed, "changing", 100)
		build := l.Build
		l.Build = func(ctx context.Context, e *sim.Env) (*sim.System, error) {
			e.Dir = ""
			return build(ctx, e)
		}
		l.Reopen = l.Build
		l.Kill, l.Lives, l.Step = true, 2, crashStep(50)
		l.Run(t)
	}
}

// largeBlockLoop is a loop with blocks of 4 KiB, larger buckets and volumes, and slow backing devices.
func largeBlockLoop(seed uint64) sim.Loop {
	const bucket = 32 << 10
	l := crashLoop(seed, "changing")
	blocks := blockdev.MemoryOptions{LogicalBlock: 4096, PhysicalBlock: 4096}
	slow := []blockdev.Latency{
		{Read: 3 * time.Millisecond, Write: 5 * time.Millisecond, Flush: 8 * time.Millisecond, Jitter: 1, Parallel: 8},
		{Read: 100 * time.Microsecond, Write: 3 * time.Millisecond, Flush: 30 * time.Millisecond, Jitter: 1, Parallel: 8},
	}
	l.Disks, l.Volumes = []sim.Disk{{Size: 520 * bucket, Options: blocks}}, nil
	for i, size := range []int64{12 << 20, 9 << 20} {
		l.Disks = append(l.Disks, sim.Disk{Size: size + crashOffset, Options: blocks, Latency: slow[i]})
		l.Volumes = append(l.Volumes, sim.Volume{Size: size, Block: 4096})
	}
	l.Prepare = func(ctx context.Context, e *sim.Env) error {
		o := offline.FormatOptions{Cache: e.Devices[0], Backing: e.Devices[1:], Bucket: bucket, Block: 4096, SetUUID: ondisk.UUID{1, 2, 3}}
		if _, err := offline.Format(ctx, o); err != nil {
			return err
		}
		for i, v := range l.Volumes {
			if err := sim.FillDevice(e.Devices[i+1], crashOffset, i, v); err != nil {
				return err
			}
		}
		return fillCache(ctx, e, "writethrough")
	}
	l.Workload = sim.Workload{
		Requests: 300, Clients: 12, Large: 64, Weights: sim.Weights{Read: 30, Write: 20, FUA: 5, Flush: 10, Discard: 15, Zeroes: 15},
	}
	return l
}

// TestPowerCutsWithLargeBlocks cuts the power of a set with blocks of 4 KiB.
func TestPowerCutsWithLargeBlocks(t *testing.T) {
	if testing.Short() {
		t.Skip("TestPowerCuts is done")
	}
	for _, seed := range sim.Seeds(1) {
		l := largeBlockLoop(seed)
		l.Step = crashStep(100)
		l.Run(t)
	}
}
