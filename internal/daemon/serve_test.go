package daemon

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ubcache/ubcache"
	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/control"
	"github.com/ubcache/ubcache/internal/nbd"
)

// fakeConfig serves volumes a and b and the flash-only volume f of a fake set, from a folder of its own.
func fakeConfig(t *testing.T, f *fakeSet) Config {
	dir := t.TempDir()
	return Config{
		Cache: "c.img", Volumes: []Named{{"a", "a.img"}, {"b", "b.img"}}, Flash: []string{"f"},
		Listen: []string{"unix:" + filepath.Join(dir, "nbd")}, Version: "0.1",
		open: f.open, getenv: func(string) string { return "" }, folders: []string{filepath.Join(dir, "run")},
	}
}

// serve starts Serve and waits until it is ready.
func serve(t *testing.T, c Config) *running {
	t.Helper()
	r, ready := serveBegin(t, c)
	select {
	case r.Served = <-ready:
	case err := <-r.ended:
		r.cancel = nil
		t.Fatalf("did not start: %v\n%s", err, r.log)
	}
	return r
}

// serveBegin starts Serve.
func serveBegin(t *testing.T, c Config) (*running, chan Served) {
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{t: t, cancel: cancel, ended: make(chan error, 1), log: new(lockedBuffer)}
	c.Log = slog.New(slog.NewTextHandler(r.log, nil))
	ready := make(chan Served, 1)
	c.Ready = func(s Served) { ready <- s }
	go func() { r.ended <- Serve(ctx, c) }()
	t.Cleanup(func() { r.stop() })
	return r, ready
}

func (r *running) control() *control.Client {
	r.t.Helper()
	c, err := control.Dial(context.Background(), []string{r.Socket})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(c.Close)
	return c
}

func newIO(t *testing.T, dev blockdev.Device) *blockdev.IO {
	t.Helper()
	io, err := blockdev.NewIO(dev, 8)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { io.Close() })
	return io
}

