package ubcache

import (
	"testing"

	"github.com/ubcache/ubcache/internal/sim"
)

// startCases fill the smallest journal.
var startCases = []writebackCase{
	{"full", func(seed uint64) sim.Loop {
		return inWriteback(dirtyLoop(seed, "writeback", 300), opening{drain: fastDrain})
	}},
	{"full and restless", func(seed uint64) sim.Loop {
		return inWriteback(dirtyLoop(seed, "writeback", 300), opening{drain: fastDrain, restless: true})
	}},
	{"writeback", func(seed uint64) sim.Loop {
		l := writebackLoop(seed, opening{drain: fastDrain})
		l.Workload.Weights = sim.Weights{Read: 10, Write: 40, FUA: 15, Flush: 15, Discard: 5, Zeroes: 10}
		return l
	}},
}

// TestStartsInARow has a set start ten times in a row and die each time, while it starts or soon after: by kills, by
// power cuts, and by both in turn. The next start finds everything, and room in the journal.
func TestStartsInARow(t *testing.T) {
	for _, c := range startCases {
		t.Run(c.name, func(t *testing.T) {
			for _, seed := range sim.Seeds(1) {
				l := c.loop(seed)
				l.Lives, l.Early, l.Kill = 10, true, seed%3 != 0
				l.Step, l.Start = 10*crashStep(25), int(seed*83%250)
				l.Run(t)
			}
		})
	}
}

// TestStartsThatHung repeats what hung once: each start took a bucket of the journal, until a new root had no entry.
func TestStartsThatHung(t *testing.T) {
	for _, s := range []struct {
		seed uint64
		cut  int
		kill bool
	}{{1020, 660, false}, {1037, 671, true}} {
		l := startCases[0].loop(s.seed)
		l.Lives, l.Early, l.Kill = 10, true, s.kill
		l.Start, l.Step, l.Most = s.cut, 1, 1
		l.Run(t)
	}
}
