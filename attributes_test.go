package ubcache

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// attributeSteps set attributes one after the other, or only read them, and compare what they are then. Where setting
// fails, that is what the error must have in it.
type attributeSteps []struct{ object, name, set, want string }

func (steps attributeSteps) run(b *bench) error {
	var errs []error
	for _, x := range steps {
		ctx := context.Background()
		if x.set != "" {
			if err := b.set.SetAttribute(ctx, x.object, x.name, x.set); err != nil {
				if !strings.Contains(err.Error(), x.want) {
					errs = append(errs, fmt.Errorf("%s of %s to %q: %w, want %q", x.name, x.object, x.set, err, x.want))
				}
				continue
			}
		}
		got, err := b.set.Attribute(x.object, x.name)
		if err != nil || got != x.want {
			errs = append(errs, fmt.Errorf("%s of %s is %q after %q, want %q; %v", x.name, x.object, got, x.set, x.want, err))
		}
	}
	return errors.Join(errs...)
}

// Names, defaults, forms and ranges of the attributes of writeback. Source: B 7.2, 7.3, 7.4.
func TestWritebackAttributes(t *testing.T) {
	simulate(t, 1, 10*time.Minute, breakable(t), func(b *bench) error {
		return attributeSteps{
			{"v0", "writeback_running", "", "1"},
			{"v0", "writeback_delay", "", "30"},
			{"v0", "writeback_percent", "", "10"},
			{"v0", "writeback_rate", "", "512.0k"},
			{"v0", "writeback_consider_fragment", "", "1"},
			{"v0", "writeback_rate_update_seconds", "", "5"},
			{"v0", "writeback_rate_i_term_inverse", "", "10000"},
			{"v0", "writeback_rate_p_term_inverse", "", "40"},
			{"v0", "writeback_rate_fp_term_low", "", "1"},
			{"v0", "writeback_rate_fp_term_mid", "", "10"},
			{"v0", "writeback_rate_fp_term_high", "", "1000"},
			{"v0", "writeback_rate_minimum", "", "8"},
			{"v0", "stripe_size", "", "1.0T"},
			{"v0", "partial_stripes_expensive", "", "0"},
			{"v0", "detach", "", ""},
			{"v0", "cache_mode", "", "[writethrough] writeback writearound none"},
			{"v0", "cache_mode", "writeback", "writethrough [writeback] writearound none"},
			{"set", "cutoff_writeback", "", "40"},
			{"set", "cutoff_writeback_sync", "", "70"},
			{"set", "idle_max_writeback_rate", "", "1"},
			{"set", "writeback_keys_done", "", "0"},
			{"set", "writeback_keys_failed", "", "0"},
			{"set", "flash_vol_create", "", ""},

			{"v0", "writeback_delay", "0", "0"},
			{"v0", "writeback_delay", "4294967295", "4294967295"},
			{"v0", "writeback_delay", "4294967296", "a number from 0 to 4294967295"},
			{"v0", "writeback_percent", "0", "0"},
			{"v0", "writeback_percent", "40", "40"},
			{"v0", "writeback_percent", "41", "a number from 0 to 40"},
			{"v0", "writeback_percent", "-1", "a number from 0 to 40"},
			{"v0", "writeback_percent", "", "40"},
			{"v0", "writeback_percent", "10", "10"},
			{"v0", "writeback_consider_fragment", "0", "0"},
			{"v0", "writeback_consider_fragment", "2", "a number from 0 to 1"},
			{"v0", "writeback_rate_update_seconds", "60", "60"},
			{"v0", "writeback_rate_update_seconds", "0", "a number from 1 to 60"},
			{"v0", "writeback_rate_update_seconds", "61", "a number from 1 to 60"},
			{"v0", "writeback_rate_i_term_inverse", "4294967295", "4294967295"},
			{"v0", "writeback_rate_i_term_inverse", "0", "a number from 1 to 4294967295"},
			{"v0", "writeback_rate_p_term_inverse", "1", "1"},
			{"v0", "writeback_rate_p_term_inverse", "0", "a number from 1 to 4294967295"},
			{"v0", "writeback_rate_minimum", "4294967295", "4294967295"},
			{"v0", "writeback_rate_minimum", "0", "a number from 1 to 4294967295"},
			{"v0", "writeback_rate_fp_term_low", "9", "9"},
			{"v0", "writeback_rate_fp_term_low", "10", "a number from 1 to 9"},
			{"v0", "writeback_rate_fp_term_mid", "9", "a number from 10 to 999"},
			{"v0", "writeback_rate_fp_term_mid", "999", "999"},
			{"v0", "writeback_rate_fp_term_high", "999", "a number from 1000 to 4294967295"},
			{"v0", "writeback_rate_fp_term_high", "4294967295", "4294967295"},
			{"set", "idle_max_writeback_rate", "0", "0"},
			{"set", "idle_max_writeback_rate", "yes", "a number from 0 to 1"},
			{"set", "cutoff_writeback", "50", "cannot be set"},
			{"v0", "writeback_rate_debug", "1", "cannot be set"},
			{"v0", "stripe_size", "1", "cannot be set"},
			{"v0", "writeback_metadata", "1", "no such attribute"},
			{"v0", "size", "1", "no such attribute"},

			{"v0", "writeback_rate", "2048", "1.0M"},
			{"v0", "writeback_rate", "0", "a number from 1 to 2147483647"},
			{"v0", "writeback_rate", "1M", "a number from 1 to 2147483647"},
			{"v0", "writeback_rate_debug", "", "rate:\t\t1.0M/sec\ndirty:\t\t0.0k\ntarget:\t\t0.0k\nproportional:\t0.0k\nintegral:\t0.0k\nchange:\t\t0.0k/sec\nnext io:\t0ms"},
			{"v0", "writeback_running", "0", "0"},
			{"v0", "writeback_rate", "", "0.0k"},
			{"v0", "writeback_running", "1", "1"},
		}.run(b)
	})
}

