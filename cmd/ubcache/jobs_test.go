package main

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/control"
)

// jobAt is a job of a kind in a state, with so much dirty.
func jobAt(kind, state string, dirty int64) *control.Job {
	return &control.Job{Kind: kind, State: state, Started: time.Unix(1e9, 0), DirtyAtStart: control.Num(1 << 20), DirtyBytes: control.Num(dirty)}
}

func TestFlushAndDetach(t *testing.T) {
	failed := func(kind string, ranges ...control.Range) *control.Job {
		j := jobAt(kind, control.Failed, 4608)
		j.Error, j.Ranges = "the disk is full of holes", ranges
		return j
	}
	two := []control.Range{{Offset: 0, Length: 4096}, {Offset: 1 << 40, Length: 512}}
	later := jobAt("detach", control.Running, 1)
	later.Started = later.Started.Add(time.Second)
	for _, x := range []struct {
		args      string
		jobs      []*control.Job
		code      int
		out, errs string
		asked     string
	}{
		{"flush data", []*control.Job{jobAt("flush", control.Running, 5), jobAt("flush", control.Done, 0)}, exitDone, "data: flushed; nothing is dirty\n", "", "flush data"},
		{"flush data", []*control.Job{jobAt("flush", control.Done, 512)}, exitDone, "data: flushed; 512 bytes were written meanwhile\n", "", "flush data"},
		{
			"flush data",
			[]*control.Job{jobAt("flush", control.Running, 1<<20)},
			exitDone,
			"data: flush in progress, 1048576 bytes are dirty (1.0 MiB); \"ubcache flush data --wait\" waits for its end, \"ubcache status\" shows how it goes\n", "", "flush data",
		},
		{
			"detach data",
			[]*control.Job{jobAt("detach", control.Running, 1<<20)},
			exitDone,
			"data: detach in progress, 1048576 bytes are dirty (1.0 MiB); \"ubcache detach data --wait\" waits for its end, \"ubcache status\" shows how it goes\n", "", "detach data",
		},
		{"detach data --wait", []*control.Job{jobAt("detach", control.Running, 5), jobAt("detach", control.Done, 0)}, exitDone, "data: detached; it is served without a cache\n", "", "detach data"},
		{"flush --wait data --timeout 1m", []*control.Job{jobAt("flush", control.Running, 5), jobAt("flush", control.Done, 0)}, exitDone, "data: flushed; nothing is dirty\n", "", "flush data"},
		{
			"flush data --wait --timeout 1ms",
			[]*control.Job{jobAt("flush", control.Running, 5)},
			exitPartial, "",
			"ubcache: flush of data: not done in 1ms; 5 bytes are dirty; the flush goes on: \"ubcache flush data --wait\" waits for its end, --cancel ends it\n", "flush data",
		},
		{
			"detach data --wait --timeout 1ms",
			[]*control.Job{jobAt("detach", control.Running, 5)},
			exitPartial, "",
			"ubcache: detach of data: not done in 1ms; 5 bytes are dirty; the detach goes on: \"ubcache detach data --wait\" waits for its end, --cancel ends it\n", "detach data",
		},
		{
			"flush data --wait",
			[]*control.Job{failed("flush", two...)},
			exitPartial,
			"data: could not be written back, and stays dirty:\n  offset 0 length 4096\n  offset 1099511627776 length 512\n",
			"ubcache: flush of data: the disk is full of holes; 4608 bytes are dirty (4.5 KiB)\n", "flush data",
		},
		{
			"detach data --wait",
			[]*control.Job{failed("detach", two[:1]...)},
			exitPartial, "data: could not be written back, and stays dirty:\n  offset 0 length 4096\n",
			"4608 bytes are dirty (4.5 KiB); the volume is still attached\n", "detach data",
		},
		{"detach data --wait", []*control.Job{failed("detach")}, exitFailed, "", "detach of data: the disk is full of holes; 4608 bytes are dirty (4.5 KiB)\n", "detach data"},
		{"flush data --wait", []*control.Job{jobAt("flush", control.Running, 5), jobAt("flush", control.Cancelled, 3)}, exitFailed, "", "flush of data: it was cancelled; 3 bytes are dirty\n", "flush data"},
		{"flush data --wait", []*control.Job{jobAt("flush", control.Running, 5), later}, exitFailed, "", "somebody has begun a detach since", "flush data"},

		{
			"detach data --cancel",
			[]*control.Job{jobAt("detach", control.Running, 5), jobAt("detach", control.Cancelled, 3)},
			exitDone,
			"data: detach cancelled, 3 bytes are dirty; the volume is attached, as before\n", "", "cancel data",
		},
		{
			"flush data --cancel",
			[]*control.Job{jobAt("flush", control.Running, 5), jobAt("flush", control.Cancelled, 3)},
			exitDone,
			"data: flush cancelled, 3 bytes are dirty; dirty data goes back at its usual rate\n", "", "cancel data",
		},
		{"detach data --cancel", []*control.Job{jobAt("detach", control.Running, 5), jobAt("detach", control.Done, 0)}, exitDone, "data: detached; it is served without a cache\n", "", "cancel data"},
		{"detach data --cancel", []*control.Job{jobAt("flush", control.Running, 5)}, exitFailed, "", "no detach of data is running", ""},
		{"flush data --cancel", []*control.Job{jobAt("flush", control.Done, 0)}, exitFailed, "", "no flush of data is running", ""},
		{"flush data --cancel", nil, exitFailed, "", "no flush of data is running", ""},

		{"flush", nil, exitUsage, "", "which volume?", ""},
		{"flush a b", nil, exitUsage, "", `unexpected argument "b"`, ""},
		{"flush data --timeout 1s", nil, exitUsage, "", "--timeout limits --wait, which is missing", ""},
		{"flush data --wait --timeout 0s", nil, exitUsage, "", "must be above 0", ""},
		{"flush data --wait --timeout soon", nil, exitUsage, "", "soon", ""},
		{"detach data --wait --cancel", nil, exitUsage, "", "not both", ""},
	} {
		f := &fakeDaemon{jobs: x.jobs}
		answer(t, f)
		code, out, errs := command(append([]string{"ubcache"}, strings.Fields(x.args)...)...)
		if code != x.code || out != x.out || !strings.Contains(errs, x.errs) || (x.errs == "") != (errs == "") || strings.Count(errs, "\n") > 1 {
			t.Errorf("%s: status %d, %q, %q; want %d, %q, %q", x.args, code, out, errs, x.code, x.out, x.errs)
		}
		if got := strings.Join(f.asked, ", "); got != x.asked {
			t.Errorf("%s: asked for %q, want %q", x.args, got, x.asked)
		}
	}
}

