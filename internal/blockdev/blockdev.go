package blockdev

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Op says what a Request does.
type Op uint8

const (
	OpRead        Op = iota // fill Buf from Off
	OpWrite                 // store Buf at Off
	OpFlush                 // make every write completed before this was submitted durable
	OpDiscard               // Len bytes at Off may be forgotten; they read as anything afterwards
	OpWriteZeroes           // Len bytes at Off read as zero afterwards
	NumOps
)

// String returns the name that traces and messages use.
func (o Op) String() string {
	if o < NumOps {
		return [NumOps]string{"read", "write", "flush", "discard", "zero"}[o]
	}
	return "op " + strconv.Itoa(int(o))
}

// Writes reports whether the operation changes what is stored.
func (o Op) Writes() bool { return o == OpWrite || o == OpDiscard || o == OpWriteZeroes }

// Flags modify a Request.
type Flags uint8

const (
	// FUA makes this one write (or write of zeroes, or discard) durable before it completes.
	FUA Flags = 1 << iota
	// NoUnmap asks a write of zeroes to keep the space allocated.
	NoUnmap
	// FastZero makes a write of zeroes fail with ErrNotSupported where it would be no faster than writing them.
	FastZero
)

// String lists the flags, separated by commas.
func (f Flags) String() string {
	var s []string
	for i, name := range []string{"fua", "nounmap", "fastzero"} {
		if f&(1<<i) != 0 {
			s = append(s, name)
		}
	}
	return strings.Join(s, ",")
}

// Purpose says on whose behalf a request is done, so that traffic can be counted by it.
type Purpose uint8

const (
	ForData Purpose = iota
	ForJournal
	ForBtree
	ForPrio
	ForUUID
	ForSuperblock
	ForWriteback
	ForScan
	ForMoving
	NumPurposes
)

// String returns the name that traces and metrics use.
func (p Purpose) String() string {
	if p < NumPurposes {
		return [NumPurposes]string{"data", "journal", "btree", "prio", "uuid", "super", "writeback", "scan", "moving"}[p]
	}
	return "purpose " + strconv.Itoa(int(p))
}

// A Request is one operation on a device. Whoever submits it owns it, and Buf, again when the queue's
// complete function is called with it, and must not touch either in between.
//
// Off, len(Buf) and Len are in bytes and multiples of the device's LogicalBlock; Buf is aligned in memory to
// Info.BufferAlign (what Pool hands out is). Err is set by the device: nil, one of this package's sentinels,
// or an error that wraps the system's errno. After an error the content of Buf (read) or of the range
// (write) is undefined.
type Request struct {
	Off     int64
	Len     int64 // discard, write zeroes; ignored for reads and writes, whose length is len(Buf)
	Buf     []byte
	Err     error
	Op      Op
	Flags   Flags
	Purpose Purpose

	// Owner is for the submitter alone: typically a pointer to the thing that the request is part of.
	Owner any

	next *Request // links requests inside a device
	done int      // bytes moved so far, while a device continues a short transfer
}

// String returns the one text form of a request, for traces and messages: "write 4096+512 journal fua".
func (r *Request) String() string {
	var b strings.Builder
	b.WriteString(r.Op.String())
	if r.Op != OpFlush {
		fmt.Fprintf(&b, " %d+%d", r.Off, r.Length())
	}
	b.WriteString(" " + r.Purpose.String())
	if r.Flags != 0 {
		b.WriteString(" " + r.Flags.String())
	}
	return b.String()
}

// Length returns the number of bytes the request covers.
func (r *Request) Length() int64 {
	if r.Op == OpRead || r.Op == OpWrite {
		return int64(len(r.Buf))
	}
	return r.Len
}

