package nbd

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ubcache/ubcache/internal/blockdev"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const testSize = 4 << 20

// memory returns a memory disk that is closed with the test.
func memory(t testing.TB, size int64, o blockdev.MemoryOptions) *blockdev.MemoryDevice {
	t.Helper()
	d, err := blockdev.Memory(size, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// serve starts a server for e, as the default export "disk", on a Unix socket and returns the socket's path.
func serve(t testing.TB, e Export, o Options) (*Server, string) {
	t.Helper()
	s := NewServer(o)
	if err := s.AddExport("disk", e); err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "nbd") // t.TempDir is too long for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "s")
	if _, err := s.ListenAndServe(context.Background(), "unix:"+path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("closing the server: %v", err)
		}
		os.RemoveAll(dir)
		if n := s.budget.free.Load(); n != s.opts.BufferBudget {
			t.Errorf("%d of %d bytes of the budget are back", n, s.opts.BufferBudget)
		}
		if n := s.pool.Stats().InUse; n != 0 {
			t.Errorf("%d buffers were not released", n)
		}
	})
	return s, path
}

// serveMemory is serve for a new memory disk with blocks of 512 bytes.
func serveMemory(t testing.TB, o Options) (*blockdev.MemoryDevice, string) {
	t.Helper()
	d := memory(t, testSize, blockdev.MemoryOptions{})
	_, path := serve(t, DeviceExport(d, "", false), o)
	return d, path
}

// raw is a client that sends exactly what a test says.
type raw struct {
	t testing.TB
	net.Conn
}

func dialRaw(t testing.TB, path string) *raw {
	t.Helper()
	nc, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	nc.SetDeadline(time.Now().Add(20 * time.Second))
	return &raw{t, nc}
}

// send writes its arguments, integers in big endian.
func (c *raw) send(args ...any) {
	c.t.Helper()
	if _, err := c.Write(wireBytes(args...)); err != nil {
		c.t.Fatalf("send: %v", err)
	}
}

func wireBytes(args ...any) (b []byte) {
	for _, a := range args {
		switch v := a.(type) {
		case uint16:
			b = be.AppendUint16(b, v)
		case uint32:
			b = be.AppendUint32(b, v)
		case uint64:
			b = be.AppendUint64(b, v)
		case string:
			b = append(b, v...)
		case []byte:
			b = append(b, v...)
		default:
			panic("wireBytes: type")
		}
	}
	return b
}

// bytes reads n bytes.
func (c *raw) bytes(n int) []byte {
	c.t.Helper()
	b := make([]byte, n)
	if _, err := io.ReadFull(c, b); err != nil {
		c.t.Fatalf("reading %d bytes: %v", n, err)
	}
	return b
}

func (c *raw) u16() uint16 { c.t.Helper(); return be.Uint16(c.bytes(2)) }
func (c *raw) u32() uint32 { c.t.Helper(); return be.Uint32(c.bytes(4)) }
func (c *raw) u64() uint64 { c.t.Helper(); return be.Uint64(c.bytes(8)) }

// eof checks that the server has closed the connection without a further byte.
func (c *raw) eof() {
	c.t.Helper()
	if n, err := c.Read(make([]byte, 1)); n != 0 || !disconnected(err) {
		c.t.Fatalf("read %d bytes, %v; want the end of the connection", n, err)
	}
}

// greet reads the greeting and answers with client flags.
func (c *raw) greet(flags uint32) *raw {
	c.t.Helper()
	if c.u64() != magicInit || c.u64() != magicOption {
		c.t.Fatal("bad greeting")
	}
	if f := c.u16(); f != flagFixedNewstyle|flagNoZeroes {
		c.t.Fatalf("handshake flags %#x", f)
	}
	c.send(flags)
	return c
}

func (c *raw) option(opt uint32, data []byte) {
	c.t.Helper()
	c.send(uint64(magicOption), opt, uint32(len(data)), data)
}

// answer reads one reply to opt.
func (c *raw) answer(opt uint32) (typ uint32, data []byte) {
	c.t.Helper()
	if m := c.u64(); m != magicOptReply {
		c.t.Fatalf("magic number of an option reply is %#x", m)
	}
	if o := c.u32(); o != opt {
		c.t.Fatalf("a reply to option %d, want %d", o, opt)
	}
	typ = c.u32()
	return typ, c.bytes(int(c.u32()))
}

// expect reads one reply to opt and checks its type.
func (c *raw) expect(opt, want uint32) []byte {
	c.t.Helper()
	typ, data := c.answer(opt)
	if typ != want {
		c.t.Fatalf("option %d: reply %#x %q, want %#x", opt, typ, data, want)
	}
	return data
}

// infoData is the data of optGo and optInfo.
func infoData(name string, infos ...uint16) []byte {
	b := wireBytes(uint32(len(name)), name, uint16(len(infos)))
	for _, i := range infos {
		b = be.AppendUint16(b, i)
	}
	return b
}

