package cacheset

import (
	"errors"
	"fmt"
	"testing"
	"time"
)

// A start in which nothing happens is given up, with an error that says so; one that goes on, however slowly, is not.
func TestStuckStart(t *testing.T) {
	simulate(t, 1, func(w *world) error {
		s := w.set
		s.Lock()
		s.start.under = true
		s.Unlock()
		for range 20 {
			w.rt.Sleep(startLimit * 3 / 4)
			s.Lock()
			s.start.keys++
			s.Unlock()
		}
		if err := s.Err(); err != nil {
			return fmt.Errorf("a start that goes on: %w", err)
		}
		var replay error
		w.rt.Go("replay", func() {
			s.Lock()
			s.torn[1] = true // there is no such node: it is never mended
			s.Unlock()
			replay = s.mend()
		})
		w.rt.Sleep(startLimit + 5*time.Second)
		if err := s.Err(); !errors.Is(err, ErrStuck) || !errors.Is(replay, ErrStuck) {
			return fmt.Errorf("after %v in which nothing happened: %v; the replay ends with %v", startLimit, err, replay)
		}
		s.abandon()
		return w.open()
	})
}