func TestServe(t *testing.T) {
	f := newFakeSet()
	f.absent = []ubcache.AbsentVolume{{Slot: 7, UUID: "22222222-0000-4000-8000-000000000001", Label: "left", Dirty: 8}}
	c := fakeConfig(t, f)
	c.NodeCache, c.Engine = 1<<20, "pread"
	r := serve(t, c)
	for i, name := range []string{"a", "b", "f"} {
		if v := r.Volumes[i]; v.Name != name || v.Size != 1<<20 {
			t.Errorf("volume %d: %+v", i, v)
		}
	}
	if o := f.options; o.Cache != "c.img" || o.RuntimeDir != c.folders[0] || o.NodeCache != 1<<20 || o.Engine != "pread" || o.CacheDevice != nil {
		t.Errorf("options %+v", o)
	}
	if o := f.volumes["a"].options; o.Backing != "a.img" || o.Flash != "" || f.volumes["f"].options.Flash != "f" {
		t.Errorf("options %+v", o)
	}
	if info, err := os.Stat(c.folders[0]); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", info, err)
	}

	// What is written arrives, in the volume that was meant, and the other connections see it.
	data := bytes.Repeat([]byte("data"), 2048)
	b, also := newIO(t, r.dial("b")), newIO(t, r.dial("b"))
	if err := b.WriteAt(data, 8192, blockdev.FUA); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{b.Flush(), b.Discard(0, 4096), b.WriteZeroes(12288, 4096, 0)} {
		if err != nil {
			t.Error(err)
		}
	}
	clear(data[4096:])
	got := make([]byte, len(data))
	if err := also.ReadAt(got, 8192); err != nil || !bytes.Equal(got, data) {
		t.Errorf("read something else, %v", err)
	}
	if err := newIO(t, r.dial("")).ReadAt(got, 8192); err != nil || len(bytes.Trim(got, "\x00")) > 0 {
		t.Errorf("the first volume is not the default: %v", err)
	}

	// The status: each figure where it belongs.
	ctl := r.control()
	s, err := ctl.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if s.PID != os.Getpid() || s.Version != "0.1" || time.Since(s.Started) > time.Minute || len(s.Volumes) != 3 {
		t.Errorf("%+v", s)
	}
	if s.Volumes[0].Connections != control.Num(1) || s.Volumes[1].Connections != control.Num(2) {
		t.Errorf("connections %v, %v", s.Volumes[0].Connections, s.Volumes[1].Connections)
	}
	if want := "nbd+unix:///b?socket=" + url.QueryEscape(r.Addrs[0].String()); !slices.Equal(s.Volumes[1].NBD, []string{want}) {
		t.Errorf("%q, want %q", s.Volumes[1].NBD, want)
	}
	text, _ := json.Marshal(s.Set)
	if want := `{"uuid":"11111111-0000-4000-8000-000000000001","failed":"why","bucket_bytes":524288,"block_bytes":4096,"in_use_percent":12,` +
		`"buckets":{"total":1125899906842624,"available":8,"empty":1,"clean":2,"ready":5,"dirty":3,"metadata":4,"pinned":6,"fixed":7,"suspect":8},` +
		`"cached_bytes":9,"dirty_bytes":10,` +
		`"btree":{"nodes_in_memory":11,"bytes_in_memory":12,"depth":18,"node_reads":19,"node_appends":20,"node_rewrites":21,"node_splits":22,"sweeps":27,"nodes_swept":28,"nodes_coalesced":29,"nodes_stale":30,"trees_lowered":31,"room_waits":32,"btree_nodes":33,"keys":34,"btree_used_percent":35},` +
		`"journal":{"entries":13,"keys":14,"bytes":15,"replayed_keys":25,"mapped_entries":26},` +
		`"allocation_batches":16,"evicted_buckets":17,"no_bucket_ready":23,"moved_bytes":40,"moved_buckets":41,"max_generation_lag":24,` +
		`"discarded_buckets":37,"discarded_bytes":38,"discard_errors":39,"verifications":42,"count_mismatches":43,` +
		`"collection":{"policy":"some","running":true,"count":1,"last_milliseconds":2,"longest_milliseconds":3,"total_milliseconds":4,"average_interval_milliseconds":5,"nodes":6,"holds":7,"longest_hold_microseconds":8,"total_hold_microseconds":9,"differences":10},` +
		`"stalls":{"another":{"count":0,"total_microseconds":0,"max_microseconds":0},"one":{"count":44,"total_microseconds":45,"max_microseconds":46}},` +
		`"absent_volumes":[{"slot":7,"uuid":"22222222-0000-4000-8000-000000000001","label":"left","dirty_bytes":8}]}`; string(text) != want {
		t.Errorf("%s\nwant %s", text, want)
	}
	text, _ = json.Marshal(s.Volumes[2].Counters)
	if want := `{"dirty_bytes":20,"requests":{"reads":12,"read_bytes":17,"writes":13,"written_bytes":18,"flushes":14,"discards":15,"zeroes":16},` +
		`"cache":{"hits":1,"misses":2,"hit_ratio_percent":33.33,"miss_collisions":10,"fills_skipped":21,"invalidation_waits":22,"read_races":11,"read_errors":19,"write_errors":33,"writes_no_room":34},` +
		`"bypassed":{"read_hits":3,"read_misses":4,"bytes":5,"by_reason":{"cache_full":7,"mode":8,"sequential":6,"unaligned":9}}}`; string(text) != want {
		t.Errorf("%s\nwant %s", text, want)
	}
	if d := s.Volumes[0].Declined; len(d) != 2 || d["in_use"] != control.Num(35) || d["no_room"] != control.Num(36) {
		t.Errorf("declined: %v", d)
	}
	text, _ = json.Marshal(s.Volumes[0].Writeback)
	if want := `{"running":true,"draining":true,"detaching":false,"at_max_rate":false,"rate_bytes_per_second":23,"target_bytes":24,"dirty_bytes":25,` +
		`"proportional_bytes_per_second":-26,"integral_bytes_per_second":27,"change_bytes_per_second":-28,"next_io_milliseconds":29,` +
		`"keys_done":30,"keys_failed":31,"errors":32}`; string(text) != want {
		t.Errorf("%s\nwant %s", text, want)
	}
	for i, v := range s.Volumes {
		if v.Mode != "writeback" || v.State != "dirty" || v.Flash != (i == 2) || (v.Writeback == nil) != (i == 2) || v.Job != nil {
			t.Errorf("%+v", v)
		}
	}
	if s.Total.Requests.Reads != control.Num(36) {
		t.Errorf("total %+v", s.Total)
	}

	r.stop()
	for _, want := range []string{
		`level=INFO msg="the set is open" set=11111111-0000-4000-8000-000000000001 "replayed keys"=25 "mapped entries"=26 volumes=3 "dirty bytes"=10`,
		`level=WARN msg="a volume with dirty data is left out: its backing device was not given, and is not complete without the cache" label=left uuid=22222222-0000-4000-8000-000000000001 slot=7 "dirty bytes"=8`,
		`level=INFO msg="the set is closed" "dirty bytes"=10`,
	} {
		if !strings.Contains(r.log.String(), want) {
			t.Errorf("no %s in\n%s", want, r.log)
		}
	}
	if want := []string{"open", "volume a", "volume b", "volume f", "close a", "close b", "close f", "close"}; !slices.Equal(f.notes(), want) {
		t.Errorf("%v, want %v", f.notes(), want)
	}
	for _, path := range []string{r.Socket, r.Addrs[0].String()} {
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", path, err)
		}
	}
}

