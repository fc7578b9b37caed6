package nbd

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// startLoad writes and verifies random blocks of the first MiB over a connection of its own until the returned
// function is called, which reports what went wrong.
func startLoad(t *testing.T, path, export string) (stop func()) {
	t.Helper()
	c := dialRaw(t, path)
	c.goTo(export, false)
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		model := make([]byte, 1<<20)
		rng := rand.New(rand.NewPCG(1, 2))
		for cookie := uint64(1); ; cookie += 2 {
			select {
			case <-done:
				return
			default:
			}
			off := rng.IntN(255) * 4096
			block := pattern(int(cookie), 4096)
			copy(model[off:], block)
			c.Write(append(request1(cmdWrite, 0, cookie, uint64(off), 4096), block...))
			reply := make([]byte, simpleSize)
			if _, err := readFull(c, reply); err != nil || be.Uint32(reply[4:]) != 0 || be.Uint64(reply[8:]) != cookie {
				t.Errorf("write under load: %v %x", err, reply)
				return
			}
			off = rng.IntN(255) * 4096
			c.Write(request1(cmdRead, 0, cookie+1, uint64(off), 4096))
			reply = make([]byte, simpleSize+4096)
			if _, err := readFull(c, reply); err != nil || be.Uint32(reply[4:]) != 0 || !bytes.Equal(reply[simpleSize:], model[off:off+4096]) {
				t.Errorf("read under load: %v %x", err, reply[:simpleSize])
				return
			}
		}
	})
	return func() { close(done); wg.Wait() }
}

func readFull(c *raw, b []byte) (n int, err error) {
	for n < len(b) && err == nil {
		var k int
		k, err = c.Read(b[n:])
		n += k
	}
	return n, err
}

