package nbd

import (
	"math/bits"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// An Export is what a Server needs of a thing to serve it. All methods may be called at the same time.
type Export interface {
	// Info describes the export. It is asked once for each handshake.
	Info() ExportInfo

	// NewQueue makes the queue of one connection, with the contract of blockdev.Device.NewQueue. The server
	// submits only requests that lie inside Info().Size, are multiples of MinBlock, have buffers aligned to a
	// page, and, on a read-only export, are reads.
	NewQueue(depth int, complete func(done []*blockdev.Request)) (blockdev.Queue, error)
}

// ExportInfo is what clients are told about an export.
type ExportInfo struct {
	Size           int64 // bytes; what is over a multiple of MinBlock is not served
	MinBlock       int   // bytes, a power of two up to 64 KiB; 0: 1
	PreferredBlock int   // bytes, a power of two; 0: 4096
	MaxBlock       int   // bytes; 0, or larger than the server's own limit: that limit
	ReadOnly       bool
	Rotational     bool
	CanTrim        bool
	CanZero        bool // OpWriteZeroes works, and NoUnmap is honoured
	CanFastZero    bool // FastZero is honoured: such a request is fast or fails with ErrNotSupported
	// MultiConn says that a flush on one queue covers what was completed on all queues of this export before,
	// and that all queues see each other's writes at once. Only then are clients told that they may use
	// several connections.
	MultiConn   bool
	Description string // free text for people; may be empty
}

// An Extent is a part of an export in one state.
type Extent struct {
	Length int64
	Flags  uint32
}

// Names of metadata contexts, and the flags of their extents.
const (
	ContextAllocation = "base:allocation"
	StateHole         = 1 << 0 // not allocated
	StateZero         = 1 << 1 // reads as zero

	ContextState  = "ubcache:state"
	StateUncached = 0      // only on the backing device
	StateClean    = 1 << 0 // in the cache, and the same on the backing device
	StateDirty    = 1 << 1 // in the cache, and newer than the backing device
)

// BlockStatus is implemented by exports that know the state of their blocks.
type BlockStatus interface {
	// MetaContexts lists the names of the contexts that AppendExtents answers for. It does not change.
	MetaContexts() []string

	// AppendExtents appends to dst the extents that follow each other from off, at least one, at most max,
	// together not more than length bytes. It may do I/O and runs on a goroutine of its own.
	AppendExtents(dst []Extent, context string, off, length int64, max int) ([]Extent, error)
}

// DeviceExport serves dev. If readOnly is set, or dev is, clients can only read.
func DeviceExport(dev blockdev.Device, description string, readOnly bool) Export {
	return deviceExport{dev, description, readOnly}
}

type deviceExport struct {
	dev         blockdev.Device
	description string
	readOnly    bool
}

func (e deviceExport) Info() ExportInfo {
	i := e.dev.Info()
	return ExportInfo{
		Size:           i.Size,
		MinBlock:       i.LogicalBlock,
		PreferredBlock: max(i.PhysicalBlock, i.OptimalIO),
		ReadOnly:       i.ReadOnly || e.readOnly,
		Rotational:     i.Rotational,
		CanTrim:        i.CanDiscard,
		CanZero:        true,
		CanFastZero:    true,
		MultiConn:      true, // a blockdev.Device flushes as a whole, whichever queue asks
		Description:    e.description,
	}
}

func (e deviceExport) NewQueue(depth int, complete func([]*blockdev.Request)) (blockdev.Queue, error) {
	return e.dev.NewQueue(depth, complete)
}

// geometry is ExportInfo brought into the form that the protocol wants.
type geometry struct {
	ExportInfo
	size           uint64
	min, pref, max uint32
}

func (i ExportInfo) geometry(limit int) geometry {
	g := geometry{ExportInfo: i}
	g.min = uint32(powerOfTwo(i.MinBlock, 1, 64<<10))
	if i.MaxBlock > 0 && i.MaxBlock < limit {
		limit = i.MaxBlock
	}
	g.max = max(uint32(limit)&^(g.min-1), g.min)
	// The protocol wants at least 512 here; much more than a page only makes clients copy more.
	g.pref = uint32(powerOfTwo(i.PreferredBlock, max(4096, int(g.min)), 1<<20))
	for g.pref > g.max && g.pref > max(512, g.min) {
		g.pref /= 2
	}
	if i.Size > 0 {
		g.size = uint64(i.Size) &^ uint64(g.min-1)
	}
	return g
}

// powerOfTwo brings n to a power of two between lo and hi, which are such themselves.
func powerOfTwo(n, lo, hi int) int {
	if n <= lo {
		return lo
	}
	return min(1<<bits.Len(uint(n-1)), hi)
}

// flags returns the transmission flags of an export.
func (g *geometry) flags(structured bool) uint16 {
	f := uint16(flagHasFlags | flagSendCache)
	if g.ReadOnly {
		f |= flagReadOnly
	} else {
		f |= flagSendFlush | flagSendFUA
		if g.CanTrim {
			f |= flagSendTrim
		}
		if g.CanZero {
			f |= flagSendZeroes
			if g.CanFastZero {
				f |= flagSendFastZero
			}
		}
	}
	if g.Rotational {
		f |= flagRotational
	}
	// Connections that can only read have nothing to flush: any number of them agree.
	if g.MultiConn || g.ReadOnly {
		f |= flagMultiConn
	}
	if structured {
		f |= flagSendDF
	}
	return f
}
