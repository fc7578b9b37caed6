package daemon

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/fixture"
	"github.com/ubcache/ubcache/internal/nbd"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// images is where fixtures are unpacked that several tests use: nothing here writes to them.
var images struct {
	dir  string
	once sync.Map // of fixture names, func() ReadOnlyConfig
}

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "ubcache-daemon")
	if err != nil {
		panic(err)
	}
	images.dir = dir
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		os.RemoveAll(dir)
		os.Exit(code)
	}))
}

// unpack writes the disks of a fixture to a folder and returns a config that serves all its volumes.
func unpack(t testing.TB, f *fixture.Fixture, dir string) ReadOnlyConfig {
	t.Helper()
	c := ReadOnlyConfig{Listen: []string{"unix:" + filepath.Join(t.TempDir(), "sock")}}
	for _, d := range f.Devices {
		path, err := f.Extract(d.Role, dir)
		if err != nil {
			t.Fatal(err)
		}
		if d.Role == "cache" {
			c.Cache = path
		} else {
			c.Volumes = append(c.Volumes, Named{d.Role, path})
		}
	}
	for name := range f.Volumes {
		if !strings.HasPrefix(name, "backing") {
			c.Flash = append(c.Flash, name)
		}
	}
	slices.Sort(c.Flash)
	return c
}

// get is unpack into a folder that all tests share.
func get(t testing.TB, name string) (*fixture.Fixture, ReadOnlyConfig) {
	t.Helper()
	f, err := fixture.Get(name)
	if err != nil {
		t.Fatal(err)
	}
	once, _ := images.once.LoadOrStore(name, sync.OnceValue(func() ReadOnlyConfig {
		dir := filepath.Join(images.dir, name)
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		return unpack(t, f, dir)
	}))
	c := once.(func() ReadOnlyConfig)()
	c.Volumes = slices.Clone(c.Volumes)
	c.Listen = []string{"unix:" + filepath.Join(t.TempDir(), "sock")}
	return f, c
}

