package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A fake is a Backend over a map: object, attribute, value.
type fake struct {
	mu     sync.Mutex
	attrs  map[string]map[string]string
	status *Status
	wait   chan struct{} // Status waits for it
	job    *Job          // of the volume; nil: none yet
	flash  []FlashVolume
}

func newFake() *fake {
	return &fake{
		attrs: map[string]map[string]string{
			"set":     {"congested": "0.0k", "trigger_gc": ""},
			"a/b ?&%": {"cache_mode": "[writethrough] writeback", "label": "é <&>"},
		},
		status: &Status{Version: "1.2", PID: 42, Set: Set{UUID: "u", BucketBytes: Num(512 << 10)}},
	}
}

func (f *fake) Status(ctx context.Context) (*Status, error) {
	if f.wait != nil {
		select {
		case <-f.wait:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return f.status, nil
}

func (f *fake) Objects(context.Context) ([]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []string
	for o := range f.attrs {
		list = append(list, o)
	}
	slices.Sort(list)
	return list, nil
}

func (f *fake) Attributes(ctx context.Context, object string) ([]Attribute, error) {
	objects, _ := f.Objects(ctx)
	f.mu.Lock()
	defer f.mu.Unlock()
	attrs, ok := f.attrs[object]
	if !ok {
		return nil, NoObject(object, objects)
	}
	var list []Attribute
	for name, value := range attrs {
		list = append(list, Attribute{name, value, name != "congested"})
	}
	slices.SortFunc(list, func(a, b Attribute) int { return strings.Compare(a.Name, b.Name) })
	return list, nil
}

func (f *fake) Attribute(ctx context.Context, object, name string) (string, error) {
	list, err := f.Attributes(ctx, object)
	if err != nil {
		return "", err
	}
	var known []string
	for _, a := range list {
		if a.Name == name {
			return a.Value, nil
		}
		known = append(known, a.Name)
	}
	return "", NoAttribute(object, name, known)
}

func (f *fake) SetAttribute(ctx context.Context, object, name, value string) error {
	if _, err := f.Attribute(ctx, object, name); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case name == "congested":
		return ReadOnly(object, name)
	case value == "bad":
		return fmt.Errorf("set: %w", BadValue(object, name, value, "writethrough or writeback"))
	case value == "late":
		return context.DeadlineExceeded
	case value == "broken":
		return errors.New("the disk is on fire")
	case value == "stopping":
		return Stopping()
	}
	f.attrs[object][name] = value
	return nil
}

// serve runs a server until the test ends and returns a client of it.
func serve(t *testing.T, b Backend) *Client {
	t.Helper()
	l, err := Listen(filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	s := NewServer(b, nil)
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	c, err := Dial(context.Background(), []string{l.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil {
			t.Error(err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(l.Addr().String()); !os.IsNotExist(err) {
			t.Errorf("the socket is left: %v", err)
		}
	})
	return c
}

func TestRequestsAreAnswered(t *testing.T) {
	ctx, f := t.Context(), newFake()
	c := serve(t, f)
	s, err := c.Status(ctx)
	if err != nil || s.PID != 42 || s.Set.BucketBytes != Num(512<<10) {
		t.Errorf("status %+v, %v", s, err)
	}
	also, raw, err := c.StatusJSON(ctx)
	if err != nil || also.PID != 42 || !strings.Contains(string(raw), `"bucket_bytes":524288`) {
		t.Errorf("status %s, %v", raw, err)
	}
	objects, err := c.Objects(ctx)
	if err != nil || !slices.Equal(objects, []string{"a/b ?&%", "set"}) {
		t.Errorf("objects %q, %v", objects, err)
	}
	attrs, err := c.Attributes(ctx, "a/b ?&%")
	if err != nil || len(attrs) != 2 || attrs[1] != (Attribute{"label", "é <&>", true}) {
		t.Errorf("attributes %+v, %v", attrs, err)
	}
	if v, err := c.Attribute(ctx, "set", "congested"); err != nil || v != "0.0k" {
		t.Errorf("%q, %v", v, err)
	}
	for _, value := range []string{"x", "", "with\nlines and \"quotes\"", strings.Repeat("y", 60000)} {
		if v, err := c.SetAttribute(ctx, "a/b ?&%", "label", value); err != nil || v != value {
			t.Errorf("set %.20q: %.20q, %v", value, v, err)
		}
	}
}

func TestErrorsComeBackAsTheyWere(t *testing.T) {
	ctx, c := t.Context(), serve(t, newFake())
	get := func(o, a string) error { _, err := c.Attribute(ctx, o, a); return err }
	set := func(o, a, v string) error { _, err := c.SetAttribute(ctx, o, a, v); return err }
	for _, x := range []struct {
		err  error
		is   error
		want Error
	}{
		{get("nil", "x"), ErrNoObject, Error{Code: "no-object", Object: "nil", Known: []string{"a/b ?&%", "set"}}},
		{get("set", "x"), ErrNoAttribute, Error{Code: "no-attribute", Object: "set", Attribute: "x", Known: []string{"congested", "trigger_gc"}}},
		{set("set", "congested", "1"), ErrReadOnly, Error{Code: "read-only", Object: "set", Attribute: "congested"}},
		{set("set", "trigger_gc", "bad"), ErrValue, Error{Code: "value", Object: "set", Attribute: "trigger_gc", Value: "bad", Want: "writethrough or writeback"}},
		{set("set", "trigger_gc", "late"), ErrTimeout, Error{Code: "timeout"}},
		{set("set", "trigger_gc", "broken"), ErrFailed, Error{Code: "failed"}},
		{set("set", "trigger_gc", "stopping"), ErrStopping, Error{Code: "stopping"}},
		{set("set", "trigger_gc", strings.Repeat("z", 1<<17)), ErrBadRequest, Error{Code: "bad-request"}},
	} {
		var e *Error
		if !errors.As(x.err, &e) || !errors.Is(x.err, x.is) {
			t.Errorf("%v is no %v", x.err, x.is)
			continue
		}
		x.want.Message = e.Message
		if fmt.Sprint(*e) != fmt.Sprint(x.want) || e.Message == "" {
			t.Errorf("%+v, want %+v", *e, x.want)
		}
	}
	if err := set("set", "trigger_gc", "\xff"); err == nil || !strings.Contains(err.Error(), "not UTF-8") {
		t.Errorf("a value that JSON cannot carry: %v", err)
	}
	if !errors.Is(&Error{Code: "of a later version"}, ErrFailed) {
		t.Error("an unknown code is no failure")
	}
}

func TestWhatIsNotKnownSaysWhatIs(t *testing.T) {
	h := NewServer(newFake(), nil)
	for _, x := range []struct {
		method, target, body string
		status               int
		want                 string
	}{
		{"GET", "/v2/status", "", 404, "speaks version 1, whose paths begin with /v1/"},
		{"GET", "/", "", 404, "/v1/"},
		{"GET", "/v1/statu", "", 404, "there are: /v1/status, /v1/objects, /v1/attributes, /v1/attribute"},
		{"GET", "/v1/status/", "", 404, "there are: /v1/status"},
		{"DELETE", "/v1/status", "", 405, `/v1/status takes GET, not \"DELETE\"`},
		{"PUT", "/v1/objects", "{}", 405, `takes GET, not \"PUT\"`},
		{"POST", "/v1/attribute", "{}", 405, "takes GET and PUT"},
		{"GET", "/v1/attribute?object=set", "", 400, "name is given 0 times; want object and name, each once"},
		{"GET", "/v1/attribute?object=set&name=a&name=b", "", 400, "name is given 2 times"},
		{"GET", "/v1/attributes?object=set&verbose=1", "", 400, `\"verbose\" is not known; want object, each once`},
		{"GET", "/v1/status?x=%zz", "", 400, "invalid URL escape"},
		{"GET", "/v1/attributes?object=", "", 404, `there is no object \"\"`},
		{"PUT", "/v1/attribute?object=set&name=trigger_gc", "", 400, "the body is not"},
		{"PUT", "/v1/attribute?object=set&name=trigger_gc", `{"value": 1}`, 400, "the body is not"},
		{"PUT", "/v1/attribute?object=set&name=trigger_gc", `{}`, 400, "the body is not"},
		{"PUT", "/v1/attribute?object=set&name=trigger_gc", `{"value": "1", "force": true}`, 400, "force"},
		{"PUT", "/v1/attribute?object=set&name=trigger_gc", `{"value": "1"} {}`, 400, "more follows"},
		{"PUT", "/v1/attribute?object=set&name=trigger_gc", `{"value": "1"}`, 200, `{"value":"1"}`},
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(x.method, x.target, strings.NewReader(x.body)))
		if w.Code != x.status || !strings.Contains(w.Body.String(), x.want) {
			t.Errorf("%s %s %s: %d %s; want %d %s", x.method, x.target, x.body, w.Code, w.Body, x.status, x.want)
		}
	}
}

// A figure that is gone, or has changed its kind, leaves the others readable, and is not 0.
func TestMissingFigures(t *testing.T) {
	var s Status
	text := `{"set": {"bucket_bytes": 7, "block_bytes": "many", "buckets": {"dirty": null}}, "new": {}, "volumes": [{"name": "v", "cache": {"hits": 1.5, "misses": 2}}]}`
	if err := decodeReply(http.StatusOK, []byte(text), &s); err != nil {
		t.Fatal(err)
	}
	if s.Set.BucketBytes != Num(7) {
		t.Errorf("%+v", s)
	}
	for _, n := range []Number{s.Set.BlockBytes, s.Set.Buckets.Dirty, s.Set.Buckets.Empty, s.Volumes[0].Cache.Hits, s.Total.Requests.Reads} {
		if _, known := n.Value(); known || n.String() != "-" {
			t.Errorf("%v is known", n)
		}
	}
	if r := s.Volumes[0].Cache.HitRatio(); r != nil {
		t.Errorf("ratio of unknown hits: %v", *r)
	}
}

func TestNumber(t *testing.T) {
	type both struct {
		N Number `json:"n,omitzero"`
	}
	for _, x := range []struct {
		n    Number
		json string
	}{{Num(0), `{"n":0}`}, {Num(int64(-5)), `{"n":-5}`}, {Num(uint64(1) << 63), `{"n":9223372036854775807}`}, {Number{}, `{}`}} {
		b, err := json.Marshal(both{x.n})
		if err != nil || string(b) != x.json {
			t.Errorf("%v: %s, %v", x.n, b, err)
		}
		var back both
		if err := json.Unmarshal(b, &back); err != nil || back.N != x.n {
			t.Errorf("%s: %v, %v", b, back.N, err)
		}
	}
}

func TestHitRatio(t *testing.T) {
	for _, x := range []struct {
		hits, misses int
		want         string
	}{{0, 0, "nil"}, {1, 0, "100"}, {0, 1, "0"}, {1, 2, "33.33"}, {999999, 1, "99.99"}, {1 << 62, 1, "99.99"}} {
		c := Cache{Hits: Num(x.hits), Misses: Num(x.misses)}
		got := "nil"
		if r := c.HitRatio(); r != nil {
			got = fmt.Sprint(*r)
		}
		if got != x.want {
			t.Errorf("%d and %d: %s, want %s", x.hits, x.misses, got, x.want)
		}
	}
}

func TestSum(t *testing.T) {
	v := func(n int) Volume {
		x := Num(n)
		return Volume{Name: fmt.Sprint(n), Counters: Counters{
			DirtyBytes: x, Requests: Requests{x, x, x, x, x, x, x},
			Cache:    Cache{Hits: x, Misses: x, MissCollisions: x, FillsSkipped: x, Waits: x, ReadRaces: x, ReadErrors: x},
			Bypassed: Bypassed{ReadHits: x, ReadMisses: x, Bytes: x, ByReason: map[string]Number{"mode": x, fmt.Sprint(n): x}},
		}}
	}
	got := Sum([]Volume{v(1), v(2)})
	want := v(3).Counters
	want.Cache.HitRatioPercent = new(float64)
	*want.Cache.HitRatioPercent = 50
	want.Bypassed.ByReason = map[string]Number{"mode": Num(3), "1": Num(1), "2": Num(2)}
	a, _ := json.Marshal(got)
	b, _ := json.Marshal(want)
	if string(a) != string(b) {
		t.Errorf("%s\nwant %s", a, b)
	}
	if none, _ := json.Marshal(Sum(nil)); strings.Contains(string(none), "ratio") || !strings.Contains(string(none), `"reads":0`) {
		t.Errorf("of nothing: %s", none)
	}
}

func TestSockets(t *testing.T) {
	env := func(m map[string]string) func(string) string { return func(k string) string { return m[k] } }
	for _, x := range []struct {
		given string
		env   map[string]string
		want  string
	}{
		{"a", map[string]string{"UBCACHE_SOCKET": "b", "XDG_RUNTIME_DIR": "/c"}, "a"},
		{"", map[string]string{"UBCACHE_SOCKET": "b", "XDG_RUNTIME_DIR": "/c"}, "b"},
		{"", map[string]string{"XDG_RUNTIME_DIR": "/c"}, "/run/ubcache/control.sock /c/ubcache/control.sock"},
		{"", map[string]string{"XDG_RUNTIME_DIR": "c"}, "/run/ubcache/control.sock"},
		{"", nil, "/run/ubcache/control.sock"},
	} {
		if got := strings.Join(Sockets(x.given, env(x.env)), " "); got != x.want {
			t.Errorf("%q, %v: %s, want %s", x.given, x.env, got, x.want)
		}
	}
}

// dead leaves a socket on which nobody listens.
func dead(t *testing.T, path string) {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
}

func TestDialFindsTheOneThatAnswers(t *testing.T) {
	c := serve(t, newFake())
	dir := t.TempDir()
	gone, file, missing := filepath.Join(dir, "gone"), filepath.Join(dir, "file"), filepath.Join(dir, "missing")
	dead(t, gone)
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	bad := []string{gone, file, missing, "@abstract", strings.Repeat("l", 200)}
	d, err := Dial(t.Context(), append(slices.Clone(bad), c.Socket()))
	if err != nil || d.Socket() != c.Socket() {
		t.Errorf("%v, %v", d, err)
	}
	_, err = Dial(t.Context(), bad)
	if !errors.Is(err, ErrNoDaemon) {
		t.Fatal(err)
	}
	for _, want := range []string{"gone: left by a daemon that is gone", "file: ", "missing: no such file", "abstract", "200 bytes, at most 107"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in: %v", want, err)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Dial(ended, bad); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func TestListen(t *testing.T) {
	old := syscall.Umask(0)
	defer syscall.Umask(old)
	c := serve(t, newFake())
	if info, err := os.Lstat(c.Socket()); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	_, err := Listen(c.Socket())
	if !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), "process 42, which serves set u") {
		t.Errorf("a second one: %v", err)
	}

	dir := t.TempDir()
	gone := filepath.Join(dir, "gone")
	dead(t, gone)
	l, err := Listen(gone)
	if err != nil {
		t.Fatalf("a dead socket: %v", err)
	}
	// Another has taken its place: that one stays.
	os.Remove(gone)
	dead(t, gone)
	l.Close()
	if _, err := os.Lstat(gone); err != nil {
		t.Error("removed another's socket")
	}

	file := filepath.Join(dir, "file")
	os.WriteFile(file, []byte("data"), 0o600)
	if _, err := Listen(file); err == nil || !strings.Contains(err.Error(), "is not a socket") {
		t.Errorf("a file: %v", err)
	}
	if b, _ := os.ReadFile(file); string(b) != "data" {
		t.Error("the file has changed")
	}
	for path, want := range map[string]string{
		filepath.Join(dir, "no", "s"): "no such file", "": "empty", "@x": "abstract", strings.Repeat("x", 108): "108 bytes", "a\x00b": "zero byte",
	} {
		if _, err := Listen(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", path, err, want)
		}
	}
}

// Someone who listens and says nothing is still someone.
func TestListenBesideAMute(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	begin := time.Now()
	if _, err := Listen(path); !errors.Is(err, ErrInUse) || time.Since(begin) > 5*time.Second {
		t.Errorf("%v after %v", err, time.Since(begin))
	}
}

func TestStoppingAnswersWhatIsInFlight(t *testing.T) {
	f := newFake()
	f.wait = make(chan struct{})
	l, err := Listen(filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	s := NewServer(f, nil)
	ended, answered := make(chan error, 1), make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	c, err := Dial(t.Context(), []string{l.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go func() { _, err := c.Status(context.Background()); answered <- err }()
	for len(s.slots) < 1 {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(20 * time.Millisecond) // the request is there
	stopped := make(chan error, 1)
	go func() { stopped <- s.Shutdown(context.Background()) }()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	select {
	case err := <-stopped:
		t.Errorf("did not wait: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	close(f.wait)
	if err := <-answered; err != nil {
		t.Errorf("in flight: %v", err)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	if _, err := c.Status(t.Context()); err == nil {
		t.Error("answers after its end")
	}
}

func TestStoppingDoesNotWaitForEver(t *testing.T) {
	f := newFake()
	f.wait = make(chan struct{})
	l, err := Listen(filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	s := NewServer(f, nil)
	ended, answered := make(chan error, 1), make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	c := newClient(l.Addr().String())
	defer c.Close()
	go func() { _, err := c.Status(context.Background()); answered <- err }()
	for len(s.slots) < 1 {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(20 * time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := s.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("stopped with %v", err)
	}
	if err := <-answered; err == nil || !strings.Contains(err.Error(), "control socket "+c.Socket()) {
		t.Errorf("answered with %v", err)
	}
	<-ended
}

// Clients above the limit wait their turn, and those that say nothing do not keep the others out for long.
func TestManyConnections(t *testing.T) {
	c := serve(t, newFake())
	var open []net.Conn
	for range maxConns - 1 {
		n, err := dial(t.Context(), c.Socket())
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, n)
	}
	if _, err := c.Status(t.Context()); err != nil {
		t.Error(err)
	}
	c.Close()
	last, err := dial(t.Context(), c.Socket())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := c.Status(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("with all places taken: %v", err)
	}
	for _, n := range append(open, last) {
		n.Close()
	}
	if _, err := c.Status(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestStrangeAnswers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	answers := make(chan string, 1)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch a := <-answers; a {
		case "redirect":
			http.Redirect(w, r, "http://elsewhere/", http.StatusFound)
		case "endless":
			for n := 0; n <= maxReply; n += 1 << 16 {
				io.WriteString(w, strings.Repeat(" ", 1<<16))
			}
		case "cut":
			w.Header().Set("Content-Length", "100")
			io.WriteString(w, "{")
		case "old":
			w.WriteHeader(404)
			io.WriteString(w, "not found")
		default:
			io.WriteString(w, a)
		}
	})}
	go srv.Serve(l)
	defer srv.Close()
	c := newClient(path)
	defer c.Close()
	for a, want := range map[string]string{
		"redirect": "no ubcache daemon: HTTP status 302", "endless": "more than", "cut": "unexpected EOF",
		"old": "no ubcache daemon: HTTP status 404", "[1]": "not what was asked for", "": "not what was asked for",
	} {
		answers <- a
		if _, err := c.Status(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", a, err, want)
		}
	}
}
