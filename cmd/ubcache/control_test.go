package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/control"
)

// A fakeDaemon is what the commands ask in these tests.
type fakeDaemon struct {
	mu     sync.Mutex
	status *control.Status
	label  string
	hang   bool

	jobs     []*control.Job // what Job answers: one after the other, and then the last one
	asked    []string       // of StartJob, CancelJob, and those of flash-only volumes
	flash    []control.FlashVolume
	err      error // of all that StartJob, CancelJob and the flash-only volumes do
	errStart error // of StartJob alone
}

func (f *fakeDaemon) Status(ctx context.Context) (*control.Status, error) {
	if f.hang {
		<-ctx.Done()
	}
	return f.status, ctx.Err()
}

func (f *fakeDaemon) Objects(ctx context.Context) ([]string, error) {
	if f.hang {
		<-ctx.Done()
	}
	return []string{"set", "cache", "data"}, ctx.Err()
}

func (f *fakeDaemon) Attributes(_ context.Context, object string) ([]control.Attribute, error) {
	if object != "data" {
		return nil, control.NoObject(object, []string{"set", "cache", "data"})
	}
	return []control.Attribute{
		{Name: "cache_mode", Value: "writethrough [writeback] none", Writable: true},
		{Name: "dirty_data", Value: "4.0k"},
		{Name: "label", Value: f.label, Writable: true},
		{Name: "stop", Writable: true},
		{Name: "writeback_rate_debug", Value: "rate:\t1.0M/sec\ndirty:\t0.0k\n"},
	}, nil
}

func (f *fakeDaemon) Attribute(ctx context.Context, object, name string) (string, error) {
	list, err := f.Attributes(ctx, object)
	var known []string
	for _, a := range list {
		if a.Name == name {
			return a.Value, nil
		}
		known = append(known, a.Name)
	}
	if err == nil {
		err = control.NoAttribute(object, name, known)
	}
	return "", err
}

func (f *fakeDaemon) SetAttribute(ctx context.Context, object, name, value string) error {
	if _, err := f.Attribute(ctx, object, name); err != nil {
		return err
	}
	switch {
	case name == "dirty_data":
		return control.ReadOnly(object, name)
	case value == "bad":
		return control.BadValue(object, name, value, "something good")
	case value == "broken":
		return errors.New("the superblock of data could not be written")
	case name == "label":
		f.label = value
	}
	return nil
}

func (f *fakeDaemon) ask(format string, args ...any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = append(f.asked, fmt.Sprintf(format, args...))
	return f.err
}

func (f *fakeDaemon) StartJob(ctx context.Context, volume, kind string) (*control.Job, error) {
	if f.errStart != nil {
		return nil, f.errStart
	}
	if err := f.ask("%s %s", kind, volume); err != nil {
		return nil, err
	}
	return f.Job(ctx, volume)
}

func (f *fakeDaemon) Job(_ context.Context, volume string) (*control.Job, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.jobs) == 0 {
		return nil, control.NoJob(volume)
	}
	j := f.jobs[0]
	if len(f.jobs) > 1 {
		f.jobs = f.jobs[1:]
	}
	return j, nil
}

func (f *fakeDaemon) CancelJob(ctx context.Context, volume string) (*control.Job, error) {
	if err := f.ask("cancel %s", volume); err != nil {
		return nil, err
	}
	return f.Job(ctx, volume)
}

func (f *fakeDaemon) FlashVolumes(context.Context) ([]control.FlashVolume, error) {
	return f.flash, f.ask("list")
}

func (f *fakeDaemon) CreateFlash(_ context.Context, label string, size int64) (*control.FlashVolume, error) {
	return &f.flash[0], f.ask("create %s %d", label, size)
}

func (f *fakeDaemon) GrowFlash(_ context.Context, name string, size int64) (*control.FlashVolume, error) {
	return &f.flash[0], f.ask("grow %s %d", name, size)
}

