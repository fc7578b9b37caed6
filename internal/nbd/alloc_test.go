package nbd

import (
	"fmt"
	"io"
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// batch sends n requests at once and reads all replies.
func batch(t testing.TB, c *raw, script, replies []byte) {
	if _, err := c.Write(script); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, replies); err != nil {
		t.Fatal(err)
	}
}

// script is n reads or writes of 4 KiB, and room for the replies.
func script(cmd uint16, n int, structured bool) (script, replies []byte) {
	size := simpleSize
	for i := range n {
		script = append(script, request1(cmd, 0, uint64(i), uint64(i)*4096, 4096)...)
		if cmd == cmdWrite {
			script = append(script, make([]byte, 4096)...)
		}
	}
	if cmd == cmdRead {
		if structured {
			size = offsetDataSize
		}
		size += 4096
	}
	return script, make([]byte, n*size)
}

// No request costs an allocation, in the server or in the client.
func TestNoAllocations(t *testing.T) {
	pool := blockdev.NewPool(blockdev.PoolOptions{})
	if testing.AllocsPerRun(10, func() { pool.Get(4096).Release() }) > 0 {
		t.Skip("the pool looks for leaks, and allocates for that")
	}
	pool.Trim(0)
	_, path := serveMemory(t, Options{})
	for _, structured := range []bool{false, true} {
		for _, cmd := range []uint16{cmdRead, cmdWrite, cmdFlush} {
			for _, n := range []int{1, 32} {
				c := dialRaw(t, path)
				c.goTo("disk", structured)
				s, r := script(cmd, n, structured)
				if cmd == cmdFlush {
					s, r = request1(cmdFlush, 0, 0, 0, 0), make([]byte, simpleSize)
				}
				for range 50 {
					batch(t, c, s, r)
				}
				if a := testing.AllocsPerRun(200, func() { batch(t, c, s, r) }); a >= 1 {
					t.Errorf("structured=%v, %d requests of type %d: %.2f allocations", structured, n, cmd, a)
				}
				c.Close()
			}
		}
	}
	cl := dial(t, path, DialOptions{})
	done := make(chan int, 64)
	q, err := cl.NewQueue(32, func(d []*blockdev.Request) { done <- len(d) })
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	var reqs []*blockdev.Request
	for i := range 32 {
		reqs = append(reqs, &blockdev.Request{Op: blockdev.Op(i % 2), Off: int64(i) * 4096, Buf: make([]byte, 4096)})
	}
	run := func() {
		q.Submit(reqs)
		for n := 0; n < len(reqs); {
			n += <-done
		}
	}
	for range 50 {
		run()
	}
	if a := testing.AllocsPerRun(200, run); a >= 1 {
		t.Errorf("client: %.2f allocations for 32 requests", a)
	}
}

// BenchmarkServer measures the server with the leanest client: one write of all requests, one read of all replies.
func BenchmarkServer(b *testing.B) {
	_, path := serveMemory(b, Options{})
	for _, cmd := range []uint16{cmdRead, cmdWrite} {
		for _, n := range []int{1, 32} {
			b.Run(fmt.Sprintf("%s/%d", opOf(cmd), n), func(b *testing.B) {
				c := dialRaw(b, path)
				defer c.Close()
				c.goTo("disk", false)
				s, r := script(cmd, n, false)
				b.ReportAllocs()
				for i := 0; i < b.N; i += n {
					batch(b, c, s, r)
				}
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "req/s")
			})
		}
	}
}
