package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/lab"
)

// benchArgs measure for a second or two, with all reports.
func benchArgs(dir string, more ...string) []string {
	return append([]string{
		"bench", "gc", "--policy", "exact", "--rounds", "1", "--runtime", "300ms", "--gc-every", "100ms", "--iodepth", "1,16", "--rw", "randrw",
		"--cache-size", "64M", "--backing-size", "96M", "--bucket", "8k", "--nodes", "20", "--json", filepath.Join(dir, "r.json"),
		"--html", filepath.Join(dir, "r.html"), "--png", filepath.Join(dir, "r.png"), "--lat-log", filepath.Join(dir, "l"), "--log-avg-ms", "50",
	}, more...)
}

// benchResult reads what --json has written.
func benchResult(t *testing.T, dir string) (r lab.Result) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "r.json"))
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// empty fails the test where something was left in a folder.
func empty(t *testing.T, dir string) {
	t.Helper()
	if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) > 0 {
		t.Errorf("it has left %v", left)
	}
}

func TestBenchGC(t *testing.T) {
	real := t.TempDir()
	cache, backing := filepath.Join(real, "cache"), filepath.Join(real, "backing")
	for _, path := range []string{cache, backing} {
		if err := os.WriteFile(path, bytes.Repeat([]byte{0xaa}, 96<<20), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	files := t.TempDir()
	for name, x := range map[string]struct {
		args    []string
		devices string
	}{
		"memory":  {nil, "memory"},
		"files":   {[]string{"--dir", files, "--attribute", "volume.writeback_percent=40"}, "files in " + files},
		"model":   {[]string{"--device-model", "nvme,ssd"}, "memory"},
		"devices": {[]string{"--cache", cache, "--backing", backing, "--rounds", "2", "--force"}, cache + " and " + backing},
	} {
		t.Run(name, func(t *testing.T) {
			dir, runtimes := t.TempDir(), t.TempDir()
			t.Setenv("XDG_RUNTIME_DIR", runtimes)
			args := benchArgs(dir, x.args...)
			if name == "devices" {
				args = without(args, "--cache-size", "--backing-size")
			}
			var stdout, stderr bytes.Buffer
			env := &environment{name: "ubcache", stdout: &stdout, stderr: &stderr}
			if code := run(env, append([]string{"ubcache"}, args...)); code != exitDone {
				t.Fatalf("exit status %d\n%s", code, stderr.String())
			}
			r := benchResult(t, dir)
			if r.Version != lab.ResultVersion || r.Partial || len(r.Rows) != 2 || r.Setup.Devices != x.devices || r.Setup.RW != "randrw" {
				t.Errorf("version %d, partial %v, %d rows, setup %+v", r.Version, r.Partial, len(r.Rows), r.Setup)
			}
			for i := range r.Rows {
				row := &r.Rows[i]
				if row.With.Latency.Count == 0 || row.Nodes < 20 || row.P50.Median <= 0 || row.With.Gap <= 0 {
					t.Errorf("%+v", row)
				}
			}
			for _, want := range []string{"exact   1 ", "LONGEST GAP", "passes of the verifier", "waits of more than 100µs"} {
				if !strings.Contains(stdout.String(), want) {
					t.Errorf("no %q in\n%s", want, stdout.String())
				}
			}
			for _, want := range []string{"round 1, exact: fill", "round 1, exact, depth 16, with collection"} {
				if !strings.Contains(stderr.String(), want) {
					t.Errorf("no %q in\n%s", want, stderr.String())
				}
			}
			for _, file := range []string{"r.html", "r.png", "l-exact-qd16-r1-gc_lat.1.log", "l-exact-qd1-r1-nogc_lat.1.log"} {
				if st, err := os.Stat(filepath.Join(dir, file)); err != nil || st.Size() == 0 {
					t.Errorf("%s: %v", file, err)
				}
			}
			if left, _ := filepath.Glob(filepath.Join(dir, "*.part")); len(left) > 0 {
				t.Errorf("it has left %v", left)
			}
			empty(t, files)
			empty(t, runtimes)
		})
	}
}

// without is args without some options and their values.
func without(args []string, options ...string) (list []string) {
	for i := 0; i < len(args); i++ {
		if strings.Contains(" "+strings.Join(options, " ")+" ", " "+args[i]+" ") {
			i++
			continue
		}
		list = append(list, args[i])
	}
	return list
}

// What cannot be written, or would be written over something else, is refused before anything is measured or formatted, and
// nothing of what was there is touched.
func TestBenchRefusesOutputs(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	if err := os.MkdirAll(in("folder"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Symlink(in("folder"), in("link")), os.Symlink("cache", in("alias"))); err != nil {
		t.Fatal(err)
	}
	data := bytes.Repeat([]byte{0xaa}, 96<<20)
	for _, name := range []string{"cache", "backing", "mine.part"} {
		if err := os.WriteFile(in(name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	real := []string{"--cache", in("cache"), "--backing", in("backing"), "--force"}
	for _, x := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"--json", in("a"), "--html", in("a")}, exitUsage, "that is --json, too"},
		{[]string{"--html", in("folder/a"), "--png", in("link/../folder/a")}, exitUsage, "that is --html, too"},
		{[]string{"--preset", "field-discard", "--json", in("a"), "--png", in("a")}, exitUsage, "that is --json, too"},
		{[]string{"--preset", "field-discard", "--policy", ""}, exitUsage, "no policy is given"},
		{[]string{"--preset", "field-discard", "--lat-log", in("l"), "--rounds", "2"}, exitUsage, "--lat-log, --rounds: with --preset there are only --policy,"},
		{append([]string{"--attribute", "set.gc_policy=classic"}, real...), exitUsage, "--policy says which"},
		{append([]string{"--nodes", "-1"}, real...), exitUsage, "-1 nodes: want 0 or more"},
		{append([]string{"--json", in("cache")}, real...), exitUsage, "that is a device, too"},
		{append([]string{"--png", in("alias")}, real...), exitUsage, "that is a device, too"},
		{append([]string{"--json", in("none/r"), "--html", in("b")}, real...), exitFailed, "no such file"},
		{append([]string{"--lat-log", in("none/l")}, real...), exitFailed, "--lat-log"},
		{append([]string{"--lat-log", in("cache/l")}, real...), exitFailed, "--lat-log"},
		{append([]string{"--lat-log", in("l"), "--log-avg-ms", "9223372036854775"}, real...), exitUsage, "--log-avg-ms"},
		{append([]string{"--runtime", "2000000h"}, real...), exitUsage, "windows"},
		{append([]string{"--rounds", "2000000000"}, real...), exitUsage, "windows"},
	} {
		var stdout, stderr bytes.Buffer
		code := run(&environment{name: "ubcache", stdout: &stdout, stderr: &stderr}, append([]string{"ubcache", "bench", "gc"}, x.args...))
		if code != x.code || !strings.Contains(stderr.String(), x.says) {
			t.Errorf("%v: exit status %d\n%s", x.args, code, stderr.String())
		}
	}
	for _, name := range []string{"cache", "backing", "mine.part"} {
		if b, err := os.ReadFile(in(name)); err != nil || !bytes.Equal(b, data) {
			t.Errorf("%s was changed: %v", name, err)
		}
	}
	if list, _ := filepath.Glob(in("*")); len(list) != 6 {
		t.Errorf("it has left %v", list)
	}
}

// What is beside a report, as one that another process is about to write, stays as it is; a link stays a link; what is no file may be
// given twice; and standard output gets a report behind the table, also where it is a file.
func TestBenchReportsBesideOthers(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	stdout, err := os.Create(in("stdout"))
	if err == nil {
		defer stdout.Close()
		err = errors.Join(os.WriteFile(in("r.json.part"), []byte("mine"), 0o600), os.WriteFile(in("target"), []byte("old"), 0o600), os.Symlink("target", in("r.json")))
	}
	if err != nil {
		t.Fatal(err)
	}
	args := func(more ...string) []string {
		return append(without(benchArgs(dir), "--iodepth", "--png", "--html"), append(more, "--iodepth", "1")...)
	}
	cmd := exec.Command("ubcache", args("--png", os.DevNull, "--html", os.DevNull)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if b, err := os.ReadFile(in("r.json.part")); err != nil || string(b) != "mine" {
		t.Errorf("what was beside is %q now: %v", b, err)
	}
	if to, err := os.Readlink(in("r.json")); err != nil || to != "target" {
		t.Errorf("the link is one to %q: %v", to, err)
	}
	benchResult(t, dir)
	cmd = exec.Command("ubcache", without(args("--html", "/dev/fd/1"), "--json")...)
	var stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s", err, stderr.String())
	}
	b, err := os.ReadFile(in("stdout"))
	if table, page, both := bytes.Cut(b, []byte("<!DOCTYPE html>")); err != nil || !both || !bytes.HasPrefix(table, []byte("randrw, ")) || !bytes.HasSuffix(page, []byte("</html>\n")) {
		t.Errorf("standard output has %d bytes, %.100q: %v", len(b), b, err)
	}
}

// Ctrl-C, or SIGTERM, ends it with what was measured by then.
func TestBenchInterrupted(t *testing.T) {
	for name, x := range map[string]struct {
		signal os.Signal
		when   string // the line of progress
		rows   int
		says   string
	}{
		"in the fill":           {unix.SIGTERM, "fill", 0, "interrupted before anything was measured"},
		"in the first window":   {unix.SIGINT, "depth 1, without collection", 0, "interrupted before anything was measured"},
		"in the second window":  {unix.SIGINT, "depth 1, with collection", 1, "interrupted: 1 of 4 windows were measured, and a part of another"},
		"after the first depth": {unix.SIGTERM, "depth 16, without collection", 1, "interrupted: 2 of 4 windows were measured"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, files, runtimes := t.TempDir(), t.TempDir(), t.TempDir()
			runtime := "60s"
			if x.rows > 0 {
				runtime = "2s"
			}
			cmd := exec.Command("ubcache", benchArgs(dir, "--runtime", runtime, "--dir", files)...)
			cmd.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+runtimes)
			var stdout bytes.Buffer
			cmd.Stdout = &stdout
			pipe, err := cmd.StderrPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			timer := time.AfterFunc(2*time.Minute, func() { cmd.Process.Kill() })
			defer timer.Stop()
			var stderr strings.Builder
			sent := false
			for scan := bufio.NewScanner(pipe); scan.Scan(); {
				stderr.WriteString(scan.Text() + "\n")
				if !sent && strings.Contains(scan.Text(), x.when) {
					sent = true
					if err := cmd.Process.Signal(x.signal); err != nil {
						t.Fatal(err)
					}
				}
			}
			err = cmd.Wait()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != exitPartial || !strings.Contains(stderr.String(), x.says) {
				t.Fatalf("%v\n%s", err, stderr.String())
			}
			empty(t, files)
			empty(t, runtimes)
			if x.rows == 0 {
				if left, _ := filepath.Glob(filepath.Join(dir, "r.*")); len(left) > 0 || stdout.Len() > 0 {
					t.Errorf("nothing was measured, and it has left %v, and printed\n%s", left, stdout.String())
				}
				return
			}
			if r := benchResult(t, dir); !r.Partial || len(r.Rows) != x.rows {
				t.Errorf("partial %v, %d rows", r.Partial, len(r.Rows))
			}
			if !strings.Contains(stdout.String(), "ENDED EARLY") {
				t.Errorf("it says\n%s", stdout.String())
			}
			if cut := strings.Contains(x.says, "a part of another"); strings.Contains(stdout.String(), "is compared with a whole one") != cut {
				t.Errorf("a window was cut: %v, and it says\n%s", cut, stdout.String())
			}
		})
	}
}