func (f *fakeDaemon) DeleteFlash(_ context.Context, name string, force bool) (*control.FlashVolume, error) {
	return &f.flash[0], f.ask("delete %s %v", name, force)
}

// answer makes the commands find f.
func answer(t *testing.T, f *fakeDaemon) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := control.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	s := control.NewServer(f, nil)
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		s.Shutdown(ctx)
		<-ended
	})
	t.Setenv(control.SocketEnv, path)
}

// fakeStatus has figures that are all different, of a volume with requests and of one without.
func fakeStatus() *control.Status {
	next := 0
	n := func() control.Number {
		next++
		return control.Num(next * 1000)
	}
	zero := control.Sum(nil)
	zero.Bypassed.ByReason = map[string]control.Number{"sequential": control.Num(0), "mode": control.Num(0)}
	zero.Requests.Zeroes = control.Number{} // a daemon that does not tell
	s := &control.Status{
		Version: "0.1", PID: 42, Started: time.Now().Add(-90 * time.Second),
		Set: control.Set{
			UUID: "11111111-0000-4000-8000-000000000001", BucketBytes: control.Num(512 << 10), InUsePercent: control.Num(12),
			Buckets: control.Buckets{
				Total: control.Num(65536), Available: control.Num(57000), Empty: n(), Clean: n(), Ready: n(), Dirty: n(), Metadata: n(), Pinned: n(),
				Fixed: n(), Suspect: n(),
			},
			CachedBytes: n(), DirtyBytes: n(), Btree: control.Btree{Nodes: n(), Bytes: n(), Reads: n(), Appends: n(), Rewrites: n(), Splits: n(), Coalesced: control.Num(7), Stale: control.Num(8), Sweeps: control.Num(9)},
			Journal: control.Journal{Entries: n(), Keys: n(), Bytes: n()}, Evicted: n(), NoBucket: n(), MovedBytes: control.Num(36000), MovedBuckets: control.Num(37),
			Verified: control.Num(3), Mismatches: control.Num(4),
			Collection: control.Collection{Policy: "paced", Running: true, Count: control.Num(11), Last: control.Num(12), Longest: control.Num(13), Holds: control.Num(14), LongestHold: control.Num(1500)},
			Stalls: map[string]control.Stall{
				"split":         {Count: control.Num(5), Total: control.Num(60100), Max: control.Num(30050)},
				"journal_write": {Count: control.Num(70), Total: control.Num(8000900), Max: control.Num(1100)},
				"set_lock":      {Count: control.Num(0), Total: control.Num(0), Max: control.Num(0)},
			},
		},
		Volumes: []control.Volume{
			{
				Name: "data", SizeBytes: control.Num(1 << 30), Mode: "writeback", State: "dirty", Connections: control.Num(2), NBD: []string{"nbd+unix:///data?socket=s"},
				Writeback: &control.Writeback{
					Running: true, Rate: control.Num(51 << 9), Target: control.Num(52 << 20), Dirty: control.Num(53 << 20), Proportional: control.Num(-54 << 9),
					Integral: control.Num(-550), Change: control.Num(56), NextIO: control.Num(57), KeysDone: control.Num(58), KeysFailed: control.Num(59), Errors: control.Num(60),
				},
				Job: &control.Job{Kind: "detach", State: "running", DirtyAtStart: control.Num(61 << 20)},
				Counters: control.Counters{
					DirtyBytes: n(), Requests: control.Requests{Reads: n(), ReadBytes: n(), Writes: n(), WrittenBytes: n(), Flushes: n(), Discards: n(), Zeroes: n()},
					Cache:    control.Cache{Hits: n(), Misses: n(), MissCollisions: n(), FillsSkipped: n(), Waits: n(), ReadRaces: n(), ReadErrors: n(), WriteErrors: n(), NoRoom: n()},
					Bypassed: control.Bypassed{ReadHits: n(), ReadMisses: n(), Bytes: n(), ByReason: map[string]control.Number{"sequential": n(), "mode": n()}},
					Declined: map[string]control.Number{"in_use": n(), "no_room": n()},
				},
			},
			{Name: "idle", SizeBytes: control.Num(1 << 20), Connections: control.Num(0), Counters: zero},
		},
	}
	s.Set.Absent = []control.AbsentVolume{{Slot: control.Num(3), UUID: "22222222-0000-4000-8000-000000000001", Label: "left", DirtyBytes: control.Num(5 << 20)}}
	s.Volumes = append(s.Volumes, control.Volume{Name: "scratch", Flash: true, Counters: control.Sum(nil)})
	s.Total = control.Sum(s.Volumes)
	return s
}

