package nbd

import (
	"fmt"
	"net"
	"sync"
	"syscall"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// A part is a request as the server sees it: a whole blockdev.Request, or a piece of one.
type part struct {
	q     *clientQueue
	req   *blockdev.Request
	whole *whole // nil: this part is all of req
	buf   []byte
	off   uint64
	n     uint32
	cmd   uint16
	flags uint16

	slot, gen     uint32
	sent, replied bool
	got           uint32 // bytes of a read that have come
	err           error
}

// whole collects the parts of one request.
type whole struct {
	left  int
	err   error
	flush bool // to be done once all is written
}

// A link is one connection of a Client.
type link struct {
	nc         net.Conn
	wire       wire
	structured bool
	reader     sync.WaitGroup
	writer     sync.WaitGroup
	wake       chan struct{} // to the writer goroutine; capacity 1

	mu      sync.Mutex
	err     error   // set once the connection is lost
	slots   []*part // by slot; the cookie is the slot and its generation
	unused  []uint32
	todo    []*part   // to be sent
	writing bool      // somebody works on tx
	idle    sync.Cond // writing was unset
	closed  bool

	tx struct { // belongs to whoever set writing
		batch  []*part
		pieces [][]byte
		base   [][]byte
		small  []byte
		queues []*clientQueue
	}
	rx struct { // belongs to the reader
		in     []byte
		have   int
		pos    int
		cur    *part
		rest   []byte
		last   bool // cur is finished when rest has come
		queues []*clientQueue
	}
}

const clientInput = 64 << 10 // bytes of the input buffer; more than the longest chunk that is not data

func newLink(nc net.Conn, structured bool) *link {
	l := &link{nc: nc, wire: newWire(nc, func() bool { return false }), structured: structured, wake: make(chan struct{}, 1)}
	l.rx.in = make([]byte, clientInput)
	l.idle.L = &l.mu
	l.reader.Go(l.read)
	l.writer.Go(func() {
		for range l.wake {
			l.write(true)
		}
	})
	return l
}

// addLocked gives p a slot and lists it for sending.
func (l *link) addLocked(p part) {
	var slot *part
	if n := len(l.unused); n > 0 {
		slot = l.slots[l.unused[n-1]]
		p.slot, p.gen = l.unused[n-1], slot.gen+1
		l.unused = l.unused[:n-1]
	} else {
		slot = new(part)
		p.slot = uint32(len(l.slots))
		l.slots = append(l.slots, slot)
	}
	*slot = p
	l.todo = append(l.todo, slot)
}

func (p *part) cookie() uint64 { return uint64(p.gen)<<32 | uint64(p.slot) }

// findLocked returns the part that a reply belongs to.
func (l *link) findLocked(cookie uint64) *part {
	if i := uint32(cookie); int64(i) < int64(len(l.slots)) {
		if p := l.slots[i]; p.req != nil && p.gen == uint32(cookie>>32) && !p.replied {
			return p
		}
	}
	return nil
}

// repliedLocked ends a part for which all of the reply has come, or none will. It is over once it also has been
// sent: a server may refuse a write before it has read it.
func (l *link) repliedLocked(p *part, queues []*clientQueue) []*clientQueue {
	p.replied = true
	if !p.sent {
		return queues
	}
	return l.endLocked(p, queues)
}

// endLocked frees the part's slot and, if it was the last of its request, adds the queue to those to be delivered.
func (l *link) endLocked(p *part, queues []*clientQueue) []*clientQueue {
	q, r, w, err := p.q, p.req, p.whole, p.err
	*p = part{slot: p.slot, gen: p.gen}
	l.unused = append(l.unused, p.slot)
	if w != nil {
		if w.err == nil {
			w.err = err
		}
		if w.left--; w.left > 0 {
			return queues
		}
		err = w.err
		if err == nil {
			err = l.err
		}
		if w.flush && err == nil {
			l.addLocked(part{q: q, req: r, cmd: cmdFlush})
			return queues
		}
	}
	r.Err = err
	q.add(r)
	if !q.touched {
		q.touched = true
		queues = append(queues, q)
	}
	return queues
}

// deliver calls the complete functions of the queues that have something.
func (l *link) deliver(queues []*clientQueue) []*clientQueue {
	if len(queues) == 0 {
		return queues
	}
	l.mu.Lock()
	for _, q := range queues {
		q.touched = false
	}
	l.mu.Unlock()
	for i, q := range queues {
		q.deliver()
		queues[i] = nil
	}
	return queues[:0]
}

// kick sends what is listed, unless somebody is at it.
func (l *link) kick() {
	l.mu.Lock()
	if l.writing || len(l.todo) == 0 {
		l.mu.Unlock()
		return
	}
	l.writing = true
	l.mu.Unlock()
	l.write(false)
}

// write sends what is listed until nothing is left, or leaves it to the writer goroutine when the socket is full
// and wait is not set.
func (l *link) write(wait bool) {
	t := &l.tx
	for len(t.pieces) > 0 || l.nextBatch() {
		for len(t.pieces) > 0 {
			n, again, err := l.wire.writev(t.pieces, wait)
			if err != nil {
				l.nc.Close() // the reader does the rest
				t.pieces = nil
				break
			}
			t.pieces = skip(t.pieces, n)
			if again && !wait {
				l.wake <- struct{}{} // capacity 1, and only the holder of writing sends
				return
			}
		}
	}
}

// nextBatch notes the batch as sent and prepares the next. It returns false, and unsets writing, if there is none.
func (l *link) nextBatch() bool {
	t := &l.tx
	l.mu.Lock()
	for _, p := range t.batch {
		p.sent = true
		if p.replied {
			t.queues = l.endLocked(p, t.queues)
		}
	}
	if len(t.queues) > 0 {
		t.batch = t.batch[:0]
		l.mu.Unlock()
		t.queues = l.deliver(t.queues)
		l.mu.Lock()
	}
	t.batch, l.todo = l.todo, t.batch[:0]
	if len(t.batch) == 0 {
		l.writing = false
		l.idle.Broadcast()
		l.mu.Unlock()
		return false
	}
	t.pieces, t.small = t.base[:0], t.small[:0]
	start := 0
	for _, p := range t.batch {
		k := len(t.small)
		t.small = append(t.small, make([]byte, requestSize)...)
		header{p.flags, p.cmd, p.cookie(), p.off, p.n}.encode(t.small[k:])
		if p.cmd == cmdWrite {
			t.pieces = append(t.pieces, t.small[start:], p.buf)
			start = len(t.small)
		}
	}
	if len(t.small) > start {
		t.pieces = append(t.pieces, t.small[start:])
	}
	t.base = t.pieces
	if l.err != nil {
		t.pieces = nil
	}
	l.mu.Unlock()
	return true
}

// read takes replies until the connection ends, and then fails all that is unanswered.
func (l *link) read() {
	err := l.readAll()
	l.nc.Close()
	l.mu.Lock()
	l.err = fmt.Errorf("nbd: connection to %s lost: %w (%w)", remote(l.nc), syscall.EIO, err)
	for _, p := range l.slots {
		if p.req != nil && !p.replied {
			p.err = l.err
			l.rx.queues = l.repliedLocked(p, l.rx.queues)
		}
	}
	l.mu.Unlock()
	l.rx.queues = l.deliver(l.rx.queues)
}

func (l *link) readAll() error {
	x := &l.rx
	for {
		n, err := l.wire.readv(x.rest, x.in[x.have:], 0)
		if err != nil {
			return err
		}
		l.mu.Lock()
		err = l.takeLocked(n)
		l.mu.Unlock()
		x.queues = l.deliver(x.queues)
		if err != nil {
			return err
		}
		l.kick()
	}
}

// takeLocked parses n bytes that readv has put behind what was there.
func (l *link) takeLocked(n int) error {
	x := &l.rx
	if len(x.rest) > 0 {
		if n < len(x.rest) {
			x.rest = x.rest[n:]
			return nil
		}
		n -= len(x.rest)
		l.dataDoneLocked()
	}
	x.have += n
	x.pos = 0
	for len(x.rest) == 0 {
		used, err := l.frameLocked(x.in[x.pos:x.have])
		if err != nil {
			return err
		}
		if used == 0 {
			break
		}
		x.pos += used
		if x.cur != nil {
			k := copy(x.rest, x.in[x.pos:x.have])
			x.pos += k
			if x.rest = x.rest[k:]; len(x.rest) == 0 {
				l.dataDoneLocked()
			}
		}
	}
	copy(x.in, x.in[x.pos:x.have])
	x.have -= x.pos
	return nil
}

func (l *link) dataDoneLocked() {
	x := &l.rx
	p, last := x.cur, x.last
	x.cur, x.rest = nil, nil
	if last {
		x.queues = l.repliedLocked(p, x.queues)
	}
}

// frameLocked takes one reply, or one chunk, from the front of b. It returns the bytes used, 0 if more are needed.
// If data follows, rx.cur and rx.rest say where it belongs.
func (l *link) frameLocked(b []byte) (int, error) {
	if len(b) < simpleSize {
		return 0, nil
	}
	x := &l.rx
	switch be.Uint32(b) {
	case magicSimple:
		p := l.findLocked(be.Uint64(b[8:]))
		if p == nil {
			return 0, protocolError("a reply to no request")
		}
		if p.got != 0 || p.err != nil || p.cmd == cmdRead && l.structured {
			return 0, protocolError("a simple reply where a structured one is due")
		}
		p.err = errorOf(be.Uint32(b[4:]))
		if p.cmd == cmdRead && p.err == nil {
			p.got = p.n
			x.cur, x.rest, x.last = p, p.buf, true
			return simpleSize, nil
		}
		x.queues = l.repliedLocked(p, x.queues)
		return simpleSize, nil
	case magicStructured:
		if !l.structured {
			return 0, protocolError("a structured reply that was not asked for")
		}
		return l.chunkLocked(b)
	}
	return 0, protocolError("not a reply")
}

func (l *link) chunkLocked(b []byte) (int, error) {
	if len(b) < chunkSize {
		return 0, nil
	}
	x := &l.rx
	done := be.Uint16(b[4:])&chunkFlagDone != 0
	typ := be.Uint16(b[6:])
	length := be.Uint32(b[16:])
	p := l.findLocked(be.Uint64(b[8:]))
	if p == nil {
		return 0, protocolError("a chunk of no request")
	}
	if typ == chunkOffsetData {
		if p.cmd != cmdRead || length < 9 || length-8 > p.n-p.got {
			return 0, protocolError("%d bytes of data for a request of %d", length-8, p.n)
		}
		if len(b) < offsetDataSize {
			return 0, nil
		}
		n := length - 8
		at := be.Uint64(b[chunkSize:]) - p.off
		if at > uint64(p.n-n) {
			return 0, protocolError("data outside the range asked for")
		}
		p.got += n
		if done && p.err == nil && p.got != p.n {
			return 0, protocolError("only %d of %d bytes", p.got, p.n)
		}
		x.cur, x.rest, x.last = p, p.buf[at:at+uint64(n)], done
		return offsetDataSize, nil
	}

	if length > maxMessageLen+64 {
		return 0, protocolError("a chunk of type %d and %d bytes", typ, length)
	}
	if len(b) < chunkSize+int(length) {
		return 0, nil
	}
	body := b[chunkSize : chunkSize+length]
	switch {
	case typ == chunkNone:
		if length != 0 || !done {
			return 0, protocolError("bad final chunk")
		}
	case typ == chunkOffsetHole:
		if p.cmd != cmdRead || length != 12 {
			return 0, protocolError("bad hole")
		}
		n, at := be.Uint32(body[8:]), be.Uint64(body)-p.off
		if n == 0 || n > p.n-p.got || at > uint64(p.n-n) {
			return 0, protocolError("hole outside the range asked for")
		}
		p.got += n
		clear(p.buf[at : at+uint64(n)])
	case typ&chunkErrBit != 0:
		if length < 6 || uint32(be.Uint16(body[4:])) > length-6 {
			return 0, protocolError("bad error chunk")
		}
		if p.err == nil {
			if p.err = errorOf(be.Uint32(body)); p.err == nil {
				return 0, protocolError("an error chunk without an error")
			}
		}
	default:
		return 0, protocolError("unexpected chunk of type %d", typ)
	}
	if done {
		if p.cmd == cmdRead && p.err == nil && p.got != p.n {
			return 0, protocolError("only %d of %d bytes", p.got, p.n)
		}
		x.queues = l.repliedLocked(p, x.queues)
	}
	return chunkSize + int(length), nil
}

// close says goodbye if nothing is in the way, disconnects, and waits for the goroutines.
func (l *link) close() {
	l.mu.Lock()
	first := !l.closed
	l.closed = true
	goodbye := first && !l.writing && l.err == nil
	if goodbye {
		l.writing = true
	}
	l.mu.Unlock()
	if !first {
		return
	}
	if goodbye {
		var b [requestSize]byte
		header{cmd: cmdDisc}.encode(b[:])
		l.wire.writev([][]byte{b[:]}, false)
	}
	l.nc.Close()
	if goodbye {
		l.write(false) // what was listed meanwhile fails
	}
	l.reader.Wait()
	l.mu.Lock()
	for l.writing {
		l.idle.Wait()
	}
	l.mu.Unlock()
	close(l.wake)
	l.writer.Wait()
}
