package volume

import (
	"testing"
	"time"
)

// Source: B 1.3, the averages too.
func TestSequencer(t *testing.T) {
	type request struct {
		start, n uint64
		at       time.Duration
		want     uint64 // sectors of the stream, with this request
	}
	for name, requests := range map[string][]request{
		"one stream":     {{0, 8, 0, 8}, {8, 8, 0, 16}, {16, 1000, 0, 1016}},
		"a gap ends it":  {{0, 8, 0, 8}, {9, 8, 0, 8}, {17, 8, 0, 16}},
		"two, in turns":  {{0, 8, 0, 8}, {1000, 8, 0, 8}, {8, 8, 0, 16}, {1008, 8, 0, 16}, {16, 8, 0, 24}},
		"in time":        {{0, 8, 0, 8}, {8, 8, streamExpiry - 1, 16}, {16, 8, 2*streamExpiry - 2, 24}},
		"too late":       {{0, 8, 0, 8}, {8, 8, streamExpiry, 8}},
		"backwards":      {{16, 8, 0, 8}, {8, 8, 0, 8}, {0, 8, 0, 8}},
		"the same twice": {{0, 8, 0, 8}, {0, 8, 0, 8}},
		// Where streams were long, a new one counts as that long at once: an eighth of the last, and falling.
		"average": {{0, 8000, 0, 8000}, {20000, 8, 0, 1000}, {40000, 8, 0, 876}, {60000, 8, 0, 767}},
	} {
		t.Run(name, func(t *testing.T) {
			var q sequencer
			for i, r := range requests {
				if got := q.sectors(r.start, r.n, r.at); got != r.want {
					t.Errorf("request %d: a stream of %d sectors, want %d", i, got, r.want)
				}
			}
		})
	}
}

// More streams than are followed: the one that has been quiet for the longest goes.
func TestSequencerForgetsTheOldest(t *testing.T) {
	var q sequencer
	for i := range uint64(streams + 1) {
		q.sectors(i*1000, 8, time.Duration(i))
	}
	if got := q.sectors(8, 8, time.Millisecond); got != 8 {
		t.Errorf("the oldest stream goes on with %d sectors, want it forgotten", got)
	}
	// That one took the place of the second.
	if got := q.sectors(2008, 8, time.Millisecond); got != 16 {
		t.Errorf("the third oldest stream goes on with %d sectors, want 16", got)
	}
}
