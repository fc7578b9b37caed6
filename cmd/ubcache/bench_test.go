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
		"in the second window":  {unix.SIGINT, "depth 1, with collection", 1, "interrupted: 2 of 4 windows were measured"},
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
		})
	}
}
