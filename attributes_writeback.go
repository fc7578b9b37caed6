package ubcache

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/writeback"
)

// backingAttributes are those of volumes that have a backing device. The kernel's writeback_metadata is left out: it has
// no effect there. Source: B 7.2.
var backingAttributes = []attr[openVolume]{
	{"detach", writeOnly[openVolume], func(ctx context.Context, v openVolume, _ string) error { return v.Detach(ctx) }},
	{"partial_stripes_expensive", func(v openVolume) string { return fmt.Sprint(number(v.v.WritebackStatus().PartialStripe)) }, nil},
	{"stripe_size", func(v openVolume) string {
		return human(int64(cmp.Or(v.v.WritebackStatus().StripeSectors, noStripe)) * ondisk.SectorSize)
	}, nil},
	setting(
		"writeback_consider_fragment", within(0, 1), func(s *writeback.Settings) int64 { return number(s.ConsiderFragment) },
		func(s *writeback.Settings, n int64) { s.ConsiderFragment = n == 1 },
	),
	setting(
		"writeback_delay", within(0, math.MaxUint32), func(s *writeback.Settings) int64 { return int64(s.Delay / time.Second) },
		func(s *writeback.Settings, n int64) { s.Delay = time.Duration(n) * time.Second },
	),
	setting(
		"writeback_percent", within(0, writeback.CutoffWriteback), func(s *writeback.Settings) int64 { return int64(s.Percent) },
		func(s *writeback.Settings, n int64) { s.Percent = int(n) },
	),
	{"writeback_rate", func(v openVolume) string { return human(shownRate(v)) }, func(_ context.Context, v openVolume, value string) error {
		n, err := integer("writeback_rate", value, 1, math.MaxInt32)
		if err == nil {
			err = v.v.SetWritebackRate(n)
		}
		return err
	}},
	{"writeback_rate_debug", rateDebug, nil},
	settingOf("writeback_rate_fp_term_high", func(s *writeback.Settings) (*uint32, int64, int64) {
		return &s.FPTermHigh, int64(s.FPTermMid) + 1, math.MaxUint32
	}),
	settingOf("writeback_rate_fp_term_low", func(s *writeback.Settings) (*uint32, int64, int64) {
		return &s.FPTermLow, 1, int64(s.FPTermMid) - 1
	}),
	settingOf("writeback_rate_fp_term_mid", func(s *writeback.Settings) (*uint32, int64, int64) {
		return &s.FPTermMid, int64(s.FPTermLow) + 1, int64(s.FPTermHigh) - 1
	}),
	settingOf("writeback_rate_i_term_inverse", func(s *writeback.Settings) (*uint32, int64, int64) {
		return &s.ITermInverse, 1, math.MaxUint32
	}),
	settingOf("writeback_rate_minimum", func(s *writeback.Settings) (*uint32, int64, int64) {
		return &s.RateMinimum, 1, math.MaxUint32
	}),
	settingOf("writeback_rate_p_term_inverse", func(s *writeback.Settings) (*uint32, int64, int64) {
		return &s.PTermInverse, 1, math.MaxUint32
	}),
	setting(
		"writeback_rate_update_seconds", within(1, 60), func(s *writeback.Settings) int64 { return int64(s.UpdateEvery / time.Second) },
		func(s *writeback.Settings, n int64) { s.UpdateEvery = time.Duration(n) * time.Second },
	),
	{"writeback_running", func(v openVolume) string { return fmt.Sprint(number(v.v.WritebackSettings().Running)) }, setRunning},
}

// noStripe is the stripe, in sectors, of a backing device that has none. Source: B 5.1.
const noStripe = 1 << 31

// flashAttributes are those of volumes that have none.
var flashAttributes = []attr[openVolume]{
	{"size", func(v openVolume) string { return human(v.Size()) }, func(ctx context.Context, v openVolume, value string) error {
		n, err := size("size", value, v.Size(), math.MaxInt64)
		if err != nil {
			return err
		}
		name, err := FlashName(v.set.FlashVolumes(), int(v.v.Inode()))
		if err != nil {
			return err
		}
		return v.set.GrowFlash(ctx, name, n)
	}},
	{"unregister", writeOnly[openVolume], func(ctx context.Context, v openVolume, _ string) error {
		name, err := FlashName(v.set.FlashVolumes(), int(v.v.Inode()))
		if err != nil {
			return err
		}
		if err := v.set.CloseVolume(ctx, v.name); err != nil {
			return err
		}
		return v.set.DeleteFlash(ctx, name)
	}},
}

