//go:build interop

package interop

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// kernels returns those that UBCACHE_KERNELS names; vm/setup must have made them ready. Where they do not depend on one
// another they run side by side, as many as there are processors: a machine of theirs has one.
func kernels() []string {
	if k := strings.Fields(os.Getenv("UBCACHE_KERNELS")); len(k) > 0 {
		return k
	}
	return []string{"6.12"}
}

// rounds returns how often each power cut is tried, each time at another moment.
func rounds(t *testing.T) int {
	s := os.Getenv("UBCACHE_ROUNDS")
	if s == "" {
		return 1
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		t.Fatalf("UBCACHE_ROUNDS=%q is not a number of rounds", s)
	}
	return n
}

// A place is a folder for one boot: images in it, and below it what guest and host exchange. It goes when the test
// succeeds, and stays for a look at it when the test fails.
type place struct {
	t      *testing.T
	kernel string
	dir    string // also holds the images
	share  string // the guest's /mnt
}

func newPlace(t *testing.T, kernel string) *place {
	t.Helper()
	dir, err := os.MkdirTemp("", "ubcache-interop-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("images and logs are left in %s", dir)
			return
		}
		os.RemoveAll(dir)
	})
	p := &place{t: t, kernel: kernel, dir: dir, share: filepath.Join(dir, "share")}
	if err := os.Mkdir(p.share, 0o755); err != nil {
		t.Fatal(err)
	}
	return p
}

// image makes an empty, sparse image and returns its path.
func (p *place) image(name string, size int64) string {
	p.t.Helper()
	path := filepath.Join(p.dir, name+".img")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		p.t.Fatal(err)
	}
	if err := errors.Join(f.Truncate(size), f.Close()); err != nil {
		p.t.Fatal(err)
	}
	return path
}

// shared returns what the guest left in a file of the shared folder.
func (p *place) shared(name string) string {
	p.t.Helper()
	b, err := os.ReadFile(filepath.Join(p.share, name))
	if err != nil {
		p.t.Fatalf("the guest did not leave %s: %v", name, err)
	}
	return strings.TrimSpace(string(b))
}

// put puts a file where the guest can read it.
func (p *place) put(name string, content []byte) {
	p.t.Helper()
	if err := os.WriteFile(filepath.Join(p.share, name), content, 0o644); err != nil {
		p.t.Fatal(err)
	}
}

// A boot is one run of a script under a kernel.
type boot struct {
	disks    []string // as for vm/run -d
	cutAt    string   // power cut at a line with this text
	throwOff bool     // writes to the disks are thrown away
	limit    time.Duration
	script   string // in guest/
	args     []string
	env      []string // NAME=VALUE, for the script
}

// devName is the guest's name for disk number i: vda to vdz, vdaa and so on.
func devName(i int) string {
	if i < 26 {
		return "vd" + string(rune('a'+i))
	}
	return "vd" + string(rune('a'+i/26-1)) + string(rune('a'+i%26))
}

const (
	statusCut  = 120 // of vm/run: power cut as asked
	statusDied = 125 // the VM died by itself
	bootTries  = 3
)

// boot runs the script and returns what it printed, which also goes to a file.
func (p *place) boot(b boot) string {
	p.t.Helper()
	// One processor: with two, and the host busy, emulation now and then trips over kernel text that the other one is
	// patching, and dies with "Oops: int3".
	args := []string{
		"-k", p.kernel, "-m", "3072", "-s", "1", "-t", strconv.Itoa(int(b.limit.Seconds())), "-o", p.share,
		"-l", filepath.Join(p.dir, b.script+".console"), "-e", "FX=" + fx(p.t),
	}
	for _, e := range b.env {
		args = append(args, "-e", e)
	}
	if b.throwOff {
		args = append(args, "-n")
	}
	want := 0
	if b.cutAt != "" {
		args = append(args, "-c", b.cutAt)
		want = statusCut
	}
	for _, d := range b.disks {
		args = append(args, "-d", d)
	}
	args = append(append(args, filepath.Join("guest", b.script)), b.args...)
	for try := 1; ; try++ {
		start := time.Now()
		out, status := run(p.t, "vm/run", args...)
		if err := os.WriteFile(filepath.Join(p.dir, b.script+".out"), []byte(out), 0o644); err != nil {
			p.t.Fatal(err)
		}
		hello, _, begun := strings.Cut(strings.TrimPrefix(out, "guest: "), "\n")
		begun = begun && strings.HasPrefix(out, "guest: ")
		switch {
		case status == want:
			p.t.Logf("%s: %s %s: %.0f s", hello, b.script, strings.Join(b.args, " "), time.Since(start).Seconds())
			return out
		case status == statusDied && !begun && try < bootTries:
			p.t.Logf("kernel %s died before it came to %s; again:\n%s", p.kernel, b.script, tail(out, 5))
		default:
			p.t.Fatalf("kernel %s, %s: status %d, want %d; it printed:\n%s", p.kernel, b.script, status, want, tail(out, 40))
		}
	}
}