// Case 23: one bad request, and the limits of lengths.
func TestCase23BadRequests(t *testing.T) {
	const size = 6 << 30 // sparse
	d := memory(t, size, blockdev.MemoryOptions{})
	bad := &hookExport{Export: DeviceExport(d, "", false), before: func(r *blockdev.Request) error {
		if r.Op != blockdev.OpFlush && r.Off <= 2<<20 && r.Off+r.Length() > 2<<20 {
			return fmt.Errorf("block at %d: %w", 2<<20, syscall.EIO)
		}
		return nil
	}}
	s, path := serve(t, bad, Options{})
	s.AddExport("ro", DeviceExport(d, "", true))
	defer startLoad(t, path, "disk")()

	const last = size - 4096
	big := make([]byte, 32<<20+512)
	for _, structured := range []bool{false, true} {
		t.Run(fmt.Sprintf("structured=%v", structured), func(t *testing.T) {
			c, ro := dialRaw(t, path), dialRaw(t, path)
			c.goTo("disk", structured)
			if f := ro.goTo("ro", structured); f&flagReadOnly == 0 || f&(flagSendFlush|flagSendTrim|flagSendZeroes) != 0 {
				t.Errorf("flags of a read-only export %#x", f)
			}
			for i, r := range []struct {
				name       string
				c          *raw
				cmd, flags uint16
				off        uint64
				length     uint32
				want       uint32
			}{
				{"read of a bad block", c, cmdRead, 0, 2 << 20, 4096, errnoIO},
				{"write to a bad block", c, cmdWrite, 0, 2 << 20, 4096, errnoIO},
				{"write to a read-only export", ro, cmdWrite, 0, 0, 4096, errnoPerm},
				{"trim of a read-only export", ro, cmdTrim, 0, 0, 4096, errnoPerm},
				{"zeroes to a read-only export", ro, cmdWriteZeroes, 0, 0, 4096, errnoPerm},
				{"flush of a read-only export", ro, cmdFlush, 0, 0, 0, 0},
				{"read of a read-only export", ro, cmdRead, 0, 0, 512, 0},
				{"unknown command", c, 4711, 0, 0, 4096, errnoInval},
				{"unknown flag", c, cmdRead, 1 << 9, 0, 4096, errnoInval},
				{"flag of another command", c, cmdRead, cmdFlagNoHole, 0, 4096, errnoInval},
				{"unknown flag on a write", c, cmdWrite, 1 << 9, 0, 4096, errnoInval},
				{"status without contexts", c, cmdBlockStatus, 0, 0, 4096, errnoInval},
				{"flush with a range", c, cmdFlush, 0, 0, 4096, errnoInval},
				{"read past the end", c, cmdRead, 0, last, 8192, errnoInval},
				{"write past the end", c, cmdWrite, 0, last, 8192, errnoNoSpace},
				{"read at the end", c, cmdRead, 0, size, 512, errnoInval},
				{"read near 2^63", c, cmdRead, 0, 1<<63 - 512, 512, errnoInval},
				{"read at 2^63", c, cmdRead, 0, 1 << 63, 512, errnoInval},
				{"read near 2^64", c, cmdRead, 0, 1<<64 - 512, 512, errnoInval},
				{"read round the end of numbers", c, cmdRead, 0, 1<<64 - 512, 1024, errnoInval},
				{"write near 2^63", c, cmdWrite, 0, 1<<63 - 512, 1024, errnoNoSpace},
				{"trim near 2^64", c, cmdTrim, 0, 1<<64 - 512, 1<<32 - 512, errnoNoSpace},
				{"read of the last block", c, cmdRead, 0, last, 4096, 0},
				{"write of the last block", c, cmdWrite, cmdFlagFUA, last, 4096, 0},
				{"trim of 2 GiB", c, cmdTrim, 0, 3 << 20, 2 << 30, 0},
				{"zeroes of 2 GiB", c, cmdWriteZeroes, 0, 3 << 20, 2 << 30, 0},
				{"trim of 2^32-512", c, cmdTrim, 0, 3 << 20, 1<<32 - 512, 0},
				{"zeroes of 2^32-512", c, cmdWriteZeroes, cmdFlagNoHole, 3 << 20, 1<<32 - 512, 0},
				{"trim up to the end", c, cmdTrim, cmdFlagFUA, size - 1<<31, 1 << 31, 0},
				{"zeroes up to the end", c, cmdWriteZeroes, cmdFlagFUA | cmdFlagFastZero, size - 1<<31, 1 << 31, 0},
				{"trim over the end", c, cmdTrim, 0, size - 1<<31, 1<<31 + 512, errnoNoSpace},
				{"trim of nothing", c, cmdTrim, 0, 4096, 0, 0},
				{"zeroes of nothing", c, cmdWriteZeroes, 0, size, 0, 0},
				{"read of nothing", c, cmdRead, 0, 512, 0, 0},
				{"write of nothing", c, cmdWrite, 0, 512, 0, 0},
				{"cache", c, cmdCache, 0, 0, 1 << 30, 0},
				{"read of the limit", c, cmdRead, 0, 3 << 20, 32 << 20, 0},
				{"read above the limit", c, cmdRead, 0, 3 << 20, 32<<20 + 512, errnoInval},
				{"write of the limit", c, cmdWrite, 0, 3 << 20, 32 << 20, 0},
				{"write above the limit", c, cmdWrite, 0, 3 << 20, 32<<20 + 512, errnoInval},
			} {
				cookie := uint64(i) + 1<<40
				r.c.send(request1(r.cmd, r.flags, cookie, r.off, r.length))
				if r.cmd == cmdWrite {
					r.c.send(big[:r.length])
				}
				var errno uint32
				if structured && (r.cmd == cmdRead || r.cmd == cmdBlockStatus) {
					flags, typ, k, body := r.c.chunk()
					if k != cookie || flags != chunkFlagDone {
						t.Fatalf("%s: chunk for %d, flags %d", r.name, k, flags)
					}
					switch typ {
					case chunkError:
						errno = be.Uint32(body)
					case chunkOffsetData:
						if be.Uint64(body) != r.off || len(body) != int(r.length)+8 {
							t.Errorf("%s: %d bytes for offset %d", r.name, len(body)-8, be.Uint64(body))
						}
					case chunkNone:
						if r.length != 0 {
							t.Errorf("%s: no data", r.name)
						}
					}
				} else {
					var k uint64
					if errno, k = r.c.simple(); k != cookie {
						t.Fatalf("%s: reply to %d", r.name, k)
					}
					if r.cmd == cmdRead && errno == 0 {
						r.c.bytes(int(r.length))
					}
				}
				if errno != r.want {
					t.Errorf("%s: error %d, want %d", r.name, errno, r.want)
				}
			}
			// A broken frame ends this connection, and no other. What came before it is answered.
			c.send(request1(cmdFlush, 0, 1, 0, 0), make([]byte, requestSize))
			ro.request(cmdFlush, 0, 2, 0, 0)
			ro.want(0, 2)
			c.want(0, 1)
			c.eof()
		})
	}
	t.Run("DF above the limit", func(t *testing.T) {
		c := dialRaw(t, path)
		if f := c.goTo("disk", true); f&flagSendDF == 0 {
			t.Error("DF is not advertised")
		}
		c.request(cmdRead, cmdFlagDF, 1, 0, 64<<20)
		if _, typ, _, body := c.chunk(); typ != chunkError || be.Uint32(body) != errnoOverflow {
			t.Errorf("chunk %d %x", typ, body)
		}
	})
}

