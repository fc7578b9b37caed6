package nbd

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
)

const (
	minInput = 8 << 10   // bytes of a connection's input buffer at first
	maxInput = 256 << 10 // and once whole buffers keep coming

	// Requests are handed over when no more input is there, or when there are so many, or so much data.
	maxBatch      = 64
	maxBatchBytes = 512 << 10
)

// Clients send a write's header and its data with two system calls. A reader that has got the header alone looks for
// small data a few more times before it sleeps: the data is there within a microsecond or two, while falling asleep
// and being woken costs ten.
const (
	spinBelow = 64 << 10
	spinTries = 10
)

var (
	errDisconnect = errors.New("client said goodbye")
	errBadMagic   = errors.New("not a request: wrong magic number")
	errStalled    = errors.New("client stalled in the middle of a transfer")
)

// A request is one request of a client, from its header to its reply. They are reused.
type request struct {
	blockdev.Request // Owner points to the request itself

	header  header
	buf     *blockdev.Buffer // holds the data of a read or a write
	verdict verdict
	errno   uint32 // the answer, when the request was not submitted
	payload []byte // of the answer to a block status query
}

// A conn is one connection in its transmission phase.
//
// Three parties work on it: the reader, the queue's complete function, and the writer goroutine. Fields without a
// note belong to the reader. tx belongs to whoever set out.writing.
type conn struct {
	srv        *Server
	nc         net.Conn
	wire       wire
	export     *export
	geo        geometry
	structured bool
	contexts   []metaContext
	queue      blockdev.Queue
	started    time.Time
	account    *account // of srv.budget

	in         []byte // input buffer; what is in it between parses is less than one header
	have       int    // bytes in it
	pos        int    // bytes of it that are parsed
	cur        *request
	rest       []byte // the part of cur's payload that has not arrived
	drop       uint32 // bytes of a refused write's payload still to throw away
	batch      []*blockdev.Request
	batchBytes int64
	refused    []*request
	free       []*request
	room       int   // requests that may be taken before the limit has to be looked at again
	roomByte   int64 // the same for bytes

	out struct {
		mu         sync.Mutex
		done       []*request // finished and not yet given to the socket
		free       []*request
		writing    bool // somebody works on tx
		submitting bool // the reader will look at done after its Submit
		inflight   int  // requests that are parsed and not answered
		bytes      int64
		waiting    bool // the reader waits on changed
		changed    sync.Cond
	}
	tx struct {
		batch  []*request
		pieces [][]byte // what is still to be sent
		base   [][]byte // the array behind pieces
		small  []byte   // replies without data
		stats  Stats
		seq    uint64 // number of this batch, from 1
	}
	wake     chan struct{}  // to the writer goroutine; capacity 1
	writerUp bool           // guarded by out.mu: the writer goroutine was started
	writer   sync.WaitGroup // and block status queries

	stats    counters
	dead     atomic.Bool   // given up: nothing more is sent
	cancel   chan struct{} // closed when given up
	stopping atomic.Bool   // graceful end asked for

	// For the watchdog: which transfer is waiting for the client (0: none), and the bytes it has moved.
	rxFrame, rxBytes, txFrame, txBytes atomic.Uint64
	frames                             uint64                 // requests begun
	watch                              struct{ rx, tx stall } // guarded by Server.mu
}

func newConn(s *Server, nc net.Conn, h *handshake) *conn {
	c := &conn{
		srv: s, nc: nc, export: h.export, geo: h.geo,
		structured: h.structured, contexts: h.contexts, started: time.Now(), account: newAccount(),
		in: make([]byte, minInput), wake: make(chan struct{}, 1), cancel: make(chan struct{}),
	}
	c.wire = newWire(nc, c.dry)
	c.out.changed.L = &c.out.mu
	c.room, c.roomByte = s.opts.MaxInFlight, s.opts.MaxInFlightBytes
	return c
}

// run serves the connection until its end, and waits for all its requests.
func (c *conn) run() error {
	err := c.read()
	c.submit()
	if c.cur != nil && c.cur.buf != nil { // its payload never came
		c.srv.budget.give(c.account, int64(len(c.cur.Buf)))
		c.cur.buf.Release()
	}
	c.rxFrame.Store(0)
	c.out.mu.Lock()
	for c.out.inflight > 0 || c.out.writing {
		c.out.waiting = true
		c.out.changed.Wait()
	}
	c.out.waiting = false
	c.out.mu.Unlock()
	err = errors.Join(err, c.queue.Close())
	close(c.wake)
	c.writer.Wait()
	if c.stopping.Load() && !c.dead.Load() {
		linger(c.nc)
	}
	c.nc.Close()
	return err
}