func TestStatus(t *testing.T) {
	f := &fakeDaemon{status: fakeStatus()}
	answer(t, f)
	code, out, errs := command("ubcache", "status")
	if code != exitDone || errs != "" {
		t.Fatalf("status %d, %s", code, errs)
	}
	golden(t, "status.txt", strings.Replace(out, "1m31s", "1m30s", 1))

	code, out, errs = command("ubcache", "status", "--json")
	var s control.Status
	if err := json.Unmarshal([]byte(out), &s); err != nil || code != exitDone || errs != "" {
		t.Fatalf("status %d, %s, %v", code, errs, err)
	}
	for _, want := range []string{`"hit_ratio_percent": 49.18`, `"dirty_bytes": 22000`, `"by_reason": {`, `"set_lock": {`, `"max_microseconds": 30050`} {
		if !strings.Contains(out, want) {
			t.Errorf("no %s in\n%s", want, out)
		}
	}
	if idle, _ := json.Marshal(s.Volumes[1]); strings.Contains(string(idle), "ratio") {
		t.Errorf("a ratio of no requests: %s", idle)
	}

	f.status.Set.Failed = "the journal could not be written"
	for _, args := range [][]string{{"ubcache", "status"}, {"ubcache", "status", "--json"}} {
		code, out, errs = command(args...)
		if code != exitFailed || !strings.Contains(out, "the journal could not be written") || errs != "ubcache: the set has stopped: the journal could not be written\n" {
			t.Errorf("a set that has stopped: status %d, %s, %s", code, out, errs)
		}
	}
}

// golden compares with a file of testdata, or writes it if UPDATE is set.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("is\n%s\nand not as in %s; UPDATE=1 writes that", got, path)
	}
}

