package nbd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
)

func dial(t testing.TB, path string, o DialOptions) *Client {
	t.Helper()
	c, err := Dial(context.Background(), "unix", path, "", o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func newIO(t testing.TB, d blockdev.Device) *blockdev.IO {
	t.Helper()
	o, err := blockdev.NewIO(d, 64)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { o.Close() })
	return o
}

// The client against our server: random operations at once from several goroutines, each in its own region,
// compared with a byte slice.
func TestClientModel(t *testing.T) {
	for _, o := range []DialOptions{{}, {SimpleReplies: true}, {Connections: 3}} {
		t.Run(fmt.Sprintf("%+v", o), func(t *testing.T) {
			d, path := serveMemory(t, Options{MaxRequest: 64 << 10}) // larger ones are split by the client
			c := dial(t, path, o)
			if i := c.Info(); i.Size != testSize || i.LogicalBlock != 512 || !i.CanDiscard || i.ReadOnly || i.MaxTransfer != 64<<10 {
				t.Errorf("info %+v", i)
			}
			if n := max(o.Connections, 1); len(c.links) != n {
				t.Errorf("%d connections", len(c.links))
			}
			const region = testSize / 4
			model := make([]byte, testSize)
			var wg sync.WaitGroup
			for w := range 4 {
				bio := newIO(t, c)
				wg.Go(func() {
					rng := rand.New(rand.NewPCG(uint64(w), 9))
					m := model[w*region : (w+1)*region]
					for range 300 {
						n := 512 * (1 + rng.IntN(8))
						if rng.IntN(10) == 0 {
							n = 512 * (1 + rng.IntN(600))
						}
						off := 512 * rng.IntN((region-n)/512)
						at := int64(w*region + off)
						var err error
						switch rng.IntN(8) {
						case 0, 1, 2:
							b := pattern(rng.Int(), n)
							copy(m[off:], b)
							err = bio.WriteAt(b, at, blockdev.Flags(rng.IntN(2)))
						case 3:
							clear(m[off : off+n])
							err = bio.WriteZeroes(at, int64(n), 0)
						case 4:
							err = bio.Flush()
						default:
							b := make([]byte, n)
							if err = bio.ReadAt(b, at); err == nil && !bytes.Equal(b, m[off:off+n]) {
								err = errors.New("differs")
							}
						}
						if err != nil {
							t.Errorf("%d bytes at %d: %v", n, at, err)
							return
						}
					}
				})
			}
			wg.Wait()
			if !bytes.Equal(d.Bytes(), model) {
				t.Error("content differs in the end")
			}
		})
	}
}

func TestClientErrors(t *testing.T) {
	e := &hookExport{Export: DeviceExport(memory(t, testSize, blockdev.MemoryOptions{NoDiscard: true}), "", false)}
	e.before = func(r *blockdev.Request) error {
		switch r.Off {
		case 4096:
			return fmt.Errorf("x: %w", syscall.EIO)
		case 8192:
			return syscall.ENOSPC
		case 12288:
			return blockdev.ErrNotSupported
		}
		return nil
	}
	_, path := serve(t, e, Options{})
	for _, simple := range []bool{true, false} {
		bio := newIO(t, dial(t, path, DialOptions{SimpleReplies: simple}))
		b := make([]byte, 512)
		for off, want := range map[int64]error{0: nil, 4096: syscall.EIO, 8192: syscall.ENOSPC, 12288: blockdev.ErrNotSupported, testSize: blockdev.ErrOutOfRange} {
			if err := bio.ReadAt(b, off); !errors.Is(err, want) {
				t.Errorf("read at %d: %v, want %v", off, err, want)
			}
			if err := bio.WriteAt(b, off, 0); !errors.Is(err, want) {
				t.Errorf("write at %d: %v, want %v", off, err, want)
			}
		}
		if err := bio.Discard(0, 512); !errors.Is(err, blockdev.ErrNotSupported) {
			t.Errorf("discard: %v", err)
		}
	}
	if _, err := Dial(context.Background(), "unix", path, "nothing", DialOptions{}); !errors.Is(err, ErrRefused) {
		t.Errorf("unknown export: %v", err)
	}
	if _, err := Dial(context.Background(), "unix", path+".not", "", DialOptions{}); err == nil {
		t.Error("no server")
	}
	if names, err := List(context.Background(), "unix", path); err != nil || len(names) != 1 || names[0] != "disk" {
		t.Errorf("List: %q, %v", names, err)
	}
}

// Requests fail, and are not forgotten, when the server goes away.
func TestClientServerGone(t *testing.T) {
	e := &hookExport{Export: DeviceExport(memory(t, testSize, blockdev.MemoryOptions{}), "", false), before: func(*blockdev.Request) error { return errHold }}
	s, path := serve(t, e, Options{})
	c := dial(t, path, DialOptions{})
	done := make(chan error, 100)
	q, err := c.NewQueue(8, func(reqs []*blockdev.Request) {
		for _, r := range reqs {
			done <- r.Err
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	var reqs []*blockdev.Request
	for range 50 {
		reqs = append(reqs, &blockdev.Request{Op: blockdev.OpWrite, Buf: make([]byte, 4096)})
	}
	q.Submit(reqs)
	eventually(t, "all are in flight", func() bool { return e.waiting() == 50 })
	s.mu.Lock()
	for c := range s.conns {
		go c.giveUp()
	}
	s.mu.Unlock()
	for range 50 {
		if err := <-done; !errors.Is(err, syscall.EIO) {
			t.Errorf("%v", err)
		}
	}
	q.Submit(reqs[:1])
	if err := <-done; !errors.Is(err, syscall.EIO) {
		t.Errorf("afterwards: %v", err)
	}
	if err := q.Close(); err != nil {
		t.Error(err)
	}
	e.release()
}

// fakeServer answers a client's handshake with flags and then hands the connection to serve.
func fakeServer(t *testing.T, flags uint16, structured bool, serve func(c *raw)) *Client {
	t.Helper()
	here, there := net.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer there.Close()
		c := &raw{t, there}
		c.send(uint64(magicInit), uint64(magicOption), uint16(3), []byte{})
		c.u32()
		option := func() uint32 {
			c.u64()
			opt := c.u32()
			c.bytes(int(c.u32()))
			return opt
		}
		if opt := option(); opt != optStructuredReply {
			t.Errorf("option %d", opt)
		}
		typ := uint32(repErrUnsup)
		if structured {
			typ = repAck
		}
		c.send(uint64(magicOptReply), uint32(optStructuredReply), typ, uint32(0))
		option()
		c.send(uint64(magicOptReply), uint32(optGo), uint32(repInfo), uint32(12), uint16(infoExport), uint64(1<<20), flags)
		c.send(uint64(magicOptReply), uint32(optGo), uint32(repAck), uint32(0))
		serve(c)
	}()
	t.Cleanup(func() { here.Close(); <-done })
	c, err := NewClient(context.Background(), here, "", DialOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// What a server cannot do is made up for.
func TestClientEmulation(t *testing.T) {
	var log []string
	c := fakeServer(t, flagHasFlags|flagSendFlush, false, func(c *raw) {
		var b [requestSize]byte
		for {
			if _, err := io.ReadFull(c, b[:]); err != nil {
				return
			}
			h, _ := decodeRequest(b[:])
			if h.cmd == cmdDisc {
				return
			}
			log = append(log, fmt.Sprintf("%d/%d %d+%d", h.cmd, h.flags, h.offset, h.length))
			if h.cmd == cmdWrite {
				c.bytes(int(h.length))
			}
			c.send(uint32(magicSimple), uint32(0), h.cookie)
		}
	})
	bio := newIO(t, c)
	for _, err := range []error{
		bio.WriteAt(make([]byte, 4096), 0, blockdev.FUA),
		bio.WriteZeroes(0, 1<<20, 0),
		bio.WriteAt(make([]byte, 512), 512, 0),
	} {
		if err != nil {
			t.Error(err)
		}
	}
	if err := bio.WriteZeroes(0, 512, blockdev.FastZero); !errors.Is(err, blockdev.ErrNotSupported) {
		t.Error(err)
	}
	want := "[1/0 0+4096 3/0 0+0 1/0 0+262144 1/0 262144+262144 1/0 524288+262144 1/0 786432+262144 1/0 512+512]"
	if got := fmt.Sprint(log); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// Replies that break the protocol end the connection with an error; they crash and overwrite nothing.
func TestClientBadReplies(t *testing.T) {
	chunk := func(flags, typ uint16, cookie uint64, length uint32, body ...any) []byte {
		return append(wireBytes(uint32(magicStructured), flags, typ, cookie, length), wireBytes(body...)...)
	}
	for name, reply := range map[string][]byte{
		"no magic":               make([]byte, 64),
		"unknown cookie":         wireBytes(uint32(magicSimple), uint32(5), uint64(77)),
		"simple for read":        wireBytes(uint32(magicSimple), uint32(0), uint64(0)),
		"chunk of no request":    chunk(1, chunkNone, 1<<40, 0),
		"nothing":                chunk(1, chunkNone, 0, 0),
		"too much data":          chunk(1, chunkOffsetData, 0, 8+8192, uint64(4096)),
		"data before":            chunk(1, chunkOffsetData, 0, 8+4096, uint64(0)),
		"data far away":          chunk(1, chunkOffsetData, 0, 8+4096, uint64(1<<64-512)),
		"data without data":      chunk(1, chunkOffsetData, 0, 8, uint64(4096)),
		"data of negative size":  chunk(1, chunkOffsetData, 0, 3, uint64(4096)),
		"half the data":          append(chunk(1, chunkOffsetData, 0, 8+2048, uint64(4096)), make([]byte, 2048)...),
		"hole of nothing":        chunk(1, chunkOffsetHole, 0, 12, uint64(4096), uint32(0)),
		"hole too large":         chunk(1, chunkOffsetHole, 0, 12, uint64(4096), uint32(1<<32-1)),
		"hole behind":            chunk(1, chunkOffsetHole, 0, 12, uint64(8192), uint32(512)),
		"hole of wrong length":   chunk(1, chunkOffsetHole, 0, 8, uint64(4096)),
		"endless error":          chunk(1, chunkError, 0, 1<<31, uint32(5), uint16(0)),
		"error message too long": chunk(1, chunkError, 0, 6, uint32(5), uint16(1)),
		"error without error":    chunk(1, chunkError, 0, 6, uint32(0), uint16(0)),
		"status not asked for":   chunk(1, chunkBlockStatus, 0, 12, uint32(1), uint64(0)),
		"same part twice": append(append(chunk(0, chunkOffsetData, 0, 8+4096, uint64(4096)), make([]byte, 4096)...),
			chunk(1, chunkOffsetData, 0, 8+512, uint64(4096))...),
		"end of connection": nil,
	} {
		t.Run(name, func(t *testing.T) {
			c := fakeServer(t, flagHasFlags, true, func(c *raw) {
				c.bytes(requestSize)
				c.Write(reply)
			})
			bio := newIO(t, c)
			b := make([]byte, 4096+1024)
			guard := pattern(0, 1024)
			copy(b[4096:], guard)
			if err := bio.ReadAt(b[:4096:4096], 4096); !errors.Is(err, syscall.EIO) || reply != nil && !errors.Is(err, ErrProtocol) {
				t.Errorf("%v", err)
			}
			if !bytes.Equal(b[4096:], guard) {
				t.Error("memory behind the buffer was overwritten")
			}
		})
	}
	for name, parts := range map[string][]byte{
		"pieces in any order": bytes.Join([][]byte{
			chunk(0, chunkOffsetData, 0, 8+1024, uint64(4096+3072)), pattern(4096+3072, 1024),
			chunk(0, chunkOffsetData, 0, 8+3072, uint64(4096)), pattern(4096, 3072), chunk(1, chunkNone, 0, 0),
		}, nil),
	} {
		t.Run(name, func(t *testing.T) {
			c := fakeServer(t, flagHasFlags, true, func(c *raw) {
				c.bytes(requestSize)
				for ; len(parts) > 0; parts = parts[1:] {
					c.Write(parts[:1])
				}
				io.Copy(io.Discard, c)
			})
			b := make([]byte, 4096)
			if err := newIO(t, c).ReadAt(b, 4096); err != nil || !bytes.Equal(b, pattern(4096, 4096)) {
				t.Errorf("%v", err)
			}
		})
	}
}

func TestDialTimeout(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	start := time.Now()
	if _, err := Dial(context.Background(), "tcp", l.Addr().String(), "", DialOptions{Timeout: 50 * time.Millisecond}); err == nil || time.Since(start) > 5*time.Second {
		t.Errorf("silent server: %v after %v", err, time.Since(start))
	}
}

func TestURI(t *testing.T) {
	for uri, want := range map[string]Address{
		"nbd://host":                        {"tcp", "host:10809", ""},
		"nbd://host/":                       {"tcp", "host:10809", ""},
		"nbd://[::1]:99/a%20b/c":            {"tcp", "[::1]:99", "a b/c"},
		"nbd+unix:///?socket=/run/x.sock":   {"unix", "/run/x.sock", ""},
		"nbd+unix:///disk?socket=%2Frun%2F": {"unix", "/run/", "disk"},
	} {
		got, err := ParseURI(uri)
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v", uri, got, err)
		}
		if again, err := ParseURI(got.String()); err != nil || again != want {
			t.Errorf("%s: as text %s", uri, got)
		}
	}
	for _, uri := range []string{"", "host", "http://host", "nbds://host", "nbd+unix:///x", "nbd://host/%zz"} {
		if a, err := ParseURI(uri); err == nil {
			t.Errorf("%q: %+v", uri, a)
		}
	}
}

// A server may answer a write before it has read the data. The buffer stays the client's until it is sent.
func TestClientEarlyReply(t *testing.T) {
	goOn := make(chan struct{})
	c := fakeServer(t, flagHasFlags, false, func(c *raw) {
		h, _ := decodeRequest(c.bytes(requestSize))
		c.bytes(10)
		c.send(uint32(magicSimple), uint32(errnoNoSpace), h.cookie)
		<-goOn
		c.bytes(int(h.length) - 10)
		io.Copy(io.Discard, c)
	})
	done := make(chan error, 1)
	q, err := c.NewQueue(1, func(d []*blockdev.Request) { done <- d[0].Err })
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	q.Submit([]*blockdev.Request{{Op: blockdev.OpWrite, Buf: make([]byte, 4096)}})
	select {
	case err := <-done:
		t.Errorf("completed before it was sent: %v", err)
	case <-time.After(30 * time.Millisecond):
	}
	close(goOn)
	if err := <-done; !errors.Is(err, syscall.ENOSPC) {
		t.Error(err)
	}
}
