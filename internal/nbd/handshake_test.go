package nbd

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// Case 22: handshake and block sizes.
func TestCase22Handshake(t *testing.T) {
	d4k := memory(t, testSize, blockdev.MemoryOptions{LogicalBlock: 4096})
	s, path := serve(t, DeviceExport(memory(t, testSize, blockdev.MemoryOptions{}), "", false), Options{})
	odd := "odd \xff\x00 name"
	for name, e := range map[string]Export{odd: DeviceExport(d4k, "4k blocks", false)} {
		if err := s.AddExport(name, e); err != nil {
			t.Fatal(err)
		}
	}

	t.Run("a export name", func(t *testing.T) {
		for _, name := range []string{"disk", odd} {
			c := dialRaw(t, path).greet(flagFixedNewstyle | flagNoZeroes)
			c.option(optExportName, []byte(name))
			if n := c.u64(); n != testSize {
				t.Errorf("size %d", n)
			}
			if f := c.u16(); f&(flagHasFlags|flagSendFlush|flagSendFUA) != flagHasFlags|flagSendFlush|flagSendFUA || f&flagSendDF != 0 {
				t.Errorf("flags %#x", f)
			}
			c.request(cmdRead, 0, 1, 4096, 4096)
			c.want(0, 1)
			c.bytes(4096)
		}
	})
	t.Run("b padding zeroes", func(t *testing.T) {
		c := dialRaw(t, path).greet(flagFixedNewstyle)
		c.option(optExportName, []byte("disk"))
		c.bytes(10)
		if !bytes.Equal(c.bytes(124), make([]byte, 124)) {
			t.Error("padding is not zero")
		}
		c.request(cmdFlush, 0, 7, 0, 0)
		c.want(0, 7)

		c = dialRaw(t, path).greet(flagFixedNewstyle | flagNoZeroes)
		c.option(optExportName, []byte("disk"))
		c.bytes(10)
		c.request(cmdFlush, 0, 8, 0, 0)
		c.want(0, 8)
	})
	t.Run("c list", func(t *testing.T) {
		c := dialRaw(t, path).greet(flagFixedNewstyle)
		c.option(optList, nil)
		var got []string
		for {
			typ, data := c.answer(optList)
			if typ == repAck {
				break
			}
			if typ != repServer {
				t.Fatalf("reply %#x", typ)
			}
			n := be.Uint32(data)
			got = append(got, fmt.Sprintf("%s|%s", data[4:4+n], data[4+n:]))
		}
		if want := []string{"disk|", odd + "|4k blocks"}; fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("got %q, want %q", got, want)
		}
		c.option(optList, []byte("x"))
		c.expect(optList, repErrInvalid)
	})
	t.Run("d unknown option", func(t *testing.T) {
		c := dialRaw(t, path).greet(flagFixedNewstyle)
		for _, opt := range []uint32{4, 11, 12345, 1<<32 - 1} {
			c.option(opt, []byte("some data"))
			c.expect(opt, repErrUnsup)
		}
		c.option(optStartTLS, nil)
		c.expect(optStartTLS, repErrPolicy)
		c.option(77, make([]byte, maxOptionLen+1))
		c.expect(77, repErrTooBig)
		c.option(optGo, infoData("disk"))
		c.infos(optGo)
		c.request(cmdFlush, 0, 9, 0, 0)
		c.want(0, 9)
	})
	t.Run("e abort", func(t *testing.T) {
		c := dialRaw(t, path).greet(flagFixedNewstyle)
		c.option(optAbort, nil)
		c.expect(optAbort, repAck)
		c.eof()
	})
	t.Run("f empty name", func(t *testing.T) {
		c := dialRaw(t, path).greet(flagFixedNewstyle)
		c.option(optInfo, infoData("", infoName))
		if name := c.infos(optInfo)[infoName]; string(name) != "disk" {
			t.Errorf("the default export is %q", name)
		}
		c.option(optExportName, nil)
		if n := c.u64(); n != testSize {
			t.Errorf("size %d", n)
		}
	})
	t.Run("g unknown name", func(t *testing.T) {
		c := dialRaw(t, path).greet(flagFixedNewstyle)
		for _, opt := range []uint32{optInfo, optGo} {
			c.option(opt, infoData("none"))
			if msg := c.expect(opt, repErrUnknown); len(msg) == 0 {
				t.Error("no message")
			}
		}
		c.option(optExportName, []byte("none"))
		c.eof()
	})
	t.Run("h block sizes", func(t *testing.T) {
		c := dialRaw(t, path).greet(flagFixedNewstyle)
		c.option(optInfo, infoData(odd))
		if m := c.infos(optInfo); len(m[infoExport]) != 10 || m[infoName] != nil || m[infoDescription] != nil {
			t.Errorf("infos without asking: %x", m)
		}
		c.option(optInfo, infoData(odd, infoBlockSize, infoName, infoDescription, 999))
		m := c.infos(optInfo)
		if want := wireBytes(uint32(4096), uint32(4096), uint32(32<<20)); !bytes.Equal(m[infoBlockSize], want) {
			t.Errorf("block sizes %x", m[infoBlockSize])
		}
		if string(m[infoName]) != odd || string(m[infoDescription]) != "4k blocks" {
			t.Errorf("name %q, description %q", m[infoName], m[infoDescription])
		}
		c.option(optGo, infoData("disk"))
		if m := c.infos(optGo); !bytes.Equal(m[infoBlockSize], wireBytes(uint32(512), uint32(4096), uint32(32<<20))) {
			t.Errorf("block sizes in GO %x", m[infoBlockSize])
		}
	})
	t.Run("i smaller than a block", func(t *testing.T) {
		copy(d4k.Bytes(), pattern(0, 8192))
		c := dialRaw(t, path)
		c.goTo(odd, false)
		c.request(cmdRead, 0, 1, 1024, 1024)
		c.want(errnoInval, 1)
		c.request(cmdWrite, 0, 2, 1024, 1024, make([]byte, 1024))
		c.want(errnoInval, 2)
		c.request(cmdWrite, 0, 3, 4096, 5000, make([]byte, 5000))
		c.want(errnoInval, 3)
		c.request(cmdTrim, 0, 4, 512, 4096)
		c.want(errnoInval, 4)
		c.request(cmdRead, 0, 5, 0, 8192)
		c.want(0, 5)
		if !bytes.Equal(c.bytes(8192), pattern(0, 8192)) {
			t.Error("bytes have changed")
		}
	})
	t.Run("j odd length", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "disk")
		content := pattern(0, 1<<20+700)
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
		d, err := blockdev.Open(file, blockdev.Options{Buffered: true, Engine: blockdev.EngineInline})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		// Also where the export itself does not round.
		for name, e := range map[string]Export{"file": DeviceExport(d, "", false), "raw": oddExport{DeviceExport(d, "", false)}} {
			s.AddExport(name, e)
			c := dialRaw(t, path).greet(flagFixedNewstyle)
			c.option(optExportName, []byte(name))
			if n := c.u64(); n != 1<<20+512 {
				t.Fatalf("%s: size %d", name, n)
			}
			c.bytes(2 + 124)
			c.request(cmdWrite, 0, 1, 1<<20+512, 512, make([]byte, 512))
			c.want(errnoNoSpace, 1)
			c.request(cmdWriteZeroes, 0, 2, 1<<20, 700)
			c.want(errnoNoSpace, 2)
			c.request(cmdRead, 0, 3, 1<<20, 512)
			c.want(0, 3)
			if !bytes.Equal(c.bytes(512), content[1<<20:1<<20+512]) {
				t.Error("wrong content")
			}
			c.Close()
		}
		if after, err := os.ReadFile(file); err != nil || !bytes.Equal(after, content) {
			t.Errorf("the file has changed (%v, %d bytes)", err, len(after))
		}
	})
}