func TestFlushJSON(t *testing.T) {
	j := jobAt("flush", control.Failed, 512)
	j.Ranges = []control.Range{{Offset: 4096, Length: 512}}
	answer(t, &fakeDaemon{jobs: []*control.Job{jobAt("flush", control.Running, 1024), j}})
	code, out, errs := command("ubcache", "flush", "data", "--wait", "--json")
	var got control.Job
	if err := json.Unmarshal([]byte(out), &got); err != nil || code != exitPartial || got.DirtyBytes != control.Num(512) || !slices.Equal(got.Ranges, j.Ranges) {
		t.Errorf("status %d, %s, %s, %v", code, out, errs, err)
	}
	answer(t, &fakeDaemon{jobs: []*control.Job{jobAt("detach", control.Running, 1024)}})
	for _, args := range [][]string{{"--wait", "--timeout", "1ms"}, nil} {
		_, out, _ = command(append([]string{"ubcache", "detach", "data", "--json"}, args...)...)
		if err := json.Unmarshal([]byte(out), &got); err != nil || got.State != control.Running {
			t.Errorf("%v: %s, %v", args, out, err)
		}
	}
}

func TestJobsThatAreRefused(t *testing.T) {
	for _, x := range []struct {
		err  error
		code int
		want string
	}{
		{control.NoVolume("data", []string{"a", "b"}), exitUsage, `there is no volume "data"; there are: a, b`},
		{control.Busy("data", "detach"), exitFailed, "a detach of data is running"},
		{control.Detached("data"), exitFailed, "data is not attached"},
		{control.FlashOnly("data"), exitFailed, "data is a flash-only volume"},
		{errors.New("broken"), exitFailed, "broken"},
	} {
		answer(t, &fakeDaemon{err: x.err, jobs: []*control.Job{jobAt("flush", control.Running, 1)}})
		for _, flag := range []string{"", "--wait", "--cancel"} {
			code, out, errs := command(strings.Fields("ubcache flush data " + flag)...)
			if code != x.code || out != "" || !strings.Contains(errs, x.want) {
				t.Errorf("%v, %s: status %d, %q, %q", x.err, flag, code, out, errs)
			}
		}
	}
}

