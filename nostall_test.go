package ubcache

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/rt"
)

// A pressure is what a cache set is put under: a flash-only volume, all of it written, in blocks of 4 KiB of which no two are
// one extent, that clients read and write at random without pause, each its own blocks, whose content they know.
type pressure struct {
	rt       *rt.Runtime
	set      *CacheSet
	v        *Volume
	versions []uint64
	think    time.Duration // that clients rest between requests, at most
	most     time.Duration // that a request may take; 0: a second

	lat     []time.Duration
	longest time.Duration // between two completions
	last    time.Duration
	failed  error
}

const pressureBlock = 4096

// pressedBucket is the size of a bucket.
const pressedBucket = 64 << 10

// newPressure formats dev, opens a set and fills a volume of so many blocks.
func newPressure(dev blockdev.Device, o Options, blocks int) (*pressure, error) {
	ctx := context.Background()
	if _, err := offline.Format(ctx, offline.FormatOptions{Cache: dev, Bucket: pressedBucket, Block: pressureBlock}); err != nil {
		return nil, err
	}
	o.CacheDevice = dev
	set, err := Open(ctx, o)
	if err != nil {
		return nil, err
	}
	p := &pressure{rt: blockdev.RuntimeOf(dev), set: set, versions: make([]uint64, blocks)}
	if _, err = set.CreateFlash(ctx, "flash", int64(blocks)*pressureBlock); err == nil {
		err = p.openVolume()
	}
	if err != nil {
		return nil, errors.Join(err, set.Close(ctx))
	}
	order := rand.New(rand.NewPCG(16, 16)).Perm(blocks)
	const fillers = 32
	p.each(fillers, func(c int, buf []byte) error {
		for i := c; i < blocks; i += fillers {
			if err := p.write(order[i], buf); err != nil {
				return err
			}
		}
		return nil
	})
	if p.failed != nil {
		return nil, errors.Join(p.failed, set.Close(ctx))
	}
	return p, nil
}

func (p *pressure) openVolume() (err error) {
	p.v, err = p.set.OpenVolume(context.Background(), VolumeOptions{Name: "flash", Flash: "flash"})
	return err
}

// each runs fn for so many clients beside one another.
func (p *pressure) each(clients int, fn func(c int, buf []byte) error) {
	var group rt.WaitGroup
	group.Init(p.rt)
	errs := make([]error, clients)
	for c := range clients {
		group.Go("client", func() { errs[c] = fn(c, make([]byte, pressureBlock)) })
	}
	group.Wait()
	p.failed = errors.Join(p.failed, errors.Join(errs...))
}

func (p *pressure) write(block int, buf []byte) error {
	p.versions[block]++
	copy(buf, pattern(int64(block)*pressureBlock, len(buf), p.versions[block]))
	begin := p.rt.Now()
	if err := p.v.WriteAt(context.Background(), buf, int64(block)*pressureBlock, 0); err != nil {
		return fmt.Errorf("after %v: %w: %v", p.rt.Now()-begin, err, p.set.set.Info().Buckets)
	}
	return nil
}

func (p *pressure) check(block int, buf []byte) error {
	if err := p.v.ReadAt(context.Background(), buf, int64(block)*pressureBlock); err != nil {
		return err
	}
	if !bytes.Equal(buf, pattern(int64(block)*pressureBlock, len(buf), p.versions[block])) {
		return fmt.Errorf("block %d reads as %x", block, buf[:16])
	}
	return nil
}

// run has clients read and write, half and half, until so many requests were made or the time is over, and keeps how long
// each took.
func (p *pressure) run(clients, requests int, long time.Duration) {
	var mu rt.Mutex
	mu.Init(p.rt)
	p.lat, p.longest, p.last = nil, 0, p.rt.Now()
	end := p.rt.Now() + long
	p.each(clients, func(c int, buf []byte) error {
		rng := rand.New(rand.NewPCG(uint64(c), uint64(clients)))
		own := len(p.versions) / clients
		var lat []time.Duration
		for range requests / clients {
			if p.rt.Now() >= end {
				break
			}
			block := c*own + rng.IntN(own)
			begin := p.rt.Now()
			var err error
			if rng.IntN(2) == 0 {
				err = p.check(block, buf)
			} else {
				err = p.write(block, buf)
			}
			if err != nil {
				return err
			}
			now := p.rt.Now()
			lat = append(lat, now-begin)
			mu.Lock()
			p.longest, p.last = max(p.longest, now-p.last), now
			mu.Unlock()
			if p.think > 0 {
				p.rt.Sleep(time.Duration(rng.Int64N(int64(p.think))))
			}
		}
		mu.Lock()
		p.lat = append(p.lat, lat...)
		mu.Unlock()
		return nil
	})
	slices.Sort(p.lat)
}