// A running is a ReadOnly under way.
type running struct {
	t testing.TB
	Served
	cancel context.CancelFunc
	ended  chan error
	log    *lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// start serves c, and fails the test where it does not come up.
func start(t testing.TB, c ReadOnlyConfig) *running {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{t: t, cancel: cancel, ended: make(chan error, 1), log: new(lockedBuffer)}
	c.Log = slog.New(slog.NewTextHandler(r.log, nil))
	ready := make(chan Served, 1)
	c.Ready = func(s Served) { ready <- s }
	go func() { r.ended <- ReadOnly(ctx, c) }()
	select {
	case r.Served = <-ready:
	case err := <-r.ended:
		cancel()
		t.Fatalf("did not start: %v\n%s", err, r.log)
	}
	t.Cleanup(func() { r.stop() })
	return r
}

// stop ends it, which must go well and not take long.
func (r *running) stop() {
	r.t.Helper()
	if r.cancel == nil {
		return
	}
	r.cancel()
	r.cancel = nil
	select {
	case err := <-r.ended:
		if err != nil {
			r.t.Errorf("stopped with %v\n%s", err, r.log)
		}
	case <-time.After(shutdownLimit + 10*time.Second):
		r.t.Fatal("does not stop")
	}
}

func (r *running) dial(export string) *nbd.Client {
	r.t.Helper()
	a := r.Addrs[0]
	c, err := nbd.Dial(context.Background(), a.Network(), a.String(), export, nbd.DialOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	return c
}

// sum hashes what an export holds.
func (r *running) sum(export string) (string, int64) {
	r.t.Helper()
	c := r.dial(export)
	h := sha256.New()
	bad, err := offline.Copy(context.Background(), h, c, offline.CopyOptions{})
	if err != nil || len(bad) > 0 {
		r.t.Fatalf("%s: %v, unreadable %v", export, err, bad)
	}
	size := c.Info().Size
	if err := c.Close(); err != nil {
		r.t.Fatal(err)
	}
	return hex.EncodeToString(h.Sum(nil)), size
}

// digest hashes the data of a file and where it lies, holes left out.
func digest(t testing.TB, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	for at := int64(0); ; {
		from, err := f.Seek(at, unix.SEEK_DATA)
		if err != nil {
			return hex.EncodeToString(h.Sum(nil))
		}
		if at, err = f.Seek(from, unix.SEEK_HOLE); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(h, from, at)
		if _, err := io.Copy(h, io.NewSectionReader(f, from, at-from)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestEveryFixtureOverNBD reads every volume that a kernel left through a socket: the content is what the kernel
// itself showed, and no image changes.
func TestEveryFixtureOverNBD(t *testing.T) {
	all, err := fixture.All()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		t.Run(f.Name, func(t *testing.T) {
			if testing.Short() && f.Name == "large-bucket" {
				t.Skip("16 GiB of holes take a while")
			}
			c := unpack(t, f, t.TempDir())
			paths := []string{c.Cache}
			for _, v := range c.Volumes {
				paths = append(paths, v.Device)
			}
			before := make([]string, len(paths))
			for i, p := range paths {
				before[i] = digest(t, p)
			}
			r := start(t, c)
			if len(r.Volumes) != len(f.Volumes) {
				t.Errorf("%d exports, %d volumes", len(r.Volumes), len(f.Volumes))
			}
			for name, want := range f.Volumes {
				if sum, size := r.sum(name); sum != want.SHA256 || size != want.Size {
					t.Errorf("%s: %d bytes with sha256 %s, the manifest says %d and %s", name, size, sum, want.Size, want.SHA256)
				}
			}
			r.stop()
			if log := r.log.String(); strings.Contains(log, "level=WARN") || strings.Contains(log, "level=ERROR") {
				t.Errorf("log: %s", log)
			}
			for i, p := range paths {
				if digest(t, p) != before[i] {
					t.Errorf("%s has changed", p)
				}
			}
		})
	}
}

// Two volumes are two exports; the first is also the default one.
func TestExports(t *testing.T) {
	f, c := get(t, "two-backing")
	c.Volumes[0].Name, c.Volumes[1].Name = "b", "a"
	c.Listen = append(c.Listen, "tcp:127.0.0.1:0")
	r := start(t, c)
	if len(r.Addrs) != 2 || r.Addrs[1].(*net.TCPAddr).Port == 0 {
		t.Fatalf("addresses %v", r.Addrs)
	}
	for _, a := range r.Addrs {
		names, err := nbd.List(context.Background(), a.Network(), a.String())
		if err != nil || !slices.Equal(names, []string{"b", "a"}) {
			t.Errorf("%v lists %v, %v", a, names, err)
		}
	}
	for export, role := range map[string]string{"b": "backing0", "": "backing0", "a": "backing1"} {
		if sum, _ := r.sum(export); sum != f.Volumes[role].SHA256 {
			t.Errorf("export %q is not %s", export, role)
		}
	}
	if _, err := nbd.Dial(context.Background(), "unix", r.Addrs[0].String(), "c", nbd.DialOptions{}); !errors.Is(err, nbd.ErrRefused) {
		t.Errorf("unknown export: %v", err)
	}
	for export, block := range map[string]int{"b": 4096, "a": 512} {
		if i := r.dial(export).Info(); !i.ReadOnly || i.LogicalBlock != block {
			t.Errorf("export %s: %+v", export, i)
		}
	}
	io, err := blockdev.NewIO(r.dial("a"), 1)
	if err != nil {
		t.Fatal(err)
	}
	defer io.Close()
	if err := io.WriteAt(make([]byte, 4096), 0, 0); !errors.Is(err, blockdev.ErrReadOnly) {
		t.Errorf("write: %v", err)
	}
}

// What does not start says why, leaves nothing open, and creates no socket.
func TestDoesNotStart(t *testing.T) {
	f, good := get(t, "wb-crash")
	_, other := get(t, "two-backing")
	busy := filepath.Join(t.TempDir(), "busy")
	l, err := net.Listen("unix", busy)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	const refusal = "refused"
	for _, tt := range []struct {
		name   string
		change func(c *ReadOnlyConfig)
		says   string
		kind   string
	}{
		{"dirty, without its cache", func(c *ReadOnlyConfig) { c.Cache = "" }, "state is dirty", refusal},
		{"of another set", func(c *ReadOnlyConfig) { c.Cache = other.Cache }, "belongs to set", refusal},
		{"cache device as volume", func(c *ReadOnlyConfig) { c.Volumes[0].Device = c.Cache }, "that of a cache device", ""},
		{"volume as cache device", func(c *ReadOnlyConfig) { c.Cache = c.Volumes[0].Device }, "that of a backing device", ""},
		{"no such file", func(c *ReadOnlyConfig) { c.Cache += "x" }, "no such file", ""},
		{"no such backing device", func(c *ReadOnlyConfig) { c.Volumes[0].Device += "x" }, "no such file", ""},
		{"no such flash-only volume", func(c *ReadOnlyConfig) { c.Flash = []string{"f"} }, `no flash-only volume "f"`, ""},
		{"flash-only volume without a cache", func(c *ReadOnlyConfig) { c.Cache, c.Volumes, c.Flash = "", nil, []string{"f"} }, "none was given", ""},
		{"one name twice", func(c *ReadOnlyConfig) { c.Volumes = append(c.Volumes, c.Volumes[0]) }, "backing0", ""},
		{"a socket in use", func(c *ReadOnlyConfig) { c.Listen = append(c.Listen, "unix:"+busy) }, "busy", ""},
		{"no such address", func(c *ReadOnlyConfig) { c.Listen = []string{"udp:1"} }, "want unix:PATH", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := good
			c.Volumes = slices.Clone(good.Volumes)
			c.Log = slog.New(slog.DiscardHandler)
			c.Ready = func(Served) { t.Error("says that it is ready") }
			tt.change(&c)
			err := ReadOnly(context.Background(), c)
			var refused *offline.RefusedError
			if err == nil || !strings.Contains(err.Error(), tt.says) || errors.As(err, &refused) != (tt.kind == refusal) {
				t.Errorf("%v, want %q", err, tt.says)
			}
			if _, err := os.Stat(strings.TrimPrefix(good.Listen[0], "unix:")); err == nil {
				t.Error("the socket is there")
			}
			for _, path := range []string{good.Cache, good.Volumes[0].Device} {
				dev, err := blockdev.Open(path, blockdev.Options{})
				if err != nil {
					t.Fatalf("still open: %v", err)
				}
				dev.Close()
			}
		})
	}
	if r := start(t, good); r.Volumes[0].Size != f.Volumes["backing0"].Size {
		t.Error("the good one does not serve")
	}
}

// While it serves, nobody else may write to the devices; others may read.
func TestDevicesAreLocked(t *testing.T) {
	_, c := get(t, "two-backing")
	r := start(t, c)
	for _, path := range []string{c.Cache, c.Volumes[0].Device, c.Volumes[1].Device} {
		if dev, err := blockdev.Open(path, blockdev.Options{}); err == nil {
			dev.Close()
			t.Errorf("%s can be opened for writing", path)
		}
		dev, err := blockdev.Open(path, blockdev.Options{ReadOnly: true})
		if err != nil {
			t.Errorf("reading is refused: %v", err)
			continue
		}
		dev.Close()
	}
	r.stop()
	if _, err := os.Stat(strings.TrimPrefix(c.Listen[0], "unix:")); err == nil {
		t.Error("the socket is still there")
	}
}

// It ends in good order while clients read for all they are worth.
func TestStopsUnderLoad(t *testing.T) {
	_, c := get(t, "wb-crash")
	r := start(t, c)
	var reads sync.WaitGroup
	begun := make(chan struct{}, 64)
	for range 4 {
		client := r.dial("backing0")
		io, err := blockdev.NewIO(client, 4)
		if err != nil {
			t.Fatal(err)
		}
		defer io.Close()
		for g := range int64(4) {
			reads.Go(func() {
				buf := make([]byte, 256<<10)
				for n := int64(0); ; n++ {
					if err := io.ReadAt(buf, (n*37+g)<<18%client.Info().Size); err != nil {
						if !errors.Is(err, syscall.EIO) && !errors.Is(err, syscall.ESHUTDOWN) {
							t.Errorf("read ended with %v", err)
						}
						return
					}
					select {
					case begun <- struct{}{}:
					default:
					}
				}
			})
		}
	}
	for range 20 {
		<-begun
	}
	begin := time.Now()
	r.stop()
	if d := time.Since(begin); d > shutdownLimit {
		t.Errorf("took %v", d)
	}
	reads.Wait()
}

// A device that cannot read everything: what needs it fails, other requests and connections go on. It is said when
// it happens, and listed at the end.
func TestFaultyDevices(t *testing.T) {
	_, c := get(t, "wb-crash")
	// Some dirty data, and something that is on the backing device alone.
	var dirty, plain [2]int64
	func() {
		dev, err := blockdev.Open(c.Cache, blockdev.Options{ReadOnly: true})
		if err != nil {
			t.Fatal(err)
		}
		defer dev.Close()
		set, err := offline.Open(context.Background(), dev, offline.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer set.Close()
		back, err := blockdev.Open(c.Volumes[0].Device, blockdev.Options{ReadOnly: true})
		if err != nil {
			t.Fatal(err)
		}
		defer back.Close()
		b, err := offline.OpenBacking(set, back)
		if err != nil {
			t.Fatal(err)
		}
		v, err := offline.OpenVolume(set, b)
		if err != nil {
			t.Fatal(err)
		}
		v.EachPiece(0, v.Info().Size, func(kind offline.Kind, off, length int64) bool {
			switch {
			case kind == offline.FromCacheDirty && length >= 16<<10 && off > 1<<20:
				dirty = [2]int64{off, length}
			case kind == offline.FromBacking && length >= 16<<10 && off > 1<<20:
				plain = [2]int64{off, length}
			}
			return dirty[1] == 0 || plain[1] == 0
		})
	}()
	if dirty[1] == 0 || plain[1] == 0 {
		t.Fatal("the fixture has no such data")
	}
	const offset = 16 * 512
	c.open = func(path string, o blockdev.Options) (blockdev.Device, error) {
		dev, err := blockdev.Open(path, o)
		if err != nil {
			return nil, err
		}
		bad := blockdev.NewFaulty(dev, 1)
		if path == c.Cache {
			// All reads of data fail, those of metadata do not.
			bad.Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpRead}, Purposes: []blockdev.Purpose{blockdev.ForData}})
		} else {
			bad.Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpRead}, Off: plain[0] + offset + 4096, Len: 4096})
		}
		return bad, nil
	}
	r := start(t, c)
	if len(r.Volumes[0].Unreadable) != 0 {
		t.Errorf("unknown at the start: %v", r.Volumes[0].Unreadable)
	}
	client := r.dial("backing0")
	io, err := blockdev.NewIO(client, 8)
	if err != nil {
		t.Fatal(err)
	}
	defer io.Close()
	var wg sync.WaitGroup
	for _, tt := range []struct {
		off int64
		bad bool
	}{
		{dirty[0], true}, {dirty[0] + 4096, true}, {plain[0], false}, {plain[0] + 4096, true}, {plain[0] + 8192, false},
	} {
		for range 10 {
			wg.Go(func() {
				err := io.ReadAt(make([]byte, 4096), tt.off)
				if tt.bad != errors.Is(err, syscall.EIO) || tt.bad != (err != nil) {
					t.Errorf("read at %d: %v, should fail: %v", tt.off, err, tt.bad)
				}
			})
		}
	}
	wg.Wait()
	said := func(what string, off int64) bool {
		return regexp.MustCompile(fmt.Sprintf(`msg="%s" volume=backing0 offset=%d length=4096`, what, off)).MatchString(r.log.String())
	}
	for deadline := time.Now().Add(10 * time.Second); !said("could not be read", dirty[0]) && time.Now().Before(deadline); {
		time.Sleep(5 * time.Millisecond)
	}
	for _, off := range []int64{dirty[0], dirty[0] + 4096, plain[0] + 4096} {
		if !said("could not be read", off) {
			t.Errorf("failure at %d is not logged:\n%s", off, r.log)
		}
		if said("was asked for and could not be read", off) {
			t.Errorf("listed before the end")
		}
	}
	r.stop()
	for _, off := range []int64{dirty[0], dirty[0] + 4096, plain[0] + 4096} {
		if !said("was asked for and could not be read", off) {
			t.Errorf("failure at %d is not listed:\n%s", off, r.log)
		}
	}
	if n := strings.Count(r.log.String(), "was asked for"); n != 3 {
		t.Errorf("%d failures listed:\n%s", n, r.log)
	}
}

