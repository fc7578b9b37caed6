package writeback

import (
	"math"
	"testing"
	"time"
)

// Every value here was computed by hand. Source: B 5.3.
func TestUpdate(t *testing.T) {
	const target = 209715 // a tenth of 2,097,152
	type change func(s *Settings, in *Input)
	inUse := func(percent int, buckets int64) change {
		return func(_ *Settings, in *Input) { in.InUse, in.UsedBuckets = percent, buckets }
	}
	for _, c := range []struct {
		name     string
		dirty    int64
		integral int64 // before
		keptUp   bool
		change   change
		want     Terms // without Dirty
		after    int64 // the integral
	}{
		{"on target", target, 0, true, nil, Terms{0, target, 0, 0, -1016, 8}, 0},
		{"twice as much", 2 * target, 0, true, nil, Terms{0, target, 5242, 104, 4322, 5346}, 1048575},
		{"and the drain lags", 2 * target, 0, false, nil, Terms{0, target, 5242, 0, 4218, 5242}, 0},
		{"and the drain lags with an integral", 2 * target, 50000, false, nil, Terms{0, target, 5242, 5, 4223, 5247}, 50000},
		{"less, with an integral", 200000, 5000000, true, nil, Terms{0, target, -242, 495, -771, 253}, 4951425},
		{
			"less, with an integral, and the drain lags", 200000, 5000000, false, nil,
			Terms{0, target, -242, 495, -771, 253},
			4951425,
		},
		{"less, with hardly an integral", 200000, 3, true, nil, Terms{0, target, -242, -4, -1016, 8}, -48572},
		{"less, without an integral", 200000, 0, true, nil, Terms{0, target, -242, 0, -1016, 8}, 0},
		{"just above half", 104858, 4000000000, true, nil, Terms{0, target, -2621, 399947, 396302, 397326}, 3999475715},
		{"half: the integral goes", 104857, 4000000000, true, nil, Terms{0, target, -2621, 0, -1016, 8}, 0},
		{
			"half of an even target", 199229, 4000000000, true, func(s *Settings, _ *Input) { s.Percent = 19 },
			Terms{0, 398458, -4980, 0, -1016, 8},
			0,
		},
		{"half, with a negative integral", 104857, -48572, true, nil, Terms{0, target, -2621, 0, -1016, 8}, 0},

		{"the settings' shares", 2 * target, 0, true, func(s *Settings, _ *Input) {
			s.PTermInverse, s.ITermInverse, s.UpdateEvery = 10, 100, 60*time.Second
		}, Terms{0, target, 20971, 125829, 145776, 146800}, 12582900},
		{
			"a percentage", 2 * target, 0, false, func(s *Settings, _ *Input) { s.Percent = 19 },
			Terms{0, 398458, 524, 0, -500, 524},
			0,
		},
		{
			"a minimum", 2 * target, 0, false, func(s *Settings, _ *Input) { s.RateMinimum = 6000 },
			Terms{0, target, 5242, 0, 4976, 6000},
			0,
		},
		{
			"a third of the set", 2 * target, 0, false, func(_ *Settings, in *Input) { in.AllBacking *= 3 },
			Terms{0, 69900, 8738, 0, 7714, 8738},
			0,
		},
		{
			"next to nothing of the set", 2 * target, 0, false,
			func(_ *Settings, in *Input) { in.Backing, in.AllBacking = 16, 1<<40 },
			Terms{0, 12, 10485, 0, 9461, 10485},
			0,
		},
		{"the largest devices", 2 * target, 0, false, func(_ *Settings, in *Input) {
			in.Backing, in.AllBacking = 1<<50-1, 1<<50-1
		}, Terms{0, target, 5242, 0, 4218, 5242}, 0},

		{
			"the most", 1 << 42, 0, true, func(_ *Settings, in *Input) { in.CacheSectors = 1 << 43 },
			Terms{0, 879609302220, 87960930222, 1759218604, 999998976, 1000000000},
			17592186044420,
		},
		{
			"a minimum above the most", target, 0, true, func(s *Settings, _ *Input) { s.RateMinimum = math.MaxUint32 },
			Terms{0, target, 0, 0, 999998976, 1000000000},
			0,
		},

		{"half in use", 200000, 0, false, inUse(50, 1044), Terms{0, target, -242, 0, -1016, 8}, 0},
		{"low, least", 210000, 0, false, inUse(51, 1045), Terms{0, target, 200, 0, -824, 200}, 0},
		{"low, most", 210000, 0, false, inUse(57, 1168), Terms{0, target, 1253, 0, 229, 1253}, 0},
		{"mid, least", 210000, 0, false, inUse(58, 1188), Terms{0, target, 1760, 0, 736, 1760}, 0},
		{"mid, most", 210000, 0, false, inUse(64, 1311), Terms{0, target, 11200, 0, 10176, 11200}, 0},
		{"high, least", 210000, 0, false, inUse(65, 1332), Terms{0, target, 157000, 0, 155976, 157000}, 0},
		{
			"four times as much in use as dirty", 340992, 0, false, inUse(65, 1332),
			Terms{0, target, 256000, 0, 254976, 256000},
			0,
		},
		{"less than four times", 340993, 0, false, inUse(65, 1332), Terms{0, target, 3281, 0, 2257, 3281}, 0},
		{"less than the error asks for", 250000, 0, false, inUse(51, 1045), Terms{0, target, 1007, 0, -17, 1007}, 0},
		{"less than a sector in each bucket", 1000, 0, false, inUse(51, 1045), Terms{0, target, 0, 0, -1016, 8}, 0},
		{"nothing dirty", 0, 0, false, inUse(65, 1332), Terms{0, target, -5242, 0, -1016, 8}, 0},
		{"not considered", 210000, 0, false, func(s *Settings, in *Input) {
			in.InUse, in.UsedBuckets, s.ConsiderFragment = 65, 1332, false
		}, Terms{0, target, 7, 0, -1016, 8}, 0},
		{"its weights", 210000, 0, false, func(s *Settings, in *Input) {
			in.InUse, in.UsedBuckets, s.FPTermHigh = 65, 1332, 2000
		}, Terms{0, target, 314000, 0, 312976, 314000}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := Defaults()
			in := Input{
				CacheSectors: 1 << 21, Dirty: c.dirty, Backing: 1 << 30, AllBacking: 1 << 30, BucketSectors: 1024,
				KeptUp: c.keptUp,
			}
			if c.change != nil {
				c.change(&s, &in)
			}
			control := NewController()
			control.integral = c.integral
			want := c.want
			want.Dirty = c.dirty
			if got := control.Update(&s, in); got != want {
				t.Errorf("%+v\nwant %+v", got, want)
			}
			if got := control.Rate(); got != want.Rate {
				t.Errorf("a rate of %d, want %d", got, want.Rate)
			}
			if control.integral != c.after {
				t.Errorf("an integral of %d, want %d", control.integral, c.after)
			}
		})
	}
}

