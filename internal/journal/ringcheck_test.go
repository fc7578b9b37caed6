package journal

import (
	"bytes"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// A ringCheck is a device that holds every journal write against the rules of F 6.1, 6.2, 6.5 and 6.6. It knows
// nothing of package journal: it decodes what is written. It also cuts the power, or kills, at a given operation.
type ringCheck struct {
	blockdev.Device
	geo     ondisk.Geometry
	buckets []uint64
	fail    func(format string, args ...any)
	lock    *rt.Mutex // must be free while I/O is submitted

	most     map[int]uint64 // greatest seq written to each ring index in this life and before
	newest   ondisk.JSet    // durable; Seq 0: none
	at       int            // ring index of newest
	begin    int64          // bytes into the bucket where it begins
	end      int64          // and behind it; -1: there is none
	bytes    []byte         // it
	first    bool           // no entry was written in this life
	flying   *ondisk.JSet
	flyingAt int
	flyBegin int64
	flyEnd   int64
	flyBytes []byte
	flushed  bool // a flush has completed since the last entry was
	started  bool // replay is over: the rules of run time hold

	entries, amended, laps int

	ops   atomic.Int64
	cutAt int // the operation before which onCut is called; -1: never
	onCut func()
}

func newRingCheck(dev blockdev.Device, geo ondisk.Geometry, buckets []uint64, fail func(string, ...any)) *ringCheck {
	return &ringCheck{Device: dev, geo: geo, buckets: buckets, fail: fail, most: map[int]uint64{}, end: -1, first: true, cutAt: -1}
}

func (c *ringCheck) Runtime() *rt.Runtime { return blockdev.RuntimeOf(c.Device) }

// resume tells the check what is in the ring at the beginning, as it reads it itself.
func (c *ringCheck) resume(image []byte) {
	for i, b := range c.buckets {
		at := c.geo.BucketStart(b) * 512
		prev := uint64(0)
		ondisk.ScanJournalBucket(image[at:at+uint64(c.geo.BucketBytes())], &c.geo, func(off int, j ondisk.JSet) {
			if prev != 0 && j.Seq != prev+1 {
				return
			}
			prev = j.Seq
			c.most[i] = max(c.most[i], j.Seq)
			if j.Seq > c.newest.Seq {
				c.newest, c.at = j, i
				c.newest.Data = nil
				c.begin, c.end = int64(off), int64(off)+c.size(&j)
				c.bytes = slices.Clone(image[at:][c.begin:c.end])
			}
		})
	}
}

// size returns how many bytes of the ring an entry takes.
func (c *ringCheck) size(j *ondisk.JSet) int64 {
	block := int64(c.geo.BlockBytes())
	return (int64(j.Bytes()) + block - 1) / block * block
}

// distance counts the steps from bucket i to the oldest with an entry from lastSeq on.
func (c *ringCheck) distance(i int, lastSeq uint64) int {
	n := len(c.buckets)
	if c.newest.Seq == 0 {
		return n
	}
	for d := 1; d < n; d++ {
		if c.most[(i+d)%n] >= lastSeq {
			return d
		}
	}
	return n
}

func (c *ringCheck) NewQueue(depth int, complete func(done []*blockdev.Request)) (blockdev.Queue, error) {
	q, err := c.Device.NewQueue(depth, func(done []*blockdev.Request) {
		for _, r := range done {
			c.completed(r)
		}
		complete(done)
	})
	return &checkQueue{q, c}, err
}

type checkQueue struct {
	blockdev.Queue
	c *ringCheck
}

func (q *checkQueue) Submit(reqs []*blockdev.Request) {
	c := q.c
	for _, r := range reqs {
		if c.lock != nil {
			if !c.lock.TryLock() {
				c.fail("%v submitted while the set's lock is held", r)
			} else {
				c.lock.Unlock()
			}
		}
		if r.Op != blockdev.OpRead {
			if n := int(c.ops.Add(1)) - 1; n == c.cutAt && c.onCut != nil {
				c.onCut()
			}
		}
		if r.Op == blockdev.OpWrite && r.Purpose == blockdev.ForJournal {
			c.submitted(r)
		}
	}
	q.Queue.Submit(reqs)
}

func (c *ringCheck) completed(r *blockdev.Request) {
	switch {
	case r.Err != nil || r.Purpose != blockdev.ForJournal:
	case r.Op == blockdev.OpFlush:
		c.flushed = true
	case r.Op == blockdev.OpWrite:
		c.newest, c.at, c.begin, c.end, c.bytes = *c.flying, c.flyingAt, c.flyBegin, c.flyEnd, c.flyBytes
		c.first = false
		c.most[c.at] = c.newest.Seq
		c.flying = nil
	}
}

// submitted checks one entry.
func (c *ringCheck) submitted(r *blockdev.Request) {
	c.entries++
	bad := func(format string, args ...any) {
		c.fail("entry written as %v: %s", r, fmt.Sprintf(format, args...))
	}
	index, within := -1, int64(0)
	for i, b := range c.buckets {
		if start := int64(c.geo.BucketStart(b)) * 512; r.Off >= start && r.Off < start+c.geo.BucketBytes() {
			index, within = i, r.Off-start
		}
	}
	if index < 0 {
		bad("outside of the journal")
		return
	}
	buf := slices.Clone(r.Buf)
	amends := c.end >= 0 && index == c.at && within == c.begin
	if amends && len(buf) < len(c.bytes) {
		buf = append(buf, c.bytes[len(buf):]...)
	}
	j, err := ondisk.DecodeJSet(buf, &c.geo)
	if err != nil {
		bad("%v", err)
		return
	}
	block := int64(c.geo.BlockBytes())
	size := c.size(&j)
	n := len(c.buckets)
	seq := c.newest.Seq + 1
	if amends {
		seq--
	}
	switch {
	case c.flying != nil:
		bad("while entry %d is in flight", c.flying.Seq)
	case r.Flags&blockdev.FUA == 0:
		bad("without FUA")
	case !c.flushed:
		bad("no flush has completed since the entry before")
	case j.Seq != seq:
		bad("seq %d behind %d", j.Seq, c.newest.Seq)
	case j.LastSeq < c.newest.LastSeq || j.LastSeq > j.Seq || j.Seq-j.LastSeq >= 32767:
		bad("last_seq %d of seq %d behind last_seq %d", j.LastSeq, j.Seq, c.newest.LastSeq)
	case j.Version != 1 || j.Bytes() > 32768 || within%block != 0 || within+size > c.geo.BucketBytes():
		bad("version %d, %d bytes at byte %d of its bucket", j.Version, j.Bytes(), within)
	case amends:
		// One sector, and nothing behind the header is changed: see amendLocked.
		if len(r.Buf) != c.Info().LogicalBlock || int(j.Keys) != int(c.newest.Keys) || !bytes.Equal(buf[240:j.Bytes()], c.bytes[240:j.Bytes()]) {
			bad("over the newest entry, which is %v", c.newest)
		}
		c.amended++
	case index == c.at && c.end >= 0:
		if within != c.end || int64(len(r.Buf)) != size {
			bad("%d bytes at byte %d of its bucket, the entry before ends at %d", len(r.Buf), within, c.end)
		}
	case index != (c.at+1)%n || within != 0:
		bad("in bucket %d at %d behind bucket %d", index, within, c.at)
	case int64(len(r.Buf)) != size:
		bad("%d bytes for %d", len(r.Buf), size)
	case c.most[index] >= c.newest.LastSeq && c.newest.Seq > 0:
		bad("over entry %d, which entry %d needs", c.most[index], c.newest.Seq)
	case c.distance(c.at, j.LastSeq) <= 2 && c.started && !c.first: // the first entry of a life has the bucket that is held for it
		bad("entering bucket %d with %d steps to the oldest that it needs", index, c.distance(c.at, j.LastSeq))
	}
	if err := j.EachKey(func(k *ondisk.Key) bool {
		if k.Size() == 0 || k.End() < uint64(k.Size()) {
			bad("key %v", k)
		}
		return true
	}); err != nil {
		bad("%v", err)
	}
	j.Data = nil
	if index != c.at && index == 0 {
		c.laps++
	}
	c.flying, c.flyingAt, c.flyBegin, c.flyEnd, c.flyBytes = &j, index, within, within+size, buf
	c.flushed = false
}
