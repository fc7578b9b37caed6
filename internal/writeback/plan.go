package writeback

import "github.com/ubcache/ubcache/internal/ondisk"

// An Extent is a dirty range [Start, End) of a volume, in sectors of its backing device, and where in the cache it lies.
type Extent struct {
	Start, End uint64
	Ptr        ondisk.Ptr
}