// Info describes a device. It does not change while the device is open.
type Info struct {
	Name          string // path or other name, for messages
	Size          int64  // bytes, a multiple of LogicalBlock
	LogicalBlock  int    // bytes: unit of offsets and lengths, 512 or more
	PhysicalBlock int    // bytes: writes of less may be slower
	OptimalIO     int    // bytes, 0 when the device does not say; of a RAID a stripe
	PartialStripe bool   // writes of less than a stripe cost reads too: RAID 4, 5 and 6
	MaxTransfer   int    // bytes: larger reads and writes are split inside; a hint for callers
	BufferAlign   int    // bytes: how Request.Buf must be aligned in memory
	Rotational    bool
	ReadOnly      bool
	CanDiscard    bool
	DiscardZeroes bool // discarded ranges read as zero
	Direct        bool // transfers go round the page cache
	Engine        string
}

// A Device is a disk: a block device, a file, memory, or a wrapper around another Device. All methods may be
// called at the same time from several goroutines.
type Device interface {
	Info() Info

	// NewQueue makes a queue on which up to depth requests are worked on at once; more may be submitted, they
	// wait inside. complete gets finished requests, in the order in which they finished, several at a time
	// where several were found finished; it is never called twice at the same time for one queue, may be
	// called from within Submit, must not block, and may submit more. The slice is the queue's own and only
	// valid during the call.
	NewQueue(depth int, complete func(done []*Request)) (Queue, error)

	// Close waits for nothing: close the queues first. It releases locks and memory; what queues that are still
	// open need stays until they are closed.
	Close() error
}

// A Queue carries requests to one device. Requests of one queue, and of different queues, are done in any
// order and at the same time; where order matters, wait.
type Queue interface {
	// Submit hands over a batch, with one system call where the device allows it. It does not wait for I/O.
	// reqs itself may be reused on return. Requests that can be refused at once (out of range, unaligned) are
	// completed with an error like any other; so are, with ErrClosed, those submitted after Close. Submit may
	// be called from several goroutines at once, and from within complete.
	Submit(reqs []*Request)

	// Close waits until every submitted request has completed, then releases the queue; Submits of those may
	// still be returning. It must not be called from within complete.
	Close() error
}

// Latency is a model of how long a device takes; see Delaying.
type Latency struct {
	Read, Write, Flush time.Duration // of one request, from its start; discards and zeroes take as long as a write
	Sequential         time.Duration // instead of Read or Write where a request begins at the end of the last; 0: as those
	Jitter             float64       // 0.2: each time is multiplied by something between 0.8 and 1.2
	PerMiB             time.Duration // added for each MiB moved; one request moves at a time
	Parallel           int           // requests served at once; 0: no limit

	// Writes, if given, is instead of Write, Sequential and Jitter for writes: how long they take, as one would report it, by
	// percentile. Between two points times are spread evenly. Parts go up, the first is 0 and the last 1.
	Writes *Percentiles
	// Discard is how long a discard takes; 0: as long as a write. If it is Exclusive, the device does nothing else meanwhile:
	// what was begun before is finished first, and what comes later waits. So do disks that cannot queue discards.
	Discard   time.Duration
	Exclusive bool
}

// Percentiles say how long requests take.
type Percentiles []Percentile

// A Percentile says that Part of all requests, 0 to 1, take no longer than Time.
type Percentile struct {
	Part float64
	Time time.Duration
}

// Mean returns the mean of what is drawn.
func (p Percentiles) Mean() time.Duration {
	sum := 0.0
	for i := 1; i < len(p); i++ {
		a, b := p[i-1], p[i]
		sum += (b.Part - a.Part) * float64(a.Time+b.Time) / 2
	}
	return time.Duration(math.Round(sum))
}

// At returns the time within which a part of the requests is done.
func (p Percentiles) At(part float64) time.Duration {
	for i := 1; i < len(p); i++ {
		if a, b := p[i-1], p[i]; part < b.Part {
			return a.Time + time.Duration(float64(b.Time-a.Time)*(part-a.Part)/(b.Part-a.Part))
		}
	}
	return p[len(p)-1].Time
}
