package nbd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// DialOptions modify Dial. The zero value is the default.
type DialOptions struct {
	// Connections is how many connections to open; queues are spread over them. Default 1; more only if the
	// server says that a flush on one covers all.
	Connections int
	// Timeout bounds connecting and the handshake. Default 30 s.
	Timeout time.Duration
	// StallTimeout is how long a TCP server's host may leave what is sent to it unacknowledged. Default 60 s.
	StallTimeout time.Duration
	// SimpleReplies keeps structured replies from being asked for.
	SimpleReplies bool
}

// A Client is an export of an NBD server as a blockdev.Device. When a connection is lost, all its requests, now and
// later, fail with an error that matches syscall.EIO.
//
// What the server cannot do is made up for where that is possible: FUA by a flush, write zeroes by writing,
// requests larger than its limit by several.
type Client struct {
	info  blockdev.Info
	neg   negotiated
	links []*link
	next  atomic.Uint32
	refs  atomic.Int32 // 1 for the open device, 1 for each queue; the connections end at 0
	shut  atomic.Bool
}

var _ blockdev.Device = (*Client)(nil)

// Dial connects to an export by its name, which may be empty.
func Dial(ctx context.Context, network, addr, export string, o DialOptions) (*Client, error) {
	def(&o.Connections, 1)
	def(&o.Timeout, 30*time.Second)
	def(&o.StallTimeout, 60*time.Second)
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	c := newClient()
	for len(c.links) < o.Connections {
		d := net.Dialer{KeepAliveConfig: keepAlive}
		nc, err := d.DialContext(ctx, network, addr)
		if err != nil {
			c.Close()
			return nil, fmt.Errorf("nbd: %w", err)
		}
		setSocketOptions(nc, o.StallTimeout)
		if err := c.add(ctx, nc, export, !o.SimpleReplies); err != nil {
			c.Close()
			return nil, fmt.Errorf("connect to %s, export %q: %w", addr, export, err)
		}
		if c.neg.flags&flagMultiConn == 0 {
			break
		}
	}
	c.describe(Address{network, addr, export}.String())
	return c, nil
}

func newClient() *Client {
	c := new(Client)
	c.refs.Store(1)
	return c
}

// DialURI is Dial for what ParseURI understands.
func DialURI(ctx context.Context, uri string, o DialOptions) (*Client, error) {
	a, err := ParseURI(uri)
	if err != nil {
		return nil, err
	}
	return Dial(ctx, a.Network, a.Addr, a.Export, o)
}

// NewClient does the handshake on a connection that exists, and owns it from then on.
func NewClient(ctx context.Context, nc net.Conn, export string, o DialOptions) (*Client, error) {
	c := newClient()
	if err := c.add(ctx, nc, export, !o.SimpleReplies); err != nil {
		return nil, err
	}
	c.describe(export)
	return c, nil
}

// List asks a server for the names of its exports.
func List(ctx context.Context, network, addr string) ([]string, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, fmt.Errorf("nbd: %w", err)
	}
	defer nc.Close()
	defer deadline(ctx, nc)()
	return (&clientHandshake{rw: nc}).list()
}

// deadline makes the end of ctx interrupt I/O on nc until the returned function is called.
func deadline(ctx context.Context, nc net.Conn) (release func()) {
	stop := context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
	return func() { stop() }
}

// add does the handshake on one more connection. It closes nc if that fails.
func (c *Client) add(ctx context.Context, nc net.Conn, export string, structured bool) error {
	release := deadline(ctx, nc)
	neg, err := (&clientHandshake{rw: nc}).run(export, structured)
	release()
	if err == nil && len(c.links) > 0 && (neg.size != c.neg.size || neg.flags != c.neg.flags) {
		err = errors.New("nbd: the export has changed between two connections")
	}
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		nc.Close()
		return err
	}
	nc.SetDeadline(time.Time{})
	c.neg = neg
	c.links = append(c.links, newLink(nc, neg.structured))
	return nil
}

func (c *Client) describe(name string) {
	block := uint32(max(512, int(c.neg.min)))
	c.neg.max &^= block - 1
	c.neg.max = max(c.neg.max, block)
	pref := powerOfTwo(int(min(c.neg.pref, 1<<20)), int(block), 1<<20)
	c.info = blockdev.Info{
		Name:          name,
		Size:          int64(c.neg.size &^ uint64(block-1)),
		LogicalBlock:  int(block),
		PhysicalBlock: pref,
		MaxTransfer:   int(min(c.neg.max, 1<<30)),
		BufferAlign:   1,
		Rotational:    c.has(flagRotational),
		ReadOnly:      c.has(flagReadOnly),
		CanDiscard:    c.has(flagSendTrim),
		Direct:        true,
		Engine:        "nbd",
	}
}

// has reports whether the server has set a transmission flag.
func (c *Client) has(flag uint16) bool { return c.neg.flags&flagHasFlags != 0 && c.neg.flags&flag != 0 }

// Info describes the export. LogicalBlock is at least 512, Size rounded down to it.
func (c *Client) Info() blockdev.Info { return c.info }

// NewQueue makes a queue on one of the connections. Depth is left to the server, which takes no more requests than
// it wants to.
func (c *Client) NewQueue(_ int, complete func([]*blockdev.Request)) (blockdev.Queue, error) {
	if c.shut.Load() {
		return nil, blockdev.ErrClosed
	}
	c.refs.Add(1)
	q := &clientQueue{c: c, l: c.links[int(c.next.Add(1)-1)%len(c.links)], complete: complete}
	q.idle.L = &q.mu
	return q, nil
}

