package lab

import (
	"fmt"
	"strconv"
	"time"
)

// A Duration is a time.Duration that JSON has in seconds.
type Duration time.Duration

// String writes at most three figures before the unit's part that nobody needs: 1.23s, 45.6ms, 789µs.
func (d Duration) String() string {
	t := time.Duration(d)
	for _, unit := range []time.Duration{time.Second, time.Millisecond, time.Microsecond} {
		switch {
		case t >= 100*unit:
			return t.Round(unit).String()
		case t >= 10*unit:
			return t.Round(unit / 10).String()
		case t >= unit:
			return t.Round(unit / 100).String()
		}
	}
	return t.String()
}

// Seconds is d as a number.
func (d Duration) Seconds() float64 { return time.Duration(d).Seconds() }

// MarshalJSON writes seconds, exact to the nanosecond.
func (d Duration) MarshalJSON() ([]byte, error) {
	return strconv.AppendFloat(nil, time.Duration(d).Seconds(), 'f', -1, 64), nil
}

// UnmarshalJSON reads seconds.
func (d *Duration) UnmarshalJSON(b []byte) error {
	f, err := strconv.ParseFloat(string(b), 64)
	if err != nil {
		return fmt.Errorf("seconds: %w", err)
	}
	*d = Duration(f*1e9 + 0.5)
	return nil
}