func TestServeAttributes(t *testing.T) {
	ctx := t.Context()
	ctl := serve(t, fakeConfig(t, newFakeSet())).control()
	objects, err := ctl.Objects(ctx)
	if err != nil || !slices.Equal(objects, []string{"a", "b", "cache", "f", "set"}) {
		t.Errorf("%v, %v", objects, err)
	}
	list, err := ctl.Attributes(ctx, "a")
	if err != nil || len(list) != 3 || list[0] != (control.Attribute{Name: "cache_mode", Value: "[writethrough] writeback", Writable: true}) || list[2].Writable {
		t.Errorf("%v, %v", list, err)
	}
	if v, err := ctl.SetAttribute(ctx, "a", "label", "x"); err != nil || v != "x" {
		t.Errorf("%q, %v", v, err)
	}
	if v, err := ctl.Attribute(ctx, "a", "label"); err != nil || v != "x" {
		t.Errorf("%q, %v", v, err)
	}
	get := func(o, a string) error { _, err := ctl.Attribute(ctx, o, a); return err }
	set := func(o, a, v string) error { _, err := ctl.SetAttribute(ctx, o, a, v); return err }
	_, noList := ctl.Attributes(ctx, "x")
	for _, x := range []struct {
		err, is error
		want    string
	}{
		{noList, control.ErrNoObject, `there is no object "x"; there are: a, b, cache, f, set`},
		{get("x", "label"), control.ErrNoObject, `there is no object "x"; there are: a, b, cache, f, set`},
		{set("x", "label", ""), control.ErrNoObject, `there is no object "x"; there are: a, b, cache, f, set`},
		{get("a", "lable"), control.ErrNoAttribute, `a has no attribute "lable"; it has: cache_mode, label, stats_total/bypassed`},
		{set("cache", "label", ""), control.ErrNoAttribute, `cache has no attribute "label"; it has: nbuckets`},
		{set("a", "stats_total/bypassed", "1"), control.ErrReadOnly, "stats_total/bypassed of a can only be read"},
		{set("a", "label", "bad"), control.ErrValue, `label of a does not take "bad": want something else`},
		{set("a", "label", "broken"), control.ErrFailed, "the superblock could not be written"},
	} {
		if !errors.Is(x.err, x.is) || x.err.Error() != x.want {
			t.Errorf("%v, want %v: %s", x.err, x.is, x.want)
		}
	}
}

