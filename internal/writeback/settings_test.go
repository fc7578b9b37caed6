package writeback

import "testing"

// Source: B 1.6.
func TestShouldWriteback(t *testing.T) {
	for _, c := range []struct {
		name string
		Decision
		want bool
	}{
		{"a write", Decision{Writeback: true}, true},
		{"in another mode", Decision{}, false},
		{"in another mode, all else for it", Decision{PartialStripe: true, Sync: true}, false},
		{"while detaching", Decision{Writeback: true, Detaching: true, PartialStripe: true, Sync: true}, false},
		{"at the cut-off", Decision{Writeback: true, InUse: 40}, true},
		{"above it", Decision{Writeback: true, InUse: 41}, false},
		{"above it, waited for", Decision{Writeback: true, InUse: 41, Sync: true}, true},
		{"at the cut-off of all, waited for", Decision{Writeback: true, InUse: 70, Sync: true}, true},
		{"above that", Decision{Writeback: true, InUse: 71, Sync: true}, false},
		{"above that, in a dirty stripe", Decision{Writeback: true, InUse: 71, PartialStripe: true}, false},
		{"in a dirty stripe, above the cut-off", Decision{Writeback: true, InUse: 70, PartialStripe: true}, true},
		{"in a dirty stripe, bypassed", Decision{Writeback: true, PartialStripe: true, Bypass: true}, true},
		{"a discard in a dirty stripe", Decision{Writeback: true, Discard: true, PartialStripe: true, Sync: true}, false},
		{"bypassed", Decision{Writeback: true, Bypass: true}, false},
		{"bypassed, waited for", Decision{Writeback: true, Bypass: true, Sync: true}, false},
	} {
		if got := ShouldWriteback(c.Decision); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}