// Who waits for a detach that has just ended is told that it has; nobody else is.
func TestDetachThatIsOver(t *testing.T) {
	for _, x := range []struct {
		args string
		last *control.Job
		code int
		out  string
	}{
		{"detach data --wait", jobAt("detach", control.Done, 0), exitDone, "data: detached; it is served without a cache\n"},
		{"detach data", jobAt("detach", control.Done, 0), exitFailed, ""},
		{"detach data --wait", jobAt("detach", control.Failed, 0), exitFailed, ""},
		{"flush data --wait", jobAt("detach", control.Done, 0), exitFailed, ""},
	} {
		answer(t, &fakeDaemon{errStart: control.Detached("data"), jobs: []*control.Job{x.last}})
		code, out, errs := command(strings.Fields("ubcache " + x.args)...)
		if code != x.code || out != x.out || (errs == "") != (code == exitDone) {
			t.Errorf("%s after %s: status %d, %q, %q", x.args, x.last.State, code, out, errs)
		}
	}
}

// A flush that is cancelled does not promise what writeback_running forbids.
func TestFlushCancelledWhereNothingGoesBack(t *testing.T) {
	f := &fakeDaemon{status: fakeStatus(), jobs: []*control.Job{jobAt("flush", control.Running, 5), jobAt("flush", control.Cancelled, 3)}}
	f.status.Volumes[0].Writeback.Running = false
	answer(t, f)
	code, out, errs := command("ubcache", "flush", "data", "--cancel")
	if code != exitDone || errs != "" || out != "data: flush cancelled, 3 bytes are dirty; dirty data stays, since writeback_running is 0\n" {
		t.Errorf("status %d, %q, %q", code, out, errs)
	}
}

// Where there is no terminal, a line says what is left, not too often.
func TestProgressTellsWhatIsLeft(t *testing.T) {
	var out strings.Builder
	p := &progress{w: &out, what: "data"}
	p.left(5, 10)
	p.left(4, 10)
	if out.String() != "data: 5 bytes left\n" {
		t.Errorf("%q", out.String())
	}
}

// A signal ends the waiting, not the job.
func TestWaitingIsInterrupted(t *testing.T) {
	f := &fakeDaemon{jobs: []*control.Job{jobAt("flush", control.Running, 7)}}
	answer(t, f)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	var out, errs strings.Builder
	o := &jobFlags{kind: control.Flush, wait: true}
	err := o.run(ctx, &environment{name: "ubcache", stdout: &out, stderr: &errs}, "data")
	if err == nil || exitStatus(began(err)) != exitFailed || !strings.Contains(err.Error(), "interrupted; 7 bytes are dirty; the flush goes on") {
		t.Error(err)
	}
	if got := strings.Join(f.asked, ", "); got != "flush data" {
		t.Errorf("asked for %s", got)
	}
}