// Case 23: trim and zeroes on a file.
func TestCase23TrimAndZeroesOnFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "disk")
	const size = 4 << 20
	if err := os.WriteFile(file, pattern(0, size), 0o600); err != nil {
		t.Fatal(err)
	}
	d, err := blockdev.Open(file, blockdev.Options{Buffered: true, Engine: blockdev.EngineInline})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	s, path := serve(t, DeviceExport(d, "", false), Options{})
	c := dialRaw(t, path)
	flags := c.goTo("disk", false)
	model := pattern(0, size)
	for i, r := range [][2]int{{0, 65536}, {0, size / 2}, {size - 65536, 65536}, {1 << 20, 0}, {512, 1024}, {0, size}} {
		if flags&flagSendTrim != 0 {
			c.request(cmdTrim, 0, 1, uint64(r[0]), uint32(r[1]))
			c.want(0, 1)
		}
		c.request(cmdWriteZeroes, uint16(i%2)*cmdFlagNoHole, 2, uint64(r[0]), uint32(r[1]))
		c.want(0, 2)
		clear(model[r[0] : r[0]+r[1]])
		got, err := os.ReadFile(file)
		if err != nil || !bytes.Equal(got, model) {
			t.Fatalf("after zeroes at %d, %d bytes: file of %d bytes differs, %v", r[0], r[1], len(got), err)
		}
	}
	c.Close()
	eventually(t, "no connection", func() bool { return len(s.Connections()) == 0 })
}

// Case 24, as far as this package decides it: what is advertised, and which requests reach the device.
func TestCase24FlushAndFUA(t *testing.T) {
	var mu sync.Mutex
	var seen []string
	e := &hookExport{Export: DeviceExport(memory(t, testSize, blockdev.MemoryOptions{}), "", false)}
	hold := false
	e.before = func(r *blockdev.Request) error {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, fmt.Sprintf("%v+%d", r.Op, r.Flags))
		if r.Op == blockdev.OpWrite && hold {
			return errHold
		}
		return nil
	}
	s, path := serve(t, e, Options{})
	s.AddExport("several caches", singleExport{e})
	a, b := dialRaw(t, path), dialRaw(t, path)
	if f := a.goTo("disk", false); f&(flagSendFlush|flagSendFUA|flagMultiConn) != flagSendFlush|flagSendFUA|flagMultiConn {
		t.Errorf("flags %#x", f)
	}
	if f := dialRaw(t, path).goTo("several caches", false); f&flagMultiConn != 0 || f&flagSendFlush == 0 {
		t.Errorf("flags %#x of an export whose flush covers one connection", f)
	}
	b.goTo("disk", false)
	a.request(cmdWrite, 0, 1, 0, 512, make([]byte, 512))
	a.want(0, 1)
	a.request(cmdWrite, cmdFlagFUA, 2, 0, 512, make([]byte, 512))
	a.want(0, 2)
	b.request(cmdFlush, 0, 3, 0, 0)
	b.want(0, 3)
	b.request(cmdTrim, cmdFlagFUA, 4, 0, 512)
	b.want(0, 4)
	b.request(cmdWriteZeroes, cmdFlagFUA|cmdFlagNoHole, 5, 0, 512)
	b.want(0, 5)
	b.request(cmdRead, cmdFlagFUA, 6, 0, 512)
	b.want(0, 6)
	b.bytes(512)
	mu.Lock()
	want := fmt.Sprintf("[%v+0 %v+1 %v+0 %v+1 %v+3 %v+0]", blockdev.OpWrite, blockdev.OpWrite, blockdev.OpFlush, blockdev.OpDiscard, blockdev.OpWriteZeroes, blockdev.OpRead)
	if fmt.Sprint(seen) != want {
		t.Errorf("device got %v, want %v", seen, want)
	}
	hold = true
	mu.Unlock()

	// A flush does not wait for writes that are not acknowledged.
	for i := range 500 {
		a.request(cmdWrite, 0, uint64(i), uint64(i)*512, 512, make([]byte, 512))
	}
	eventually(t, "writes wait", func() bool { return e.waiting() == 500 })
	a.request(cmdFlush, 0, 1000, 0, 0)
	a.want(0, 1000)
	mu.Lock()
	hold = false
	mu.Unlock()
	e.release()
	got := map[uint64]bool{}
	for range 500 {
		errno, cookie := a.simple()
		if errno != 0 || got[cookie] {
			t.Fatalf("reply to %d with error %d", cookie, errno)
		}
		got[cookie] = true
	}
}