// at returns the latency that so many of 1000 requests did not exceed.
func (p *pressure) at(perMille float64) time.Duration {
	return p.lat[min(int(perMille*float64(len(p.lat))/1000), len(p.lat)-1)]
}

func (p *pressure) String() string {
	return fmt.Sprintf("%d requests, p50 %v, p99 %v, p99.9 %v, most %v, longest gap %v", len(p.lat), p.at(500), p.at(990), p.at(999),
		p.at(1000), p.longest)
}

// reread opens the set again and reads all of the volume.
func (p *pressure) reread(dev blockdev.Device) (err error) {
	ctx := context.Background()
	if err := p.set.Close(ctx); err != nil {
		return err
	}
	if p.set, err = Open(ctx, Options{CacheDevice: dev}); err != nil {
		return err
	}
	if err := p.openVolume(); err != nil {
		return err
	}
	const readers = 16
	p.each(readers, func(c int, buf []byte) error {
		for i := c; i < len(p.versions); i += readers {
			if err := p.check(i, buf); err != nil {
				return err
			}
		}
		return nil
	})
	return p.failed
}

// checkCache looks at a cache device with the offline checker.
func checkCache(dev blockdev.Device) error {
	s, _, err := offline.Check(context.Background(), dev, nil, offline.CheckOptions{})
	if s != nil {
		defer s.Close()
	}
	if err != nil {
		return err
	}
	for _, f := range s.Report.Findings() {
		if f.Severity > offline.Harmless {
			return fmt.Errorf("check: %s", f.String())
		}
	}
	return nil
}

// simulatePressure runs fn on a set in simulated time, on a device of that kind.
func simulatePressure(t *testing.T, l blockdev.Latency, buckets, blocks int, o Options, fn func(p *pressure, dev blockdev.Device) error) {
	t.Helper()
	if raced && testing.Short() {
		t.Skip("the race detector sees nothing in a simulation; without it this runs")
	}
	s := rt.NewSim(16)
	s.Limit = 10 * time.Hour
	o.RuntimeDir = t.TempDir()
	m, err := blockdev.Memory(int64(buckets)*pressedBucket, blockdev.MemoryOptions{Runtime: s.Runtime()})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	var failed error
	err = s.Run(func() {
		dev := blockdev.NewDelaying(m, l)
		p, err := newPressure(dev, o, blocks)
		if err != nil {
			failed = err
			return
		}
		failed = errors.Join(fn(p, dev), p.failed, p.set.Close(context.Background()))
	})
	if err := errors.Join(err, failed); err != nil {
		t.Fatal(err)
	}
	m.SetRuntime(rt.New())
	if err := checkCache(m); err != nil {
		t.Fatal(err)
	}
}

// done is what work in the background has done.
func (p *pressure) done() string {
	s := p.set.Stats()
	return fmt.Sprintf("%d sweeps, %d nodes swept, %d coalesced, %d rewritten, %d verifications, %d MiB moved", s.Sweeps, s.NodesSwept, s.NodesCoalesced,
		s.NodesStale, s.Verifications, s.MovedBytes>>20)
}

// With sweeps, verifier, maintenance and moving that never rest, 999 of 1000 requests are as fast as without, to a tenth
// (B 9.12). The device is like a SATA SSD.
func TestBackgroundWorkIsNotFelt(t *testing.T) {
	ssd, err := blockdev.LatencyPreset("ssd")
	if err != nil {
		t.Fatal(err)
	}
	for _, clients := range []int{1, 128} {
		t.Run(fmt.Sprint(clients), func(t *testing.T) {
			var p999 [2]time.Duration
			for i, restless := range []bool{false, true} {
				simulatePressure(t, ssd, 8192, 20_000, Options{restless: restless, NodeCache: 1 << 20}, func(p *pressure, _ blockdev.Device) error {
					if !restless {
						p.set.set.SetMoving(false)
					}
					p.run(clients, 60_000+1000*clients, time.Hour)
					if p.failed != nil {
						return nil
					}
					t.Logf("restless %v: %v; %s", restless, p, p.done())
					p999[i] = p.at(999)
					if s := p.set.Stats(); restless && (s.Sweeps < 3 || s.NodesCoalesced == 0 || s.Verifications < 3 || s.MovedBytes == 0) {
						return errors.New("not all was at work")
					}
					return nil
				})
			}
			ratio := float64(p999[1]) / float64(p999[0])
			t.Logf("p99.9 is %.3f of what it is without", ratio)
			if ratio > 1.1 {
				t.Errorf("p99.9 is %.3f of what it is without", ratio)
			}
		})
	}
}

