package nbd

import (
	"bytes"
	"context"
	"io"
	"net"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// script is a peer that sends fixed bytes and takes all it is sent.
type scriptConn struct {
	io.Reader
	net.Conn // nil: any other use is a mistake
}

func (s *scriptConn) Read(p []byte) (int, error)       { return s.Reader.Read(p) }
func (s *scriptConn) Write(p []byte) (int, error)      { return len(p), nil }
func (s *scriptConn) Close() error                     { return nil }
func (s *scriptConn) SetDeadline(time.Time) error      { return nil }
func (s *scriptConn) SetReadDeadline(time.Time) error  { return nil }
func (s *scriptConn) SetWriteDeadline(time.Time) error { return nil }
func (s *scriptConn) RemoteAddr() net.Addr             { return nil }

// fuzzServer is a server with one export of 1 MiB, whose largest request and budget are small.
func fuzzServer(f *testing.F) *Server {
	d, err := blockdev.Memory(1<<20, blockdev.MemoryOptions{})
	if err != nil {
		f.Fatal(err)
	}
	s := NewServer(Options{MaxRequest: 64 << 10, BufferBudget: 160 << 10, MaxInFlight: 8, MaxInFlightBytes: 96 << 10})
	if err := s.AddExport("disk", mapExport{DeviceExport(d, "text", false)}); err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { s.Close(); d.Close() })
	return s
}

func checkReleased(t *testing.T, s *Server) {
	if n := s.budget.free.Load(); n != s.opts.BufferBudget {
		t.Fatalf("%d of %d bytes of the budget are back", n, s.opts.BufferBudget)
	}
	if n := s.pool.Stats().InUse; n != 0 {
		t.Fatalf("%d buffers were not released", n)
	}
}

func FuzzServerHandshake(f *testing.F) {
	s := fuzzServer(f)
	option := func(opt uint32, data []byte) []byte {
		return wireBytes(uint64(magicOption), opt, uint32(len(data)), data)
	}
	f.Add(wireBytes(uint32(3), option(optList, nil), option(optStructuredReply, nil), option(optInfo, infoData("", 3, 1, 2)), option(optGo, infoData("disk"))))
	f.Add(wireBytes(uint32(1), option(optStructuredReply, nil), option(optSetMeta, wireBytes(uint32(0), uint32(1), uint32(15), ContextAllocation)),
		option(optExportName, []byte("disk"))))
	f.Add(wireBytes(uint32(3), option(optStartTLS, nil), option(optAbort, nil)))
	f.Fuzz(func(t *testing.T, script []byte) {
		nc := &scriptConn{Reader: bytes.NewReader(script)}
		s.wg.Add(1)
		go func() { defer s.wg.Done(); s.serveConn(nc) }()
		s.wg.Wait()
		checkReleased(t, s)
	})
}

func FuzzServerTransmission(f *testing.F) {
	s := fuzzServer(f)
	f.Add(false, bytes.Join([][]byte{
		request1(cmdWrite, cmdFlagFUA, 1, 0, 512), make([]byte, 512), request1(cmdRead, 0, 2, 0, 8192), request1(cmdFlush, 0, 3, 0, 0),
		request1(cmdTrim, 0, 4, 0, 1<<20), request1(cmdWriteZeroes, 3, 5, 512, 1<<19), request1(cmdCache, 0, 6, 0, 1<<20), request1(cmdDisc, 0, 7, 0, 0),
	}, nil))
	f.Add(true, bytes.Join([][]byte{
		request1(cmdBlockStatus, 0, 1, 0, 1<<20), request1(cmdRead, cmdFlagDF, 2, 0, 8192), request1(cmdWrite, 0, 3, 0, 10<<10), make([]byte, 10<<10),
		request1(cmdRead, 0, 4, 1<<63, 1<<31), request1(99, 0xffff, 5, 0, 0),
	}, nil))
	f.Fuzz(func(t *testing.T, structured bool, script []byte) {
		e := s.lookup("disk")
		h := &handshake{export: e, geo: e.Info().geometry(s.opts.MaxRequest), structured: structured}
		if structured {
			h.contexts = []metaContext{{1, ContextAllocation}, {2, ContextState}}
		}
		c := newConn(s, &scriptConn{Reader: bytes.NewReader(script)}, h)
		q, err := e.NewQueue(8, c.complete)
		if err != nil {
			t.Fatal(err)
		}
		c.queue = q
		c.run()
		checkReleased(t, s)
	})
}

func FuzzClient(f *testing.F) {
	greeting := wireBytes(uint64(magicInit), uint64(magicOption), uint16(3))
	answer := func(opt, typ uint32, data ...any) []byte {
		d := wireBytes(data...)
		return append(wireBytes(uint64(magicOptReply), opt, typ, uint32(len(d))), d...)
	}
	ready := bytes.Join([][]byte{
		greeting, answer(optStructuredReply, repAck), answer(optGo, repInfo, uint16(infoExport), uint64(1<<20), uint16(0xfff)),
		answer(optGo, repInfo, uint16(infoBlockSize), uint32(1), uint32(4096), uint32(65536)), answer(optGo, repAck),
	}, nil)
	f.Add(append(bytes.Clone(ready), wireBytes(uint32(magicStructured), uint16(1), uint16(chunkOffsetData), uint64(0), uint32(8+4096), uint64(4096), make([]byte, 4096),
		uint32(magicSimple), uint32(5), uint64(1), uint32(magicStructured), uint16(1), uint16(chunkError), uint64(2), uint32(6), uint32(5), uint16(0))...))
	f.Add(append(bytes.Clone(ready), wireBytes(uint32(magicStructured), uint16(0), uint16(chunkOffsetHole), uint64(0), uint32(12), uint64(4096), uint32(4096),
		uint32(magicStructured), uint16(1), uint16(chunkNone), uint64(0), uint32(0))...))
	f.Add(append(append(bytes.Clone(greeting), answer(optStructuredReply, repErrUnsup, "no")...), answer(optGo, repErrUnsup)...))
	f.Fuzz(func(t *testing.T, script []byte) {
		c, err := NewClient(context.Background(), &scriptConn{Reader: bytes.NewReader(script)}, "", DialOptions{})
		if err != nil {
			return
		}
		done := 0
		q, err := c.NewQueue(8, func(d []*blockdev.Request) { done += len(d) })
		if err != nil {
			t.Fatal(err)
		}
		const guard = 4096
		buf := bytes.Repeat([]byte{0x55}, 3*4096+guard)
		reqs := []*blockdev.Request{
			{Op: blockdev.OpRead, Off: 4096, Buf: buf[:4096]},
			{Op: blockdev.OpWrite, Off: 0, Buf: make([]byte, 4096)},
			{Op: blockdev.OpRead, Off: 0, Buf: buf[4096:12288]},
			{Op: blockdev.OpFlush},
			{Op: blockdev.OpWriteZeroes, Len: 1 << 20, Flags: blockdev.FUA},
		}
		q.Submit(reqs)
		q.Close()
		c.Close()
		if done != len(reqs) {
			t.Fatalf("%d of %d requests were completed", done, len(reqs))
		}
		for _, b := range buf[3*4096:] {
			if b != 0x55 {
				t.Fatal("written behind a buffer")
			}
		}
	})
}
