package cacheset

// gentleBytes is how much of it the work in the background has the device do at a time.
const gentleBytes = 8 << 10

// gently makes an I/O that nobody waits for: in small parts, and of the whole set one part at a time. So whoever reads or
// writes meanwhile waits behind one part at most, wherever the device moves one request's data after the other's: a node
// of 256 KiB, or the pieces that are moved together, are half a millisecond on a SATA SSD. Where hurry, which is called with
// the lock held, says that it is no time for that, the rest goes at once.
//
// Sources: B 9.12.
func (s *Set) gently(p []byte, off int64, hurry func() bool, do func(p []byte, off int64) error) error {
	for len(p) > 0 {
		if s.hurries(hurry) || s.lane.Acquire(s.stop, 1) != nil {
			return do(p, off)
		}
		n := min(len(p), gentleBytes)
		err := do(p[:n], off)
		s.lane.Release(1)
		if err != nil {
			return err
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

func (s *Set) hurries(hurry func() bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.needMeta > 0 || s.needSpace > 0 || s.closed || s.table.MaxLag() >= sweepAim || hurry()
}

// never and always are ways to hurry.
func never() bool  { return false }
func always() bool { return true }
