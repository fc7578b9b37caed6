package daemon

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ubcache/ubcache"
	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/control"
)

// waitFor polls until something holds.
func waitFor(t *testing.T, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it does not come true")
		}
	}
}

func TestServeFlash(t *testing.T) {
	ctx, f := t.Context(), newFakeSet()
	f.flash = []ubcache.FlashVolume{{Slot: 0, Label: "f", Size: 1 << 20, Dirty: 4096}, {Slot: 3, Size: 1 << 20}}
	r := serve(t, fakeConfig(t, f))
	ctl := r.control()
	describe := func() string {
		t.Helper()
		list, err := ctl.FlashVolumes(ctx)
		if err != nil {
			t.Fatal(err)
		}
		var s []string
		for _, v := range list {
			s = append(s, fmt.Sprintf("%v %q %v %v as %q (%v, %d)", v.Slot, v.Label, v.SizeBytes, v.DirtyBytes, v.Volume, v.Connections, len(v.NBD)))
		}
		return strings.Join(s, "; ")
	}
	const before = `0 "f" 1048576 4096 as "f" (0, 1); 3 "" 1048576 0 as "" (-, 0)`
	if got := describe(); got != before {
		t.Errorf("%s, want %s", got, before)
	}

	// Made, and served at once.
	v, err := ctl.CreateFlash(ctx, "new", 2<<20)
	if err != nil || v.Slot != control.Num(5) || v.Volume != "new" || len(v.NBD) != 1 || v.Connections != control.Num(0) {
		t.Fatalf("%+v, %v", v, err)
	}
	io := newIO(t, r.dial("new"))
	if err := io.WriteAt(make([]byte, 4096), 0, 0); err != nil {
		t.Error(err)
	}
	if got, want := describe(), before+`; 5 "new" 2097152 0 as "new" (1, 1)`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if s, err := ctl.Status(ctx); err != nil || len(s.Volumes) != 4 || s.Volumes[3].Name != "new" || !s.Volumes[3].Flash || s.Volumes[3].Writeback != nil {
		t.Errorf("%+v, %v", s, err)
	}
	if v, err = ctl.GrowFlash(ctx, "new", 3<<20); err != nil || v.SizeBytes != control.Num(3<<20) {
		t.Errorf("%+v, %v", v, err)
	}

	// Refused, and nothing has changed.
	now := describe()
	notes := len(f.notes())
	create := func(label string) error { _, err := ctl.CreateFlash(ctx, label, 1<<20); return err }
	grow := func(name string, size int64) error { _, err := ctl.GrowFlash(ctx, name, size); return err }
	remove := func(name string) error { _, err := ctl.DeleteFlash(ctx, name, false); return err }
	for _, x := range []struct {
		err, is error
		want    string
	}{
		{create("new"), control.ErrExists, `there is a volume "new" already`},
		{create("a"), control.ErrExists, `there is a volume "a" already`},
		{create("f"), control.ErrExists, `there is a volume "f" already`},
		{create("set"), control.ErrValue, `cannot be named "set"`},
		{create("x/y"), control.ErrValue, `cannot be named "x/y"`},
		{create("12"), control.ErrValue, "names the slot of another"},
		{create(""), control.ErrValue, "a volume's name is empty"},
		{create(strings.Repeat("l", 33)), control.ErrValue, "at most 32"},
		{grow("nil", 1), control.ErrNoVolume, `there is no volume "nil"; there are: f, 3, new`},
		{grow("new", 1), control.ErrValue, "it has 3145728 bytes already"},
		{remove("nil"), control.ErrNoVolume, "there is no volume"},
		{remove("a"), control.ErrNoVolume, "there is no volume"},
		{remove("new"), control.ErrConnected, "clients are connected to new: 1"},
	} {
		if !errors.Is(x.err, x.is) || !strings.Contains(x.err.Error(), x.want) {
			t.Errorf("%v, want %v: %s", x.err, x.is, x.want)
		}
	}
	if got := describe(); got != now || len(f.notes()) != notes {
		t.Errorf("%s, was %s; %v", got, now, f.notes())
	}

	// Deleted, clients or not; also one that is not served.
	if v, err = ctl.DeleteFlash(ctx, "new", true); err != nil || v.Slot != control.Num(5) || v.Connections != control.Num(1) {
		t.Errorf("%+v, %v", v, err)
	}
	if err := io.WriteAt(make([]byte, 4096), 0, 0); err == nil {
		t.Error("a volume that was deleted takes data")
	}
	if err := remove("3"); err != nil {
		t.Error(err)
	}
	if got, want := describe(), `0 "f" 1048576 4096 as "f" (0, 1)`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if s, err := ctl.Status(ctx); err != nil || len(s.Volumes) != 3 {
		t.Errorf("%+v, %v", s, err)
	}
	r.stop()
	want := "open, volume a, volume b, volume f, volume new, close new, delete new, delete 3, close a, close b, close f, close"
	if got := strings.Join(f.notes(), ", "); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
}

