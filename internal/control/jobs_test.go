package control

import (
	"context"
	"encoding/json"
	"errors"
	"net/http/httptest"
	"reflect"
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

// What would change what is done is refused, and nothing is done.
func TestJobsRefuse(t *testing.T) {
	f := newFake()
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
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(x.method, x.target, strings.NewReader(x.body)))
		if w.Code != x.status || !strings.Contains(w.Body.String(), x.want) {
			t.Errorf("%s %s %s: %d %s; want %d %s", x.method, x.target, x.body, w.Code, w.Body, x.status, x.want)
		}
	}
	if f.job != nil {
		t.Errorf("something was done: %v", f.job)
	}
}
