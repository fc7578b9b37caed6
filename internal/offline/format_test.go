package offline

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/fixture"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// formatTool returns the path of a program, or skips the test.
func formatTool(t *testing.T, name string) string {
	t.Helper()
	for _, dir := range append(filepath.SplitList(os.Getenv("PATH")), "/usr/sbin", "/sbin") {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path
		}
	}
	if os.Getenv("UBCACHE_REQUIRE_TOOLS") == "1" {
		t.Fatalf("UBCACHE_REQUIRE_TOOLS is 1, and there is no %s", name)
	}
	t.Skipf("there is no %s", name)
	return ""
}

func formatRun(t *testing.T, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(formatTool(t, name), args...)
	cmd.Stdin = strings.NewReader("secret")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func formatImage(t *testing.T, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk.img")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
	return path
}

func formatOpen(t *testing.T, path string) blockdev.Device {
	t.Helper()
	dev, err := blockdev.Open(path, blockdev.Options{Engine: blockdev.EnginePread})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dev.Close() })
	return dev
}

func formatMemory(t *testing.T, size int64) *blockdev.MemoryDevice {
	t.Helper()
	dev, err := blockdev.Memory(size, blockdev.MemoryOptions{Name: fmt.Sprintf("disk%d", formatCount.next())})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dev.Close() })
	return dev
}

type formatCounter int

func (c *formatCounter) next() int { *c++; return int(*c) }

var formatCount formatCounter

// An infoDevice says other things of itself than the device below.
type infoDevice struct {
	blockdev.Device
	info blockdev.Info
}

func (d infoDevice) Info() blockdev.Info { return d.info }

func withInfo(dev blockdev.Device, change func(*blockdev.Info)) blockdev.Device {
	info := dev.Info()
	change(&info)
	return infoDevice{dev, info}
}

func putUint32(path string, off int64, order binary.ByteOrder, values ...uint32) error {
	b := make([]byte, 4*len(values))
	for i, v := range values {
		order.PutUint32(b[4*i:], v)
	}
	return putBytes(path, off, b)
}

func putBytes(path string, off int64, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	if _, err := f.WriteAt(b, off); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}

// TestFormatAllOrNothing looks at every device before any is written to, and undoes what was written when a later
// one fails.
func TestFormatAllOrNothing(t *testing.T) {
	old := ondisk.NewUUID()
	setUp := func(t *testing.T) (cache, backing *blockdev.MemoryDevice, faulty *blockdev.Faulty, o FormatOptions) {
		cache, backing = formatMemory(t, 4<<20), formatMemory(t, 1<<20)
		if _, err := Format(t.Context(), FormatOptions{Cache: cache, Bucket: 4096, UUID: old, SetUUID: old}); err != nil {
			t.Fatal(err)
		}
		for i := range cache.Bytes()[8192:] {
			cache.Bytes()[8192+i] = byte(i >> 12)
		}
		for i := range backing.Bytes() {
			backing.Bytes()[i] = byte(i>>12) + 1
		}
		faulty = blockdev.NewFaulty(backing, 1)
		o = FormatOptions{Cache: cache, Backing: []blockdev.Device{faulty}, Bucket: 4096, SetUUID: old, Overwrite: OverwriteBcache}
		return
	}
	cache, backing, _, o := setUp(t)
	beforeC, beforeB := bytes.Clone(cache.Bytes()), bytes.Clone(backing.Bytes())
	if _, err := Format(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	if bytes.Equal(cache.Bytes(), beforeC) || bytes.Equal(backing.Bytes(), beforeB) {
		t.Fatal("nothing was written")
	}
	// Now with each operation in turn failing once on the second device.
	for skip, done := 0, false; !done; skip++ {
		cache, backing, faulty, o := setUp(t)
		faulty.Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpWrite, blockdev.OpFlush}, Skip: skip, Count: 1})
		_, err := Format(t.Context(), o)
		if done = err == nil; done {
			if skip < 4 {
				t.Errorf("only %d operations", skip)
			}
			break
		}
		var failed *FormatError
		if !errors.As(err, &failed) || len(failed.Lost) > 0 || !strings.Contains(err.Error(), "everything is as it was") {
			t.Fatalf("operation %d: %v", skip, err)
		}
		if !bytes.Equal(cache.Bytes(), beforeC) || !bytes.Equal(backing.Bytes(), beforeB) {
			t.Fatalf("operation %d failed, and something has changed", skip)
		}
		if skip > 100 {
			t.Fatal("no end")
		}
	}
	// And with a device that fails for good after some writes.
	cache, _, faulty, o := setUp(t)
	faulty.Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpWrite}, Skip: 1})
	_, err := Format(t.Context(), o)
	var failed *FormatError
	if !errors.As(err, &failed) || len(failed.Lost) != 1 || failed.Lost[0] != backing.Info().Name && failed.Lost[0] != faulty.Info().Name {
		t.Errorf("%v", err)
	}
	if !bytes.Equal(cache.Bytes(), beforeC) {
		t.Error("the first device has changed")
	}
}