// oddExport does not round its size down.
type oddExport struct{ Export }

func (e oddExport) Info() ExportInfo {
	i := e.Export.Info()
	i.Size += 188
	return i
}

func TestHandshakeRefusesNonsense(t *testing.T) {
	_, path := serveMemory(t, Options{})
	for name, script := range map[string][]byte{
		"unknown client flags": wireBytes(uint32(0x10)),
		"wrong magic":          wireBytes(uint32(1), uint64(1), uint32(7), uint32(0)),
		"endless option":       wireBytes(uint32(1), uint64(magicOption), uint32(99), uint32(1<<32-1)),
		"endless name":         wireBytes(uint32(1), uint64(magicOption), uint32(optExportName), uint32(1<<31)),
		"too many options":     bytes.Repeat(wireBytes(uint64(magicOption), uint32(99), uint32(0)), maxOptions+1),
	} {
		t.Run(name, func(t *testing.T) {
			c := dialRaw(t, path)
			if strings.HasPrefix(name, "too many") {
				script = append(wireBytes(uint32(1)), script...)
			}
			go c.Write(script)
			b := make([]byte, 4096)
			for {
				if _, err := c.Read(b); err != nil {
					if !disconnected(err) {
						t.Fatal(err)
					}
					return
				}
			}
		})
	}
	t.Run("lengths that do not fit", func(t *testing.T) {
		c := dialRaw(t, path).greet(flagFixedNewstyle)
		c.option(optStructuredReply, nil)
		c.expect(optStructuredReply, repAck)
		for _, opt := range []uint32{optInfo, optGo, optListMeta, optSetMeta} {
			for _, data := range [][]byte{
				nil,
				{1},
				wireBytes(uint32(5), "disk"), wireBytes(uint32(1<<32-1), "disk"), wireBytes(uint32(4), "disk"),
				wireBytes(uint32(4), "disk", uint16(1)), wireBytes(uint32(4), "disk", uint32(1), uint32(9), "base:"),
			} {
				c.option(opt, data)
				c.expect(opt, repErrInvalid)
			}
		}
		c.option(optSetMeta, wireBytes(uint32(4), "disk", uint32(1<<31)))
		c.expect(optSetMeta, repErrTooBig)
		c.option(optStructuredReply, []byte{1})
		c.expect(optStructuredReply, repErrInvalid)
		c.option(optAbort, nil)
		c.expect(optAbort, repAck)
	})
}