func TestServeBlockStates(t *testing.T) {
	f := newFakeSet()
	v, err := f.OpenVolume(t.Context(), ubcache.VolumeOptions{Name: "v"})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close(t.Context())
	for _, x := range []struct {
		context string
		flash   bool
		most    int
		want    string
	}{
		{nbd.ContextState, false, 10, "[{7 7} {520192 1} {262144 2} {262144 0}]"},
		{nbd.ContextState, true, 2, "[{7 7} {520192 1} {262144 2}]"},
		{nbd.ContextAllocation, false, 10, "[{7 7} {1044480 0}]"},
		{nbd.ContextAllocation, true, 10, "[{7 7} {782336 0} {262144 3}]"},
	} {
		e := newVolumeExport(v, x.flash)
		got, err := e.AppendExtents([]nbd.Extent{{Length: 7, Flags: 7}}, x.context, 4096, 1<<20-4096, x.most)
		if err != nil || fmt.Sprint(got) != x.want {
			t.Errorf("%s, flash %v: %v, %v; want %s", x.context, x.flash, got, err, x.want)
		}
	}
	i := newVolumeExport(v, false).Info()
	if i.Size != 1<<20 || i.MinBlock != 4096 || i.ReadOnly || !i.CanTrim || !i.CanZero || !i.MultiConn {
		t.Errorf("%+v", i)
	}
}

// Whatever fails at the start: what was opened is closed, in the right order, and no socket is left.
func TestServeDoesNotStart(t *testing.T) {
	busy, err := net.Listen("unix", filepath.Join(t.TempDir(), "busy"))
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	boom := errors.New("boom")
	for _, x := range []struct {
		name   string
		change func(*Config, *fakeSet)
		want   string
		notes  string
	}{
		{"names", func(c *Config, _ *fakeSet) { c.Flash[0] = "a" }, `two volumes have the name "a"`, ""},
		{"control socket", func(c *Config, _ *fakeSet) { c.Socket = busy.Addr().String() }, "another daemon answers there", ""},
		{"control socket folder", func(c *Config, _ *fakeSet) { c.Socket = "no/s" }, "control socket: ", ""},
		{"runtime folder", func(c *Config, _ *fakeSet) { c.RuntimeDir = "no/such" }, "mkdir no/such", ""},
		{"set", func(_ *Config, f *fakeSet) { f.failOpen = boom }, "boom", ""},
		{"volume", func(_ *Config, f *fakeSet) { f.failVolume = "b" }, "no such thing", "open, volume a, close a, close"},
		{"flash", func(_ *Config, f *fakeSet) { f.failVolume = "f" }, "no such thing", "open, volume a, volume b, close a, close b, close"},
		{
			"listener", func(c *Config, _ *fakeSet) { c.Listen = append(c.Listen, "unix:"+busy.Addr().String()) }, "another program listens there",
			"open, volume a, volume b, volume f, close a, close b, close f, close",
		},
		{"volume, and close", func(_ *Config, f *fakeSet) { f.failVolume, f.failClose = "b", boom }, "no such thing", "open, volume a, close a, close"},
	} {
		t.Run(x.name, func(t *testing.T) {
			f := newFakeSet()
			c := fakeConfig(t, f)
			x.change(&c, f)
			var log lockedBuffer
			c.Log = slog.New(slog.NewTextHandler(&log, nil))
			c.Ready = func(Served) { t.Error("ready") }
			err := Serve(t.Context(), c)
			if err == nil || !strings.Contains(err.Error(), x.want) {
				t.Errorf("%v, want %s", err, x.want)
			}
			if got := strings.Join(f.notes(), ", "); got != x.notes {
				t.Errorf("%s, want %s", got, x.notes)
			}
			if f.failClose != nil && !strings.Contains(log.String(), `msg="while ending" err=boom`) {
				t.Errorf("the second error is lost:\n%s", &log)
			}
			for _, path := range []string{filepath.Join(c.folders[0], control.SocketName), strings.TrimPrefix(c.Listen[0], "unix:")} {
				if _, err := os.Lstat(path); err == nil {
					t.Errorf("%s is left", path)
				}
			}
		})
	}
}

// noteClose notes when a device is closed.
type noteClose struct {
	blockdev.Device
	close func()
}

func (n noteClose) Close() error {
	n.close()
	return n.Device.Close()
}

