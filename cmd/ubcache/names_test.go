package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/ubcache/ubcache/internal/fixture"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// heads writes the first 8 KiB of every image of the fixtures to a folder; both tools look no further. It returns
// the stored output of bcache-super-show by path.
func heads(t *testing.T) map[string][]byte {
	t.Helper()
	dir := t.TempDir()
	out := map[string][]byte{}
	add := func(name, file string, stored []byte, err error) {
		if err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(filepath.Join(fixture.Dir(), file))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		z, err := zstd.NewReader(f, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(64<<20))
		if err != nil {
			t.Fatal(err)
		}
		defer z.Close()
		hole := 0 // at the start: see the map beside an image that has one
		if m, err := os.ReadFile(filepath.Join(fixture.Dir(), strings.TrimSuffix(file, ".zst")+".map")); err == nil {
			fmt.Sscan(string(m), &hole)
		}
		head := make([]byte, 8192)
		if _, err := io.ReadFull(z, head[hole:]); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, head, 0o600); err != nil {
			t.Fatal(err)
		}
		out[path] = stored
	}
	all, err := fixture.All()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		for _, d := range f.Devices {
			stored, err := f.SuperShow(d.Role)
			add(f.Name+"-"+d.Role, filepath.Join(f.Name, d.File), stored, err)
		}
	}
	formats, err := fixture.Formats()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range formats {
		stored, err := f.SuperShowText()
		add(f.Name, filepath.Join("formats", f.File), stored, err)
	}
	return out
}

// TestBcacheSuperShowStored holds the output against what was stored with the fixtures: both streams in one file,
// errors first.
func TestBcacheSuperShowStored(t *testing.T) {
	for path, stored := range heads(t) {
		status, out, errs := command("bcache-super-show", path)
		if errs+out != string(stored) {
			t.Errorf("%s:\n%s%s\nstored:\n%s", filepath.Base(path), errs, out, stored)
		}
		if want := strings.HasPrefix(string(stored), "Corrupt"); (status != 0) != want {
			t.Errorf("%s: status %d", filepath.Base(path), status)
		}
	}
}