// Clients that never rest overwrite a flash-only volume that takes 78 % of the buckets: each bucket they fill has to be made
// by moving, so who writes waits for that. What is moved lies a few extents a leaf, all over the index; it has to go together.
func TestMovingKeepsUp(t *testing.T) {
	slow := blockdev.Latency{Read: 700 * time.Microsecond, Write: 900 * time.Microsecond, Flush: time.Millisecond, Jitter: 0.4, Parallel: 32}
	for _, c := range []struct {
		clients int
		most    time.Duration // of a request
		gap     time.Duration
	}{{32, 60 * time.Millisecond, 30 * time.Millisecond}, {128, 250 * time.Millisecond, 50 * time.Millisecond}} {
		t.Run(fmt.Sprint(c.clients), func(t *testing.T) {
			simulatePressure(t, slow, 8192, 102_400, Options{NodeCache: 2 << 20}, func(p *pressure, _ blockdev.Device) error {
				p.run(c.clients, 1<<40, 5*time.Second)
				if p.failed != nil {
					return nil
				}
				t.Logf("%v; %s", p, p.done())
				if s := p.set.Stats(); s.MovedBytes == 0 {
					return errors.New("nothing had to be moved")
				}
				if most := p.at(1000); most > c.most || p.longest > c.gap || len(p.lat) < 70_000 {
					return fmt.Errorf("%d requests, one took %v, the longest gap was %v", len(p.lat), most, p.longest)
				}
				return nil
			})
		})
	}
}

// collected runs clients for so long, and has a sweep and a verification begin every so often. Each must come to its end,
// and no request take a second.
func (p *pressure) collected(clients int, long, every time.Duration) error {
	ctx := context.Background()
	before := p.set.Stats()
	var group rt.WaitGroup
	group.Init(p.rt)
	over, asked := false, uint64(0)
	var mu rt.Mutex
	mu.Init(p.rt)
	var failed error
	group.Go("collections", func() {
		for {
			end := false
			for begin := p.rt.Now(); !end && p.rt.Now()-begin < every; {
				p.rt.Sleep(min(every, 500*time.Millisecond))
				mu.Lock()
				end = over
				mu.Unlock()
			}
			if end || failed != nil {
				return
			}
			asked++
			p.set.set.TriggerGC()
			failed = p.set.Verify(ctx)
		}
	})
	p.run(clients, 1<<40, long)
	mu.Lock()
	over = true
	mu.Unlock()
	group.Wait()
	if err := errors.Join(p.failed, failed); err != nil {
		return err
	}
	for try := 0; p.set.Stats().Sweeps-before.Sweeps < (asked+1)/2 && try < 100; try++ { // the last may still be under way
		p.rt.Sleep(100 * time.Millisecond)
	}
	s := p.set.Stats()
	if most := cmp.Or(p.most, time.Second); p.at(1000) > most || p.longest > most {
		return fmt.Errorf("a request took %v, the longest gap was %v", p.at(1000), p.longest)
	}
	// One that is asked for while one is under way comes behind it; two such are one.
	if s.Sweeps-before.Sweeps < (asked+1)/2 || s.Verifications-before.Verifications < asked || s.Mismatches+uint64(s.Suspect) > 0 {
		return fmt.Errorf("%d collections were asked for; since then %d sweeps, %d verifications, %d mismatches", asked, s.Sweeps-before.Sweeps,
			s.Verifications-before.Verifications, s.Mismatches)
	}
	return nil
}

