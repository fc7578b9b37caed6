package nbd

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// A client that does not take its replies is given up, and disturbs no other.
func TestSlowClient(t *testing.T) {
	d := memory(t, testSize, blockdev.MemoryOptions{})
	s, path := serve(t, DeviceExport(d, "", false), Options{StallTimeout: 300 * time.Millisecond, BufferBudget: 32 << 20, MaxInFlightBytes: 8 << 20})
	slow := dialRaw(t, path)
	slow.goTo("disk", false)
	for i := range 64 {
		slow.request(cmdRead, 0, uint64(i), 0, 1<<20)
	}
	eventually(t, "8 MiB are held", func() bool { return s.budget.free.Load() == 24<<20 })
	fast := dialRaw(t, path)
	fast.goTo("disk", false)
	for range 100 {
		fast.request(cmdRead, 0, 1, 0, 4096)
		fast.want(0, 1)
		fast.bytes(4096)
	}
	eventually(t, "the slow one is gone", func() bool { return len(s.Connections()) == 1 })
	eventually(t, "its buffers are back", func() bool { return s.budget.free.Load() == 32<<20 })
}

// A client that stops within the data of a write is given up; one that does nothing is not.
func TestDeadClient(t *testing.T) {
	s, path := serve(t, DeviceExport(memory(t, testSize, blockdev.MemoryOptions{}), "", false), Options{StallTimeout: 200 * time.Millisecond})
	idle, dead, drained := dialRaw(t, path), dialRaw(t, path), dialRaw(t, path)
	idle.goTo("disk", false)
	dead.goTo("disk", false)
	dead.request(cmdWrite, 0, 1, 0, 1<<20, make([]byte, 1000))
	drained.goTo("disk", false)
	drained.request(cmdWrite, 0, 1, 0, 1<<30, make([]byte, 1000))
	eventually(t, "one is left", func() bool { return len(s.Connections()) == 1 })
	dead.eof()
	drained.eof()
	time.Sleep(300 * time.Millisecond)
	idle.request(cmdFlush, 0, 1, 0, 0)
	idle.want(0, 1)
}

func TestHandshakeTimeout(t *testing.T) {
	_, path := serveMemory(t, Options{HandshakeTimeout: 50 * time.Millisecond})
	c := dialRaw(t, path).greet(flagFixedNewstyle)
	c.eof()
}

// Clients that vanish with requests in flight, the device being slower than they.
func TestKillMidRequest(t *testing.T) {
	e := &hookExport{Export: DeviceExport(memory(t, testSize, blockdev.MemoryOptions{}), "", false), before: func(*blockdev.Request) error { return errHold }}
	s, path := serve(t, e, Options{})
	var clients []*raw
	for i := range 8 {
		c := dialRaw(t, path)
		c.goTo("disk", i%2 == 0)
		for k := range 8 {
			c.request(cmdRead, 0, uint64(k), 0, 64<<10)
			c.request(cmdWrite, 0, uint64(k), 0, 4096, make([]byte, 4096))
		}
		clients = append(clients, c)
	}
	eventually(t, "all are in flight", func() bool { return e.waiting() == 8*16 })
	for i, c := range clients {
		if i%3 == 0 {
			c.request(cmdWrite, 0, 99, 0, 4096, make([]byte, 100)) // and in the middle of one
		}
		c.Close()
	}
	e.release()
	eventually(t, "all are gone", func() bool { return len(s.Connections()) == 0 })
	if st, err := s.ExportStats("disk"); err != nil || st[OpRead].Requests != 64 || st[OpWrite].Requests != 64 {
		t.Errorf("%v %+v", err, st)
	}
}

// A client that only closes its sending side still gets all its replies.
func TestHalfClose(t *testing.T) {
	_, path := serveMemory(t, Options{})
	c := dialRaw(t, path)
	c.goTo("disk", false)
	var script []byte
	for i := range 100 {
		script = append(script, request1(cmdRead, 0, uint64(i), 0, 4096)...)
	}
	c.send(script)
	c.Conn.(*net.UnixConn).CloseWrite()
	for i := range 100 {
		c.want(0, uint64(i))
		c.bytes(4096)
	}
	c.eof()
}

