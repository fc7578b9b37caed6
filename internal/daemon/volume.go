package daemon

import (
	"context"

	"github.com/ubcache/ubcache"
	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/nbd"
)

// A volumeExport is a volume of a running set as the NBD server wants it.
type volumeExport struct {
	v     volume
	dev   blockdev.Device
	flash bool // what is not in the cache is nowhere
}

func newVolumeExport(v volume, flash bool) *volumeExport { return &volumeExport{v, v.Device(), flash} }

func (e *volumeExport) Info() nbd.ExportInfo {
	i := e.dev.Info()
	description := "bcache volume"
	if e.flash {
		description = "bcache flash-only volume"
	}
	return nbd.ExportInfo{
		Size: e.v.Size(), MinBlock: e.v.BlockSize(), PreferredBlock: max(i.PhysicalBlock, i.OptimalIO), Rotational: i.Rotational,
		CanTrim: true, CanZero: true, MultiConn: true, Description: description,
	}
}

func (e *volumeExport) NewQueue(depth int, complete func([]*blockdev.Request)) (blockdev.Queue, error) {
	return e.dev.NewQueue(depth, complete)
}

func (e *volumeExport) MetaContexts() []string {
	return []string{nbd.ContextAllocation, nbd.ContextState}
}

// AppendExtents tells clients what is cached and dirty, and what is a hole in a flash-only volume. What the backing
// device has allocated is not known.
func (e *volumeExport) AppendExtents(dst []nbd.Extent, metaContext string, off, length int64, most int) ([]nbd.Extent, error) {
	allocation := metaContext == nbd.ContextAllocation
	if allocation && !e.flash {
		return append(dst, nbd.Extent{Length: length}), nil
	}
	n := len(dst)
	err := e.v.EachState(context.Background(), off, length, func(s ubcache.BlockState, _, length int64) bool {
		flags := stateFlags(s, allocation)
		if len(dst) > n && dst[len(dst)-1].Flags == flags {
			dst[len(dst)-1].Length += length
			return true
		}
		if len(dst)-n == most {
			return false
		}
		dst = append(dst, nbd.Extent{Length: length, Flags: flags})
		return true
	})
	if len(dst) > n {
		err = nil // what is known is an answer
	}
	return dst, err
}

func stateFlags(s ubcache.BlockState, allocation bool) uint32 {
	switch {
	case allocation && s == ubcache.Uncached:
		return nbd.StateHole | nbd.StateZero
	case allocation:
		return 0
	case s == ubcache.Clean:
		return nbd.StateClean
	case s == ubcache.Dirty:
		return nbd.StateDirty
	}
	return nbd.StateUncached
}
