package journal

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// fill puts n keys into a slot as AppendLocked does.
func fill(s *Shared, slot int, seq uint64, n int) {
	b := s.keys(slot)[:0]
	for i := range n {
		k := ondisk.NewInvalidation(1, seq*100+uint64(i), 8)
		b = ondisk.AppendKey(b, &k)
		s.publish(slot, seq, len(b)/8)
	}
}

func describe(list []sharedEntry, err error) string {
	if err != nil {
		return err.Error()
	}
	var b strings.Builder
	for _, e := range list {
		fmt.Fprintf(&b, "%d:%d ", e.seq, len(e.keys)/16)
	}
	return strings.TrimSpace(b.String())
}

var someone = Identity{Set: ondisk.UUID{1}, Boot: ondisk.UUID{2}, SuperSeq: 3}

func TestSharedRead(t *testing.T) {
	other := func(change func(*Identity)) Identity {
		id := someone
		change(&id)
		return id
	}
	for _, c := range []struct {
		name   string
		make   func(s *Shared)
		id     Identity
		newest uint64
		want   string
	}{
		{"nothing", func(*Shared) {}, someone, 4, "5:0"},
		{"the open entry", func(s *Shared) { fill(s, 0, 5, 3) }, someone, 4, "5:3"},
		{"and the one in flight", func(s *Shared) { fill(s, 0, 5, 3); fill(s, 1, 6, 2) }, someone, 4, "5:3 6:2"},
		{"which is on disk", func(s *Shared) { fill(s, 0, 5, 3); fill(s, 1, 6, 2) }, someone, 5, "6:2"},
		{"both on disk", func(s *Shared) { fill(s, 0, 5, 3); fill(s, 1, 6, 2) }, someone, 6, ""},
		{"slots the other way", func(s *Shared) { fill(s, 0, 7, 1); fill(s, 1, 6, 2) }, someone, 5, "6:2 7:1"},
		{"a gap to the disk", func(s *Shared) { fill(s, 0, 5, 3); fill(s, 1, 6, 2) }, someone, 3, ""},
		{"a gap between", func(s *Shared) { fill(s, 0, 5, 3); fill(s, 1, 7, 2) }, someone, 4, "5:3"},
		{"another set", func(s *Shared) { fill(s, 0, 5, 3) }, other(func(i *Identity) { i.Set[5]++ }), 4, ""},
		{"another boot", func(s *Shared) { fill(s, 0, 5, 3) }, other(func(i *Identity) { i.Boot[5]++ }), 4, ""},
		{"activated elsewhere", func(s *Shared) { fill(s, 0, 5, 3) }, other(func(i *Identity) { i.SuperSeq++ }), 4, ""},
		{"closed", func(s *Shared) { fill(s, 0, 5, 3); s.invalidate() }, someone, 4, ""},
		{"a bad head", func(s *Shared) { fill(s, 0, 5, 3); s.mem[9] ^= 1 }, someone, 4, ""},
		{"junk behind the keys", func(s *Shared) { fill(s, 0, 5, 3); s.keys(0)[48] = 0xff }, someone, 4, "5:3"},
		{"half a key", func(s *Shared) { fill(s, 0, 5, 3); s.publish(0, 5, 5) }, someone, 4, "shared journal entry : entry 5, byte 32: key: length is 8 bytes, a key has at least 16; removing the file gives up what only it holds"},
		{"too many words", func(s *Shared) { s.publish(0, 5, 5000) }, someone, 4, "shared journal entry : entry 5 would have 40000 bytes; removing the file gives up what only it holds"},
	} {
		s := NewShared()
		s.reset(someone, 5)
		c.make(s)
		list, err := s.read(c.id, c.newest)
		if got := describe(list, err); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
		if err != nil && !errors.Is(err, ondisk.ErrCorrupt) {
			t.Errorf("%s: %v does not match ErrCorrupt", c.name, err)
		}
	}
	if list, err := NewShared().read(someone, 0); list != nil || err != nil {
		t.Errorf("an empty file: %v, %v", list, err)
	}
}

