package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/fixture"
	"github.com/ubcache/ubcache/internal/nbd"
	"github.com/ubcache/ubcache/internal/offline"
)

// These tests serve sets that kernels left in a process of its own, as users do, and read them with the clients that
// users have. Where a tool is missing they are skipped, or fail if UBCACHE_REQUIRE_TOOLS=1.

// A disks is a fixture unpacked: paths by role.
type disks map[string]string

func unpack(t testing.TB, name string, roles ...string) (*fixture.Fixture, disks) {
	t.Helper()
	f, err := fixture.Get(name)
	if err != nil {
		t.Fatal(err)
	}
	dir, d := t.TempDir(), disks{}
	for _, x := range f.Devices {
		if len(roles) > 0 && !slices.Contains(roles, x.Role) {
			continue
		}
		if d[x.Role], err = f.Extract(x.Role, dir); err != nil {
			t.Fatal(err)
		}
	}
	return f, d
}

// unchanged fails the test where a disk is not what the manifest says.
func (d disks) unchanged(t testing.TB, f *fixture.Fixture) {
	t.Helper()
	for _, x := range f.Devices {
		if path := d[x.Role]; path != "" {
			if sum, err := hashFile(path); err != nil || sum != x.SHA256 {
				t.Errorf("%s has changed: %v", x.Role, err)
			}
		}
	}
}

// A served is a "ubcache serve" that runs.
type served struct {
	t      testing.TB
	cmd    *exec.Cmd
	lines  []string // of standard output, up to "ready"
	stderr bytes.Buffer
	sock   string
	exited bool
}

// serve starts the program and waits until it is ready.
func serve(t testing.TB, args ...string) *served {
	t.Helper()
	s := &served{t: t, sock: filepath.Join(t.TempDir(), "nbd.sock")}
	s.cmd = exec.Command("ubcache", append([]string{"serve", "--read-only", "--nbd", "unix:" + s.sock}, args...)...)
	s.cmd.Stderr = &s.stderr
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if !s.exited {
			s.cmd.Process.Kill()
			s.cmd.Wait()
		}
	})
	for scan := bufio.NewScanner(out); scan.Scan(); {
		s.lines = append(s.lines, scan.Text())
		if scan.Text() == "ready" {
			return s
		}
	}
	err = s.cmd.Wait()
	s.exited = true
	t.Fatalf("not ready: %v\n%s\n%s", err, strings.Join(s.lines, "\n"), s.stderr.String())
	return nil
}

// stop sends SIGTERM: the process must end by itself with status 0 soon, and remove its socket.
func (s *served) stop() {
	s.t.Helper()
	if err := s.cmd.Process.Signal(unix.SIGTERM); err != nil {
		s.t.Fatal(err)
	}
	timer := time.AfterFunc(20*time.Second, func() { s.cmd.Process.Kill() })
	defer timer.Stop()
	err := s.cmd.Wait()
	s.exited = true
	if err != nil {
		s.t.Errorf("after SIGTERM: %v\n%s", err, s.stderr.String())
	}
	if _, err := os.Stat(s.sock); err == nil {
		s.t.Error("the socket is still there")
	}
}

func (s *served) uri(export string) string {
	return nbd.Address{Network: "unix", Addr: s.sock, Export: export}.String()
}

// qemuURI is the URI as qemu wants it, which does not know %2F in a socket's path.
func (s *served) qemuURI(export string) string {
	return "nbd+unix:///" + url.PathEscape(export) + "?socket=" + s.sock
}

// tool runs a tool, which must succeed, and returns what it prints.
func tool(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := try(t, name, args...)
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return out
}