func TestThousandConnections(t *testing.T) {
	s, path := serve(t, DeviceExport(memory(t, testSize, blockdev.MemoryOptions{}), "", false), Options{MaxConns: 1000})
	var clients [1000]*raw
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := w; i < len(clients); i += 8 {
				c := dialRaw(t, path)
				c.goTo("disk", i%2 == 0)
				clients[i] = c
			}
		})
	}
	wg.Wait()
	eventually(t, "all are connected", func() bool { return len(s.Connections()) == len(clients) })
	over, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer over.Close()
	if n, err := over.Read(make([]byte, 1)); n != 0 || !disconnected(err) {
		t.Errorf("connection over the limit: %d bytes, %v", n, err)
	}
	for round := range 3 {
		for i, c := range clients {
			c.request(cmdWrite, 0, uint64(i), uint64(i)*512, 512, bytes.Repeat([]byte{byte(i + round)}, 512))
		}
		for i, c := range clients {
			c.want(0, uint64(i))
		}
	}
	if st, _ := s.ExportStats("disk"); st[OpWrite] != (OpStats{3000, 0, 3000 * 512}) {
		t.Errorf("%+v", st[OpWrite])
	}
	for _, c := range clients {
		c.Close()
	}
	eventually(t, "all are gone", func() bool { return len(s.Connections()) == 0 })
}