// Rates that no update makes: the first, one that was set, and the highest.
func TestRate(t *testing.T) {
	s := Defaults()
	in := Input{CacheSectors: 1 << 21, Dirty: 419430, Backing: 1, AllBacking: 1, BucketSectors: 1024, KeptUp: true}
	c := NewController()
	is := func(what string, want int64, atMax bool) {
		t.Helper()
		if c.Rate() != want || c.AtMax() != atMax {
			t.Errorf("%s: a rate of %d, at max %v, want %d, %v", what, c.Rate(), c.AtMax(), want, atMax)
		}
	}
	update := func(what string, want Terms) {
		t.Helper()
		want.Dirty = in.Dirty
		if got := c.Update(&s, in); got != want {
			t.Errorf("%s: %+v, want %+v", what, got, want)
		}
	}
	is("attached", 1024, false)
	c.SetRate(2000)
	is("set", 2000, false)
	update("updated", Terms{Target: 209715, Proportional: 5242, Integral: 104, Change: 3346, Rate: 5346})
	c.LeaveMax()
	is("a request to a set that was not idle", 5346, false)

	c.EnterMax()
	is("idle", MaxRate, true)
	update("updated while idle", Terms{Target: 209715, Rate: MaxRate})
	c.LeaveMax()
	is("a request", 1, false)
	update("updated after it", Terms{Target: 209715, Proportional: 5242, Integral: 209, Change: 5450, Rate: 5451})

	s.Percent = 0
	update("no target", Terms{Change: MaxRate - 5451, Rate: MaxRate})
	is("no target", MaxRate, false)
	c.EnterMax()
	c.LeaveMax()
	is("no target, after a request to an idle set", MaxRate, false)
	s.Percent = 10
	update("a target again", Terms{Target: 209715, Proportional: 5242, Integral: 314, Change: 5556 - MaxRate, Rate: 5556})
}
