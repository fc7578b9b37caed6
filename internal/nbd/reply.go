package nbd

import (
	"errors"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// complete takes finished requests from the queue. It never waits: what the socket does not take at once is left
// to the writer goroutine.
func (c *conn) complete(done []*blockdev.Request) {
	o := &c.out
	o.mu.Lock()
	for _, q := range done {
		o.done = append(o.done, q.Owner.(*request))
	}
	if o.writing || o.submitting {
		o.mu.Unlock()
		return
	}
	o.writing = true
	o.mu.Unlock()
	c.write(false)
}

// write sends the replies of all that is done, until nothing is left. The caller has set out.writing; it is unset
// on return, unless the socket was full and wait is not set: then the writer goroutine goes on.
func (c *conn) write(wait bool) {
	for len(c.tx.pieces) > 0 || c.nextBatch() {
		for len(c.tx.pieces) > 0 {
			if c.dead.Load() {
				c.tx.pieces = nil
				break
			}
			if wait {
				c.txFrame.Store(c.tx.seq)
			}
			n, again, err := c.wire.writev(c.tx.pieces, wait)
			if wait {
				c.txBytes.Add(uint64(n))
			}
			if err != nil {
				c.giveUp()
				continue
			}
			c.tx.pieces = skip(c.tx.pieces, n)
			if again && !wait {
				c.wakeWriter()
				return
			}
		}
	}
}

// wakeWriter passes out.writing on to the writer goroutine, which is started when it is needed first.
func (c *conn) wakeWriter() {
	c.out.mu.Lock()
	start := !c.writerUp
	c.writerUp = true
	c.out.mu.Unlock()
	if start {
		c.writer.Go(func() {
			for range c.wake {
				c.write(true)
			}
		})
	}
	c.wake <- struct{}{} // capacity 1, and only the holder of out.writing sends: never waits
}

// nextBatch lets go of what has been sent, and prepares what is done now. It returns false, and unsets
// out.writing, if nothing is.
func (c *conn) nextBatch() bool {
	var bytes int64
	for _, r := range c.tx.batch {
		if r.buf != nil {
			bytes += int64(len(r.Buf))
			r.buf.Release()
			r.buf = nil
		}
		r.Buf, r.Err, r.payload = nil, nil, nil
	}
	if bytes > 0 {
		c.srv.budget.give(c.account, bytes)
	}
	o := &c.out
	o.mu.Lock()
	o.inflight -= len(c.tx.batch)
	o.bytes -= bytes
	o.free = append(o.free, c.tx.batch...)
	c.tx.batch, o.done = o.done, c.tx.batch[:0]
	more := len(c.tx.batch) > 0
	if more {
		c.tx.seq++
	} else {
		o.writing = false
		c.txFrame.Store(0)
	}
	if o.waiting {
		o.waiting = false
		o.changed.Broadcast()
	}
	o.mu.Unlock()
	if more {
		c.encode()
	}
	return more
}

// encode makes the pieces of the replies to tx.batch. Replies without data that follow each other become one piece.
func (c *conn) encode() {
	t := &c.tx
	t.pieces, t.small = t.base[:0], t.small[:0]
	start := 0
	for _, r := range t.batch {
		errno := r.errno
		if r.verdict == submit {
			errno = errnoOf(r.Err)
		}
		st := &t.stats[opOf(r.header.cmd)]
		st.Requests++
		if errno != 0 {
			st.Errors++
		} else if r.verdict != refuse {
			st.Bytes += uint64(r.header.length)
		}

		var piece []byte
		switch cookie := r.header.cookie; {
		case r.header.cmd == cmdRead && errno == 0 && r.buf != nil:
			n := len(r.Buf)
			if c.structured {
				piece = r.buf.WithHeader(offsetDataSize, n)
				putOffsetData(piece, cookie, r.header.offset, uint32(n))
			} else {
				piece = r.buf.WithHeader(simpleSize, n)
				putSimple(piece, 0, cookie)
			}
		case r.payload != nil && errno == 0:
			piece = r.payload
		case c.structured && (r.header.cmd == cmdRead || r.header.cmd == cmdBlockStatus):
			k := len(t.small)
			if errno == 0 {
				t.small = append(t.small, make([]byte, chunkSize)...)
				putChunk(t.small[k:], chunkFlagDone, chunkNone, cookie, 0)
			} else {
				t.small = append(t.small, make([]byte, errorChunkSize)...)
				putErrorChunk(t.small[k:], cookie, errno)
			}
			continue
		default:
			k := len(t.small)
			t.small = append(t.small, make([]byte, simpleSize)...)
			putSimple(t.small[k:], errno, cookie)
			continue
		}
		if len(t.small) > start {
			t.pieces = append(t.pieces, t.small[start:])
			start = len(t.small)
		}
		t.pieces = append(t.pieces, piece)
	}
	if len(t.small) > start {
		t.pieces = append(t.pieces, t.small[start:])
	}
	t.base = t.pieces
	c.stats.add(&t.stats)
	t.stats = Stats{}
}

// maxExtents is the most extents of one context in a reply.
const maxExtents = 4096

// queryStatus answers a block status request. It runs on a goroutine of its own.
func (c *conn) queryStatus(r *request) {
	payload, err := c.blockStatus(r.header)
	r.payload, r.errno = payload, errnoOf(err)
	o := &c.out
	o.mu.Lock()
	o.done = append(o.done, r)
	write := !o.writing && !o.submitting
	if write {
		o.writing = true
	}
	o.mu.Unlock()
	if write {
		c.write(false)
	}
}

var errBadExtents = errors.New("nbd: export gave extents outside the range asked for")

// blockStatus returns the chunks of the reply to a block status request, one for each selected context.
func (c *conn) blockStatus(h header) ([]byte, error) {
	status := c.export.status
	limit := maxExtents
	if h.flags&cmdFlagReqOne != 0 {
		limit = 1
	}
	var out []byte
	var extents []Extent
	for i, ctx := range c.contexts {
		var err error
		extents, err = status.AppendExtents(extents[:0], ctx.name, int64(h.offset), int64(h.length), limit)
		if err != nil {
			return nil, err
		}
		extents = merged(extents)
		var covered int64
		for _, e := range extents {
			if e.Length <= 0 || e.Length > int64(h.length)-covered {
				return nil, errBadExtents
			}
			covered += e.Length
		}
		if covered == 0 || len(extents) > limit {
			return nil, errBadExtents
		}
		var flags uint16
		if i == len(c.contexts)-1 {
			flags = chunkFlagDone
		}
		k := len(out)
		out = append(out, make([]byte, chunkSize+4)...)
		putChunk(out[k:], flags, chunkBlockStatus, h.cookie, uint32(4+8*len(extents)))
		be.PutUint32(out[k+chunkSize:], ctx.id)
		for _, e := range extents {
			out = be.AppendUint32(out, uint32(e.Length))
			out = be.AppendUint32(out, e.Flags)
		}
	}
	return out, nil
}

// merged joins neighbours in the same state, in place.
func merged(in []Extent) []Extent {
	out := in[:0]
	for _, e := range in {
		if n := len(out); n > 0 && out[n-1].Flags == e.Flags {
			out[n-1].Length += e.Length
		} else {
			out = append(out, e)
		}
	}
	return out
}
