package blockdev_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

const sector = 512

// A crashDisk is a Crashable with a blocking way in. Writes are named by the byte that fills them.
type crashDisk struct {
	*blockdev.Crashable
	io *blockdev.IO
	t  *testing.T
}

func newCrashDisk(t *testing.T) *crashDisk {
	t.Helper()
	c, err := blockdev.NewCrashable(mustMemory(t, 1<<20, blockdev.MemoryOptions{}), blockdev.CrashableOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return newCrashDiskOn(t, c)
}

func newCrashDiskOn(t *testing.T, c *blockdev.Crashable) *crashDisk {
	t.Helper()
	io, err := blockdev.NewIO(c, 4)
	if err != nil {
		t.Fatal(err)
	}
	d := &crashDisk{c, io, t}
	t.Cleanup(func() {
		if err := errors.Join(io.Close(), c.Close()); err != nil {
			t.Error(err)
		}
	})
	return d
}

func (d *crashDisk) write(first, sectors int, what byte, flags blockdev.Flags) {
	d.t.Helper()
	if err := d.io.WriteAt(bytes.Repeat([]byte{what}, sectors*sector), int64(first)*sector, flags); err != nil {
		d.t.Fatal(err)
	}
}

func (d *crashDisk) flush() {
	d.t.Helper()
	if err := d.io.Flush(); err != nil {
		d.t.Fatal(err)
	}
}

// picture shows the first n sectors of what a crash leaves, one letter each; '.' is zero, '?' is mixed.
func (d *crashDisk) picture(seed uint64, s blockdev.Strength, n int) string {
	d.t.Helper()
	after, err := d.Crash(rand.New(rand.NewPCG(seed, 1)), s)
	if err != nil {
		d.t.Fatal(err)
	}
	defer after.Close()
	return picture(after.Bytes(), n)
}

func picture(b []byte, n int) string {
	p := make([]byte, n)
	for i := range p {
		sec := b[i*sector:][:sector]
		switch {
		case bytes.Count(sec, sec[:1]) != sector:
			p[i] = '?'
		case sec[0] == 0:
			p[i] = '.'
		default:
			p[i] = sec[0]
		}
	}
	return string(p)
}

// pictures collects what many crashes of one state leave.
func (d *crashDisk) pictures(s blockdev.Strength, n int) map[string]int {
	d.t.Helper()
	seen := map[string]int{}
	for seed := range uint64(400) {
		seen[d.picture(seed, s, n)]++
	}
	return seen
}

func (d *crashDisk) expect(s blockdev.Strength, want ...string) {
	d.t.Helper()
	seen := d.pictures(s, len(want[0]))
	for _, w := range want {
		if seen[w] == 0 {
			d.t.Errorf("%v: never %q, of %v", s, w, seen)
		}
		delete(seen, w)
	}
	if len(seen) > 0 {
		d.t.Errorf("%v: unexpected %v", s, seen)
	}
}

func TestCrashKeepsWhatIsDurable(t *testing.T) {
	d := newCrashDisk(t)
	d.write(0, 2, 'a', 0)
	d.flush()
	d.write(3, 1, 'b', blockdev.FUA)
	if n := d.Unflushed(); n != 0 {
		t.Errorf("%d unflushed writes", n)
	}
	for _, s := range []blockdev.Strength{blockdev.Prefix, blockdev.Reordered, blockdev.Torn} {
		d.expect(s, "aa.b")
	}
}

func TestCrashOfUnflushedWrites(t *testing.T) {
	d := newCrashDisk(t)
	d.write(0, 3, 'a', 0)
	d.flush()
	d.write(0, 2, 'b', 0)
	d.write(2, 1, 'c', 0)
	if n := d.Unflushed(); n != 2 {
		t.Errorf("%d unflushed writes, want 2", n)
	}
	d.expect(blockdev.Prefix, "bbc")
	d.expect(blockdev.Reordered, "aaa", "bba", "aac", "bbc")
	d.expect(blockdev.Torn, "aaa", "bba", "aac", "bbc", "baa", "aba", "bac", "abc")
}

func TestCrashReordersOverlappingWrites(t *testing.T) {
	d := newCrashDisk(t)
	d.write(0, 2, 'a', 0)
	d.write(1, 2, 'b', 0)
	d.expect(blockdev.Prefix, "abb")
	d.expect(blockdev.Reordered, "...", "aa.", ".bb", "abb", "aab")
}

func TestCrashDoesNotUndoFUA(t *testing.T) {
	d := newCrashDisk(t)
	d.write(0, 3, 'a', 0)
	d.write(1, 1, 'b', blockdev.FUA)
	d.expect(blockdev.Reordered, ".b.", "aba")
	d.expect(blockdev.Torn, ".b.", "aba", "ab.", ".ba")
	d.write(1, 1, 'c', 0) // later than b: may be there or not
	d.expect(blockdev.Reordered, ".b.", "aba", ".c.", "aca")
	d.flush()
	d.expect(blockdev.Torn, "aca")
}

func TestCrashOfZeroesAndDiscards(t *testing.T) {
	d := newCrashDisk(t)
	d.write(0, 3, 'a', 0)
	d.flush()
	if err := d.io.WriteZeroes(0, sector, 0); err != nil {
		t.Fatal(err)
	}
	if err := d.io.Discard(2*sector, sector); err != nil {
		t.Fatal(err)
	}
	d.expect(blockdev.Reordered, "aaa", ".aa", "aa.", ".a.")
	d.flush()
	d.expect(blockdev.Torn, ".a.")
}

func TestPowerCut(t *testing.T) {
	d := newCrashDisk(t)
	d.write(0, 1, 'a', 0)
	d.CutPowerAfter(3)
	d.write(1, 1, 'b', 0)
	d.flush()
	d.write(2, 1, 'c', 0)
	if d.Power().IsCut() {
		t.Error("cut too early")
	}
	for name, err := range map[string]error{
		"write":   d.io.WriteAt(make([]byte, sector), 0, 0),
		"flush":   d.io.Flush(),
		"zeroes":  d.io.WriteZeroes(0, sector, 0),
		"discard": d.io.Discard(0, sector),
		"read":    d.io.ReadAt(make([]byte, sector), 0),
	} {
		if !errors.Is(err, blockdev.ErrPowerCut) {
			t.Errorf("%s after the cut: %v", name, err)
		}
	}
	if !d.Power().IsCut() || d.Power().Ops() != 4 {
		t.Errorf("cut: %v after %d operations, want 4", d.Power().IsCut(), d.Power().Ops())
	}
	d.expect(blockdev.Prefix, "abc")
	d.expect(blockdev.Reordered, "ab.", "abc")
}

func TestPowerIsShared(t *testing.T) {
	power := new(blockdev.Power)
	var disks []*crashDisk
	for range 2 {
		c, err := blockdev.NewCrashable(mustMemory(t, 1<<20, blockdev.MemoryOptions{}), blockdev.CrashableOptions{Power: power})
		if err != nil {
			t.Fatal(err)
		}
		disks = append(disks, newCrashDiskOn(t, c))
	}
	power.CutAfter(2)
	disks[0].write(0, 1, 'a', 0)
	disks[1].write(0, 1, 'b', 0)
	if err := disks[0].io.Flush(); !errors.Is(err, blockdev.ErrPowerCut) {
		t.Error(err)
	}
	if err := disks[1].io.ReadAt(make([]byte, sector), 0); !errors.Is(err, blockdev.ErrPowerCut) {
		t.Error(err)
	}
}

func TestCrashOfADeviceThatHadContent(t *testing.T) {
	m := mustMemory(t, 1<<20, blockdev.MemoryOptions{})
	copy(m.Bytes()[3*sector:], bytes.Repeat([]byte("x"), sector))
	c, err := blockdev.NewCrashable(m, blockdev.CrashableOptions{})
	if err != nil {
		t.Fatal(err)
	}
	d := newCrashDiskOn(t, c)
	d.write(0, 1, 'a', 0)
	d.expect(blockdev.Reordered, "...x", "a..x")
}

// A flush makes durable what had completed when it was submitted, not what completes until it does itself.
func TestFlushCoversOnlyWhatHadCompleted(t *testing.T) {
	sim := rt.NewSim(7)
	r := sim.Runtime()
	m := mustMemory(t, 1<<20, blockdev.MemoryOptions{Runtime: r})
	slow := blockdev.NewDelaying(m, blockdev.Latency{Write: time.Second, Flush: 10 * time.Second})
	c, e := blockdev.NewCrashable(slow, blockdev.CrashableOptions{})
	if e != nil {
		t.Fatal(e)
	}
	runErr := sim.Run(func() {
		io, err := blockdev.NewIO(c, 4)
		if err != nil {
			t.Error(err)
			return
		}
		buf := func(b byte) []byte { return bytes.Repeat([]byte{b}, sector) }
		check := func(e error) {
			if e != nil {
				t.Error(e)
			}
		}
		check(io.WriteAt(buf('a'), 0, 0)) // completed before the flush
		var g rt.WaitGroup
		g.Init(r)
		g.Go("flush", func() { check(io.Flush()) })
		g.Go("write", func() {
			r.Sleep(2 * time.Second)
			check(io.WriteAt(buf('b'), sector, 0)) // completes during the flush
		})
		g.Wait()
		if at := r.Now(); at < 11*time.Second || at > 12*time.Second {
			t.Errorf("it took %v of simulated time, want 11 s", at)
		}
		seen := map[string]bool{}
		for seed := range uint64(50) {
			after, err := c.Crash(rand.New(rand.NewPCG(seed, 1)), blockdev.Reordered)
			check(err)
			seen[picture(after.Bytes(), 2)] = true
			check(after.Close())
		}
		if !seen["a."] || !seen["ab"] || len(seen) != 2 {
			t.Errorf("after the flush a crash leaves %v, want a. and ab", seen)
		}
		check(io.Close())
		check(c.Close())
	})
	if runErr != nil {
		t.Fatal(runErr)
	}
}

// Random writes, flushes and crashes against what may be there: each sector holds its durable value or one
// written to it since.
func TestCrashAgainstModel(t *testing.T) {
	const sectors = 24
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 0))
		d := newCrashDisk(t)
		var possible [sectors]map[byte]bool
		live := make([]byte, sectors)
		for i := range possible {
			possible[i] = map[byte]bool{0: true}
		}
		steps := 1 + rng.IntN(60)
		for range steps {
			first := rng.IntN(sectors)
			n := 1 + rng.IntN(min(6, sectors-first))
			what := byte(1 + rng.IntN(250))
			var flags blockdev.Flags
			switch rng.IntN(8) {
			case 0:
				d.flush()
				for i := range possible {
					possible[i] = map[byte]bool{live[i]: true}
				}
				continue
			case 1, 2:
				flags = blockdev.FUA
			}
			d.write(first, n, what, flags)
			for i := first; i < first+n; i++ {
				if flags != 0 {
					possible[i] = map[byte]bool{}
				}
				possible[i][what] = true
				live[i] = what
			}
		}
		for crash := range uint64(20) {
			s := blockdev.Strength(crash % 3)
			after, err := d.Crash(rand.New(rand.NewPCG(seed, crash)), s)
			if err != nil {
				t.Fatal(err)
			}
			again, err := d.Crash(rand.New(rand.NewPCG(seed, crash)), s)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(after.Bytes(), again.Bytes()) {
				t.Fatalf("seed %d, crash %d: the same crash leaves something else", seed, crash)
			}
			for i := range sectors {
				got := after.Bytes()[i*sector:][:sector]
				if bytes.Count(got, got[:1]) != sector || !possible[i][got[0]] || s == blockdev.Prefix && got[0] != live[i] {
					t.Fatalf("seed %d, crash %d, %v: sector %d holds %d, possible %v, live %d", seed, crash, s, i, got[0], possible[i], live[i])
				}
			}
			if err := errors.Join(after.Close(), again.Close()); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func BenchmarkCrash(b *testing.B) {
	for _, size := range []int64{5 << 20, 64 << 20} {
		b.Run(fmt.Sprintf("%dMiB", size>>20), func(b *testing.B) {
			c, err := blockdev.NewCrashable(mustMemory(b, size, blockdev.MemoryOptions{}), blockdev.CrashableOptions{})
			if err != nil {
				b.Fatal(err)
			}
			io, err := blockdev.NewIO(c, 1)
			if err != nil {
				b.Fatal(err)
			}
			p := bytes.Repeat([]byte("x"), 4096)
			for off := int64(0); off < size; off += 1 << 15 {
				if err := io.WriteAt(p, off, 0); err != nil {
					b.Fatal(err)
				}
				if off == size/2 {
					if err := io.Flush(); err != nil {
						b.Fatal(err)
					}
				}
			}
			rng := rand.New(rand.NewPCG(1, 1))
			for b.Loop() {
				after, err := c.Crash(rng, blockdev.Torn)
				if err != nil {
					b.Fatal(err)
				}
				after.Close()
			}
		})
	}
}

func TestCrashBarrier(t *testing.T) {
	c, err := blockdev.NewCrashable(mustMemory(t, 1<<20, blockdev.MemoryOptions{}), blockdev.CrashableOptions{
		Barrier: func(data []byte) bool { return data[0] == 'B' },
	})
	if err != nil {
		t.Fatal(err)
	}
	d := newCrashDiskOn(t, c)
	d.write(0, 1, 'a', 0)
	d.write(1, 1, 'b', 0)
	d.write(1, 2, 'B', 0)
	d.write(3, 1, 'c', 0)
	d.expect(blockdev.Torn, "aBB.", "aBBc")
}