// Limits are kept, and nothing stops for ever when they are reached.
func TestBackpressure(t *testing.T) {
	var mu sync.Mutex
	most := 0
	e := &hookExport{Export: DeviceExport(memory(t, 64<<20, blockdev.MemoryOptions{}), "", false)}
	e.before = func(r *blockdev.Request) error {
		mu.Lock()
		defer mu.Unlock()
		most = max(most, e.waiting()+1)
		return errHold
	}
	s, path := serve(t, e, Options{MaxInFlight: 10, MaxInFlightBytes: 1 << 20, BufferBudget: 2 << 20, MaxRequest: 2 << 20})
	stop := make(chan struct{})
	var releaser sync.WaitGroup
	releaser.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(200 * time.Microsecond):
				e.release()
			}
		}
	})
	var wg sync.WaitGroup
	for w := range 4 {
		c := dialRaw(t, path)
		c.goTo("disk", false)
		lengths := []uint32{4096, 300 << 10, 512, 1 << 20, 2 << 20}
		const n = 100
		wg.Go(func() {
			for i := range n {
				if length := lengths[i%len(lengths)]; (i+w)%2 == 0 {
					c.Write(request1(cmdRead, 0, uint64(i), 0, length))
				} else {
					c.Write(append(request1(cmdWrite, 0, uint64(i), 0, length), make([]byte, length)...))
				}
			}
		})
		wg.Go(func() {
			reply := make([]byte, simpleSize+2<<20)
			for range n {
				if _, err := readFull(c, reply[:simpleSize]); err != nil || be.Uint32(reply[4:]) != 0 {
					t.Errorf("reply %x, %v", reply[:simpleSize], err)
					return
				}
				if i := int(be.Uint64(reply[8:])); (i+w)%2 == 0 {
					if _, err := readFull(c, reply[:lengths[i%len(lengths)]]); err != nil {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	releaser.Wait()
	e.release()
	if most > 40 {
		t.Errorf("%d requests of 4 connections were in flight", most)
	}
	eventually(t, "all bytes are back", func() bool { return s.budget.free.Load() == 2<<20 })
}

func TestShutdownAnswersWhatIsInFlight(t *testing.T) {
	e := &hookExport{Export: DeviceExport(memory(t, testSize, blockdev.MemoryOptions{}), "", false), before: func(*blockdev.Request) error { return errHold }}
	s, path := serve(t, e, Options{})
	c, half := dialRaw(t, path), dialRaw(t, path)
	greeting := dialRaw(t, path).greet(flagFixedNewstyle)
	c.goTo("disk", false)
	for i := range 20 {
		c.request(cmdRead, 0, uint64(i), 0, 4096)
	}
	half.goTo("disk", false)
	half.request(cmdWrite, 0, 1, 0, 4096, make([]byte, 10))
	eventually(t, "all are in flight", func() bool { return e.waiting() == 20 })
	done := make(chan error)
	go func() { done <- s.Shutdown(context.Background()) }()
	half.eof()
	greeting.eof()
	select {
	case err := <-done:
		t.Fatalf("Shutdown did not wait: %v", err)
	case <-time.After(30 * time.Millisecond):
	}
	e.release()
	for i := range 20 {
		c.want(0, uint64(i))
		c.bytes(4096)
	}
	c.eof()
	c.Close()
	if err := <-done; err != nil {
		t.Errorf("Shutdown: %v", err)
	}
	if _, err := net.Dial("unix", path); err == nil {
		t.Error("still listening")
	}
}

func TestShutdownIsBounded(t *testing.T) {
	e := &hookExport{Export: DeviceExport(memory(t, testSize, blockdev.MemoryOptions{}), "", false), before: func(*blockdev.Request) error { return errHold }}
	s, path := serve(t, e, Options{})
	c := dialRaw(t, path)
	c.goTo("disk", false)
	c.request(cmdFlush, 0, 1, 0, 0)
	eventually(t, "it is in flight", func() bool { return e.waiting() == 1 })
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer cancel()
	if err := s.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Shutdown: %v", err)
	}
	c.eof()
	e.release()
}

func TestRemoveExport(t *testing.T) {
	s, path := serve(t, DeviceExport(memory(t, testSize, blockdev.MemoryOptions{}), "", false), Options{})
	s.AddExport("other", DeviceExport(memory(t, testSize, blockdev.MemoryOptions{}), "", false))
	gone, stays := dialRaw(t, path), dialRaw(t, path)
	gone.goTo("other", false)
	stays.goTo("disk", false)
	go func() { gone.eof(); gone.Close() }()
	if err := s.RemoveExport(context.Background(), "other"); err != nil {
		t.Fatal(err)
	}
	if err := s.RemoveExport(context.Background(), "other"); !errors.Is(err, ErrNoExport) {
		t.Errorf("second removal: %v", err)
	}
	stays.request(cmdFlush, 0, 1, 0, 0)
	stays.want(0, 1)
	c := dialRaw(t, path).greet(flagFixedNewstyle)
	c.option(optGo, infoData("other"))
	c.expect(optGo, repErrUnknown)
}

func TestListen(t *testing.T) {
	dir := t.TempDir()
	ctx := context.Background()
	path := filepath.Join(dir, "sock")
	l, err := Listen(ctx, "unix:"+path)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Lstat(path); err != nil || info.Mode() != os.ModeSocket|0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if _, err := Listen(ctx, "unix:"+path); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("on a live socket: %v", err)
	}
	// A stale socket: its listener is gone, the file is not.
	l.(*unixListener).UnixListener.Close()
	l2, err := Listen(ctx, "unix:"+path)
	if err != nil {
		t.Fatalf("on a stale socket: %v", err)
	}
	l.Close() // must not remove what is now the other's
	if _, err := net.Dial("unix", path); err != nil {
		t.Errorf("the new socket: %v", err)
	}
	l2.Close()
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after Close: %v", err)
	}
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(ctx, "unix:"+path); err == nil {
		t.Error("took the place of a regular file")
	}
	if b, _ := os.ReadFile(path); string(b) != "precious" {
		t.Error("the file was changed")
	}
	for _, addr := range []string{"", "unix:", "tcp", "udp:1.2.3.4:5", "/path", "unix:" + filepath.Join(dir, "none", "s")} {
		if l, err := Listen(ctx, addr); err == nil {
			l.Close()
			t.Errorf("Listen(%q) succeeded", addr)
		}
	}
}

func TestSeveralListeners(t *testing.T) {
	s, path := serve(t, DeviceExport(memory(t, testSize, blockdev.MemoryOptions{}), "", false), Options{})
	a, err := s.ListenAndServe(context.Background(), "tcp:127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	for _, addr := range []net.Addr{a, &net.UnixAddr{Name: path, Net: "unix"}} {
		nc, err := net.Dial(addr.Network(), addr.String())
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		c := &raw{t, nc}
		c.goTo("disk", false)
		c.request(cmdFlush, 0, 1, 0, 0)
		c.want(0, 1)
	}
}