func TestServeWrapsDevices(t *testing.T) {
	f := newFakeSet()
	c := fakeConfig(t, f)
	dir := t.TempDir()
	image := func(name string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, make([]byte, 4096), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	c.Cache = image("c")
	for i, name := range []string{"a", "b"} {
		c.Volumes[i].Device = image(name)
	}
	c.Wrap = func(role, name string, dev blockdev.Device) blockdev.Device {
		f.note("wrap %s %s", role, name)
		return noteClose{dev, func() { f.note("device %s", name) }}
	}
	serve(t, c).stop()
	if o := f.volumes["b"].options; o.Backing != "" || o.BackingDevice.Info().Name != c.Volumes[1].Device || f.options.Cache != "" || f.options.CacheDevice.Info().Name != c.Cache {
		t.Errorf("%+v", o)
	}
	want := "wrap cache cache, wrap backing a, wrap backing b, open, volume a, volume b, volume f, close a, close b, close f, close, device b, device a, device cache"
	if got := strings.Join(f.notes(), ", "); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}

	*f = *newFakeSet()
	c.Volumes[1].Device = "missing"
	if err := Serve(t.Context(), c); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	if got, want := strings.Join(f.notes(), ", "), "wrap cache cache, wrap backing a, device a, device cache"; got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
}

// Before the set is open, and while it ends, the control socket says so.
func TestServeStartingAndStopping(t *testing.T) {
	f := newFakeSet()
	f.opening, f.closing = make(chan struct{}), make(chan struct{})
	gate := make(chan struct{})
	f.wrap = func(dev blockdev.Device) blockdev.Device { return &gated{Device: dev, gate: gate} }
	c := fakeConfig(t, f)
	r, ready := serveBegin(t, c)
	r.Socket = filepath.Join(c.folders[0], control.SocketName)
	for _, err := os.Stat(r.Socket); err != nil; _, err = os.Stat(r.Socket) {
		time.Sleep(time.Millisecond)
	}
	ctl := r.control()
	ctx := t.Context()
	_, e1 := ctl.Status(ctx)
	_, e2 := ctl.Objects(ctx)
	_, e3 := ctl.Attributes(ctx, "a")
	_, e4 := ctl.Attribute(ctx, "a", "label")
	_, e5 := ctl.SetAttribute(ctx, "a", "label", "x")
	for i, err := range []error{e1, e2, e3, e4, e5} {
		if !errors.Is(err, control.ErrStarting) {
			t.Errorf("%d: %v", i, err)
		}
	}
	close(f.opening)
	r.Served = <-ready

	// A request is in flight, and is answered.
	io := newIO(t, r.dial("a"))
	answered := make(chan error, 1)
	go func() { answered <- io.ReadAt(make([]byte, 4096), 0) }()
	<-gate
	r.cancel()
	var err error
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if _, err = ctl.SetAttribute(ctx, "a", "label", "x"); err != nil {
			break
		}
	}
	if !errors.Is(err, control.ErrStopping) {
		t.Error(err)
	}
	if _, err := ctl.Status(ctx); err != nil {
		t.Errorf("status while requests are answered: %v", err)
	}
	gate <- struct{}{}
	if err := <-answered; err != nil {
		t.Errorf("in flight: %v", err)
	}
	close(f.closing)
	r.stop()
}

// gated makes the first read wait: it sends to gate when it is there, and takes from it before it goes on.
type gated struct {
	blockdev.Device
	gate chan struct{}
	once sync.Once
}

func (g *gated) NewQueue(depth int, complete func([]*blockdev.Request)) (blockdev.Queue, error) {
	q, err := g.Device.NewQueue(depth, complete)
	return &gatedQueue{Queue: q, g: g}, err
}

type gatedQueue struct {
	blockdev.Queue
	g       *gated
	waiting sync.WaitGroup
}

func (q *gatedQueue) Submit(reqs []*blockdev.Request) {
	if reqs[0].Op != blockdev.OpRead {
		q.Queue.Submit(reqs)
		return
	}
	first := false
	q.g.once.Do(func() { first = true })
	if !first {
		q.Queue.Submit(reqs)
		return
	}
	reqs = slices.Clone(reqs)
	q.waiting.Go(func() {
		q.g.gate <- struct{}{}
		<-q.g.gate
		q.Queue.Submit(reqs)
	})
}

func (q *gatedQueue) Close() error {
	q.waiting.Wait()
	return q.Queue.Close()
}