// run starts a program and returns what it printed on both streams, and its exit status.
func run(t *testing.T, name string, args ...string) (string, int) {
	t.Helper()
	var out bytes.Buffer
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s: %v", name, err)
	}
	return out.String(), cmd.ProcessState.ExitCode()
}

// must is run for what has to succeed.
func must(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, status := run(t, name, args...)
	if status != 0 {
		t.Fatalf("%s %s: status %d:\n%s", name, strings.Join(args, " "), status, tail(out, 40))
	}
	return out
}

func tail(s string, lines int) string {
	l := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(l[max(0, len(l)-lines):], "\n")
}

// program returns the path of ours, under one of its names: those of "make build", or an installed one's in UBCACHE_BIN.
func program(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("UBCACHE_BIN")
	if dir == "" {
		dir = filepath.Join("..", "bin")
	}
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v (make build)", err)
	}
	return path
}

var buildFX = sync.OnceValues(func() (string, error) {
	// Not in a test's own folder: all tests use it. The guest sees the host's root, so a path is all it needs.
	path, err := filepath.Abs(filepath.Join("..", "bin", "interop-fx"))
	if err != nil {
		return "", err
	}
	cmd := exec.Command("go", "build", "-o", path, "./fx")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build ./fx: %w\n%s", err, out)
	}
	return path, nil
})

func fx(t *testing.T) string {
	t.Helper()
	path, err := buildFX()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// content is what fx prints of a device.
type content struct {
	Size   int64    `json:"size"`
	SHA256 string   `json:"sha256"`
	Chunk  int64    `json:"chunk"`
	Chunks []string `json:"chunks"` // a hash of each, "-": all zero
}

func parseContent(t *testing.T, s string) content {
	t.Helper()
	var c content
	if err := json.Unmarshal([]byte(s), &c); err != nil {
		t.Fatalf("fx hash printed %q: %v", s, err)
	}
	return c
}

// cat runs "ubcache cat" into a file, so that fx can look at it too, and compares with what the kernel read. It returns
// the path of the file, "" when there is nothing to look at.
func (p *place) cat(file string, kernel content, args ...string) string {
	p.t.Helper()
	path := filepath.Join(p.dir, file)
	got, size, err := catTo(p.t, path, args...)
	if err != nil {
		p.t.Errorf("ubcache cat %s: %v", strings.Join(args, " "), err)
		return ""
	}
	if got != kernel.SHA256 || size != kernel.Size {
		ours := parseContent(p.t, must(p.t, fx(p.t), "hash", path))
		p.t.Errorf("ubcache cat %s: %d bytes, sha256 %s; the kernel reads %d bytes, %s; %s",
			strings.Join(args, " "), size, got, kernel.Size, kernel.SHA256, differs(ours, kernel))
		return path
	}
	p.t.Logf("kernel %s and ubcache cat agree on %d bytes, sha256 %s", p.kernel, size, kernel.SHA256)
	return path
}

// catTo runs "ubcache cat" into a file.
func catTo(t *testing.T, path string, args ...string) (sha string, size int64, err error) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	sum := sha256.New()
	var n counter
	var diag bytes.Buffer
	cmd := exec.CommandContext(t.Context(), program(t, "ubcache"), append([]string{"cat"}, args...)...)
	cmd.Stdout, cmd.Stderr = io.MultiWriter(f, sum, &n), &diag
	if err := cmd.Run(); err != nil {
		return "", 0, fmt.Errorf("%w\n%s", err, tail(diag.String(), 20))
	}
	return hex.EncodeToString(sum.Sum(nil)), int64(n), nil
}

// differs names the first chunks in which two contents are not the same.
func differs(a, b content) string {
	var s []string
	for i := range min(len(a.Chunks), len(b.Chunks)) {
		if a.Chunks[i] != b.Chunks[i] {
			s = append(s, strconv.Itoa(i))
		}
	}
	return fmt.Sprintf("%d chunks of %d bytes differ: %s", len(s), a.Chunk, strings.Join(s[:min(len(s), 20)], " "))
}

type counter int64

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}

// check runs "ubcache check" and demands that it finds nothing above harmless.
func (p *place) check(args ...string) {
	p.t.Helper()
	out, status := run(p.t, program(p.t, "ubcache"), append([]string{"check"}, args...)...)
	if status != 0 {
		p.t.Errorf("ubcache check %s: status %d:\n%s", strings.Join(args, " "), status, tail(out, 40))
	}
}

// show runs our bcache-super-show and that of bcache-tools, and demands the same text.
func (p *place) show(image string) {
	p.t.Helper()
	theirs, err := exec.LookPath("bcache-super-show")
	if err != nil {
		p.t.Fatal(err)
	}
	want, wantStatus := run(p.t, theirs, image)
	got, status := run(p.t, program(p.t, "bcache-super-show"), image)
	if got != want || status != wantStatus {
		p.t.Errorf("our bcache-super-show %s: status %d, and it prints\n%s\nthat of bcache-tools: status %d, and\n%s", image, status, got, wantStatus, want)
	}
	if out, status := run(p.t, program(p.t, "ubcache"), "show", image); status != 0 {
		p.t.Errorf("ubcache show %s: status %d:\n%s", image, status, out)
	}
}