// A damaged leaf: its range is named at the start and reads as an error, all else reads as it should.
func TestDamagedIndex(t *testing.T) {
	f, good := get(t, "split-crash")
	c := unpack(t, f, t.TempDir())
	var leaf int64
	dev, err := blockdev.Open(c.Cache, blockdev.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	set, err := offline.Open(context.Background(), dev, offline.Options{EachNode: func(ref offline.NodeRef, n *ondisk.Node) {
		if ref.Level == 0 && len(n.Sets) > 1 {
			leaf = int64(ref.Sector()) * 512
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	set.Close()
	dev.Close()
	img, err := os.OpenFile(c.Cache, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := img.WriteAt([]byte{0xff}, leaf+40); err != nil {
		t.Fatal(err)
	}
	img.Close()
	r := start(t, c)
	bad := r.Volumes[0].Unreadable
	if len(bad) == 0 || !strings.Contains(r.log.String(), "node-damaged") {
		t.Fatalf("unknown: %v\n%s", bad, r.log)
	}
	client := r.dial("backing0")
	var out bytes.Buffer
	got, err := offline.Copy(context.Background(), &out, client, offline.CopyOptions{})
	if err != nil || !slices.Equal(got, bad) {
		t.Errorf("%v, could not be read: %v, unknown at the start: %v", err, got, bad)
	}
	// Everything else is as the kernel shows it: with the unknown parts from a good copy the sum is right.
	g := start(t, good).dial("backing0")
	io, err := blockdev.NewIO(g, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer io.Close()
	for _, x := range bad {
		part := out.Bytes()[x[0]:][:x[1]]
		if len(bytes.Trim(part, "\x00")) > 0 {
			t.Errorf("%v is not zeroes", x)
		}
		if err := io.ReadAt(part, x[0]); err != nil {
			t.Fatal(err)
		}
	}
	if sum := sha256.Sum256(out.Bytes()); hex.EncodeToString(sum[:]) != f.Volumes["backing0"].SHA256 {
		t.Error("the rest is not what it should be")
	}
}