// read takes requests until the client leaves, breaks the protocol, or stop is called.
func (c *conn) read() error {
	for {
		tries := 0
		if len(c.rest) > 0 && len(c.rest) <= spinBelow {
			tries = spinTries
		}
		n, err := c.wire.readv(c.rest, c.in[c.have:], tries)
		if err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) && c.stopping.Load() {
				return nil
			}
			return err
		}
		full := n == len(c.rest)+len(c.in)-c.have
		if c.rxFrame.Load() != 0 {
			c.rxBytes.Add(uint64(n))
		}
		if err := c.take(n); err != nil {
			return err
		}
		if len(c.batch)+len(c.refused) >= maxBatch || c.batchBytes >= maxBatchBytes {
			c.submit()
		}
		var frame uint64
		if c.cur != nil {
			frame = c.frames
		}
		if frame != c.rxFrame.Load() {
			c.rxFrame.Store(frame)
		}
		if full && len(c.in) < maxInput {
			grown := make([]byte, 2*len(c.in))
			copy(grown, c.in[:c.have])
			c.in = grown
		}
	}
}

// dry is called when no more input is there. It hands over what has been collected, and returns whether that was
// more than one request: then it took a while, and the next ones may have come.
func (c *conn) dry() bool {
	n := len(c.batch) + len(c.refused)
	c.submit()
	return n > 1
}

// take parses n bytes that readv has put behind what was there.
func (c *conn) take(n int) error {
	if len(c.rest) > 0 {
		if n < len(c.rest) {
			c.rest = c.rest[n:]
			return nil
		}
		n -= len(c.rest)
		c.payloadDone()
	}
	c.have += n
	c.pos = 0
	for {
		if c.drop > 0 {
			k := min(int(c.drop), c.have-c.pos)
			c.pos += k
			c.drop -= uint32(k)
			if c.drop > 0 {
				break
			}
			c.refused = append(c.refused, c.cur)
			c.cur = nil
		}
		if c.have-c.pos < requestSize {
			break
		}
		h, ok := decodeRequest(c.in[c.pos:])
		if !ok {
			return errBadMagic
		}
		c.pos += requestSize
		if h.cmd == cmdDisc {
			return errDisconnect
		}
		if err := c.begin(h); err != nil {
			return err
		}
		if len(c.rest) > 0 {
			break // the input is used up
		}
	}
	copy(c.in, c.in[c.pos:c.have])
	c.have -= c.pos
	return nil
}

// begin starts a request whose header has been parsed.
func (c *conn) begin(h header) error {
	v, errno := c.geo.check(h, c.structured, len(c.contexts) > 0)
	var bytes int64
	if v == submit && (h.cmd == cmdRead || h.cmd == cmdWrite) {
		bytes = int64(h.length)
	}
	if err := c.reserve(bytes); err != nil {
		return err
	}
	r := c.newRequest()
	r.header, r.verdict, r.errno = h, v, errno
	c.frames++
	if v == submit {
		h.fill(&r.Request)
		if bytes > 0 {
			c.batchBytes += bytes
			r.buf = c.srv.pool.Get(int(bytes))
			r.Buf = r.buf.Data[:bytes]
		}
	}
	switch {
	case h.cmd == cmdWrite && bytes > 0:
		k := copy(r.Buf, c.in[c.pos:c.have])
		c.pos += k
		c.cur, c.rest = r, r.Buf[k:]
		if len(c.rest) == 0 {
			c.payloadDone()
		}
	case h.cmd == cmdWrite && h.length > 0:
		c.cur, c.drop = r, h.length
	case v == submit:
		c.batch = append(c.batch, &r.Request)
	case v == queryStatus:
		c.out.mu.Lock()
		c.out.inflight++
		c.out.mu.Unlock()
		c.writer.Go(func() { c.queryStatus(r) })
	default:
		c.refused = append(c.refused, r)
	}
	return nil
}

func (c *conn) payloadDone() {
	c.batch = append(c.batch, &c.cur.Request)
	c.cur, c.rest = nil, nil
}