// Case 16: a sweep and a verification every five seconds, for a minute; more than 2,000 buckets, more than 100,000 extents.
// In the second run there are hardly any free buckets, and what is written to there has to be moved together all the time.
func TestCollectionsStopNobody(t *testing.T) {
	slow := blockdev.Latency{Read: 700 * time.Microsecond, Write: 900 * time.Microsecond, Flush: time.Millisecond, Jitter: 0.4, Parallel: 32}
	for _, c := range []struct {
		name            string
		buckets, blocks int
		clients         int
		think           time.Duration
		disk            blockdev.Latency
	}{
		{"depth 1", 8192, 102_400, 1, 0, slow}, // not so many requests in a minute
		{"depth 128", 8192, 102_400, 128, 40 * time.Millisecond, slow},
		{"nearly full", 8192, 117_000, 16, 16 * time.Millisecond, fast},
	} {
		t.Run(c.name, func(t *testing.T) {
			simulatePressure(t, c.disk, c.buckets, c.blocks, Options{NodeCache: 2 << 20}, func(p *pressure, dev blockdev.Device) error {
				p.think = c.think
				if err := p.collected(c.clients, time.Minute, 5*time.Second); err != nil {
					return err
				}
				t.Logf("%v; %s; %d percent in use", p, p.done(), p.set.Stats().InUse)
				return p.reread(dev)
			})
		})
	}
}

// Case 16 in real time, with devices in memory: three seconds, or a minute with UBCACHE_LONG.
func TestCollectionsStopNobodyNatively(t *testing.T) {
	long, every := 3*time.Second, 500*time.Millisecond
	switch {
	case os.Getenv("UBCACHE_LONG") != "":
		long, every = time.Minute, 5*time.Second
	case testing.Short():
		long, every = time.Second, 200*time.Millisecond
	}
	for _, c := range []struct {
		name                     string
		buckets, blocks, clients int
	}{{"depth 1", 16_384, 102_400, 1}, {"depth 128", 16_384, 102_400, 128}, {"nearly full", 8192, 117_000, 16}} {
		t.Run(c.name, func(t *testing.T) {
			dev, err := blockdev.Memory(int64(c.buckets)*pressedBucket, blockdev.MemoryOptions{})
			if err != nil {
				t.Fatal(err)
			}
			defer dev.Close()
			p, err := newPressure(dev, Options{RuntimeDir: t.TempDir()}, c.blocks)
			if err != nil {
				t.Fatal(err)
			}
			p.most = 5 * time.Second // the processors are anybody's; in simulated time it is a second
			if raced {
				p.most = 20 * time.Second // everything takes ten times as long
			}
			err = p.collected(c.clients, long, every)
			if err == nil {
				t.Logf("%v; %s; %d percent in use", p, p.done(), p.set.Stats().InUse)
				err = p.reread(dev)
			}
			if err := errors.Join(err, p.set.Close(context.Background()), checkCache(dev)); err != nil {
				t.Error(err)
			}
		})
	}
}

// flat runs p for so long in four parts, with collections, and demands that the last takes no more memory than the first, but
// a tenth, and some MiB.
func (p *pressure) flat(t *testing.T, clients int, long, every time.Duration) error {
	var used [4]uint64
	for i := range used {
		if err := p.collected(clients, long/4, every); err != nil {
			return err
		}
		p.lat = nil
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		statm, err := os.ReadFile("/proc/self/statm")
		if err != nil {
			return err
		}
		var mapped, resident uint64
		if _, err := fmt.Sscan(string(statm), &mapped, &resident); err != nil {
			return err
		}
		used[i] = m.HeapAlloc
		t.Logf("after %v: heap %d MiB, resident %d MiB, %d MiB of nodes; %s; %d percent in use", long/4*time.Duration(i+1), m.HeapAlloc>>20,
			resident*uint64(os.Getpagesize())>>20, p.set.set.Info().NodeBytes>>20, p.done(), p.set.Stats().InUse)
	}
	if used[3] > used[0]+used[0]/10+4<<20 {
		return fmt.Errorf("the heap grew from %d to %d bytes", used[0], used[3])
	}
	return nil
}

// Two simulated hours of random overwrites of a full cache, with a sweep and a verification every minute; or with UBCACHE_LONG
// unset, two minutes.
func TestHoursOfOverwrites(t *testing.T) {
	long := 2 * time.Minute
	if os.Getenv("UBCACHE_LONG") != "" {
		long = 2 * time.Hour
	}
	simulatePressure(t, fast, 2048, 29_000, Options{NodeCache: 1 << 20}, func(p *pressure, dev blockdev.Device) error {
		p.think = 200 * time.Millisecond
		if err := p.flat(t, 16, long, min(time.Minute, long/8)); err != nil {
			return err
		}
		return p.reread(dev)
	})
}