func TestFlash(t *testing.T) {
	list := []control.FlashVolume{
		{Slot: control.Num(3), Label: "f", SizeBytes: control.Num(1 << 20), DirtyBytes: control.Num(4096), Volume: "f", NBD: []string{"nbd+unix:///f?socket=s"}, Connections: control.Num(2)},
		{Slot: control.Num(4), SizeBytes: control.Num(512), DirtyBytes: control.Num(0)},
	}
	const first = "slot 3 label \"f\": 1048576 bytes (1.0 MiB), holds 4096, served as f, 2 connections nbd+unix:///f?socket=s\n"
	for _, x := range []struct {
		args      string
		err       error
		code      int
		out, errs string
		asked     string
	}{
		{"create f 1GiB", nil, exitDone, "created: " + first, "", "create f 1073741824"},
		{"grow f 2G", nil, exitDone, "grown: " + first, "", "grow f 2147483648"},
		{"delete f", nil, exitDone, "deleted: " + first, "", "delete f false"},
		{"delete f --force", nil, exitDone, "deleted: " + first, "", "delete f true"},
		{"list", nil, exitDone, first + "slot 4: 512 bytes, holds 0\n", "", "list"},
		{"delete f", control.Connected("f", 2), exitRefused, "", "clients are connected to f: 2; force ends their connections: give --force", "delete f false"},
		{"delete f", control.NoVolume("f", nil), exitUsage, "", `there is no volume "f"`, "delete f false"},
		{"create f 1G", control.Exists("f"), exitFailed, "", `there is a volume "f" already`, "create f 1073741824"},
		{"grow f 1", control.BadFlash(errors.New("it has 2 bytes")), exitUsage, "", "it has 2 bytes", "grow f 1"},
		{"create f 0", nil, exitUsage, "", "a size of 0", ""},
		{"create f -1", nil, exitUsage, "", "", ""},
		{"create f 1X", nil, exitUsage, "", `unknown unit "X"`, ""},
		{"create f", nil, exitUsage, "", "too few arguments: want name and size", ""},
		{"create 12 1G", nil, exitUsage, "", "a number names the slot of another", ""},
		{"create set 1G", nil, exitUsage, "", `cannot be named "set"`, ""},
		{"create a/b 1G", nil, exitUsage, "", "not a name for a file", ""},
		{"list f", nil, exitUsage, "", `unexpected argument "f"`, ""},
		{"list --cache c --socket s", nil, exitUsage, "", "not both", ""},
		{"grow f 1G --runtime-dir r", nil, exitUsage, "", "--runtime-dir is of use with --cache only", ""},
		{"", nil, exitUsage, "", "which command? See ubcache flash --help", ""},
		{"creat f 1", nil, exitUsage, "", `unknown command "creat"; did you mean create?`, ""},
	} {
		f := &fakeDaemon{flash: list, err: x.err}
		answer(t, f)
		code, out, errs := command(append([]string{"ubcache", "flash"}, strings.Fields(x.args)...)...)
		if code != x.code || out != x.out || !strings.Contains(errs, x.errs) || (code == exitDone) != (errs == "") {
			t.Errorf("%s: status %d, %q, %q; want %d, %q, %q", x.args, code, out, errs, x.code, x.out, x.errs)
		}
		if got := strings.Join(f.asked, ", "); got != x.asked {
			t.Errorf("%s: asked for %q, want %q", x.args, got, x.asked)
		}
	}
	answer(t, &fakeDaemon{flash: list})
	var got []control.FlashVolume
	_, out, _ := command("ubcache", "flash", "list", "--json")
	if err := json.Unmarshal([]byte(out), &got); err != nil || len(got) != 2 || got[0].DirtyBytes != control.Num(4096) {
		t.Errorf("%s: %v", out, err)
	}
	for _, sub := range []string{"create", "grow", "delete", "list"} {
		code, out, errs := command("ubcache", "flash", sub, "--help")
		if code != exitDone || errs != "" || !strings.Contains(out, "USAGE\n  ubcache flash "+sub) || !strings.Contains(out, "EXIT STATUS\n") || !strings.Contains(out, "EXAMPLE\n") {
			t.Errorf("help of %s: status %d, %s%s", sub, code, out, errs)
		}
	}
}
