package volume

import (
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// An op is a request that is not a read that hits. It takes a goroutine, but for most writes that stay in the cache, see
// fast.go. What it needs is its own and is used again.
type op struct {
	v     *Volume
	q     *queue
	req   *blockdev.Request
	conf  *conf
	why   bypass
	retry bool   // a hit that has to be read again
	run   func() // o.do

	io     group
	keys   []ondisk.Key
	in     cacheset.Insertion
	seq    uint64 // newest journal entry that has a part of what the request changed
	pieces []piece
	dirty  []span // live dirty parts of what a write covers

	below   bool    // it has begun to write to the backing device, and no flush has made that durable
	fails   uint64  // Volume.flushFails before
	acked   bool    // it counts in Volume.acks
	tidings tidings // of a flush

	dirtying bool          // it counts in dirtyState.writes
	placed   bool          // a write whose data went to the cache device with its batch, see fast.go
	since    time.Duration // when that was
	fills    []*fill
}

// newOp returns an op for a request, which uses c from now on.
func (v *Volume) newOp(q *queue, r *blockdev.Request, c *conf, why bypass, retry bool) *op {
	o := v.ops.get()
	if o.v == nil {
		o.v = v
		o.run = o.do
		o.io.init(v, &v.back, &v.cache)
		o.io.op = o
	}
	o.q, o.req, o.conf, o.why, o.retry, o.seq = q, r, c, why, retry, 0
	o.below, o.acked = false, false
	o.waitedFor(true)
	c.users.Add(1)
	return o
}

// waitedFor says whether a request waits for what the op does from now on: its waits are counted then.
func (o *op) waitedFor(yes bool) { o.io.request, o.in.Request = yes, yes }

// stalled counts a wait of a request that has begun at begin.
func (v *Volume) stalled(cause cacheset.Stall, begin time.Duration) {
	v.set.Stalled(cause, v.rt.Now()-begin)
}

func (v *Volume) putOp(o *op) {
	v.unuse(o.conf)
	o.q, o.req, o.conf = nil, nil, nil
	o.io.reset()
	o.keys, o.pieces, o.dirty = o.keys[:0], o.pieces[:0], o.dirty[:0]
	o.placed = false
	v.ops.put(o)
}

// do carries a request out.
func (o *op) do() {
	v := o.v
	defer v.running.Done()
	r := o.req
	switch {
	case r.Op == blockdev.OpFlush:
		r.Err = o.flush()
	case o.conf.detached:
		r.Err = o.uncached()
	case o.placed:
		r.Err = o.finish()
	case r.Op == blockdev.OpRead:
		o.read() // finishes the request when the data is there
		v.putOp(o)
		return
	default:
		r.Err = o.write()
	}
	q, acked := o.q, o.acked
	v.putOp(o)
	q.finish(r)
	if acked {
		v.acks.out.Add(1)
	}
}

// span returns what the request covers, in key sectors.
func (o *op) span() span {
	at := o.v.first + uint64(o.req.Off)/ondisk.SectorSize
	return span{at, at + uint64(o.req.Length())/ondisk.SectorSize}
}

// backOff returns where on the backing device a key sector lies, in bytes: the key space is the device's.
func backOff(sector uint64) int64 { return int64(sector) * ondisk.SectorSize }

// A bypass says why a request goes round the cache.
type bypass uint8

const (
	accepted bypass = iota
	bypassFull
	bypassMode
	bypassUnaligned
	bypassSequential
)

// bypassLocked decides whether a request may add to the cache; now is the time. Source: B 1.2.
func (q *queue) bypassLocked(r *blockdev.Request, c *conf, now time.Duration) bypass {
	v := q.v
	start := v.first + uint64(r.Off)/ondisk.SectorSize
	n := uint64(r.Length()) / ondisk.SectorSize
	why := accepted
	switch {
	case r.Op == blockdev.OpDiscard || r.Op == blockdev.OpWriteZeroes:
		return bypassMode // never in the cache
	case c.detaching:
		why = bypassMode
	case v.set.InUseLocked() > cutoffAdd:
		why = bypassFull
	case c.Mode == ondisk.ModeNone || c.Mode == ondisk.Writearound && r.Op == blockdev.OpWrite:
		why = bypassMode
	case start%v.block != 0 || n%v.block != 0:
		why = bypassUnaligned
	case c.SequentialCutoff != 0:
		if q.seq.sectors(start, n, now) >= uint64(c.SequentialCutoff)/ondisk.SectorSize {
			why = bypassSequential
		}
	}
	s := &v.stats
	switch why {
	case accepted:
		v.set.Age(n)
		return accepted
	case bypassFull:
		s.BypassFull++
		v.set.FullLocked(!v.flash && v.super.Load().State() == ondisk.StateClean)
	case bypassMode:
		s.BypassMode++
	case bypassUnaligned:
		s.BypassUnaligned++
	case bypassSequential:
		s.BypassSequential++
	}
	s.Bypassed += n
	return why
}