// The same on a file for as many real minutes as UBCACHE_MINUTES says; a few seconds without.
func TestMinutesOnAFile(t *testing.T) {
	long := 4 * time.Second
	if s := os.Getenv("UBCACHE_MINUTES"); s != "" {
		minutes, err := strconv.Atoi(s)
		if err != nil {
			t.Fatal(err)
		}
		long = time.Duration(minutes) * time.Minute
	}
	path := filepath.Join(t.TempDir(), "cache")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 2048*pressedBucket); err != nil {
		t.Fatal(err)
	}
	dev, err := blockdev.Open(path, blockdev.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	p, err := newPressure(dev, Options{RuntimeDir: t.TempDir(), NodeCache: 1 << 20}, 27_000)
	if err != nil {
		t.Fatal(err)
	}
	p.most = 9 * time.Second // the disk below is anybody's
	if err = p.flat(t, 16, long, min(10*time.Second, long/8)); err == nil {
		err = p.reread(dev)
	}
	if err := errors.Join(err, p.set.Close(context.Background()), checkCache(dev)); err != nil {
		t.Fatal(err)
	}
}

// BenchmarkBackgroundWork is what clients feel of work in the background that never rests, in real time, rounds without and
// with it in turn; and the processor time that each took, of the clients too. The devices are memory, as they are and as slow
// as an SSD; with the first the processors are all that there is to wait for. It does not ask for a number of times.
func BenchmarkBackgroundWork(b *testing.B) {
	const rounds = 5
	ssd, err := blockdev.LatencyPreset("ssd")
	if err != nil {
		b.Fatal(err)
	}
	for _, c := range []struct {
		device            string
		clients, requests int
	}{{"memory", 1, 200_000}, {"memory", 128, 200_000}, {"ssd", 1, 20_000}, {"ssd", 128, 100_000}} {
		b.Run(fmt.Sprintf("device=%s/depth=%d", c.device, c.clients), func(b *testing.B) {
			var lat [2][3][]float64 // p50, p99, p99.9 in µs
			var cpu, elapsed [2]float64
			for round := range 2 * rounds {
				with := round % 2
				mem, err := blockdev.Memory(8192*pressedBucket, blockdev.MemoryOptions{})
				if err != nil {
					b.Fatal(err)
				}
				dev := blockdev.Device(mem)
				if c.device == "ssd" {
					dev = blockdev.NewDelaying(mem, ssd)
				}
				p, err := newPressure(dev, Options{RuntimeDir: b.TempDir(), NodeCache: 1 << 20, restless: with == 1}, 20_000)
				if err != nil {
					b.Fatal(err)
				}
				p.set.set.SetMoving(with == 1)
				begin, before := time.Now(), processorTime(b)
				p.run(c.clients, c.requests, time.Minute)
				elapsed[with] += time.Since(begin).Seconds()
				cpu[with] += (processorTime(b) - before).Seconds()
				for i, at := range []float64{500, 990, 999} {
					lat[with][i] = append(lat[with][i], float64(p.at(at).Nanoseconds())/1e3)
				}
				if with == 1 {
					b.Log(p, "; ", p.done())
				}
				if err := errors.Join(p.failed, p.set.Close(context.Background()), mem.Close()); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(0, "ns/op")
			for i, name := range []string{"p50", "p99", "p99.9"} {
				var ratios []float64 // of neighbours
				for round := range rounds {
					ratios = append(ratios, lat[1][i][round]/lat[0][i][round])
				}
				slices.Sort(ratios)
				b.ReportMetric(ratios[0], "least-"+name+"-with/without")
				b.ReportMetric(ratios[rounds/2], name+"-with/without")
				b.ReportMetric(ratios[rounds-1], "most-"+name+"-with/without")
				for with := range 2 {
					slices.Sort(lat[with][i])
				}
				b.ReportMetric(lat[0][i][rounds/2], "µs/"+name+"-without")
				b.ReportMetric(lat[1][i][rounds/2], "µs/"+name+"-with")
			}
			b.ReportMetric(cpu[0]/elapsed[0], "cpus/without")
			b.ReportMetric(cpu[1]/elapsed[1], "cpus/with")
		})
	}
}

func processorTime(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
