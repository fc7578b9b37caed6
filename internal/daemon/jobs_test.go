package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/ubcache/ubcache"
	"github.com/ubcache/ubcache/internal/control"
)

// jobDaemon serves a fake whose volume a has jobs that end when the test says so.
func jobDaemon(t *testing.T) (r *running, ctl *control.Client, a *fakeVolume) {
	f := newFakeSet()
	r = serve(t, fakeConfig(t, f))
	a = f.volumes["a"]
	a.end = make(chan error)
	return r, r.control(), a
}

// waitJob polls until a job has ended.
func waitJob(t *testing.T, ctl *control.Client, volume string) *control.Job {
	t.Helper()
	var j *control.Job
	waitFor(t, func() bool {
		var err error
		if j, err = ctl.Job(t.Context(), volume); err != nil {
			t.Fatal(err)
		}
		return j.State != control.Running
	})
	return j
}

// parts makes ranges of offsets and lengths.
func parts(n ...int64) (list []ubcache.Range) {
	for ; len(n) > 0; n = n[2:] {
		list = append(list, ubcache.Range{Off: n[0], Len: n[1]})
	}
	return list
}

func TestServeJobs(t *testing.T) {
	ctx := t.Context()
	_, ctl, a := jobDaemon(t)
	if _, err := ctl.Job(ctx, "a"); !errors.Is(err, control.ErrNoJob) {
		t.Error(err)
	}

	// Started once, whoever else asks; no other kind beside it.
	gone, leave := context.WithCancel(ctx)
	first, err := ctl.StartJob(gone, "a", control.Flush)
	if err != nil || first.Kind != "flush" || first.State != "running" || first.DirtyAtStart != control.Num(20) || time.Since(first.Started) > time.Minute {
		t.Fatalf("%+v, %v", first, err)
	}
	leave()
	a.dirty.Store(-5)
	again, err := ctl.StartJob(ctx, "a", control.Flush)
	if err != nil || !again.Started.Equal(first.Started) || again.DirtyBytes != control.Num(15) || again.DirtyAtStart != control.Num(20) {
		t.Errorf("%+v, %v", again, err)
	}
	if _, err := ctl.StartJob(ctx, "a", control.Detach); !errors.Is(err, control.ErrBusy) {
		t.Error(err)
	}
	if _, err := ctl.SetAttribute(ctx, "a", "detach", "1"); !errors.Is(err, control.ErrBusy) {
		t.Error(err)
	}
	s, err := ctl.Status(ctx)
	if err != nil || s.Volumes[0].Job == nil || s.Volumes[0].Job.State != "running" || s.Volumes[1].Job != nil {
		t.Errorf("%+v, %v", s, err)
	}
	a.end <- nil
	a.dirty.Store(-20)
	j := waitJob(t, ctl, "a")
	if j.State != "done" || j.Ended.Before(j.Started) || j.Error != "" || j.Ranges != nil {
		t.Errorf("%+v", j)
	}

	// What cannot be written is listed, in order and put together.
	if _, err := ctl.StartJob(ctx, "a", control.Flush); err != nil {
		t.Fatal(err)
	}
	a.end <- &ubcache.WriteBackError{Ranges: parts(8192, 512, 0, 512, 512, 512, 8300, 1, 8192, 4096), Dirty: 5120, Err: errors.New("bad disk")}
	j = waitJob(t, ctl, "a")
	if want := []control.Range{{Offset: 0, Length: 1024}, {Offset: 8192, Length: 4096}}; j.State != "failed" || j.Error != "bad disk" ||
		!reflect.DeepEqual(j.Ranges, want) {
		t.Errorf("%+v", j)
	}
	later, err := ctl.CancelJob(ctx, "a")
	if err != nil || !reflect.DeepEqual(later, j) {
		t.Errorf("cancelled after its end: %+v, %v", later, err)
	}

	// Cancelled, the volume is as before; not, it is served uncached.
	if _, err := ctl.SetAttribute(ctx, "a", "detach", "1"); err != nil {
		t.Fatal(err)
	}
	if j, err = ctl.CancelJob(ctx, "a"); err != nil || j.Kind != "detach" || j.State != "cancelled" || j.Error != "" {
		t.Errorf("%+v, %v", j, err)
	}
	if s, err := ctl.Status(ctx); err != nil || s.Volumes[0].Writeback == nil {
		t.Errorf("%+v, %v", s, err)
	}
	if _, err := ctl.StartJob(ctx, "a", control.Detach); err != nil {
		t.Fatal(err)
	}
	a.end <- nil
	if j := waitJob(t, ctl, "a"); j.Kind != "detach" || j.State != "done" {
		t.Errorf("%+v", j)
	}
	if s, err := ctl.Status(ctx); err != nil || s.Volumes[0].Writeback != nil || s.Volumes[1].Writeback == nil {
		t.Errorf("%+v, %v", s, err)
	}
	if _, err := ctl.StartJob(ctx, "a", control.Detach); !errors.Is(err, control.ErrNotAttached) || !strings.Contains(err.Error(), "a is not attached") {
		t.Error(err)
	}
	for volume, want := range map[string]string{"f": "f is a flash-only volume", "x": `there is no volume "x"; there are: a, b, f`, "set": "there is no volume"} {
		if _, err := ctl.StartJob(ctx, volume, control.Flush); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// A stop cancels a job and waits for it, but not for ever, before the set is closed.
func TestServeStopsWithAJob(t *testing.T) {
	for _, deaf := range []bool{false, true} {
		f := newFakeSet()
		r := serve(t, fakeConfig(t, f))
		a := f.volumes["a"]
		a.end = make(chan error)
		if deaf {
			a.deaf = make(chan struct{})
		}
		ctl := r.control()
		if _, err := ctl.StartJob(t.Context(), "a", control.Detach); err != nil {
			t.Fatal(err)
		}
		waitFor(t, func() bool { return len(f.notes()) == 5 })
		begin := time.Now()
		r.stop()
		if d := time.Since(begin); d > 10*time.Second {
			t.Errorf("took %v", d)
		}
		want := "open, volume a, volume b, volume f, detach a begins, detach a ends, close a, close b, close f, close"
		if deaf {
			want = strings.Replace(want, "detach a ends, ", "", 1)
		}
		if got := strings.Join(f.notes(), ", "); got != want {
			t.Errorf("%s\nwant %s", got, want)
		}
		if deaf != strings.Contains(r.log.String(), "a job does not end") {
			t.Errorf("logged:\n%s", r.log)
		}
		if deaf {
			close(a.deaf)
		}
	}
}

// Once the end has begun, no job begins.
func TestNoJobWhileStopping(t *testing.T) {
	f := newFakeSet()
	v, err := f.OpenVolume(t.Context(), ubcache.VolumeOptions{Name: "a"})
	if err != nil {
		t.Fatal(err)
	}
	b := newBackend(&Config{Log: slog.New(slog.DiscardHandler)})
	b.add("a", v)
	if _, err := b.StartJob(t.Context(), "a", control.Flush); !errors.Is(err, control.ErrStarting) {
		t.Error(err)
	}
	b.start(f, nil, nil)
	b.stop()
	_, asked := b.StartJob(t.Context(), "a", control.Flush)
	_, late := b.jobs.start("a", control.Flush, v) // asked just before
	_, create := b.CreateFlash(t.Context(), "x", 1)
	_, grow := b.GrowFlash(t.Context(), "x", 1)
	_, remove := b.DeleteFlash(t.Context(), "x", true)
	for i, err := range []error{asked, late, create, grow, remove} {
		if !errors.Is(err, control.ErrStopping) {
			t.Errorf("%d: %v", i, err)
		}
	}
	if got := fmt.Sprint(f.notes()); got != "[volume a]" {
		t.Errorf("done all the same: %s", got)
	}
}
