package nbd

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// These tests run other people's clients against the server. Where a tool is missing they are skipped, or fail if
// UBCACHE_REQUIRE_TOOLS=1 says that all tools ought to be there.

func tool(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		if _, err := exec.LookPath(name); err != nil {
			if os.Getenv("UBCACHE_REQUIRE_TOOLS") == "1" {
				t.Fatalf("%s is not installed, and UBCACHE_REQUIRE_TOOLS=1", name)
			}
			t.Skipf("%s is not installed", name)
		}
	}
}

// run runs a tool and returns what it prints.
func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = t.TempDir()
	if name == "nbdsh" { // runs the first python3 in PATH, but its module belongs to the system's
		cmd.Env = append(os.Environ(), "PATH=/usr/bin:"+os.Getenv("PATH"))
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func uri(path, export string) string {
	return Address{"unix", path, export}.String()
}

// qemuURI is the URI as qemu 7 wants it, which does not know %2F in a socket's path.
func qemuURI(path, export string) string {
	return "nbd+unix:///" + url.PathEscape(export) + "?socket=" + path
}

const clientSize = 16 << 20

// clientServer serves "disk", with block status, "4k" with large blocks, and "ro".
func clientServer(t *testing.T) (*blockdev.MemoryDevice, string) {
	t.Helper()
	d := memory(t, clientSize, blockdev.MemoryOptions{})
	copy(d.Bytes(), pattern(0, clientSize))
	s, path := serve(t, mapExport{DeviceExport(d, "a disk of the test", false)}, Options{})
	for name, e := range map[string]Export{
		"4k": DeviceExport(memory(t, clientSize, blockdev.MemoryOptions{LogicalBlock: 4096}), "", false),
		"ro": DeviceExport(d, "", true),
	} {
		if err := s.AddExport(name, e); err != nil {
			t.Fatal(err)
		}
	}
	return d, path
}

func TestClientNbdinfo(t *testing.T) {
	tool(t, "nbdinfo")
	_, path := clientServer(t)
	type export struct {
		Name        string   `json:"export-name"`
		Description string   `json:"description"`
		Size        int64    `json:"export-size"`
		Contexts    []string `json:"contexts"`
		ReadOnly    bool     `json:"is_read_only"`
		Flush       bool     `json:"can_flush"`
		FUA         bool     `json:"can_fua"`
		Multi       bool     `json:"can_multi_conn"`
		Trim        bool     `json:"can_trim"`
		Zero        bool     `json:"can_zero"`
		FastZero    bool     `json:"can_fast_zero"`
		DF          bool     `json:"can_df"`
		Min         int      `json:"block_size_minimum"`
		Pref        int      `json:"block_size_preferred"`
		Max         int      `json:"block_size_maximum"`
	}
	var got struct {
		Protocol   string
		Structured bool
		Exports    []export
	}
	parse := func(args ...string) {
		t.Helper()
		got.Exports = nil
		out := run(t, "nbdinfo", args...)
		if err := json.Unmarshal([]byte(out), &got); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	parse("--json", uri(path, ""))
	want := export{"disk", "a disk of the test", clientSize, []string{ContextAllocation, ContextState}, false, true, true, true, true, true, true, true, 512, 4096, 32 << 20}
	got.Exports[0].Name = "disk" // some versions print the name asked for
	if fmt.Sprint(got.Exports) != fmt.Sprint([]export{want}) || got.Protocol != "newstyle-fixed" || !got.Structured {
		t.Errorf("got %+v, want %+v", got, want)
	}
	parse("--list", "--json", uri(path, ""))
	if len(got.Exports) != 3 {
		t.Errorf("list: %+v", got.Exports)
	}
	parse("--json", uri(path, "4k"))
	if e := got.Exports[0]; e.Min != 4096 || e.Name != "4k" {
		t.Errorf("4k: %+v", e)
	}
	parse("--json", uri(path, "ro"))
	if e := got.Exports[0]; !e.ReadOnly || e.Trim || e.Zero || !e.Multi {
		t.Errorf("ro: %+v", e)
	}
	if out := run(t, "nbdinfo", "--size", uri(path, "")); strings.TrimSpace(out) != fmt.Sprint(clientSize) {
		t.Errorf("size %q", out)
	}
	out := run(t, "nbdinfo", "--map", "--json", uri(path, ""))
	var extents []struct{ Offset, Length, Type int64 }
	if err := json.Unmarshal([]byte(out), &extents); err != nil || len(extents) != clientSize/(64<<10) || extents[1].Type != 3 {
		t.Errorf("map: %v, %d extents", err, len(extents))
	}
	if out, err := exec.Command("nbdinfo", uri(path, "none")).CombinedOutput(); err == nil {
		t.Errorf("unknown export: %s", out)
	}
}

func TestClientNbdcopy(t *testing.T) {
	tool(t, "nbdcopy")
	d, path := clientServer(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "copy")
	run(t, "nbdcopy", uri(path, "ro"), file)
	b, err := os.ReadFile(file)
	if err != nil || string(b) != string(d.Bytes()) {
		t.Fatalf("copy out: %v, %d bytes", err, len(b))
	}
	want := pattern(12345, clientSize)
	clear(want[3<<20 : 5<<20]) // becomes write zeroes
	if err := os.WriteFile(file, want, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, export := range []string{"disk", "4k"} {
		run(t, "nbdcopy", "--flush", file, uri(path, export))
		back := filepath.Join(dir, "back")
		run(t, "nbdcopy", "--allocated", uri(path, map[string]string{"disk": "ro", "4k": "4k"}[export]), back)
		if b, err := os.ReadFile(back); err != nil || string(b) != string(want) {
			t.Errorf("%s: copy in and out: %v", export, err)
		}
	}
	run(t, "nbdcopy", "--connections=1", "--requests=128", "--request-size=4096", uri(path, "4k"), uri(path, "disk"))
	if string(d.Bytes()) != string(want) {
		t.Error("copy between exports differs")
	}
}

func TestClientNbdsh(t *testing.T) {
	tool(t, "nbdsh")
	_, path := clientServer(t)
	script := `
import errno
assert h.get_size() == 16 << 20
assert h.can_flush() and h.can_fua() and h.can_trim() and h.can_zero() and h.can_fast_zero() and h.can_multi_conn() and h.can_cache() and h.can_df()
h.pwrite(b"x" * 4096, 8192, nbd.CMD_FLAG_FUA)
assert h.pread(4096, 8192) == b"x" * 4096
h.zero(512, 8192, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
h.zero(512, 9216, nbd.CMD_FLAG_FAST_ZERO)
assert h.pread(2048, 8192) == bytes(512) + b"x" * 512 + bytes(512) + b"x" * 512
h.trim(1 << 20, 0)
h.cache(1 << 20, 0)
h.flush()
chunks = []
def chunk(buf, off, status, err):
    chunks.append((len(buf), off, status))
assert h.pread_structured(65536, 65536, chunk, nbd.CMD_FLAG_DF)
assert chunks == [(65536, 65536, nbd.READ_DATA)]
extents = []
def extent(context, off, e, err):
    extents.append((context, off, e))
h.block_status(256 << 10, 0, extent)
assert [e[0] for e in extents] == ["base:allocation", "ubcache:state"], extents
assert extents[0][2] == [65536, 0, 65536, 3, 65536, 0, 65536, 3], extents
# Requests that libnbd would not send by itself.
h.set_strict_mode(0)
def fails(code, f, *args):
    try:
        f(*args)
    except nbd.Error as e:
        assert e.errnum == code, (e.errnum, code, f, args)
    else:
        assert False, (f, args)
fails(errno.EINVAL, h.pread, 512, 16 << 20)
fails(errno.EINVAL, h.pread, 100, 0)
fails(errno.ENOSPC, h.pwrite, bytes(1024), (16 << 20) - 512)
fails(errno.EINVAL, h.pwrite, bytes(512), 1)
fails(errno.ENOSPC, h.trim, 1024, (16 << 20) - 512)
fails(errno.ENOSPC, h.zero, 512, 1 << 62)
assert h.pread(512, 0) is not None
# Many at once.
bufs = [nbd.Buffer(4096) for _ in range(200)]
cookies = [h.aio_pread(b, 4096 * i) for i, b in enumerate(bufs)] + [h.aio_flush()]
while cookies:
    h.poll(-1)
    cookies = [c for c in cookies if not h.aio_command_completed(c)]
h.shutdown()
`
	run(t, "nbdsh", "-c", fmt.Sprintf(`
h.add_meta_context("base:allocation")
h.add_meta_context("ubcache:state")
h.connect_uri(%q)
`, uri(path, "disk")), "-c", script)
	run(t, "nbdsh", "-c", fmt.Sprintf(`
h.set_request_structured_replies(False)
h.connect_uri(%q)
assert not h.get_structured_replies_negotiated()
h.pwrite(b"y" * 4096, 0)
assert h.pread(4096, 0) == b"y" * 4096
h.shutdown()
h = nbd.NBD()
h.set_opt_mode(True)
h.connect_unix(%q)
h.set_export_name("none")
try:
    h.opt_info()
    assert False
except nbd.Error as e:
    pass
h.set_export_name("ro")
h.opt_info()
assert h.is_read_only()
names = []
h.opt_list(lambda name, desc: names.append((name, desc)))
assert sorted(n for n, d in names) == ["4k", "disk", "ro"], names
h.opt_go()
h.set_strict_mode(0)
try:
    h.pwrite(bytes(512), 0)
    assert False
except nbd.Error as e:
    assert e.errnum == 1, e.errnum
h.shutdown()
`, uri(path, "disk"), path))
}

func TestClientQemu(t *testing.T) {
	tool(t, "qemu-img", "qemu-io")
	d, path := clientServer(t)
	dir := t.TempDir()
	if out := run(t, "qemu-img", "info", "--output=json", qemuURI(path, "disk")); !strings.Contains(out, fmt.Sprintf(`"virtual-size": %d`, clientSize)) {
		t.Errorf("info: %s", out)
	}
	file := filepath.Join(dir, "copy.qcow2")
	// What the map calls a hole reads as zero for qemu: use the export without a map.
	run(t, "qemu-img", "convert", "-f", "raw", "-O", "qcow2", qemuURI(path, "ro"), file)
	if out := run(t, "qemu-img", "compare", "-f", "qcow2", "-F", "raw", file, qemuURI(path, "ro")); !strings.Contains(out, "identical") {
		t.Errorf("compare: %s", out)
	}
	want := append([]byte(nil), d.Bytes()...)
	run(t, "qemu-img", "convert", "-n", "-f", "qcow2", "-O", "raw", file, qemuURI(path, "4k"))
	if out := run(t, "qemu-img", "compare", "-f", "raw", "-F", "raw", qemuURI(path, "4k"), qemuURI(path, "ro")); !strings.Contains(out, "identical") {
		t.Errorf("compare of exports: %s", out)
	}
	out := run(t, "qemu-io", "-f", "raw", "-c", "write -P 0x5a 1M 64k", "-c", "read -P 0x5a 1M 64k", "-c", "write -f -P 0x11 2M 4k",
		"-c", "write -z 1M 32k", "-c", "read -P 0 1M 32k", "-c", "read -P 0x5a 1056k 32k", "-c", "write -z -u 4M 1M", "-c", "read -P 0 4M 1M",
		"-c", "discard 8M 1M", "-c", "flush", "-c", "aio_write -P 1 9M 1M", "-c", "aio_read 9M 64k", "-c", "aio_flush", qemuURI(path, "disk"))
	if strings.Contains(out, "failed") || strings.Contains(out, "Error") {
		t.Errorf("qemu-io: %s", out)
	}
	if string(d.Bytes()[5<<20:8<<20]) != string(want[5<<20:8<<20]) || d.Bytes()[2<<20] != 0x11 {
		t.Error("content after qemu-io")
	}
}

func TestClientFio(t *testing.T) {
	tool(t, "fio")
	if out, err := exec.Command("fio", "--enghelp").CombinedOutput(); err != nil || !strings.Contains(string(out), "nbd") {
		if os.Getenv("UBCACHE_REQUIRE_TOOLS") == "1" {
			t.Fatal("UBCACHE_REQUIRE_TOOLS is 1, and fio has no nbd engine")
		}
		t.Skip("fio has no nbd engine")
	}
	_, path := clientServer(t)
	for _, export := range []string{"disk", "4k"} {
		run(t, "fio", "--name=verify", "--ioengine=nbd", "--uri="+uri(path, export), "--rw=randwrite", "--bssplit=4k/60:64k/30:512k/10", "--iodepth=32",
			"--size=16m", "--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--randrepeat=0", "--fsync=50")
		run(t, "fio", "--name=mixed", "--ioengine=nbd", "--uri="+uri(path, export), "--rw=randrw", "--bs=4k", "--iodepth=16", "--size=16m",
			"--verify=crc32c", "--verify_backlog=64", "--verify_fatal=1", "--time_based", "--runtime=1")
	}
}