type singleExport struct{ Export }

func (e singleExport) Info() ExportInfo {
	i := e.Export.Info()
	i.MultiConn = false
	return i
}

// Bytes may arrive in any pieces.
func TestFramesInPieces(t *testing.T) {
	d, path := serveMemory(t, Options{})
	c := dialRaw(t, path)
	c.goTo("disk", false)
	var script []byte
	rng := rand.New(rand.NewPCG(3, 4))
	const n = 60
	off := 0
	for i := range n {
		length := 512 * (1 + rng.IntN(100))
		if i == 30 {
			length = 600 << 10
		}
		script = append(script, request1(cmdWrite, 0, uint64(i), uint64(off), uint32(length))...)
		script = append(script, pattern(off, length)...)
		off += length
		script = append(script, request1(cmdWrite, 1<<8, uint64(i+n), 0, uint32(rng.IntN(3000)))...) // refused
		script = append(script, make([]byte, be.Uint32(script[len(script)-4:]))...)
	}
	go func() {
		for b := script; len(b) > 0; {
			k := 1 + rng.IntN(40)
			switch rng.IntN(6) {
			case 0:
				k = 1 + rng.IntN(200<<10)
			case 1:
				k = 1 + rng.IntN(9000)
			case 2:
				time.Sleep(50 * time.Microsecond)
			}
			k = min(k, len(b))
			if _, err := c.Write(b[:k]); err != nil {
				t.Error(err)
				return
			}
			b = b[k:]
		}
	}()
	seen := map[uint64]uint32{}
	for range 2 * n {
		errno, cookie := c.simple()
		if _, twice := seen[cookie]; twice {
			t.Fatalf("two replies to %d", cookie)
		}
		seen[cookie] = errno
	}
	for cookie, errno := range seen {
		if want := uint32(cookie/n) * errnoInval; errno != want {
			t.Errorf("request %d: error %d, want %d", cookie, errno, want)
		}
	}
	if !bytes.Equal(d.Bytes()[:off], pattern(0, off)) {
		t.Error("content differs")
	}
}

func TestErrnoTable(t *testing.T) {
	for _, c := range []struct {
		err  error
		want uint32
	}{
		{nil, 0},
		{fmt.Errorf("x: %w", blockdev.ErrNotSupported), errnoNotSup},
		{blockdev.ErrReadOnly, errnoPerm},
		{blockdev.ErrOutOfRange, errnoInval},
		{&blockdev.IOError{Err: syscall.ENOSPC}, errnoNoSpace},
		{syscall.EDQUOT, errnoNoSpace},
		{syscall.ENODEV, errnoIO},
		{fmt.Errorf("anything"), errnoIO},
	} {
		if got := errnoOf(c.err); got != c.want {
			t.Errorf("%v: %d, want %d", c.err, got, c.want)
		}
	}
}
