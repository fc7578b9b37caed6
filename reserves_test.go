package ubcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/rt"
)

// A brim is a set that a flash-only volume fills to the brim, with pieces of so many bytes.
type brim struct {
	name            string
	buckets, bucket int64
	piece, stride   int64
	levels          int  // that the tree must have by then
	restless        bool // tried without a rest too: that takes long
}

var brims = []brim{
	// All of it is dirty data. The journal has four buckets, as few as there are.
	{"dirty", 520, 8 << 10, 24 << 10, 24 << 10, 1, true},
	// As many keys as there can be: no two pieces are one extent.
	{"keys", 520, 8 << 10, 512, 1024, 2, true},
	// And as deep a tree as there can be: a node has room for 160 keys.
	{"deep", 3000, 4 << 10, 512, 1024, 3, false},
}

// At the brim writes fail with ErrNoSpace, soon, and nothing else does: the set goes on, and what is there reads right. When
// there is room again, a write gets it within ten seconds. Then all that again. What the next start needs is there: ours, and
// by the checker a kernel's (bucket/life.go).
func TestFullToTheBrim(t *testing.T) {
	for _, c := range brims {
		for _, restless := range []bool{false, true} {
			if restless && !c.restless {
				continue
			}
			t.Run(fmt.Sprintf("%s/restless=%v", c.name, restless), func(t *testing.T) { c.run(t, restless) })
		}
	}
}

func (c brim) run(t *testing.T, restless bool) {
	if raced && testing.Short() {
		t.Skip("the race detector sees nothing in a simulation; without it this runs")
	}
	s := rt.NewSim(4)
	s.Limit = 2 * time.Hour
	o := Options{RuntimeDir: t.TempDir(), NodeCache: 64 << 10, restless: restless}
	m, err := blockdev.Memory(c.buckets*c.bucket, blockdev.MemoryOptions{Runtime: s.Runtime()})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	var failed error
	err = s.Run(func() { failed = c.fill(t, blockdev.NewDelaying(m, fast), o) })
	if err := errors.Join(err, failed); err != nil {
		t.Fatal(err)
	}
	m.SetRuntime(rt.New())
	if err := checkCache(m); err != nil {
		t.Fatal(err)
	}
}

func (c brim) fill(t *testing.T, dev blockdev.Device, o Options) (err error) {
	ctx, r := context.Background(), blockdev.RuntimeOf(dev)
	if _, err := offline.Format(ctx, offline.FormatOptions{Cache: dev, Bucket: c.bucket, Block: 512}); err != nil {
		return err
	}
	o.CacheDevice = dev
	set, err := Open(ctx, o)
	if err != nil {
		return err
	}
	defer func() {
		if set != nil {
			err = errors.Join(err, set.Close(ctx))
		}
	}()
	pieces := int(c.buckets * c.bucket / c.piece)
	if _, err := set.CreateFlash(ctx, "flash", int64(pieces)*c.stride); err != nil {
		return err
	}
	v, err := set.OpenVolume(ctx, VolumeOptions{Name: "flash", Flash: "flash"})
	if err != nil {
		return err
	}
	order := rand.New(rand.NewPCG(4, 4)).Perm(pieces)
	versions, unsure := make([]uint64, pieces), make([]bool, pieces)
	write := func(i int) error {
		versions[i]++
		err := v.WriteAt(ctx, pattern(int64(i)*c.stride, int(c.piece), versions[i]), int64(i)*c.stride, 0)
		if unsure[i] = err != nil; errors.Is(err, ErrNoSpace) {
			return nil
		}
		return err
	}
	for round := range 3 {
		// Sixteen clients, each until it has found no room three times.
		var group rt.WaitGroup
		group.Init(r)
		next, full, longest := 0, 0, time.Duration(0)
		var failed error
		for range 16 {
			group.Go("client", func() {
				for misses := 0; misses < 3 && next < pieces && failed == nil; {
					i := order[next]
					next++
					begin := r.Now()
					if err := write(i); err != nil {
						failed = err
					}
					if longest = max(longest, r.Now()-begin); unsure[i] {
						misses++
						full++
					}
				}
			})
		}
		group.Wait()
		i := set.set.Info()
		t.Logf("round %d: full at %d of %d pieces, %d percent in use, the longest write took %v; tree of %d levels, %d nodes swept, %v", round, next, pieces,
			i.InUse, longest, i.Root.Level+1, i.NodesSwept, i.Buckets)
		if failed != nil {
			return failed
		}
		if full == 0 || longest > time.Minute || int(i.Root.Level)+1 < c.levels {
			return fmt.Errorf("it did not get full, or a write took %v", longest)
		}
		if err := c.reads(v, order[:next], versions, unsure); err != nil {
			return err
		}
		// Half of what is there goes.
		for _, i := range order[:next/2] {
			if err := v.Discard(ctx, int64(i)*c.stride, c.stride); err != nil {
				return err
			}
			versions[i], unsure[i] = 0, false
		}
		begin := r.Now()
		for _, i := range order[:next/8] {
			for {
				if err := write(i); err != nil {
					return err
				}
				if !unsure[i] {
					break
				}
				if r.Now()-begin > 10*time.Second {
					return fmt.Errorf("ten seconds after half of it was discarded there is no room for a write: %+v", set.set.Info())
				}
			}
		}
		took := r.Now() - begin
		t.Logf("round %d: an eighth of it was written again in %v", round, took)
		if took > 10*time.Second {
			return fmt.Errorf("an eighth of it took %v to write", took)
		}
		order = append(order[next:], order[:next]...)
	}
	if err := set.Close(ctx); err != nil {
		return err
	}
	set = nil
	if set, err = Open(ctx, Options{CacheDevice: dev}); err != nil {
		return err
	}
	if v, err = set.OpenVolume(ctx, VolumeOptions{Name: "flash", Flash: "flash"}); err != nil {
		return err
	}
	return c.reads(v, order, versions, unsure)
}

// reads reads pieces. Of those whose last write failed some sectors may be of that one.
func (c brim) reads(v *Volume, pieces []int, versions []uint64, unsure []bool) error {
	got := make([]byte, c.piece)
	for _, i := range pieces {
		if unsure[i] {
			continue
		}
		if err := v.ReadAt(context.Background(), got, int64(i)*c.stride); err != nil {
			return err
		}
		want := make([]byte, c.piece)
		if versions[i] > 0 {
			want = pattern(int64(i)*c.stride, int(c.piece), versions[i])
		}
		if !bytes.Equal(got, want) {
			return fmt.Errorf("piece %d reads as %x, want version %d", i, got[:16], versions[i])
		}
	}
	return nil
}