// TestFormatVerifies is about a device that says it has written and has not.
func TestFormatVerifies(t *testing.T) {
	m := formatMemory(t, 64<<20)
	_, err := Format(t.Context(), FormatOptions{Backing: []blockdev.Device{liar{m}}})
	var failed *FormatError
	if !errors.As(err, &failed) || failed.Doing != "verify" || !strings.Contains(err.Error(), "byte 4096 reads as 0x00 and was written as") {
		t.Errorf("%v", err)
	}
}

// A liar drops writes.
type liar struct{ blockdev.Device }

func (l liar) NewQueue(depth int, complete func([]*blockdev.Request)) (blockdev.Queue, error) {
	q, err := l.Device.NewQueue(depth, complete)
	return liarQueue{q, complete}, err
}

type liarQueue struct {
	blockdev.Queue
	complete func([]*blockdev.Request)
}

func (q liarQueue) Submit(reqs []*blockdev.Request) {
	for _, r := range reqs {
		if r.Op == blockdev.OpWrite {
			q.complete([]*blockdev.Request{r})
		} else {
			q.Queue.Submit([]*blockdev.Request{r})
		}
	}
}

// TestFormatPowerCut cuts the power at each write: a device never has a new superblock beside an old mark that was
// to go, nor a superblock that is neither the old nor the new one.
func TestFormatPowerCut(t *testing.T) {
	const (
		seed    = 7
		first   = 3 // bucket: 1,024 of 4 KiB
		journal = 8
	)
	old, set := ondisk.NewUUID(), ondisk.NewUUID()
	cuts := 0
	for n, finished := 0, false; !finished; n++ {
		m := formatMemory(t, 4<<20)
		if _, err := Format(t.Context(), FormatOptions{Cache: m, Bucket: 4096, UUID: old, SetUUID: set}); err != nil {
			t.Fatal(err)
		}
		copy(m.Bytes()[65536-10:], "SWAPSPACE2")
		for i := range journal {
			copy(m.Bytes()[(first+i)*4096:], "an old journal entry")
		}
		c, err := blockdev.NewCrashable(m, blockdev.CrashableOptions{})
		if err != nil {
			t.Fatal(err)
		}
		c.CutPowerAfter(n)
		_, err = Format(t.Context(), FormatOptions{Cache: c, Bucket: 4096, SetUUID: set, Overwrite: OverwriteAnything})
		if finished = err == nil; n > 200 {
			t.Fatal("no end")
		}
		for i := range 20 {
			rng := rand.New(rand.NewPCG(seed, uint64(n*100+i)))
			after, err := c.Crash(rng, blockdev.Torn)
			if err != nil {
				t.Fatal(err)
			}
			cuts++
			p, err := Probe(t.Context(), after, nil)
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range p.Signatures {
				b := s.Bcache
				if b == nil || b.UUID == old {
					continue
				}
				if b.Why == "its checksum is wrong" {
					t.Fatalf("cut %d.%d: half a superblock", n, i)
				}
				if len(p.Signatures) > 1 {
					t.Fatalf("cut %d.%d: the new superblock beside %v", n, i, p.Signatures)
				}
				for j := range journal {
					if !bytes.Equal(after.Bytes()[(first+j)*4096:][:20], make([]byte, 20)) {
						t.Fatalf("cut %d.%d: the new superblock before journal bucket %d was cleared", n, i, j)
					}
				}
			}
			if finished && (len(p.Signatures) != 1 || p.Signatures[0].Bcache == nil || p.Signatures[0].Bcache.UUID == old) {
				t.Fatalf("formatted, and lost at the cut: %v", p.Signatures)
			}
			after.Close()
		}
		c.Close()
	}
	if cuts < 100 {
		t.Errorf("only %d cuts", cuts)
	}
}