// TestSharedPrefix looks at the mapping as it is after each store of 8 bytes that AppendLocked makes: always whole keys,
// the first ones.
func TestSharedPrefix(t *testing.T) {
	s := NewShared()
	s.reset(someone, 5)
	for i := range s.keys(0) {
		s.keys(0)[i] = 0xa5 // of an earlier entry
	}
	var k ondisk.Key
	var b []byte
	for n := range 20 {
		k = ondisk.NewExtent(3, uint64(n+1)*8, 8, ondisk.MakePtr(1, 77, 0), true)
		enc := ondisk.AppendKey(nil, &k)
		for at := 0; at < len(enc); at += 8 {
			copy(s.keys(0)[len(b)+at:], enc[at:at+8])
			list, err := s.read(someone, 4)
			if err != nil || !bytes.Equal(list[0].keys, b) {
				t.Fatalf("key %d, byte %d: %v %v", n, at, describe(list, err), err)
			}
		}
		b = append(b, enc...)
		s.publish(0, 5, len(b)/8)
		if list, err := s.read(someone, 4); err != nil || !bytes.Equal(list[0].keys, b) {
			t.Fatalf("key %d: %v", n, describe(list, err))
		}
	}
}

// TestSharedReset: a mapping on its way from one owner to the next is never taken for either's with the other's keys.
func TestSharedReset(t *testing.T) {
	next := Identity{Set: ondisk.UUID{1}, Boot: ondisk.UUID{2}, SuperSeq: 4}
	s := NewShared()
	s.reset(someone, 5)
	fill(s, 0, 5, 3)
	fill(s, 1, 6, 3)
	// What reset stores, a word at a time.
	after := s.Clone()
	after.reset(next, 9)
	var changed []int
	for at := 0; at < 136; at += 8 {
		if !bytes.Equal(s.mem[at:at+8], after.mem[at:at+8]) {
			changed = append(changed, at)
		}
	}
	now := s.Clone()
	now.invalidate()
	for _, at := range changed {
		if at == sharedHead {
			continue
		}
		for _, id := range []Identity{someone, next} {
			if list, err := now.read(id, 4); len(list) != 0 || err != nil {
				t.Errorf("before the word at %d is stored: %s", at, describe(list, err))
			}
		}
		copy(now.mem[at:at+8], after.mem[at:])
	}
	now.check.Store(binary.NativeEndian.Uint64(after.mem[sharedHead:]))
	if got := describe(now.read(next, 8)); got != "9:0" {
		t.Errorf("at the end: %s", got)
	}
}

func TestSharedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "open-entry")
	s, err := OpenShared(path)
	must(t, err)
	s.reset(someone, 5)
	fill(s, 0, 5, 4)
	again, err := OpenShared(path) // as the next process would, this one being dead without having done anything
	must(t, err)
	if got := describe(again.read(someone, 4)); got != "5:4" {
		t.Errorf("%s", got)
	}
	if got := describe(s.Clone().read(someone, 4)); got != "5:4" {
		t.Errorf("Clone: %s", got)
	}
	must(t, s.Close())
	must(t, s.Close())
	must(t, again.Close())
	info, err := os.Stat(path)
	must(t, err)
	if info.Mode() != 0o600 || info.Size() != sharedBytes {
		t.Errorf("%v, %d bytes", info.Mode(), info.Size())
	}
	must(t, os.WriteFile(path, []byte("something else"), 0o600))
	s, err = OpenShared(path)
	must(t, err)
	if got := describe(s.read(someone, 4)); got != "" {
		t.Errorf("another file: %s", got)
	}
	must(t, s.Close())
	if _, err := OpenShared(filepath.Join(path, "x")); err == nil {
		t.Error("a path below a file opens")
	}
	id, err := BootID()
	if err != nil || id.IsZero() {
		t.Errorf("BootID: %v, %v", id, err)
	}
}