// flashVolCreate makes a flash-only volume: "SIZE", as the kernel has it, or "SIZE LABEL". Without a label the volume gets
// one like the kernel's links to volumes: volume0, or the next that is free.
func flashVolCreate(ctx context.Context, s *CacheSet, value string) error {
	bytes, label, _ := strings.Cut(value, " ")
	n, err := size("flash_vol_create", bytes, 1, math.MaxInt64)
	if err != nil {
		return err
	}
	label = strings.TrimSpace(label)
	list := s.FlashVolumes()
	for i := 0; label == ""; i++ {
		label = fmt.Sprintf("volume%d", i)
		if s.Volume(label) != nil || slices.ContainsFunc(list, func(f FlashVolume) bool { return f.Label == label }) {
			label = ""
		}
	}
	_, err = s.CreateFlash(ctx, label, n)
	return err
}

// setting makes the attribute of one of writeback's settings.
func setting(
	name string, within func(*writeback.Settings) (low, high int64), get func(*writeback.Settings) int64, set func(*writeback.Settings, int64),
) attr[openVolume] {
	return attr[openVolume]{name, func(v openVolume) string {
		s := v.v.WritebackSettings()
		return strconv.FormatInt(get(&s), 10)
	}, func(_ context.Context, v openVolume, value string) error {
		return v.v.ChangeWriteback(func(s *writeback.Settings) error {
			low, high := within(s)
			n, err := integer(name, value, low, high)
			if err == nil {
				set(s, n)
			}
			return err
		})
	}}
}

// settingOf makes the attribute of a setting that of gives, with what it can be.
func settingOf(name string, of func(*writeback.Settings) (setting *uint32, low, high int64)) attr[openVolume] {
	return setting(name, func(s *writeback.Settings) (int64, int64) {
		_, low, high := of(s)
		return low, high
	}, func(s *writeback.Settings) int64 {
		p, _, _ := of(s)
		return int64(*p)
	}, func(s *writeback.Settings, n int64) {
		p, _, _ := of(s)
		*p = uint32(n)
	})
}

// within is a range that depends on nothing.
func within(low, high int64) func(*writeback.Settings) (int64, int64) {
	return func(*writeback.Settings) (int64, int64) { return low, high }
}

// setRunning freezes writeback, or lets it go on, which makes no sense without a cache.
func setRunning(_ context.Context, v openVolume, value string) error {
	n, err := integer("writeback_running", value, 0, 1)
	if err != nil {
		return err
	}
	if n == 1 && !v.v.WritebackStatus().Attached {
		return fmt.Errorf("writeback_running of %s: %w", v.name, ErrDetached)
	}
	return v.v.ChangeWriteback(func(s *writeback.Settings) error {
		s.Running = n == 1
		return nil
	})
}

// shownRate is the rate in bytes per second, 0 while writeback does not run.
func shownRate(v openVolume) int64 {
	s := v.v.WritebackStatus()
	if !s.Running {
		return 0
	}
	return s.Terms.Rate * ondisk.SectorSize
}

// rateDebug is the rate and what it is made of. Source: B 7.2.
func rateDebug(v openVolume) string {
	s := v.v.WritebackStatus()
	h := func(sectors int64) string { return human(sectors * ondisk.SectorSize) }
	return fmt.Sprintf("rate:\t\t%s/sec\ndirty:\t\t%s\ntarget:\t\t%s\nproportional:\t%s\nintegral:\t%s\nchange:\t\t%s/sec\nnext io:\t%dms",
		human(shownRate(v)), h(v.v.DirtySectors()), h(s.Terms.Target), h(s.Terms.Proportional), h(s.Terms.Integral), h(s.Terms.Change),
		max(s.NextIO, 0).Milliseconds())
}

// FindFlash returns the flash-only volume of that name: its label, or its slot where that is nobody's label. Errors:
// ErrNoVolume, or one that tells of several with that label.
func FindFlash(list []FlashVolume, name string) (FlashVolume, error) {
	var labelled, numbered []FlashVolume
	for _, f := range list {
		switch {
		case f.Label == name && name != "":
			labelled = append(labelled, f)
		case strconv.Itoa(f.Slot) == name:
			numbered = append(numbered, f)
		}
	}
	switch {
	case len(labelled) > 1:
		return FlashVolume{}, fmt.Errorf("%d flash-only volumes have the label %q, in slots %d and %d: name one by its slot", len(labelled), name,
			labelled[0].Slot, labelled[1].Slot)
	case len(labelled) == 1:
		return labelled[0], nil
	case len(numbered) == 1:
		return numbered[0], nil
	}
	return FlashVolume{}, fmt.Errorf("%q: %w", name, ErrNoVolume)
}

// FlashName returns the name of the flash-only volume in a slot that names no other: its label if it can be, or the slot.
func FlashName(list []FlashVolume, slot int) (string, error) {
	for _, f := range list {
		if f.Slot != slot {
			continue
		}
		for _, name := range []string{f.Label, strconv.Itoa(slot)} {
			if g, err := FindFlash(list, name); err == nil && g.Slot == slot {
				return name, nil
			}
		}
		return "", fmt.Errorf("no name names the flash-only volume in slot %d alone: others have the same as their label", slot)
	}
	return "", fmt.Errorf("slot %d: %w", slot, ErrNoVolume)
}