func try(t testing.TB, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = t.TempDir()
	if name == "nbdsh" { // runs the first python3 in PATH, but its module belongs to the system's
		cmd.Env = append(os.Environ(), "PATH=/usr/bin:"+os.Getenv("PATH"))
	}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// A subject is a set that clients are tried on.
type subject struct {
	fixture string
	flags   func(d disks) []string
	exports map[string]string // name of the export: of the fixture's volume
	first   string
}

var subjects = []subject{
	{
		"wb-crash", func(d disks) []string { return []string{"--cache", d["cache"], "--volume", "data=" + d["backing0"]} },
		map[string]string{"data": "backing0"},
		"data",
	},
	{
		"two-backing", func(d disks) []string {
			return []string{"--cache", d["cache"], "--volume", "wt=" + d["backing1"], "--volume", "wb=" + d["backing0"], "--engine", "pread"}
		},
		map[string]string{"wb": "backing0", "wt": "backing1"},
		"wt",
	},
	{
		"flash-only", func(d disks) []string { return []string{"--cache", d["cache"], "--flash", "flashA", "--flash", "1"} },
		map[string]string{"flashA": "flashA", "1": "flashB"},
		"flashA",
	},
}

// TestClientsOfSetsAtRest runs every client on every subject.
func TestClientsOfSetsAtRest(t *testing.T) {
	for _, sub := range subjects {
		t.Run(sub.fixture, func(t *testing.T) {
			f, d := unpack(t, sub.fixture)
			s := serve(t, sub.flags(d)...)
			var want []string
			for export, volume := range sub.exports {
				want = append(want, fmt.Sprintf("volume %s: %d bytes", export, f.Volumes[volume].Size), s.uri(export))
			}
			slices.Sort(want)
			if got := slices.Sorted(slices.Values(s.lines[:len(s.lines)-1])); !slices.Equal(got, want) {
				t.Errorf("it printed %q, want %q", got, want)
			}
			files := map[string]string{}
			for export, volume := range sub.exports {
				files[export] = catVolume(t, d, volume)
			}
			t.Run("nbdinfo", func(t *testing.T) { clientNbdinfo(t, s, &sub, f, d) })
			t.Run("nbdcopy", func(t *testing.T) { clientNbdcopy(t, s, &sub, f) })
			t.Run("nbdsh", func(t *testing.T) { clientNbdsh(t, s, &sub, f, files) })
			t.Run("qemu", func(t *testing.T) { clientQemu(t, s, &sub, f, files) })
			t.Run("fio", func(t *testing.T) { clientFio(t, s, &sub, f) })
			s.stop()
			if log := s.stderr.String(); strings.Contains(log, "could not be read") || strings.Contains(log, "level=ERROR") {
				t.Errorf("log: %s", log)
			}
			d.unchanged(t, f)
		})
	}
}

// catVolume writes a volume to a file by "ubcache cat".
func catVolume(t testing.TB, d disks, volume string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "cat.img")
	out, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	args := []string{"ubcache", "cat", "--cache", d["cache"], "--flash", volume}
	if d[volume] != "" {
		args = append(args[:4], "--backing", d[volume])
	}
	var errs bytes.Buffer
	if status := run(&environment{stdin: strings.NewReader(""), stdout: holes{out}, stderr: &errs}, args); status != exitDone {
		t.Fatalf("cat: status %d\n%s", status, errs.String())
	}
	at, err := out.Seek(0, io.SeekCurrent)
	if err == nil {
		err = out.Truncate(at)
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// holes leaves holes where zeroes are written.
type holes struct{ *os.File }

func (h holes) Write(p []byte) (int, error) {
	const page = 64 << 10
	for at := 0; at < len(p); at += page {
		b := p[at:min(at+page, len(p))]
		var err error
		if bytes.Count(b, []byte{0}) == len(b) {
			_, err = h.Seek(int64(len(b)), io.SeekCurrent)
		} else {
			_, err = h.File.Write(b)
		}
		if err != nil {
			return at, err
		}
	}
	return len(p), nil
}

func clientNbdinfo(t *testing.T, s *served, sub *subject, f *fixture.Fixture, d disks) {
	needTool(t, "nbdinfo")
	type export struct {
		Name     string   `json:"export-name"`
		Size     int64    `json:"export-size"`
		Contexts []string `json:"contexts"`
		ReadOnly bool     `json:"is_read_only"`
		Multi    bool     `json:"can_multi_conn"`
		Trim     bool     `json:"can_trim"`
		Zero     bool     `json:"can_zero"`
		Min      int      `json:"block_size_minimum"`
	}
	parse := func(args ...string) []export {
		t.Helper()
		var got struct{ Exports []export }
		if out := tool(t, "nbdinfo", append([]string{"--json"}, args...)...); json.Unmarshal([]byte(out), &got) != nil || len(got.Exports) == 0 {
			t.Fatalf("nbdinfo %v: %s", args, out)
		}
		return got.Exports
	}
	good := func(e export, name string) {
		t.Helper()
		if e.Size != f.Volumes[sub.exports[name]].Size || !e.ReadOnly || !e.Multi || e.Trim || e.Zero || len(e.Contexts) != 2 || e.Min < 512 {
			t.Errorf("%s: %+v", name, e)
		}
	}
	good(parse(s.uri(""))[0], sub.first)
	var names []string
	for _, e := range parse("--list", s.uri("")) {
		names = append(names, e.Name)
		good(e, e.Name)
	}
	if len(names) != len(sub.exports) || names[0] != sub.first {
		t.Errorf("list: %q", names)
	}
	var dirty int64
	for name, volume := range sub.exports {
		size := f.Volumes[volume].Size
		if out := tool(t, "nbdinfo", "--size", s.uri(name)); strings.TrimSpace(out) != fmt.Sprint(size) {
			t.Errorf("%s: size %s, want %d", name, out, size)
		}
		for _, context := range []string{"base:allocation", "ubcache:state"} {
			var extents []struct{ Offset, Length, Type int64 }
			if out := tool(t, "nbdinfo", "--json", "--map="+context, s.uri(name)); json.Unmarshal([]byte(out), &extents) != nil {
				t.Fatalf("map: %s", out)
			}
			at := int64(0)
			for _, e := range extents {
				if e.Offset != at || e.Length <= 0 {
					t.Fatalf("%s of %s: %+v at %d", context, name, e, at)
				}
				at += e.Length
				if context == "ubcache:state" && e.Type == nbd.StateDirty {
					dirty += e.Length
				}
			}
			if at != size {
				t.Errorf("%s of %s: covers %d of %d bytes", context, name, at, size)
			}
		}
	}
	var report struct{ Totals offline.Stats }
	_, out, _ := command("ubcache", "check", "--json", "--cache", d["cache"])
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatal(err)
	}
	if dirty == 0 || dirty != report.Totals.DirtyBytes {
		t.Errorf("the map says that %d bytes are dirty, check says %d", dirty, report.Totals.DirtyBytes)
	}
}

func clientNbdcopy(t *testing.T, s *served, sub *subject, f *fixture.Fixture) {
	needTool(t, "nbdcopy")
	for name, volume := range sub.exports {
		file := filepath.Join(t.TempDir(), "copy")
		tool(t, "nbdcopy", s.uri(name), file)
		if sum, err := hashFile(file); err != nil || sum != f.Volumes[volume].SHA256 {
			t.Errorf("%s: %v, sha256 %s, the manifest says %s", name, err, sum, f.Volumes[volume].SHA256)
		}
		os.Remove(file)
	}
}

func clientNbdsh(t *testing.T, s *served, sub *subject, f *fixture.Fixture, files map[string]string) {
	needTool(t, "nbdsh")
	for name, volume := range sub.exports {
		tool(t, "nbdsh", "-c", fmt.Sprintf(`
import errno, random
uri, size, path = %q, %d, %q
h.add_meta_context("base:allocation")
h.add_meta_context("ubcache:state")
h.connect_uri(uri)
assert h.get_size() == size and h.is_read_only() and h.can_multi_conn()
assert not h.can_trim() and not h.can_zero()
block = h.get_block_size(nbd.SIZE_MINIMUM)
data = open(path, "rb")
def right(n, off, got):
    data.seek(off)
    assert data.read(n) == got, (n, off)
rng = random.Random(5)
for i in range(200):
    n = rng.choice([1, 2, 8, 63, 256]) * block
    off = rng.randrange((size - n) // block) * block
    right(n, off, h.pread(n, off))
right(block, size - block, h.pread(block, size - block))
# Many at once, on two connections.
h2 = nbd.NBD()
h2.connect_uri(uri)
for h3 in (h, h2):
    bufs = [(nbd.Buffer(4096), 4096 * rng.randrange(size // 4096 - 1)) for i in range(200)]
    cookies = [h3.aio_pread(b, off) for b, off in bufs]
    while cookies:
        h3.poll(-1)
        cookies = [c for c in cookies if not h3.aio_command_completed(c)]
    for b, off in bufs:
        right(4096, off, b.to_bytearray())
extents = {}
def extent(context, off, e, err):
    extents[context] = e
h.block_status(min(size, 1 << 30), 0, extent)
assert set(extents) == {"base:allocation", "ubcache:state"}, extents
# What must be refused, asked for all the same.
h.set_strict_mode(0)
def fails(codes, f, *args):
    try:
        f(*args)
    except nbd.Error as e:
        assert e.errnum in codes, (e.errnum, codes, f, args)
    else:
        assert False, (f, args)
for f, args in ((h.pwrite, (bytes(block), 0)), (h.zero, (block, 0)), (h.trim, (block, 0)), (h.pwrite, (bytes(block), 0, nbd.CMD_FLAG_FUA))):
    fails((errno.EPERM, errno.EROFS), f, *args)
fails((errno.EINVAL,), h.pread, block, size)
fails((errno.EINVAL,), h.pread, 2 * block, size - block)
fails((errno.EINVAL,), h.pread, block, 1 << 62)
fails((errno.EINVAL,), h.pread, block - 1, 0)
h.flush()
right(block, 0, h.pread(block, 0))
h.shutdown()
h2.shutdown()
`, s.uri(name), f.Volumes[volume].Size, files[name]))
	}
}

func clientQemu(t *testing.T, s *served, sub *subject, f *fixture.Fixture, files map[string]string) {
	needTool(t, "qemu-img")
	needTool(t, "qemu-io")
	for name, volume := range sub.exports {
		if out := tool(t, "qemu-img", "info", "--output=json", s.qemuURI(name)); !strings.Contains(out, fmt.Sprintf(`"virtual-size": %d`, f.Volumes[volume].Size)) {
			t.Errorf("info: %s", out)
		}
		if out := tool(t, "qemu-img", "compare", "-f", "raw", "-F", "raw", files[name], s.qemuURI(name)); !strings.Contains(out, "identical") {
			t.Errorf("compare: %s", out)
		}
		qcow := filepath.Join(t.TempDir(), "copy.qcow2")
		tool(t, "qemu-img", "convert", "-f", "raw", "-O", "qcow2", s.qemuURI(name), qcow)
		if out := tool(t, "qemu-img", "compare", "-f", "raw", "-F", "qcow2", files[name], qcow); !strings.Contains(out, "identical") {
			t.Errorf("compare with the copy: %s", out)
		}
		os.Remove(qcow)
		if out := tool(t, "qemu-io", "-r", "-f", "raw", "-c", "read 0 64k", "-c", "read 1M 4k", "-c", "aio_read 2M 1M", "-c", "aio_flush", s.qemuURI(name)); strings.Contains(out, "failed") {
			t.Errorf("qemu-io: %s", out)
		}
		for _, args := range [][]string{{"-f", "raw", "-c", "write 0 4k"}, {"-r", "-f", "raw", "-c", "write 0 4k"}} {
			if out, err := try(t, "qemu-io", append(args, s.qemuURI(name))...); err == nil || strings.Contains(out, "wrote") {
				t.Errorf("qemu-io %v is not refused: %v, %s", args, err, out)
			}
		}
	}
}

// fioHasNBD skips the test where fio has no nbd engine.
func fioHasNBD(t *testing.T) {
	needTool(t, "fio")
	if out := tool(t, "fio", "--enghelp"); !strings.Contains(out, "nbd") {
		if os.Getenv("UBCACHE_REQUIRE_TOOLS") == "1" {
			t.Fatal("fio has no nbd engine")
		}
		t.Skip("fio has no nbd engine")
	}
}

func clientFio(t *testing.T, s *served, sub *subject, _ *fixture.Fixture) {
	fioHasNBD(t)
	for name := range sub.exports {
		out := tool(t, "fio", "--name=read", "--readonly", "--ioengine=nbd", "--uri="+s.uri(name), "--rw=randread", "--bssplit=4k/70:64k/20:512k/10",
			"--iodepth=32", "--size=16m", "--io_size=24m", "--output-format=json")
		var got struct {
			Jobs []struct {
				Error int
				Read  struct {
					Bytes int64 `json:"io_bytes"`
				}
			}
		}
		if i := strings.IndexByte(out, '{'); i < 0 || json.Unmarshal([]byte(out[i:]), &got) != nil || len(got.Jobs) != 1 || got.Jobs[0].Error != 0 || got.Jobs[0].Read.Bytes < 20<<20 {
			t.Errorf("%s: %+v\n%s", name, got, out)
		}
	}
}

// TestServeStopsUnderLoad: SIGTERM while fio reads ends the process with status 0 and without a long wait.
func TestServeStopsUnderLoad(t *testing.T) {
	fioHasNBD(t)
	f, d := unpack(t, "wb-crash")
	s := serve(t, "--cache", d["cache"], "--volume", "data="+d["backing0"])
	fio := exec.Command("fio", "--name=load", "--readonly", "--ioengine=nbd", "--uri="+s.uri("data"), "--rw=randread", "--bs=64k", "--iodepth=64",
		"--size=128m", "--time_based", "--runtime=60")
	fio.Dir = t.TempDir()
	if err := fio.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- fio.Wait() }()
	busy(t, s.cmd.Process.Pid)
	begin := time.Now()
	s.stop()
	if took := time.Since(begin); took > 12*time.Second {
		t.Errorf("it took %v", took)
	}
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Error("fio waits for replies that do not come")
		fio.Process.Kill()
		<-ended
	}
	d.unchanged(t, f)
}

