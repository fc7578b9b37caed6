package writeback

// Terms are what a rate was made of, in the units of writeback_rate_debug (B 7.2).
type Terms struct {
	Dirty  int64 // sectors
	Target int64 // sectors of this volume that may be dirty

	Proportional int64 // sectors per second
	Integral     int64 // sectors per second
	Change       int64 // of the rate since the update before, sectors per second
	Rate         int64 // sectors per second
}