// What is dirty, and how it goes, in attributes and in figures; then the volume is detached by its attribute.
func TestDetachByAttribute(t *testing.T) {
	simulate(t, 1, 10*time.Minute, breakable(t), func(b *bench) error {
		ctx, v := context.Background(), b.volumes[0]
		err := errors.Join(b.attribute("cache_mode", "writeback"), b.attribute("writeback_running", "0"))
		for off := int64(0); off < 4<<20; off += 8192 {
			err = errors.Join(err, v.WriteAt(ctx, page('A'), off, 0))
		}
		if err != nil {
			return err
		}
		if err := b.rt.SleepContext(ctx, 6*time.Second); err != nil { // the rate is worked out
			return err
		}
		s := v.Stats()
		w := s.Writeback
		if s.Mode != "writeback" || s.State != "dirty" || s.DirtyBytes != 2<<20 || s.Flash || !s.Attached || w.Running || w.Dirty != 2<<20 ||
			w.Target <= 0 || w.Rate <= 0 || w.Draining || w.Detaching || w.KeysDone != 0 {
			return fmt.Errorf("%+v", s)
		}
		debug, err := b.set.Attribute("v0", "writeback_rate_debug")
		if want := fmt.Sprintf("rate:\t\t0.0k/sec\ndirty:\t\t2.0M\ntarget:\t\t%s\nproportional:\t%s\nintegral:\t%s\nchange:\t\t%s/sec\n",
			human(w.Target), human(w.Proportional), human(w.Integral), human(w.Change)); err != nil || !strings.HasPrefix(debug, want) {
			return fmt.Errorf("%s, want %s; %v", debug, want, err)
		}
		ended, cancel := context.WithCancel(ctx)
		cancel()
		if err := b.set.SetAttribute(ended, "v0", "detach", "1"); !errors.Is(err, context.Canceled) {
			return fmt.Errorf("given up at once: %v", err)
		}
		err = attributeSteps{
			{"v0", "state", "", "dirty"},
			{"v0", "detach", "1", ""},
			{"v0", "state", "", "no cache"},
			{"v0", "dirty_data", "", "0.0k"},
			{"v0", "detach", "1", ErrDetached.Error()},
			{"v0", "writeback_running", "1", ErrDetached.Error()},
		}.run(b)
		if err != nil {
			return err
		}
		if done, _ := b.set.Attribute("set", "writeback_keys_done"); done == "0" {
			return errors.New("no key was written back")
		}
		if s := v.Stats(); s.Attached || s.DirtyBytes != 0 || s.State != "no cache" || s.Writeback.KeysDone == 0 {
			return fmt.Errorf("%+v", s)
		}
		return b.alone(0, 'A')
	})
}