// busy waits until a process has used some CPU time.
func busy(t *testing.T, pid int) {
	t.Helper()
	ticks := func() (n int) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			t.Fatal(err)
		}
		fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')'):]))
		var user, system int
		fmt.Sscan(fields[12], &user)
		fmt.Sscan(fields[13], &system)
		return user + system
	}
	for first, deadline := ticks(), time.Now().Add(20*time.Second); ticks() < first+20; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("no load")
		}
	}
}

// A second signal, and one before it is ready, end it too.
func TestServeInterrupted(t *testing.T) {
	_, d := unpack(t, "two-backing")
	s := serve(t, "--cache", d["cache"], "--volume", "a="+d["backing0"])
	c, err := nbd.Dial(context.Background(), "unix", s.sock, "a", nbd.DialOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s.cmd.Process.Signal(unix.SIGINT)
	timer := time.AfterFunc(20*time.Second, func() { s.cmd.Process.Kill() })
	defer timer.Stop()
	err = s.cmd.Wait()
	s.exited = true
	if err != nil {
		t.Errorf("after SIGINT, with an idle client: %v\n%s", err, s.stderr.String())
	}
}

// TestCatStopsWithItsReader: a reader that has enough, as head has.
func TestCatStopsWithItsReader(t *testing.T) {
	_, d := unpack(t, "two-backing")
	cmd := exec.Command("ubcache", "cat", "--cache", d["cache"], "--backing", d["backing0"])
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 4096)); err != nil {
		t.Fatal(err)
	}
	out.Close()
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) {
		t.Errorf("%v, want a failure\n%s", err, stderr.String())
	}
}