// infos reads the replies to optGo or optInfo up to the acknowledgement.
func (c *raw) infos(opt uint32) map[uint16][]byte {
	c.t.Helper()
	m := map[uint16][]byte{}
	for {
		typ, data := c.answer(opt)
		switch typ {
		case repAck:
			return m
		case repInfo:
			m[be.Uint16(data)] = data[2:]
		default:
			c.t.Fatalf("option %d: reply %#x %q", opt, typ, data)
		}
	}
}

// goTo does a whole handshake for an export and returns its transmission flags.
func (c *raw) goTo(name string, structured bool) uint16 {
	c.t.Helper()
	c.greet(flagFixedNewstyle | flagNoZeroes)
	if structured {
		c.option(optStructuredReply, nil)
		c.expect(optStructuredReply, repAck)
	}
	c.option(optGo, infoData(name))
	return be.Uint16(c.infos(optGo)[infoExport][8:])
}

func (c *raw) request(cmd, flags uint16, cookie, off uint64, length uint32, payload ...[]byte) {
	c.t.Helper()
	c.send(request1(cmd, flags, cookie, off, length), bytes.Join(payload, nil))
}

func request1(cmd, flags uint16, cookie, off uint64, length uint32) []byte {
	b := make([]byte, requestSize)
	header{flags, cmd, cookie, off, length}.encode(b)
	return b
}

// simple reads a simple reply's header.
func (c *raw) simple() (errno uint32, cookie uint64) {
	c.t.Helper()
	if m := c.u32(); m != magicSimple {
		c.t.Fatalf("magic number of a reply is %#x", m)
	}
	return c.u32(), c.u64()
}

// want reads a simple reply and checks it.
func (c *raw) want(errno uint32, cookie uint64) {
	c.t.Helper()
	if e, k := c.simple(); e != errno || k != cookie {
		c.t.Fatalf("reply to %d with error %d, want to %d with %d", k, e, cookie, errno)
	}
}

// chunk reads a chunk of a structured reply.
func (c *raw) chunk() (flags, typ uint16, cookie uint64, body []byte) {
	c.t.Helper()
	if m := c.u32(); m != magicStructured {
		c.t.Fatalf("magic number of a chunk is %#x", m)
	}
	flags, typ, cookie = c.u16(), c.u16(), c.u64()
	return flags, typ, cookie, c.bytes(int(c.u32()))
}

// hookExport serves a device through functions of the test.
type hookExport struct {
	Export
	// before is called for each request; an error is its result, errHold keeps it until release is called.
	before func(*blockdev.Request) error

	mu   sync.Mutex
	held []heldRequest
}

type heldRequest struct {
	q *hookQueue
	r *blockdev.Request
}

var errHold = errors.New("hold it")

type hookQueue struct {
	e        *hookExport
	q        blockdev.Queue
	complete func([]*blockdev.Request)
	mu       sync.Mutex // complete is called by one at a time
	wg       sync.WaitGroup
}

func (e *hookExport) NewQueue(depth int, complete func([]*blockdev.Request)) (blockdev.Queue, error) {
	q := &hookQueue{e: e, complete: complete}
	var err error
	q.q, err = e.Export.NewQueue(depth, func(done []*blockdev.Request) {
		q.mu.Lock()
		defer q.mu.Unlock()
		complete(done)
	})
	return q, err
}

func (q *hookQueue) Submit(reqs []*blockdev.Request) {
	for _, r := range reqs {
		switch err := q.e.before(r); {
		case errors.Is(err, errHold):
			q.wg.Add(1)
			q.e.mu.Lock()
			q.e.held = append(q.e.held, heldRequest{q, r})
			q.e.mu.Unlock()
		case err != nil:
			r.Err = err
			q.mu.Lock()
			q.complete([]*blockdev.Request{r})
			q.mu.Unlock()
		default:
			q.q.Submit([]*blockdev.Request{r})
		}
	}
}

func (q *hookQueue) Close() error {
	q.wg.Wait()
	return q.q.Close()
}

// waiting returns how many requests are held.
func (e *hookExport) waiting() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.held)
}

// release lets all held requests go on.
func (e *hookExport) release() {
	e.mu.Lock()
	held := e.held
	e.held = nil
	e.mu.Unlock()
	for _, h := range held {
		h.q.q.Submit([]*blockdev.Request{h.r})
		h.q.wg.Done()
	}
}

// eventually waits until f is true.
func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if f() {
			return
		}
	}
	t.Fatalf("after 10 s, still not: %s", what)
}

// pattern is content that depends on its position.
func pattern(off, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		x := uint32(off+i) * 2654435761
		b[i] = byte(x >> 13)
	}
	return b
}
