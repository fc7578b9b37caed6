package writeback

import "time"

const (
	InitialRate = 1024      // sectors per second, of a volume that was just attached
	MaxRate     = 1<<31 - 1 // no limit

	maxComputed = 1_000_000_000 // sectors per second, the most that an update makes
	shareBits   = 14            // of a volume's share of the set
)

// An Input is what an update of the rate goes by.
type Input struct {
	CacheSectors int64 // of all buckets, without the dirty data of flash-only volumes
	Dirty        int64 // sectors of this volume

	// Sizes of this volume's backing device and of all that the set has, in sectors: not zero, below 1<<50.
	Backing, AllBacking uint64

	InUse         int   // percent of the buckets
	UsedBuckets   int64 // those that are not available for new data
	BucketSectors int64

	// KeptUp says that the drain goes as fast as it may, see Limiter.KeptUp. Where it does not, because the device is
	// too slow or there was nothing to do, a higher rate would change nothing now and too much later.
	KeptUp bool
}

// Terms are what a rate was made of, in the units of writeback_rate_debug (B 7.2).
type Terms struct {
	Dirty  int64 // sectors
	Target int64 // sectors of this volume that may be dirty

	Proportional int64 // sectors per second
	Integral     int64 // sectors per second
	Change       int64 // of the rate since the update before, sectors per second
	Rate         int64 // sectors per second
}

// A Controller computes how fast a volume's dirty data is written back: so that as much as its target stays dirty, and
// the less is written the less there is above it. Source: B 5.3, except that the integral does not outlive what it was
// made for, see terms.
type Controller struct {
	rate     int64 // sectors per second
	integral int64 // of the error over time, sectors * seconds

	atMax    bool // the set is idle
	noTarget bool // the percentage is zero
}

// NewController returns the controller of a volume that was just attached.
func NewController() *Controller { return &Controller{rate: InitialRate} }

// Rate returns how fast data is to be written back, in sectors per second; MaxRate is as fast as it goes.
func (c *Controller) Rate() int64 {
	if c.atMax || c.noTarget {
		return MaxRate
	}
	return c.rate
}

// SetRate sets the rate until the next update, as writeback_rate does: 1 to MaxRate sectors per second.
func (c *Controller) SetRate(sectors int64) { c.rate = sectors }

// EnterMax makes the rate MaxRate until LeaveMax, whatever is dirty: the set is idle.
func (c *Controller) EnterMax() { c.atMax = true }

// LeaveMax ends what EnterMax began: somebody uses the set. Until the next update hardly anything is written back.
func (c *Controller) LeaveMax() {
	if c.atMax {
		c.atMax, c.rate = false, 1
	}
}

// AtMax reports whether EnterMax is in effect.
func (c *Controller) AtMax() bool { return c.atMax }

// Update computes the rate anew. It is called every s.UpdateEvery while there is dirty data, and when the percentage
// was changed. Where the rate is MaxRate, because of that or of EnterMax, there are no terms but dirty and target.
func (c *Controller) Update(s *Settings, in Input) Terms {
	before := c.Rate()
	t := Terms{Dirty: in.Dirty, Target: target(s, &in)}
	c.noTarget = s.Percent == 0
	if !c.atMax && !c.noTarget {
		t.Proportional, t.Integral = c.terms(s, &in, t.Target)
		c.rate = min(max(t.Proportional+t.Integral, int64(s.RateMinimum)), maxComputed)
	}
	t.Rate = c.Rate()
	t.Change = t.Rate - before
	return t
}

// target returns the sectors of the volume that may be dirty: its share, by the size of the backing device, of what may
// be dirty in the set.
func target(s *Settings, in *Input) int64 {
	share := max(1, in.Backing<<shareBits/in.AllBacking)
	return in.CacheSectors * int64(s.Percent) / 100 * int64(share) >> shareBits
}

// terms returns the two parts of the rate.
func (c *Controller) terms(s *Settings, in *Input, target int64) (proportional, integral int64) {
	err := in.Dirty - target
	proportional = err / int64(s.PTermInverse)
	if s.ConsiderFragment && fragmented(in) {
		proportional = max(proportional, in.Dirty/in.UsedBuckets*fragmentWeight(s, in.InUse))
	}
	switch {
	case 2*in.Dirty <= target:
		// Not the kernel's: the error is at most the target here and several times that in an overload, so what an hour
		// of overload has summed up takes hours to go. Until then a small cache would be drained at full speed, however
		// little is dirty. No steady load needs that sum: it would keep more dirty.
		c.integral = 0
	case err < 0 && c.integral > 0, err > 0 && in.KeptUp:
		c.integral += err * int64(s.UpdateEvery/time.Second)
	}
	return proportional, c.integral / int64(s.ITermInverse)
}

// fragmented reports whether more than half of the buckets are in use and hold more than three times as much as is
// dirty.
func fragmented(in *Input) bool {
	return in.InUse > 50 && in.Dirty > 0 && in.UsedBuckets*in.BucketSectors/in.Dirty > 3
}

// fragmentWeight returns by how much of a bucket's dirty data, per second, fragmentation raises the rate.
func fragmentWeight(s *Settings, inUse int) int64 {
	switch {
	case inUse <= 57:
		return int64(s.FPTermLow) * int64(inUse-50)
	case inUse <= 64:
		return int64(s.FPTermMid) * int64(inUse-57)
	default:
		return int64(s.FPTermHigh) * int64(inUse-64)
	}
}