// TestDumpIsWhatTheKernelPrinted holds "dump --what btree" against the keys that a kernel printed after its own
// replay. Neighbours that continue each other count as one.
func TestDumpIsWhatTheKernelPrinted(t *testing.T) {
	for _, name := range []string{"wb-crash", "wb-crash-6.1", "gc-crash", "split-crash", "flush-crash", "flash-only", "two-backing", "writearound", "discards", "fresh-attached"} {
		t.Run(name, func(t *testing.T) {
			f, d := unpack(t, name, "cache")
			text, err := f.Keys()
			if err != nil {
				t.Fatal(err)
			}
			status, out, errs := command("ubcache", "dump", "--what", "btree", "--cache", d["cache"])
			if status != exitDone || errs != "" {
				t.Fatalf("status %d: %s", status, errs)
			}
			got, want := joinDumped(t, out), joinDumped(t, string(text))
			if !slices.Equal(got, want) {
				i := 0
				for i < min(len(got), len(want)) && got[i] == want[i] {
					i++
				}
				t.Errorf("%d keys, the kernel has %d; the first difference is at %d: %v, %v", len(got), len(want), i, got[i:min(i+1, len(got))], want[i:min(i+1, len(want))])
			}
			var lines []dumpedKey
			_, out, _ = command("ubcache", "dump", "--what", "btree", "--json", "--cache", d["cache"])
			for line := range strings.Lines(out) {
				var k struct {
					Type                  string
					Inode, Start, Sectors int
					Dirty                 bool
					Dev, Sector, Gen      int
					State                 string
				}
				if err := json.Unmarshal([]byte(line), &k); err != nil || k.Type != "key" || k.State != "live" {
					t.Fatalf("%v: %s", err, line)
				}
				lines = append(lines, dumpedKey{k.Inode, k.Start, k.Sectors, k.Dev, k.Sector, k.Gen, k.Dirty})
			}
			if !slices.Equal(joinRuns(lines), want) {
				t.Error("the JSON says something else")
			}
		})
	}
}