// Close says goodbye and disconnects, once all queues are closed.
func (c *Client) Close() error {
	if c.shut.Swap(true) {
		return blockdev.ErrClosed
	}
	c.release()
	return nil
}

func (c *Client) release() {
	if c.refs.Add(-1) == 0 {
		for _, l := range c.links {
			l.close()
		}
	}
}

// Disconnect ends the connections at once. Requests in flight, and later ones, fail.
func (c *Client) Disconnect() {
	for _, l := range c.links {
		l.nc.Close()
	}
}

// A clientQueue is a queue of a Client: it belongs to one connection.
type clientQueue struct {
	c        *Client
	l        *link
	complete func([]*blockdev.Request)

	mu         sync.Mutex // taken inside link.mu
	idle       sync.Cond
	done       []*blockdev.Request
	spare      []*blockdev.Request
	delivering bool
	pending    int
	closed     bool
	touched    bool // guarded by link.mu: listed for delivery
}

// Submit sends a batch with one system call, as far as the socket takes it; the rest goes out in the background.
func (q *clientQueue) Submit(reqs []*blockdev.Request) {
	q.mu.Lock()
	closed := q.closed
	q.pending += len(reqs)
	q.mu.Unlock()
	refused := false
	l := q.l
	l.mu.Lock()
	for _, r := range reqs {
		r.Err = q.c.info.Check(r)
		switch {
		case closed:
			r.Err = blockdev.ErrClosed
		case l.err != nil:
			r.Err = l.err
		case r.Err == nil && q.startLocked(r):
			continue
		}
		refused = true
		q.add(r)
	}
	l.mu.Unlock()
	if refused {
		q.deliver()
	}
	l.kick()
}

// startLocked turns a request into parts to be sent. It returns false if r is finished already.
func (q *clientQueue) startLocked(r *blockdev.Request) bool {
	c := q.c
	var p part
	p.q, p.req = q, r
	p.off = uint64(r.Off)
	limit := int64(c.neg.max)
	switch r.Op {
	case blockdev.OpFlush:
		if !c.has(flagSendFlush) {
			return false // it has no volatile cache
		}
		p.cmd, p.off = cmdFlush, 0
		q.l.addLocked(p)
		return true
	case blockdev.OpRead:
		p.cmd, p.buf = cmdRead, r.Buf
	case blockdev.OpWrite:
		p.cmd, p.buf = cmdWrite, r.Buf
	case blockdev.OpDiscard:
		p.cmd, limit = cmdTrim, 1<<30
	case blockdev.OpWriteZeroes:
		p.cmd, limit = cmdWriteZeroes, 1<<30
		if r.Flags&blockdev.FastZero != 0 {
			if !c.has(flagSendFastZero) {
				r.Err = blockdev.ErrNotSupported
				return false
			}
			p.flags |= cmdFlagFastZero
		}
		if r.Flags&blockdev.NoUnmap != 0 {
			p.flags |= cmdFlagNoHole
		}
		if !c.has(flagSendZeroes) {
			p.cmd, p.flags, limit = cmdWrite, 0, min(int64(len(zeroes)), int64(c.neg.max))
		}
	}
	flush := false
	if r.Flags&blockdev.FUA != 0 && r.Op.Writes() {
		if c.has(flagSendFUA) {
			p.flags |= cmdFlagFUA
		} else {
			flush = c.has(flagSendFlush)
		}
	}
	left := r.Length()
	if left == 0 {
		return false
	}
	if left <= limit && !flush {
		p.n = uint32(left)
		if p.cmd == cmdWrite && p.buf == nil {
			p.buf = zeroes[:left]
		}
		q.l.addLocked(p)
		return true
	}
	p.whole = &whole{left: int((left + limit - 1) / limit), flush: flush}
	for ; left > 0; left -= limit {
		n := min(left, limit)
		p.n = uint32(n)
		if p.cmd == cmdWrite && r.Op == blockdev.OpWriteZeroes {
			p.buf = zeroes[:n]
		} else if r.Buf != nil && (r.Op == blockdev.OpRead || r.Op == blockdev.OpWrite) {
			at := int64(p.off) - r.Off
			p.buf = r.Buf[at : at+n : at+n]
		}
		q.l.addLocked(p)
		p.off += uint64(n)
	}
	return true
}

// zeroes is what write zeroes writes where the server cannot do it.
var zeroes [256 << 10]byte

// add puts a finished request on the list for deliver.
func (q *clientQueue) add(r *blockdev.Request) {
	q.mu.Lock()
	q.done = append(q.done, r)
	q.mu.Unlock()
}

// deliver hands finished requests to the complete function, unless someone is at it, who will then take these too.
func (q *clientQueue) deliver() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.delivering {
		return
	}
	q.delivering = true
	for len(q.done) > 0 {
		batch := q.done
		q.done, q.spare = q.spare[:0], nil
		q.mu.Unlock()
		q.complete(batch)
		n := len(batch)
		clear(batch)
		q.mu.Lock()
		q.spare = batch[:0]
		q.pending -= n
	}
	q.delivering = false
	if q.pending == 0 {
		q.idle.Broadcast()
	}
}

// Close waits until every submitted request has completed.
func (q *clientQueue) Close() error {
	q.mu.Lock()
	first := !q.closed
	q.closed = true
	for q.pending > 0 || q.delivering {
		q.idle.Wait()
	}
	q.mu.Unlock()
	if !first {
		return blockdev.ErrClosed
	}
	q.c.release()
	return nil
}