// TestFormatAsMakeBcache holds superblocks against those of make-bcache with the same options. Only uuids and
// checksums differ.
func TestFormatAsMakeBcache(t *testing.T) {
	for _, c := range []struct {
		args string // %s is the image
		o    FormatOptions
	}{
		{"-C %s -w 512 -b 64k", FormatOptions{Block: 512, Bucket: 64 << 10}},
		{"-C %s -w 4k -b 4k", FormatOptions{Block: 4096, Bucket: 4096}},
		{"-C %s -w 512 -b 8k --discard", FormatOptions{Block: 512, Bucket: 8192, Discard: true}},
		{"-C %s -w 1k -b 32k --cache_replacement_policy=fifo", FormatOptions{Block: 1024, Bucket: 32 << 10, Replacement: ondisk.FIFO}},
		{"-C %s -w 512 -b 64k --cache_replacement_policy=random --writeback", FormatOptions{Block: 512, Bucket: 64 << 10, Replacement: ondisk.Random, CacheMode: ondisk.Writeback}},
		{"-B %s -w 512", FormatOptions{Block: 512}},
		{"-B %s -w 4k --writeback --discard", FormatOptions{Block: 4096, CacheMode: ondisk.Writeback, Discard: true}},
		{"-B %s -w 512 -o 2048", FormatOptions{Block: 512, DataOffset: 1 << 20}},
		{"-B %s -w 512 -o 17 -b 64k", FormatOptions{Block: 512, DataOffset: 17 * 512, Bucket: 64 << 10}},
	} {
		t.Run(c.args, func(t *testing.T) {
			theirs := formatImage(t, 64<<20)
			formatRun(t, "make-bcache", strings.Fields(fmt.Sprintf(c.args, theirs))...)
			m := formatMemory(t, 64<<20)
			if strings.HasPrefix(c.args, "-C") {
				c.o.Cache = m
			} else {
				c.o.Backing = []blockdev.Device{m}
			}
			if _, err := Format(t.Context(), c.o); err != nil {
				t.Fatal(err)
			}
			want, err := os.ReadFile(theirs)
			if err != nil {
				t.Fatal(err)
			}
			got := m.Bytes()
			for _, b := range [][]byte{want, got} {
				clear(b[4096 : 4096+8])
				clear(b[4096+40 : 4096+72])
			}
			if !bytes.Equal(got, want) {
				for i := range got {
					if got[i] != want[i] {
						t.Fatalf("byte %d is %#x, make-bcache writes %#x", i, got[i], want[i])
					}
				}
			}
		})
	}
}

// TestFormatScansForUnflushed lets Format look into sets that kernels wrote.
func TestFormatScansForUnflushed(t *testing.T) {
	for name, want := range map[string]Unflushed{"wb-clean": UnflushedRecorded, "writearound": UnflushedNone, "fresh-attached": UnflushedNone} {
		t.Run(name, func(t *testing.T) {
			f, err := fixture.Get(name)
			if err != nil {
				t.Fatal(err)
			}
			path, err := f.Extract("cache", t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			p, err := Probe(t.Context(), formatOpen(t, path), ScanDirty)
			if err != nil {
				t.Fatal(err)
			}
			if got := p.Unflushed(); got != want {
				t.Errorf("%v, want %v: %v", got, want, p.Signatures)
			}
		})
	}
}

func TestFormatOptionErrors(t *testing.T) {
	a, b := formatMemory(t, 64<<20), formatMemory(t, 64<<20)
	both := []blockdev.Device{a, b}
	for _, c := range []struct {
		o    FormatOptions
		want string
	}{
		{FormatOptions{}, "no device"},
		{FormatOptions{Backing: both, UUID: ondisk.NewUUID()}, "is for one device, and 2 are given"},
		{FormatOptions{Backing: both, Label: "x"}, "is for one backing device, and 2 are given"},
		{FormatOptions{Backing: both[:1], Label: strings.Repeat("x", 33)}, "at most 32 bytes"},
		{FormatOptions{Backing: both[:1], Replacement: 3}, "is not known"},
		{FormatOptions{Backing: both[:1], CacheMode: 4}, "is not known"},
	} {
		if _, err := Format(t.Context(), c.o); err == nil || !regexp.MustCompile(c.want).MatchString(err.Error()) {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Format(ctx, FormatOptions{Backing: both}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled, and %v", err)
	}
	for _, m := range []*blockdev.MemoryDevice{a, b} {
		if len(bytes.Trim(m.Bytes(), "\x00")) > 0 {
			t.Error("something was written")
		}
	}
}
