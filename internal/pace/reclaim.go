package pace

// reclaim is classic, but the allocator goes on: Linux 6.10. B 3.5 (b).
type reclaim struct{ classic }

func (reclaim) Allocates() bool { return true }
