package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

var theHour = time.Date(2025, 1, 2, 3, 4, 5, 0, time.UTC)

func (f *fake) StartJob(_ context.Context, volume, kind string) (*Job, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case volume == "set" || f.attrs[volume] == nil:
		return nil, NoVolume(volume, []string{"a/b ?&%"})
	case f.job != nil && f.job.State == Running && f.job.Kind != kind:
		return nil, Busy(volume, f.job.Kind)
	}
	f.job = &Job{Kind: kind, State: Running, Started: theHour, DirtyAtStart: Num(10), DirtyBytes: Num(7)}
	return f.job, nil
}

func (f *fake) Job(_ context.Context, volume string) (*Job, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case volume == "flash":
		return nil, FlashOnly(volume)
	case volume == "bare":
		return nil, Detached(volume)
	case f.job == nil:
		return nil, NoJob(volume)
	}
	return f.job, nil
}

func (f *fake) CancelJob(ctx context.Context, volume string) (*Job, error) {
	j, err := f.Job(ctx, volume)
	if err == nil {
		j.State, j.Ended = Cancelled, theHour.Add(time.Second)
	}
	return j, err
}

func (f *fake) FlashVolumes(context.Context) ([]FlashVolume, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.flash), nil
}

func (f *fake) CreateFlash(_ context.Context, label string, size int64) (*FlashVolume, error) {
	if label == "" {
		return nil, BadFlash(errors.New("a volume's name is empty"))
	}
	if _, err := f.index(label); err == nil {
		return nil, Exists(label)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.flash = append(f.flash, FlashVolume{Slot: Num(len(f.flash)), Label: label, SizeBytes: Num(size), DirtyBytes: Num(0), Volume: label, Connections: Num(1)})
	return &f.flash[len(f.flash)-1], nil
}

func (f *fake) index(name string) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	i := slices.IndexFunc(f.flash, func(v FlashVolume) bool { return v.Label == name })
	if i < 0 {
		return i, NoVolume(name, nil)
	}
	return i, nil
}

func (f *fake) GrowFlash(_ context.Context, name string, size int64) (*FlashVolume, error) {
	i, err := f.index(name)
	if err != nil {
		return nil, err
	}
	f.flash[i].SizeBytes = Num(size)
	return &f.flash[i], nil
}

func (f *fake) DeleteFlash(_ context.Context, name string, force bool) (*FlashVolume, error) {
	i, err := f.index(name)
	if err != nil {
		return nil, err
	}
	if !force {
		return nil, Connected(name, 1)
	}
	v := f.flash[i]
	f.flash = slices.Delete(f.flash, i, i+1)
	return &v, nil
}

func TestJobs(t *testing.T) {
	ctx, f := t.Context(), newFake()
	c := serve(t, f)
	const name = "a/b ?&%" // as a part of a path
	if _, err := c.Job(ctx, name); !errors.Is(err, ErrNoJob) {
		t.Error(err)
	}
	j, err := c.StartJob(ctx, name, Flush)
	want := &Job{Kind: "flush", State: "running", Started: theHour, DirtyAtStart: Num(10), DirtyBytes: Num(7)}
	if err != nil || !reflect.DeepEqual(j, want) {
		t.Fatalf("%+v, %v", j, err)
	}
	if j, err = c.Job(ctx, name); err != nil || !reflect.DeepEqual(j, want) {
		t.Errorf("%+v, %v", j, err)
	}
	if _, err := c.StartJob(ctx, name, Detach); !errors.Is(err, ErrBusy) || !strings.Contains(err.Error(), "a flush of a/b ?&% is running") {
		t.Error(err)
	}
	want.State, want.Ended = "cancelled", theHour.Add(time.Second)
	if j, err = c.CancelJob(ctx, name); err != nil || !reflect.DeepEqual(j, want) {
		t.Errorf("%+v, %v", j, err)
	}
	*f.job = Job{
		Kind: "detach", State: "failed", Started: theHour, Ended: theHour, DirtyAtStart: Num(10), DirtyBytes: Num(1), Error: "why",
		Ranges: []Range{{4096, 512}, {1 << 40, 1024}},
	}
	if j, err = c.Job(ctx, name); err != nil || !reflect.DeepEqual(j, f.job) {
		t.Errorf("%+v, %v", j, err)
	}
	text, _ := json.Marshal(j)
	if want := `{"kind":"detach","state":"failed","started":"2025-01-02T03:04:05Z","ended":"2025-01-02T03:04:05Z","dirty_bytes_at_start":10,"dirty_bytes":1,` +
		`"error":"why","ranges":[{"offset":4096,"length":512},{"offset":1099511627776,"length":1024}]}`; string(text) != want {
		t.Errorf("%s\nwant %s", text, want)
	}
	for _, x := range []struct {
		volume string
		is     error
		want   string
	}{
		{"set", ErrNoVolume, `there is no volume "set"; there are: a/b ?&%`},
		{"", ErrNoVolume, `there is no volume ""`},
	} {
		if _, err := c.StartJob(ctx, x.volume, Detach); !errors.Is(err, x.is) || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%v, want %s", err, x.want)
		}
	}
	for volume, want := range map[string]string{"flash": "flash is a flash-only volume", "bare": "bare is not attached"} {
		if _, err := c.CancelJob(ctx, volume); !errors.Is(err, ErrNotAttached) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if e := NoVolume("x", nil); e.Message != `there is no volume "x", nor any other` {
		t.Error(e)
	}
}