// The end is bounded where requests or the set take for ever.
func TestServeStopsInBoundedTime(t *testing.T) {
	for _, stuck := range []bool{false, true} {
		f := newFakeSet()
		f.closing, f.stuck = make(chan struct{}), stuck
		gate := make(chan struct{})
		f.wrap = func(dev blockdev.Device) blockdev.Device { return &gated{Device: dev, gate: gate} }
		c := fakeConfig(t, f)
		c.drainLimit, c.closeLimit, c.closeGrace = 50*time.Millisecond, 50*time.Millisecond, 50*time.Millisecond
		r := serve(t, c)
		io := newIO(t, r.dial("a"))
		answered := make(chan error, 1)
		go func() { answered <- io.ReadAt(make([]byte, 4096), 0) }()
		<-gate
		begin := time.Now()
		r.cancel()
		r.cancel = nil
		err := <-r.ended
		if stuck != (err != nil) || stuck && !strings.Contains(err.Error(), "the set does not close: given up after 100ms") {
			t.Errorf("ended with %v", err)
		}
		if d := time.Since(begin); d > 5*time.Second {
			t.Errorf("took %v", d)
		}
		if !strings.Contains(r.log.String(), `unix on export \"a\", 1 requests unanswered`) {
			t.Errorf("not logged who was cut off:\n%s", r.log)
		}
		if !stuck && !strings.Contains(r.log.String(), "not written out in time: the next start takes longer") {
			t.Errorf("not logged what that means:\n%s", r.log)
		}
		if err := <-answered; err == nil {
			t.Error("answered after the end")
		}
		gate <- struct{}{}
		close(f.closing)
	}
}

func TestServeInterruptedAtTheStart(t *testing.T) {
	f := newFakeSet()
	f.opening = make(chan struct{})
	r, _ := serveBegin(t, fakeConfig(t, f))
	r.cancel()
	r.cancel = nil
	if err := <-r.ended; !errors.Is(err, context.Canceled) || len(f.notes()) != 0 {
		t.Errorf("%v, %v", err, f.notes())
	}
}

func TestFolders(t *testing.T) {
	dir := t.TempDir()
	open, file := filepath.Join(dir, "open"), filepath.Join(dir, "file")
	if err := os.Mkdir(open, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	good, missing := filepath.Join(dir, "good"), filepath.Join(dir, "no", "such")
	bad := []string{open, file, missing}
	for range 2 { // made, and found
		if got, err := firstFolder(append(slices.Clone(bad), good)); got != good || err != nil {
			t.Errorf("%s, %v", got, err)
		}
	}
	_, err := firstFolder(bad)
	for _, want := range []string{"has mode 0777: others can write there", "file is not a folder", "mkdir "} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %v", want, err)
		}
	}

	// None: it says what that costs, and serves.
	f := newFakeSet()
	c := fakeConfig(t, f)
	c.folders = bad
	r := serve(t, c)
	if r.Socket != "" || f.options.RuntimeDir != "" {
		t.Errorf("%+v, %+v", r.Served, f.options)
	}
	r.stop()
	for _, want := range []string{"each acknowledged write waits for the journal", "no control socket"} {
		if !strings.Contains(r.log.String(), want) {
			t.Errorf("no %q in:\n%s", want, r.log)
		}
	}

	// As told.
	f = newFakeSet()
	c = fakeConfig(t, f)
	c.folders, c.RuntimeDir = bad, good
	c.getenv = func(name string) string { return map[string]string{control.SocketEnv: filepath.Join(dir, "env")}[name] }
	r = serve(t, c)
	if r.Socket != filepath.Join(dir, "env") || f.options.RuntimeDir != good {
		t.Errorf("%+v, %+v", r.Served, f.options)
	}
}

func TestCheckNames(t *testing.T) {
	for _, name := range []string{"", "set", "cache", ".", "..", "a/b", "a\nb", "\xff", strings.Repeat("x", 256)} {
		if CheckNames([]string{name}) == nil {
			t.Errorf("%.20q is taken", name)
		}
	}
	if err := CheckNames([]string{"a", "b", "set0", "ü b", strings.Repeat("x", 255)}); err != nil {
		t.Error(err)
	}
	if CheckNames([]string{"a", "b", "a"}) == nil {
		t.Error("the same name twice")
	}
}