// TestKilledProcess kills real processes that append as fast as they can, and finds in device and mapping every key
// that they had said was acknowledged.
func TestKilledProcess(t *testing.T) {
	const env = "UBCACHE_TEST_JOURNAL_DIR"
	if dir := os.Getenv(env); dir != "" {
		appendForEver(t, dir)
		return
	}
	dir := t.TempDir()
	disk := newDisk(t, smallest, nil)
	must(t, os.WriteFile(filepath.Join(dir, "cache"), disk.Bytes(), 0o600))
	must(t, disk.Close())
	total := 0
	for life := range 4 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKilledProcess$", "-test.v")
		cmd.Env = append(os.Environ(), env+"="+dir)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		must(t, err)
		must(t, cmd.Start())
		// Each life reports what it found; it must be all that the one before had reported.
		lines := bufio.NewScanner(out)
		found, acked := -1, 0
		timer := time.AfterFunc(30*time.Second, func() { _ = cmd.Process.Kill() })
		for lines.Scan() {
			var n int
			if _, err := fmt.Sscanf(lines.Text(), "found %d", &n); err == nil {
				found = n
				timer.Reset(time.Duration(50+30*life) * time.Millisecond)
			} else if _, err := fmt.Sscanf(lines.Text(), "acked %d", &n); err == nil {
				acked = n
			} else if strings.Contains(lines.Text(), "FAIL") || strings.Contains(lines.Text(), ".go:") {
				t.Error(lines.Text())
			}
		}
		_ = cmd.Wait() // killed
		timer.Stop()
		if found < total {
			t.Fatalf("life %d found %d keys, %d were acknowledged", life, found, total)
		}
		total = max(found, acked)
	}
	if total == 0 {
		t.Error("no key was ever acknowledged")
	}
	t.Logf("%d keys", total)
}

// appendForEver is a process that opens what is in dir, checks it, says what it found, and then appends and
// acknowledges until it is killed.
func appendForEver(t *testing.T, dir string) {
	ctx := context.Background()
	dev, err := blockdev.Open(filepath.Join(dir, "cache"), blockdev.Options{Engine: blockdev.EnginePread, Buffered: true})
	must(t, err)
	shared, err := OpenShared(filepath.Join(dir, "open-entry"))
	must(t, err)
	m := newModel(smallest)
	for i := range m.appended {
		m.appended[i] = 1 << 40 // whatever there is
	}
	m.roots = 1 << 20
	w := newWorld(t, dev, m, 1, shared)
	w.check.lock = nil // others may hold it here
	w.rng = nil
	super := filepath.Join(dir, "super-seq")
	if b, err := os.ReadFile(super); err == nil {
		m.super = binary.LittleEndian.Uint64(b)
	}
	image, err := os.ReadFile(filepath.Join(dir, "cache"))
	must(t, err)
	w.check.resume(image)
	rec, err := w.read(ctx, make([]uint64, smallest.leaves))
	if errors.Is(err, ErrEmpty) {
		must(t, w.format(ctx))
		m.appended = make([]uint64, smallest.leaves)
	} else {
		must(t, err)
		must(t, w.open(ctx, rec))
	}
	must(t, os.WriteFile(super, binary.LittleEndian.AppendUint64(nil, m.super), 0o600)) // this activation's
	fmt.Printf("\nfound %d\n", m.total)
	for i := 0; ; i++ {
		res, err := w.j.Reserve(ctx, 9, 0)
		must(t, err)
		w.mu.Lock()
		seq := w.appendLocked(&res, i%smallest.leaves, 3)
		n := m.total
		w.mu.Unlock()
		must(t, w.j.Acknowledge(ctx, seq))
		fmt.Printf("acked %d\n", n)
		if i%50 == 0 {
			must(t, w.j.Sync(ctx))
		}
	}
}

// TestRealRuntime runs the load on real time and threads, for the race detector.
func TestRealRuntime(t *testing.T) {
	d := newDisk(t, smallest, rt.New())
	defer d.Close()
	shared := NewShared()
	w := newWorld(t, blockdev.NewDelaying(d, blockdev.Latency{Write: 20 * time.Microsecond, Flush: 50 * time.Microsecond}), newModel(smallest), 1, shared)
	w.check.lock = nil
	ctx := context.Background()
	must(t, w.format(ctx))
	var g rt.WaitGroup
	g.Init(w.r)
	for n := range 8 {
		g.Go("writer", func() {
			for i := range 300 {
				res, err := w.j.Reserve(ctx, 3*5, 1)
				must(t, err)
				w.mu.Lock()
				seq := w.appendLocked(&res, n%smallest.leaves, 1+i%5)
				w.mu.Unlock()
				w.j.Release(&res)
				must(t, w.j.Acknowledge(ctx, seq))
				switch i % 10 {
				case 3:
					must(t, w.j.WaitDurable(ctx, seq))
				case 7:
					must(t, w.j.Sync(ctx))
				}
			}
		})
	}
	g.Wait()
	must(t, w.close(ctx))
	if w.check.entries == 0 {
		t.Error("nothing was written")
	}
}