func TestGetAndSet(t *testing.T) {
	f := &fakeDaemon{label: "old"}
	answer(t, f)
	for _, x := range []struct {
		args      string
		code      int
		out, errs string
	}{
		{"get data label", exitDone, "old\n", ""},
		{"get data writeback_rate_debug", exitDone, "rate:\t1.0M/sec\ndirty:\t0.0k\n", ""},
		{"get data --json label", exitDone, "{\n  \"name\": \"label\",\n  \"value\": \"old\"\n}\n", ""},
		{"set data label new", exitDone, "new\n", ""},
		{"set data label \"\"", exitDone, "", ""},
		{"set data cache_mode writeback", exitDone, "writethrough [writeback] none\n", ""},
		{"set data stop 1", exitDone, "", ""},
		{
			"get data", exitDone,
			"cache_mode: writethrough [writeback] none\ndirty_data: 4.0k\nlabel:\nstop:\nwriteback_rate_debug:\n   rate:\t1.0M/sec\n   dirty:\t0.0k\n", "",
		},
		{"get dat", exitUsage, "", `there is no object "dat"; there are: set, cache, data`},
		{"get dat label", exitUsage, "", `there is no object "dat"; there are: set, cache, data`},
		{"set dat label x", exitUsage, "", `there is no object "dat"`},
		{"get data lable", exitUsage, "", `data has no attribute "lable"; it has: cache_mode, dirty_data, label, stop, writeback_rate_debug`},
		{"set data lable x", exitUsage, "", `data has no attribute "lable"; it has: cache_mode`},
		{"set data dirty_data x", exitUsage, "", "dirty_data of data can only be read"},
		{"set data label bad", exitUsage, "", `label of data does not take "bad": want something good`},
		{"set data label broken", exitFailed, "", "the superblock of data could not be written"},
		{"get", exitUsage, "", "which object, and perhaps an attribute?"},
		{"get a b c", exitUsage, "", `unexpected argument "c"`},
		{"set data label", exitUsage, "", "too few arguments: want object, attribute and value"},
	} {
		args := strings.Fields(strings.ReplaceAll(x.args, `""`, "EMPTY"))
		for i, a := range args {
			args[i] = strings.ReplaceAll(a, "EMPTY", "")
		}
		code, out, errs := command(append([]string{"ubcache"}, args...)...)
		if code != x.code || out != x.out || !strings.Contains(errs, x.errs) || (x.errs == "") != (errs == "") {
			t.Errorf("%s: status %d, %q, %q; want %d, %q, %q", x.args, code, out, errs, x.code, x.out, x.errs)
		}
	}
	var list []control.Attribute
	_, out, _ := command("ubcache", "get", "data", "--json")
	if err := json.Unmarshal([]byte(out), &list); err != nil || len(list) != 5 || !list[0].Writable || list[1].Writable {
		t.Errorf("%s: %v", out, err)
	}
}

func TestNoDaemon(t *testing.T) {
	gone := filepath.Join(t.TempDir(), "gone")
	l, err := net.Listen("unix", gone)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	for _, args := range []string{"status", "get set", "set set x y"} {
		code, out, errs := command(strings.Fields("ubcache " + args + " --socket " + gone)...)
		if code != exitFailed || out != "" || !strings.Contains(errs, "no daemon answers ("+gone+": left by a daemon that is gone)") || strings.Count(errs, "\n") != 1 {
			t.Errorf("%s: status %d, %q, %q", args, code, out, errs)
		}
	}
	t.Setenv(control.SocketEnv, filepath.Join(filepath.Dir(gone), "missing"))
	if code, _, errs := command("ubcache", "status"); code != exitFailed || !strings.Contains(errs, "missing: no such file or directory") {
		t.Errorf("status %d, %q", code, errs)
	}
}

func TestCompletionAsksTheDaemon(t *testing.T) {
	f := &fakeDaemon{label: "old"}
	answer(t, f)
	complete := func(line string) string {
		args := append([]string{"ubcache", "__complete"}, strings.Fields(line)...)
		if strings.HasSuffix(line, " ") {
			args = append(args, "")
		}
		_, out, _ := command(args...)
		return out
	}
	for line, want := range map[string]string{
		"get ":                 "set\ncache\ndata\n:4\n",
		"get data ":            "cache_mode\twritethrough [writeback] none\ndirty_data\t4.0k\nlabel\told\nstop\nwriteback_rate_debug\trate:\t1.0M/sec\n:4\n",
		"get data label ":      ":4\n",
		"set data ":            "cache_mode\twritethrough [writeback] none\nlabel\told\nstop\n:4\n",
		"set data cache_mode ": "writethrough\nwriteback\nnone\n:4\n",
		"set data label ":      ":4\n",
		"set nothing ":         ":4\n",
	} {
		if got := complete(line); got != want {
			t.Errorf("%q: %q, want %q", line, got, want)
		}
	}
	f.hang = true
	begin := time.Now()
	if got := complete("get "); got != ":4\n" || time.Since(begin) > 5*time.Second {
		t.Errorf("of a daemon that hangs: %q after %v", got, time.Since(begin))
	}
	t.Setenv(control.SocketEnv, "/nonexistent/s")
	if got := complete("get "); got != ":4\n" {
		t.Errorf("without a daemon: %q", got)
	}
}