func TestFlash(t *testing.T) {
	ctx, f := t.Context(), newFake()
	c := serve(t, f)
	if list, err := c.FlashVolumes(ctx); err != nil || len(list) != 0 {
		t.Errorf("%v, %v", list, err)
	}
	const name = "a/b ?"
	v, err := c.CreateFlash(ctx, name, 1<<40)
	want := FlashVolume{Slot: Num(0), Label: name, SizeBytes: Num(1 << 40), DirtyBytes: Num(0), Volume: name, Connections: Num(1)}
	if err != nil || !reflect.DeepEqual(*v, want) {
		t.Errorf("%+v, %v", v, err)
	}
	want.SizeBytes = Num(1 << 41)
	if v, err = c.GrowFlash(ctx, name, 1<<41); err != nil || !reflect.DeepEqual(*v, want) {
		t.Errorf("%+v, %v", v, err)
	}
	if list, err := c.FlashVolumes(ctx); err != nil || !reflect.DeepEqual(list, []FlashVolume{want}) {
		t.Errorf("%v, %v", list, err)
	}
	errs := map[error]error{}
	_, errs[ErrExists] = c.CreateFlash(ctx, name, 1)
	_, errs[ErrValue] = c.CreateFlash(ctx, "", 1)
	_, errs[ErrNoVolume] = c.GrowFlash(ctx, "x", 1)
	_, errs[ErrConnected] = c.DeleteFlash(ctx, name, false)
	_, errs[ErrBadRequest] = c.GrowFlash(ctx, name, 0)
	for is, err := range errs {
		if !errors.Is(err, is) {
			t.Errorf("%v is not %v", err, is)
		}
	}
	if v, err = c.DeleteFlash(ctx, name, true); err != nil || !reflect.DeepEqual(*v, want) || len(f.flash) != 0 {
		t.Errorf("%+v, %v", v, err)
	}
}

// What would change what is done is refused, and nothing is done.
func TestJobsAndFlashRefuse(t *testing.T) {
	f := newFake()
	f.flash = []FlashVolume{{Label: "f", SizeBytes: Num(5)}}
	h := NewServer(f, nil)
	for _, x := range []struct {
		method, target, body string
		status               int
		want                 string
	}{
		{"GET", "/v1/volumes/set/flush", "", 405, "takes POST"},
		{"DELETE", "/v1/volumes/set/job", "", 405, "takes GET"},
		{"POST", "/v1/volumes/set", "", 404, "there are: "},
		{"POST", "/v1/volumes/set/flush/", "", 404, "there are: "},
		{"POST", "/v1/volumes/a%2fb%20%3f&%25/flush", `{}`, 400, "there is a body"},
		{"POST", "/v1/volumes/a%2fb%20%3f&%25/detach", `{"wait": true}`, 400, "there is a body"},
		{"POST", "/v1/volumes/a%2fb%20%3f&%25/cancel", ` `, 400, "there is a body"},
		{"POST", "/v1/volumes/a%2fb%20%3f&%25/flush?wait=1", "", 400, "is not known; want none"},
		{"POST", "/v1/volumes/a/b/flush", "", 404, "there are: "},
		{"POST", "/v1/flash", "", 400, "the body is not"},
		{"POST", "/v1/flash", `{"label": "x"}`, 400, "both are needed"},
		{"POST", "/v1/flash", `{"size": 1}`, 400, "both are needed"},
		{"POST", "/v1/flash", `{"label": "x", "size": 0}`, 400, "above 0"},
		{"POST", "/v1/flash", `{"label": "x", "size": -1}`, 400, "above 0"},
		{"POST", "/v1/flash", `{"label": "x", "size": 1.5}`, 400, "the body is not"},
		{"POST", "/v1/flash", `{"label": "x", "size": "1G"}`, 400, "the body is not"},
		{"POST", "/v1/flash", `{"label": "x", "size": 9223372036854775808}`, 400, "the body is not"},
		{"POST", "/v1/flash", `{"label": "x", "size": 1, "force": true}`, 400, "force"},
		{"POST", "/v1/flash", `{"label": "x", "size": 1}{}`, 400, "more follows"},
		{"PUT", "/v1/flash", `{"label": "x", "size": 1}`, 405, "takes GET and POST"},
		{"PATCH", "/v1/flash/f", `{"label": "x", "size": 9}`, 400, "label"},
		{"PATCH", "/v1/flash/f", `{"size": null}`, 400, "above 0"},
		{"DELETE", "/v1/flash/f?force=yes", "", 400, "want none, or force, each 1 or 0"},
		{"DELETE", "/v1/flash/f?force=1&force=1", "", 400, "want none, or force"},
		{"DELETE", "/v1/flash/f?Force=1", "", 400, "is not known"},
		{"DELETE", "/v1/flash/f?force=1", "{}", 400, "there is a body"},
		{"DELETE", "/v1/flash/f?force=0", "", 409, "clients are connected to f: 1"},
		{"DELETE", "/v1/flash/f", "", 409, `"code":"connected"`},
		{"DELETE", "/v1/flash/", "", 404, "there is no volume"},
		{"DELETE", "/v1/flash", "", 405, "takes GET and POST"},
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(x.method, x.target, strings.NewReader(x.body)))
		if w.Code != x.status || !strings.Contains(w.Body.String(), x.want) {
			t.Errorf("%s %s %s: %d %s; want %d %s", x.method, x.target, x.body, w.Code, w.Body, x.status, x.want)
		}
	}
	if got := fmt.Sprint(f.flash); f.job != nil || got != fmt.Sprint([]FlashVolume{{Label: "f", SizeBytes: Num(5)}}) {
		t.Errorf("something was done: %v, %s", f.job, got)
	}
}