// reserve waits until one more request, with that many bytes of data, is within all limits. What was parsed
// before is submitted first, so that it can make room.
func (c *conn) reserve(bytes int64) error {
	c.room--
	c.roomByte -= bytes
	if c.room < 0 || c.roomByte < 0 {
		c.room++
		c.roomByte += bytes
		c.submit()
		if err := c.waitRoom(bytes); err != nil {
			return err
		}
		c.room--
		c.roomByte -= bytes
	}
	if bytes > 0 && !c.srv.budget.tryTake(c.account, bytes) {
		c.submit()
		c.room-- // submit looked at the limits anew
		c.roomByte -= bytes
		if !c.srv.budget.take(c.account, bytes, c.cancel) {
			return net.ErrClosed
		}
	}
	return nil
}

// waitRoom waits until the connection's own limits allow a request. One request is allowed whatever its size.
func (c *conn) waitRoom(bytes int64) error {
	o := &c.out
	o.mu.Lock()
	defer o.mu.Unlock()
	for {
		if c.dead.Load() {
			return net.ErrClosed
		}
		c.room, c.roomByte = c.srv.opts.MaxInFlight-o.inflight, c.srv.opts.MaxInFlightBytes-o.bytes
		if o.inflight == 0 || c.room > 0 && c.roomByte >= bytes {
			return nil
		}
		o.waiting = true
		o.changed.Wait()
	}
}

// submit hands the batch to the export, and sends what was finished meanwhile.
func (c *conn) submit() {
	if len(c.batch) == 0 && len(c.refused) == 0 {
		return
	}
	var bytes int64
	for _, q := range c.batch {
		bytes += int64(len(q.Buf))
	}
	c.batchBytes = 0
	o := &c.out
	o.mu.Lock()
	o.inflight += len(c.batch) + len(c.refused)
	o.bytes += bytes
	o.done = append(o.done, c.refused...)
	o.submitting = true
	o.mu.Unlock()
	if len(c.batch) > 0 {
		c.queue.Submit(c.batch)
	}
	o.mu.Lock()
	o.submitting = false
	write := len(o.done) > 0 && !o.writing
	if write {
		o.writing = true
	}
	o.mu.Unlock()
	c.batch, c.refused = c.batch[:0], c.refused[:0]
	if write {
		c.write(false)
	}
	o.mu.Lock()
	c.room, c.roomByte = c.srv.opts.MaxInFlight-o.inflight, c.srv.opts.MaxInFlightBytes-o.bytes
	if len(c.free) == 0 {
		c.free, o.free = o.free, c.free
	}
	o.mu.Unlock()
}

func (c *conn) newRequest() *request {
	if n := len(c.free); n > 0 {
		r := c.free[n-1]
		c.free = c.free[:n-1]
		return r
	}
	r := new(request)
	r.Owner = r
	return r
}

// stop ends the connection in good order: nothing more is read, what was read is answered.
func (c *conn) stop() {
	c.stopping.Store(true)
	c.nc.SetReadDeadline(time.Unix(1, 0))
}

// giveUp ends the connection at once. What is in flight is finished, but not answered.
func (c *conn) giveUp() {
	c.out.mu.Lock()
	first := !c.dead.Swap(true)
	c.out.changed.Broadcast()
	c.out.mu.Unlock()
	if first {
		close(c.cancel)
		c.nc.Close()
	}
}

// linger closes the sending side and waits a moment for the client to close its own: closing a TCP connection
// with unread input would destroy replies that are still on their way.
func linger(nc net.Conn) {
	w, ok := nc.(interface{ CloseWrite() error })
	if !ok || w.CloseWrite() != nil {
		return
	}
	nc.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
	var b [4096]byte
	for {
		if _, err := nc.Read(b[:]); err != nil {
			return
		}
	}
}

// stall remembers when the watchdog saw a transfer first.
type stall struct {
	frame, bytes uint64
	since        time.Time
}

// stallProgress is what a transfer must move in each StallTimeout to be let go on, in bytes.
const stallProgress = 1 << 20

func (s *stall) check(frame, bytes uint64, now time.Time, limit time.Duration) bool {
	switch {
	case frame == 0 || frame != s.frame:
	case now.Sub(s.since) < limit:
		return true
	case bytes-s.bytes < stallProgress:
		return false
	}
	*s = stall{frame, bytes, now}
	return true
}

// watchLocked gives the connection up if its client has stalled.
func (c *conn) watchLocked(now time.Time) error {
	limit := c.srv.opts.StallTimeout
	if !c.watch.rx.check(c.rxFrame.Load(), c.rxBytes.Load(), now, limit) {
		return fmt.Errorf("%w: sending a write", errStalled)
	}
	if !c.watch.tx.check(c.txFrame.Load(), c.txBytes.Load(), now, limit) {
		return fmt.Errorf("%w: taking replies", errStalled)
	}
	return nil
}
