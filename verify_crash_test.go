package ubcache

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/sim"
)

// verifying has the lives of a loop look what the verifier has found, now and then and before they stop: never anything.
func verifying(l sim.Loop) sim.Loop {
	open := func(open func(ctx context.Context, e *sim.Env) (*sim.System, error)) func(ctx context.Context, e *sim.Env) (*sim.System, error) {
		return func(ctx context.Context, e *sim.Env) (*sim.System, error) {
			s, err := open(ctx, e)
			if err != nil {
				return nil, err
			}
			stop := s.Close
			s.Close = func(ctx context.Context) error {
				err := countsFit(s)
				if e := stop(ctx); err == nil {
					err = e
				}
				return err
			}
			return s, nil
		}
	}
	l.Build, l.Reopen = open(l.Build), open(l.Reopen)
	between := l.Between
	l.Between = func(ctx context.Context, e *sim.Env, s *sim.System, n int) error {
		if n%20 == 0 {
			if err := countsFit(s); err != nil {
				return err
			}
		}
		if n == 280 && s.Own.(crashSet).set.Stats().Verifications < 3 {
			return fmt.Errorf("verified %d times", s.Own.(crashSet).set.Stats().Verifications)
		}
		if between != nil {
			return between(ctx, e, s, n)
		}
		return nil
	}
	return l
}

func countsFit(s *sim.System) error {
	if st := s.Own.(crashSet).set.Stats(); st.Mismatches > 0 || st.Suspect > 0 {
		return fmt.Errorf("%d counts did not fit in %d verifications, %d buckets suspect", st.Mismatches, st.Verifications, st.Suspect)
	}
	return nil
}

var verifyCases = []writebackCase{
	{"writethrough", func(seed uint64) sim.Loop {
		l := crashLoop(seed, "changing")
		l.Build = opening{mode: "writethrough", restless: true}.open
		l.Reopen = l.Build
		return verifying(l)
	}},
	{"fast", func(seed uint64) sim.Loop {
		l := writebackLoop(seed, opening{drain: fastDrain, restless: true})
		l.Between = changeModes
		return verifying(l)
	}},
	{"detaching", func(seed uint64) sim.Loop {
		l := writebackLoop(seed, opening{restless: true})
		l.Between = detachEach
		return verifying(l)
	}},
}

// TestVerifyWhileRunning verifies all the time beside loads with each mode, flash-only volumes, discards, evictions,
// writeback and detaches: whatever is going on, the counts are exact.
func TestVerifyWhileRunning(t *testing.T) {
	for _, c := range inTurn(verifyCases) {
		t.Run(c.name, func(t *testing.T) {
			for _, seed := range sim.Seeds(3) {
				l := c.loop(seed)
				l.Most = -1
				l.Run(t)
			}
		})
	}
}

// TestPowerCutsWhileVerifying cuts the power of such sets, and of those that recover from that.
func TestPowerCutsWhileVerifying(t *testing.T) {
	for _, c := range inTurn(verifyCases) {
		t.Run(c.name, func(t *testing.T) {
			for _, seed := range sim.Seeds(1) {
				l := c.loop(seed)
				l.Lives, l.Step = 2, crashStep(200)
				l.Run(t)
			}
		})
	}
}

// A verification can be asked for, by the attribute too, and is counted.
func TestTriggerVerify(t *testing.T) {
	simulate(t, 1, time.Hour, breakable(t), func(b *bench) error {
		ctx := context.Background()
		if err := b.volumes[0].WriteAt(ctx, make([]byte, 64<<10), 0, 0); err != nil {
			return err
		}
		if st := b.set.Stats(); st.Verifications != 0 {
			return fmt.Errorf("verified %d times without being asked", st.Verifications)
		}
		if err := b.set.SetAttribute(ctx, "set", "trigger_verify", "1"); err != nil {
			return err
		}
		if v, err := b.set.Attribute("set", "trigger_verify"); v != "" || err != nil {
			return fmt.Errorf("%q, %w", v, err)
		}
		if err := b.set.Verify(ctx); err != nil {
			return err
		}
		if st := b.set.Stats(); st.Verifications != 2 || st.Mismatches != 0 {
			return fmt.Errorf("verified %d times, %d mismatches", st.Verifications, st.Mismatches)
		}
		over, cancel := context.WithCancel(ctx)
		cancel()
		if err := b.set.SetAttribute(over, "set", "trigger_verify", "1"); err == nil || !strings.Contains(err.Error(), "canceled") {
			return fmt.Errorf("nobody waits: %w", err)
		}
		return nil
	})
}