func TestFlashAttributes(t *testing.T) {
	simulate(t, 1, 10*time.Minute, breakable(t), func(b *bench) error {
		ctx := context.Background()
		err := attributeSteps{
			{"set", "flash_vol_create", "1M", ""},
			{"set", "flash_vol_create", "1024k", ""},
			{"set", "flash_vol_create", "2MiB own", ""},
			{"set", "flash_vol_create", "1M own", "already"},
			{"set", "flash_vol_create", "own", "a number of bytes from 1 to"},
			{"set", "flash_vol_create", "0", "a number of bytes from 1 to"},
			{"set", "flash_vol_create", "1Z", "a number of bytes from 1 to"},
			{"set", "flash_vol_create", "1M two words", "bad label"},
			{"set", "flash_vol_create", "1M 12", "slot"},
		}.run(b)
		if got, want := fmt.Sprint(b.set.FlashVolumes()), "[{1 volume0 1048576 0} {2 volume1 1048576 0} {3 own 2097152 0}]"; err != nil || got != want {
			return fmt.Errorf("%s, want %s; %v", got, want, err)
		}
		v, err := b.set.OpenVolume(ctx, VolumeOptions{Name: "f", Flash: "own"})
		if err != nil {
			return err
		}
		if s := v.Stats(); !s.Flash || s.Slot != 3 || s.Attached || s.Mode != "writeback" || s.State != "flash only" {
			return fmt.Errorf("%+v", s)
		}
		err = attributeSteps{
			{"f", "size", "", "2.0M"},
			{"f", "size", "4M", "4.0M"},
			{"f", "size", "2M", "a number of bytes from 4194304 to"},
			{"f", "unregister", "", ""},
			{"f", "cache_mode", "none", "cannot be set"},
			{"f", "detach", "1", "no such attribute"},
			{"f", "writeback_percent", "1", "no such attribute"},
			{"f", "label", "", "own"},
		}.run(b)
		if err := errors.Join(err, v.WriteAt(ctx, page('F'), 4<<20-4096, 0)); err != nil {
			return err
		}
		if err := b.set.SetAttribute(ctx, "f", "unregister", "1"); err != nil {
			return err
		}
		if got := fmt.Sprint(b.set.FlashVolumes()); b.set.Volume("f") != nil || got != "[{1 volume0 1048576 0} {2 volume1 1048576 0}]" {
			return errors.New("it is still there: " + got)
		}
		return nil
	})
}

// Lists are sorted, and each can be read.
func TestAttributesAreSorted(t *testing.T) {
	simulate(t, 1, 10*time.Minute, breakable(t), func(b *bench) error {
		for _, object := range b.set.Objects() {
			list, err := b.set.Attributes(object)
			if err != nil {
				return err
			}
			var names []string
			for _, a := range list {
				names = append(names, a.Name)
			}
			if !slices.IsSorted(names) || len(slices.Compact(slices.Clone(names))) != len(names) {
				return fmt.Errorf("%s has %v", object, names)
			}
		}
		return nil
	})
}

// A name means one volume, or none: who deletes a volume means that one.
func TestFlashNames(t *testing.T) {
	list := []FlashVolume{{Slot: 0, Label: "a"}, {Slot: 1}, {Slot: 2, Label: "1"}, {Slot: 3, Label: "b"}, {Slot: 4, Label: "b"}, {Slot: 5, Label: "3"}}
	for name, want := range map[string]int{"a": 0, "0": 0, "1": 2, "2": 2, "4": 4, "3": 5, "5": 5} {
		if f, err := FindFlash(list, name); err != nil || f.Slot != want {
			t.Errorf("%q is the volume in slot %d, %v; want %d", name, f.Slot, err, want)
		}
	}
	for _, name := range []string{"", "c", "6", "00", "-1"} {
		if f, err := FindFlash(list, name); !errors.Is(err, ErrNoVolume) {
			t.Errorf("%q: %v, %v", name, f, err)
		}
	}
	if f, err := FindFlash(list, "b"); err == nil || !strings.Contains(err.Error(), "slots 3 and 4: name one by its slot") {
		t.Errorf("of two: %v, %v", f, err)
	}
	for slot, want := range map[int]string{0: "a", 2: "1", 4: "4", 5: "3"} {
		if name, err := FlashName(list, slot); err != nil || name != want {
			t.Errorf("slot %d: %q, %v; want %q", slot, name, err, want)
		}
	}
	for _, slot := range []int{1, 3, 6} { // another has that as its label; the same; there is none
		if name, err := FlashName(list, slot); err == nil {
			t.Errorf("slot %d: %q", slot, name)
		}
	}
}