// TestBcacheSuperShowAsTheTool compares both streams and the status with those of the real tool, with and without
// -f, for all fixtures, and for all ways to call it that make no sense.
func TestBcacheSuperShowAsTheTool(t *testing.T) {
	tool := needTool(t, "bcache-super-show")
	dir := t.TempDir()
	put := func(name string, b []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	lines := [][]string{
		{},
		{"-f"},
		{"a", "b"},
		{"-x", "a"},
		{"-fx", "a"},
		{"--help"},
		{""},
		{filepath.Join(dir, "missing")},
		{dir},
		{filepath.Join(dir, "missing"), "--", "-f"},
		{"--", filepath.Join(dir, "missing")},
		{put("empty", nil)},
		{put("zero", make([]byte, 8192))},
		{put("short", make([]byte, 4096+2255))},
		{put("just", make([]byte, 4096+2256))},
		{put("noise", bytes.Repeat([]byte("bcache"), 2000))},
	}
	for path := range heads(t) {
		lines = append(lines, []string{path}, []string{path, "-f"})
	}
	for _, args := range lines {
		cmd := exec.Command(tool, args...)
		cmd.Args[0] = "bcache-super-show"
		var out, errs bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errs
		cmd.Run()
		status, gotOut, gotErrs := command(append([]string{"bcache-super-show"}, args...)...)
		if status != cmd.ProcessState.ExitCode() || gotOut != out.String() || gotErrs != errs.String() {
			t.Errorf("%q: status %d\n%s--\n%s\nthe tool: status %d\n%s--\n%s", args, status, gotOut, gotErrs, cmd.ProcessState.ExitCode(), out.String(), errs.String())
		}
	}
}

var anyUUID = regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`)

// makeLines are calls of make-bcache that both do; C and B are images of 64 MiB.
var makeLines = []string{
	"-C C -w 512 -b 64k",
	"-C -w 4096 -b 65536 C",
	"-w1k -b64k -C C --discard",
	"-B B -w 512",
	"-B -w 4k --writeback B",
	"--bdev B --block=4k --data-offset=2048",
	"-C C -B B -w 512 -b 64k --writeback",
	"-B B -C C -w 512 -b 64k --cset-uuid aaaaaaaa-0000-4000-8000-0000000000FF",
	"--cache C --bucket 64k --block 512 --cache_replacement_policy=fifo",
	"--wipe -C C -b 32k -w 512 --cache_rep lru",
	"-C C -w 512 -b 8k",
	"-C C -w 512 -b 4k",
	"-B -- B",
}

func TestMakeBcacheAsTheTool(t *testing.T) {
	tool := needTool(t, "make-bcache")
	for _, line := range makeLines {
		t.Run(line, func(t *testing.T) {
			var out, errs bytes.Buffer
			theirs, args := makeArgs(t, line)
			if !strings.Contains(line, "w") && !strings.Contains(line, "block") {
				args = append([]string{"-w", "512"}, args...) // its default is the page cache's
			}
			cmd := exec.Command(tool, args...)
			cmd.Stdout, cmd.Stderr = &out, &errs
			if err := cmd.Run(); err != nil {
				t.Fatalf("%v: %s", err, errs.String())
			}
			ours, args := makeArgs(t, line)
			status, gotOut, gotErrs := command(append([]string{"make-bcache"}, args...)...)
			if status != 0 || gotErrs != "" {
				t.Fatalf("status %d: %s", status, gotErrs)
			}
			want := anyUUID.ReplaceAllString(out.String(), "UUID")
			if got := anyUUID.ReplaceAllString(gotOut, "UUID"); got != want {
				t.Errorf("prints\n%s\nthe tool\n%s", got, want)
			}
			for i := range ours {
				a, b := superOf(t, ours[i]), superOf(t, theirs[i])
				a.UUID, b.UUID, a.Csum, b.Csum = ondisk.UUID{}, ondisk.UUID{}, 0, 0
				if !strings.Contains(line, "cset-uuid") {
					a.SetUUID, b.SetUUID = ondisk.UUID{}, ondisk.UUID{}
				}
				if *a != *b {
					t.Errorf("writes %+v\nthe tool %+v", a, b)
				}
			}
		})
	}
}

// makeArgs makes the images that a line names, and its arguments.
func makeArgs(t *testing.T, line string) (images, args []string) {
	t.Helper()
	for _, a := range strings.Fields(line) {
		if a == "C" || a == "B" {
			a = sparse(t, a, 64<<20)
			images = append(images, a)
		}
		args = append(args, a)
	}
	return images, args
}

// superOf reads a superblock; nothing before it may be there.
func superOf(t *testing.T, path string) *ondisk.Superblock {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var b [8192]byte
	if _, err := io.ReadFull(f, b[:]); err != nil {
		t.Fatal(err)
	}
	if len(bytes.Trim(b[:4096], "\x00")) > 0 {
		t.Error("bytes before the superblock are not zero")
	}
	sb, err := ondisk.DecodeSuperblock(b[4096:])
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

// TestMakeBcacheOutput needs no other tool.
func TestMakeBcacheOutput(t *testing.T) {
	_, args := makeArgs(t, "-C C -B B -w 4k -b 64k -o 2048 --cset-uuid aaaaaaaa-0000-4000-8000-0000000000ff")
	status, out, errs := command(append([]string{"make-bcache"}, args...)...)
	out = regexp.MustCompile(`(?m)^UUID:\t\t\t`+anyUUID.String()).ReplaceAllString(out, "UUID:\t\t\tRANDOM")
	want := `UUID:			RANDOM
Set UUID:		aaaaaaaa-0000-4000-8000-0000000000ff
version:		0
nbuckets:		1024
block_size:		8
bucket_size:		128
nr_in_set:		1
nr_this_dev:		0
first_bucket:		1
UUID:			RANDOM
Set UUID:		aaaaaaaa-0000-4000-8000-0000000000ff
version:		4
block_size:		8
data_offset:		2048
`
	if status != 0 || errs != "" || out != want {
		t.Errorf("status %d, %q\n%s", status, errs, out)
	}
}

func TestOldOptions(t *testing.T) {
	opts := &oldOptions{name: "tool", short: "ab:", long: []string{"alpha", "beta:", "betamax", "gamma"}}
	for _, c := range []struct{ line, want string }{
		{"", "[]"},
		{"x -a y", "[{ x} {a } { y}]"},
		{"-ab1 -b 2 -ba", "[{a } {b 1} {b 2} {b a}]"},
		{"--alpha --beta 1 --beta=2 --gam -", "[{alpha } {beta 1} {beta 2} {gamma } { -}]"},
		{"-a -- -b --alpha", "[{a } { -b} { --alpha}]"},
		{"--betam", "[{betamax }]"},
		{"-c", "tool: invalid option -- 'c'"},
		{"-:", "tool: invalid option -- ':'"},
		{"-b", "tool: option requires an argument -- 'b'"},
		{"--bet", "tool: option '--bet' is ambiguous"},
		{"--delta=1", "tool: unrecognized option '--delta=1'"},
		{"--alpha=1", "tool: option '--alpha' doesn't allow an argument"},
		{"--beta", "tool: option '--beta' requires an argument"},
	} {
		words, err := opts.parse(strings.Fields(c.line))
		got := fmt.Sprint(words)
		if err != nil {
			got = err.Error()
		}
		if got != c.want {
			t.Errorf("%q: %s, want %s", c.line, got, c.want)
		}
	}
}