type dumpedKey struct {
	inode, start, n, dev, sector, gen int
	dirty                             bool
}

func joinDumped(t *testing.T, text string) []dumpedKey {
	t.Helper()
	var list []dumpedKey
	for line := range strings.Lines(text) {
		var k dumpedKey
		if _, err := fmt.Sscanf(line, "%d:%d len %d -> [%d:%d gen %d]", &k.inode, &k.start, &k.n, &k.dev, &k.sector, &k.gen); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		k.dirty = strings.Contains(line, "] dirty")
		list = append(list, k)
	}
	return joinRuns(list)
}

func joinRuns(list []dumpedKey) (out []dumpedKey) {
	for _, k := range list {
		if n := len(out); n > 0 {
			next := out[n-1]
			next.start, next.sector, next.n = next.start+next.n, next.sector+next.n, k.n
			if k == next {
				out[n-1].n += k.n
				continue
			}
		}
		out = append(out, k)
	}
	return out
}

// TestJSONIsWhole: whatever state a set is in, what --json prints can be parsed to the last byte.
func TestJSONIsWhole(t *testing.T) {
	_, d := unpack(t, "split-crash")
	damaged := filepath.Join(t.TempDir(), "damaged.img")
	b, err := os.ReadFile(d["cache"])
	if err != nil {
		t.Fatal(err)
	}
	copy(b[18432*512+40:], "\xff\xff") // a leaf
	if err := os.WriteFile(damaged, b, 0o600); err != nil {
		t.Fatal(err)
	}
	fresh := sparse(t, "fresh.img", 64<<20)
	if status, _, errs := command("ubcache", "format", "--cache", fresh, "--bucket", "64k"); status != exitDone {
		t.Fatal(errs)
	}
	for _, tt := range []struct {
		name, path string
		status     int
		worst      string
	}{
		{"good", d["cache"], exitDone, `"harmless"`},
		{"damaged", damaged, exitFailed, `"data at risk"`},
		{"fresh", fresh, exitDone, `"harmless"`},
		{"backing device", d["backing0"], exitFailed, `"fatal"`},
		{"zeroes", sparse(t, "zero.img", 1<<20), exitFailed, `"fatal"`},
		{"tiny", sparse(t, "tiny.img", 100), exitFailed, `"fatal"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			status, out, _ := command("ubcache", "check", "--json", "--cache", tt.path)
			var report struct {
				Cache    string
				Worst    json.RawMessage
				Findings []struct {
					Code, Severity, Device, Message string
					Sector, Sectors, Count          *int64
				}
				Totals  map[string]int64
				Buckets map[string]int64
			}
			dec := json.NewDecoder(strings.NewReader(out))
			if err := dec.Decode(&report); err != nil || dec.More() {
				t.Fatalf("%v: %s", err, out)
			}
			if status != tt.status || string(report.Worst) != tt.worst || report.Cache != tt.path || len(report.Findings) == 0 {
				t.Errorf("status %d, %s", status, out)
			}
			for _, x := range report.Findings {
				if x.Code == "" || x.Severity == "" || x.Message == "" || x.Sector == nil || x.Sectors == nil || x.Count == nil || *x.Count < 1 {
					t.Errorf("%+v", x)
				}
			}
			status, out, errs := command("ubcache", "dump", "--json", "--all", "--what", strings.Join(dumpParts, ","), "--cache", tt.path)
			if want := tt.worst == `"fatal"`; want != (status == exitFailed) || want != (errs != "") {
				t.Errorf("dump: status %d, %s", status, errs)
			}
			types := map[string]int{}
			for line := range strings.Lines(out) {
				var x struct{ Type string }
				if err := json.Unmarshal([]byte(line), &x); err != nil || x.Type == "" {
					t.Fatalf("%v: %s", err, line)
				}
				types[x.Type]++
			}
			wanted := []string{"superblock"}
			switch tt.name {
			case "good", "damaged":
				wanted = []string{"superblock", "journal", "entry", "entry_key", "slot", "key", "node", "bucket"}
			case "fresh":
				wanted = []string{"superblock", "bucket"}
			case "tiny":
				wanted = nil
			}
			for _, w := range wanted {
				if types[w] == 0 {
					t.Errorf("no %s in %v", w, types)
				}
			}
			if len(types) != len(wanted) {
				t.Errorf("types %v, want %v", types, wanted)
			}
		})
	}
}