// Where a step fails, all is as it was.
func TestServeFlashThatFails(t *testing.T) {
	ctx, f := t.Context(), newFakeSet()
	f.flash = []ubcache.FlashVolume{{Slot: 0, Label: "f", Size: 1 << 20}}
	r := serve(t, fakeConfig(t, f))
	ctl := r.control()
	boom := errors.New("boom")
	for name, try := range map[string]func() error{
		"create": func() error {
			f.failCreate = boom
			_, err := ctl.CreateFlash(ctx, "x", 1)
			return err
		},
		"create, with its reason": func() error {
			f.failCreate = fmt.Errorf("boom: %w", ubcache.ErrFlashSize)
			_, err := ctl.CreateFlash(ctx, "x", 1)
			if !errors.Is(err, control.ErrValue) {
				t.Errorf("%v", err)
			}
			return err
		},
		"serve": func() error {
			f.failVolume = "boom"
			_, err := ctl.CreateFlash(ctx, "boom", 1)
			return fmt.Errorf("boom: %w", err)
		},
		"grow": func() error {
			f.failGrow = boom
			_, err := ctl.GrowFlash(ctx, "f", 2<<20)
			return err
		},
		"close": func() error {
			f.failCloseVolume = boom
			_, err := ctl.DeleteFlash(ctx, "f", false)
			return err
		},
		"delete": func() error {
			f.failDelete = boom
			_, err := ctl.DeleteFlash(ctx, "f", false)
			return err
		},
	} {
		if err := try(); err == nil || !strings.Contains(err.Error(), "boom") {
			t.Errorf("%s: %v", name, err)
		}
		f.failCreate, f.failVolume, f.failGrow, f.failCloseVolume, f.failDelete = nil, "", nil, nil, nil
		list, err := ctl.FlashVolumes(ctx)
		if err != nil || len(list) != 1 || list[0].Volume != "f" || list[0].SizeBytes != control.Num(1<<20) {
			t.Errorf("after %s: %+v, %v", name, list, err)
		}
		client := r.dial("f")
		io, err := blockdev.NewIO(client, 1)
		if err != nil {
			t.Fatal(err)
		}
		if err := io.ReadAt(make([]byte, 4096), 0); err != nil {
			t.Errorf("after %s: %v", name, err)
		}
		io.Close()
		client.Close()
		waitFor(t, func() bool {
			list, _ := ctl.FlashVolumes(ctx)
			return len(list) == 1 && list[0].Connections == control.Num(0)
		})
	}
}

// The attributes that the kernel has for it: what they make is served, what they take away is not.
func TestServeFlashAttributes(t *testing.T) {
	ctx, f := t.Context(), newFakeSet()
	f.flash = []ubcache.FlashVolume{{Slot: 0, Label: "f", Size: 1 << 20}}
	f.attrs["set"]["flash_vol_create"] = ""
	r := serve(t, fakeConfig(t, f))
	ctl := r.control()
	for _, x := range []struct{ value, as string }{{"1M", "5"}, {"1M named", "named"}} {
		if v, err := ctl.SetAttribute(ctx, "set", "flash_vol_create", x.value); err != nil || v != "" {
			t.Errorf("%q, %v", v, err)
		}
		r.dial(x.as).Close()
	}
	for _, x := range []struct {
		value string
		is    error
	}{{"bad", control.ErrValue}, {"broken", control.ErrFailed}, {"1M set", control.ErrFailed}, {"1M a", control.ErrFailed}} {
		if _, err := ctl.SetAttribute(ctx, "set", "flash_vol_create", x.value); !errors.Is(err, x.is) {
			t.Errorf("%s: %v", x.value, err)
		}
	}
	if len(f.FlashVolumes()) != 3 {
		t.Errorf("%v", f.FlashVolumes())
	}

	held := r.dial("f")
	if _, err := ctl.SetAttribute(ctx, "f", "unregister", "1"); !errors.Is(err, control.ErrConnected) {
		t.Error(err)
	}
	held.Close()
	waitFor(t, func() bool { _, err := ctl.SetAttribute(ctx, "f", "unregister", "1"); return err == nil })
	if _, err := ctl.SetAttribute(ctx, "a", "unregister", "1"); !errors.Is(err, control.ErrNoAttribute) {
		t.Error(err)
	}
	if _, err := ctl.SetAttribute(ctx, "5", "detach", "1"); !errors.Is(err, control.ErrNoAttribute) {
		t.Error(err)
	}
	if got := fmt.Sprint(f.FlashVolumes()); got != "[{5  1048576 0} {6 named 1048576 0}]" {
		t.Error(got)
	}
}
