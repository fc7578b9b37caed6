package lab

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

// Policies are the values of the attribute gc_policy, the one without collections first.
var Policies = []string{"exact", "classic", "reclaim", "dynamic", "rescale", "paced"}

// Loads are the values of Setup.RW.
var Loads = []string{"randwrite", "randrw", "randread"}

// A Setup is what is measured, in the words of a report. Zero values are not replaced, but for RangeBytes: see Defaults.
type Setup struct {
	Policies     []string `json:"policies"`
	RW           string   `json:"rw"`          // one of Loads; randrw is half reads
	BlockBytes   int      `json:"block_bytes"` // of one request
	Depths       []int    `json:"iodepths"`
	Runtime      Duration `json:"runtime_seconds"` // of each window
	Rounds       int      `json:"rounds"`
	GCEvery      Duration `json:"gc_every_seconds"`
	Nodes        int      `json:"nodes"` // the fill goes on until the index has so many; 0: until the cache was filled once
	CacheBytes   int64    `json:"cache_bytes"`
	BackingBytes int64    `json:"backing_bytes"`
	RangeBytes   int64    `json:"range_bytes"` // of the volume, from its beginning: what is loaded
	BucketBytes  int64    `json:"bucket_bytes"`
	NodeCache    int64    `json:"node_cache_bytes"` // index kept in memory, at most
	Seed         uint64   `json:"seed"`
	Devices      string   `json:"devices"`                // what they are: "memory", "files in ...", the names of two devices
	DeviceModel  string   `json:"device_model,omitempty"` // latency models; empty: none

	Attributes []Attribute `json:"attributes,omitempty"` // set before the fill
}

// An Attribute is one to be set: its object is "set", "cache", or VolumeName.
type Attribute struct {
	Object string `json:"object"`
	Name   string `json:"name"`
	Value  string `json:"value"`
}

// VolumeName is the name of the volume that is measured.
const VolumeName = "volume"

// Defaults returns the setup that is measured where nothing else is said.
func Defaults() Setup {
	return Setup{ // and RangeBytes, see DefaultRange
		Policies: slices.Clone(Policies), RW: "randwrite", BlockBytes: 4096, Depths: []int{1, 128},
		Runtime: Duration(60 * time.Second), Rounds: 3, GCEvery: Duration(5 * time.Second),
		CacheBytes: 2 << 30, BackingBytes: 8 << 30, BucketBytes: 64 << 10, NodeCache: 256 << 20, Seed: 1, Devices: "memory",
	}
}

// A Config is a Setup and what it runs on.
type Config struct {
	Setup

	RT     *rt.Runtime  // default: the real one
	Logger *slog.Logger // of the sets; default: none

	// Open makes the devices of one run, and releases them. They are formatted before each run: whatever they hold is lost.
	Open func(ctx context.Context, r *rt.Runtime) (*Devices, error)

	// RuntimeDir is a folder in memory for the journal entry that is not on disk yet, as the daemon has it; empty: none, so
	// that each write waits for the journal.
	RuntimeDir string

	// Log, if not nil, makes the log of the latencies of one window.
	Log func(l LogName) (*LatLog, error)

	Progress func(p Progress) // called some times a second; default: nobody is told
}

// Devices are what one run is made on.
type Devices struct {
	Cache, Backing blockdev.Device

	// Blank says that what was never written reads as zeroes. Else reads of it are not checked.
	Blank bool

	Release func() error // may be nil
}

// A LogName says which window a log of latencies is of.
type LogName struct {
	Policy     string
	Depth      int
	Round      int // from 1
	Collecting bool
}

// Progress is how far Measure is.
type Progress struct {
	Stage       string // "fill", "without collection", "with collection", "settle"
	Policy      string
	Depth       int // 0 while the set is filled
	Round       int // from 1
	Step, Steps int // fills and windows that are done, and all
	Done, Of    float64
	Nodes       int    // while the set is filled
	Requests    uint64 // of this window
	Elapsed     time.Duration
	Collections int
}

// Check says what is wrong with a setup.
func (s *Setup) Check() error {
	var errs []error
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if len(s.Policies) == 0 {
		fail("no policy is given")
	}
	for i, p := range s.Policies {
		if !slices.Contains(Policies, p) {
			fail("no policy %q: there are %s", p, strings.Join(Policies, ", "))
		}
		if slices.Contains(s.Policies[:i], p) {
			fail("policy %q is given twice", p)
		}
	}
	if !slices.Contains(Loads, s.RW) {
		fail("no load %q: there are %s", s.RW, strings.Join(Loads, ", "))
	}
	if s.BlockBytes < 512 || s.BlockBytes > 1<<20 || s.BlockBytes%512 != 0 {
		fail("requests of %d bytes: want a multiple of 512, at most 1 MiB", s.BlockBytes)
	}
	if len(s.Depths) == 0 {
		fail("no depth is given")
	}
	for i, d := range s.Depths {
		if d < 1 || d > maxDepth {
			fail("a depth of %d: want 1 to %d", d, maxDepth)
		}
		if slices.Contains(s.Depths[:i], d) {
			fail("depth %d is given twice", d)
		}
		if s.BlockBytes >= 512 && int64(d)*4 > s.RangeBytes/int64(s.BlockBytes) {
			fail("a depth of %d with only %d blocks to load", d, s.RangeBytes/int64(s.BlockBytes))
		}
	}
	if s.RangeBytes < 0 || s.RangeBytes > s.BackingBytes {
		fail("a range of %d bytes of a backing device of %d", s.RangeBytes, s.BackingBytes)
	}
	if s.Runtime < Duration(100*time.Millisecond) {
		fail("a runtime of %v: want 100ms or more", s.Runtime)
	}
	if s.GCEvery <= 0 {
		fail("collections every %v: want more than 0", s.GCEvery)
	}
	if s.Rounds < 1 {
		fail("%d rounds: want 1 or more", s.Rounds)
	}
	if w := 2 * float64(s.Rounds) * float64(len(s.Policies)) * float64(len(s.Depths)); w > maxWindows || w*s.Runtime.Seconds() > maxTook.Seconds() {
		fail("%.0f windows of %v: want no more than %d, and %v in all", w, s.Runtime, maxWindows, maxTook)
	}
	if s.Nodes < 0 {
		fail("%d nodes: want 0 or more", s.Nodes)
	}
	if s.NodeCache < 1<<20 {
		fail("a node cache of %d bytes: want 1 MiB or more", s.NodeCache)
	}
	return errors.Join(errs...)
}

const (
	maxDepth   = 4096
	maxWindows = 1_000_000
	maxTook    = Duration(10_000 * time.Hour)

	// rangePercent of the cache are loaded where nothing is said: with what overwrites leave behind in buckets, and moving, that is
	// less than what may be in use before writes go round the cache (B 1.6), so that what is measured is the cache.
	rangePercent = 25
)

// DefaultRange sets the range that is loaded where there is none.
func (s *Setup) DefaultRange() {
	if s.RangeBytes == 0 && s.BlockBytes > 0 {
		s.RangeBytes = min(s.BackingBytes, s.CacheBytes*rangePercent/100) / int64(s.BlockBytes) * int64(s.BlockBytes)
	}
}

func (c *Config) fill() error {
	if c.RT == nil {
		c.RT = rt.New()
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Progress == nil {
		c.Progress = func(Progress) {}
	}
	if c.Open == nil {
		c.Open = MemoryDevices(c.CacheBytes, c.BackingBytes)
	}
	c.DefaultRange()
	return c.Check()
}
