package writeback

import "time"

// Percent of the buckets in use above which writes no longer stay in the cache as dirty data. Source: B 1.6.
const (
	CutoffWriteback     = 40 // for writes that nobody waits for
	CutoffWritebackSync = 70 // for all
)

// Settings are what an operator sets on one volume. The ranges are those of the attributes, and the owner's to hold.
// Source: B 5.4, 7.2.
type Settings struct {
	Running          bool          // dirty data is written back; off, it stays in the cache until a detach
	Percent          int           // of the cache that may be dirty, 0 to CutoffWriteback; 0: none, as fast as it goes
	Delay            time.Duration // pause after all of the index was looked through
	ConsiderFragment bool          // raise the rate where little dirty data holds many buckets
	UpdateEvery      time.Duration // of the rate; whole seconds, 1 to 60

	PTermInverse uint32 // of the rate's share that follows the error: seconds in which it would be gone; 1 or more
	ITermInverse uint32 // of the share that follows the error's sum over time; 1 or more

	// Weight of fragmentation for each percent in use, above 50, 57 and 64 percent. FPTermLow < FPTermMid < FPTermHigh.
	FPTermLow, FPTermMid, FPTermHigh uint32

	RateMinimum uint32 // sectors per second, 1 or more
}

// Defaults returns the settings of a volume that was just attached. Source: B 5.4.
func Defaults() Settings {
	return Settings{
		Running: true, Percent: 10, Delay: 30 * time.Second, ConsiderFragment: true, UpdateEvery: 5 * time.Second,
		PTermInverse: 40, ITermInverse: 10000, FPTermLow: 1, FPTermMid: 10, FPTermHigh: 1000, RateMinimum: 8,
	}
}

// A Decision is what is known of a write when it is decided whether it goes to the cache alone, as dirty data.
type Decision struct {
	Writeback     bool // the volume's mode
	Detaching     bool
	InUse         int // percent of the buckets
	Discard       bool
	PartialStripe bool // partial stripes are expensive, and a stripe that the write touches has dirty data
	Bypass        bool // it would go round the cache
	Sync          bool // somebody waits for it, or it is metadata
}

// ShouldWriteback reports whether a write goes to the cache alone. Writes over live dirty data do so in any mode, which
// is not decided here. Source: should_writeback, B 1.6.
func ShouldWriteback(d Decision) bool {
	switch {
	case !d.Writeback, d.Detaching, d.InUse > CutoffWritebackSync:
		return false
	case d.Discard:
		return false
	case d.PartialStripe: // the rest of the stripe will be written from the cache anyway
		return true
	case d.Bypass:
		return false
	default:
		return d.Sync || d.InUse <= CutoffWriteback
	}
}

// IdleUpdates returns after how many updates of the rates of a set's volumes, without a request to any of them, the set
// is idle, and written back as fast as it goes: six of each volume, for each volume. Source: B 5.5.
func IdleUpdates(volumes int) int { return 6 * volumes * volumes }