// mapExport answers block status queries.
type mapExport struct{ Export }

func (mapExport) MetaContexts() []string { return []string{ContextAllocation, ContextState} }

// AppendExtents says: each odd 64 KiB is a hole, each fourth dirty.
func (mapExport) AppendExtents(dst []Extent, context string, off, length int64, max int) ([]Extent, error) {
	const unit = 64 << 10
	for len(dst) < max && length > 0 {
		n := min(unit-off%unit, length)
		e := Extent{Length: n}
		switch i := off / unit; {
		case context == ContextAllocation && i%2 == 1:
			e.Flags = StateHole | StateZero
		case context == ContextState && i%4 == 0:
			e.Flags = StateDirty
		}
		dst = append(dst, e)
		off, length = off+n, length-n
	}
	return dst, nil
}

func TestBlockStatus(t *testing.T) {
	s, path := serve(t, mapExport{DeviceExport(memory(t, testSize, blockdev.MemoryOptions{}), "", false)}, Options{})
	s.AddExport("plain", DeviceExport(memory(t, testSize, blockdev.MemoryOptions{}), "", false))
	query := func(export string, names ...string) []byte {
		b := wireBytes(uint32(len(export)), export, uint32(len(names)))
		for _, n := range names {
			b = append(b, wireBytes(uint32(len(n)), n)...)
		}
		return b
	}
	contexts := func(c *raw, opt uint32) (names []string) {
		for {
			typ, data := c.answer(opt)
			if typ == repAck {
				return names
			}
			names = append(names, fmt.Sprintf("%d %s", be.Uint32(data), data[4:]))
		}
	}
	c := dialRaw(t, path).greet(flagFixedNewstyle | flagNoZeroes)
	c.option(optListMeta, query("disk"))
	c.expect(optListMeta, repErrInvalid) // before structured replies
	c.option(optStructuredReply, nil)
	c.expect(optStructuredReply, repAck)
	for _, step := range []struct {
		opt   uint32
		query []byte
		want  string
	}{
		{optListMeta, query("disk"), "[0 base:allocation 0 ubcache:state]"},
		{optListMeta, query("disk", "base:"), "[0 base:allocation]"},
		{optListMeta, query("disk", "qemu:"), "[]"},
		{optListMeta, query("plain"), "[]"},
		{optSetMeta, query("disk", "base:"), "[]"},
		{optSetMeta, query("disk"), "[]"},
		{optSetMeta, query("", ContextState, ContextAllocation, "x-y:z"), "[1 base:allocation 2 ubcache:state]"},
	} {
		c.option(step.opt, step.query)
		if got := fmt.Sprint(contexts(c, step.opt)); got != step.want {
			t.Errorf("option %d, query %q: %s, want %s", step.opt, step.query, got, step.want)
		}
	}
	c.option(optGo, infoData("disk"))
	c.infos(optGo)

	c.request(cmdBlockStatus, 0, 1, 32<<10, 256<<10)
	flags, typ, cookie, body := c.chunk()
	if want := wireBytes(uint32(1), uint32(32<<10), uint32(0), uint32(64<<10), uint32(3), uint32(64<<10), uint32(0), uint32(64<<10), uint32(3), uint32(32<<10), uint32(0)); flags != 0 ||
		typ != chunkBlockStatus || cookie != 1 || !bytes.Equal(body, want) {
		t.Errorf("first chunk %d %d %d %x", flags, typ, cookie, body)
	}
	flags, typ, cookie, body = c.chunk()
	if want := wireBytes(uint32(2), uint32(32<<10), uint32(2), uint32(192<<10), uint32(0), uint32(32<<10), uint32(2)); flags != chunkFlagDone ||
		typ != chunkBlockStatus || cookie != 1 || !bytes.Equal(body, want) {
		t.Errorf("second chunk %d %d %d %x", flags, typ, cookie, body)
	}
	c.request(cmdBlockStatus, cmdFlagReqOne, 2, 0, testSize)
	for range 2 {
		if _, _, _, body = c.chunk(); len(body) != 12 {
			t.Errorf("more than one extent: %x", body)
		}
	}
	for i, r := range [][2]uint64{{testSize, 512}, {0, 0}, {1 << 63, 512}, {1, 512}} {
		c.request(cmdBlockStatus, 0, uint64(i), r[0], uint32(r[1]))
		if _, typ, _, body := c.chunk(); typ != chunkError || be.Uint32(body) != errnoInval {
			t.Errorf("status at %d: chunk %d %x", r[0], typ, body)
		}
	}

	// Contexts of one export do not hold for another.
	c = dialRaw(t, path).greet(flagFixedNewstyle | flagNoZeroes)
	c.option(optStructuredReply, nil)
	c.expect(optStructuredReply, repAck)
	c.option(optSetMeta, query("disk", ContextAllocation))
	contexts(c, optSetMeta)
	c.option(optGo, infoData("plain"))
	c.infos(optGo)
	c.request(cmdBlockStatus, 0, 1, 0, 512)
	if _, typ, _, body := c.chunk(); typ != chunkError || be.Uint32(body) != errnoInval {
		t.Errorf("status without contexts: chunk %d %x", typ, body)
	}
}
