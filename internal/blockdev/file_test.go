package blockdev

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/rt"
	"github.com/ubcache/ubcache/internal/uring"
)

// openFile makes and opens a file for a test of what only this package sees.
func openFile(t *testing.T, size int64, o Options) *file {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "blockdev")
	if err != nil {
		dir = t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "disk")
	if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, size)); err != nil {
		t.Fatal(err)
	}
	d, err := Open(path, o)
	if errors.Is(err, uring.ErrUnavailable) {
		t.Skip("needs io_uring: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d.(*file)
}

func eachEngine(t *testing.T, fn func(t *testing.T, engine string)) {
	for _, engine := range []string{EngineUring, EnginePread, EngineInline} {
		t.Run(engine, func(t *testing.T) { fn(t, engine) })
	}
}

func newIO(t *testing.T, d Device, depth int) *IO {
	t.Helper()
	o, err := NewIO(d, depth)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { o.Close() })
	return o
}

// Transfers that the kernel does in pieces are continued.
func TestShortTransfersAreContinued(t *testing.T) {
	eachEngine(t, func(t *testing.T, engine string) {
		f := openFile(t, 1<<20, Options{Engine: engine})
		f.most = 8192
		o := newIO(t, f, 2)
		for _, flags := range []Flags{0, FUA} {
			want := bytes.Repeat([]byte("0123456789abcdef"), 100*32)
			want[0] = byte(flags)
			if err := o.WriteAt(want, 512, flags); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, len(want))
			if err := o.ReadAt(got, 512); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Fatal("content is wrong")
			}
		}
	})
}

func TestReadingAFileThatHasShrunk(t *testing.T) {
	eachEngine(t, func(t *testing.T, engine string) {
		f := openFile(t, 1<<20, Options{Engine: engine})
		o := newIO(t, f, 2)
		if err := os.Truncate(f.path, 64<<10); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 8192)
		for _, off := range []int64{60 << 10, 64 << 10, 512 << 10} {
			err := o.ReadAt(buf, off)
			var e *IOError
			if !errors.Is(err, io.ErrUnexpectedEOF) || !errors.As(err, &e) || e.Off != off || e.Len != 8192 {
				t.Errorf("at %d: %v", off, err)
			}
		}
		if err := o.ReadAt(buf, 0); err != nil {
			t.Error(err)
		}
	})
}

// A request that the system refuses brings the errno, with device and range.
func TestErrorsCarryTheErrno(t *testing.T) {
	eachEngine(t, func(t *testing.T, engine string) {
		f := openFile(t, 1<<20, Options{Engine: engine})
		q, err := f.NewQueue(1, func([]*Request) {})
		if err != nil {
			t.Fatal(err)
		}
		good := f.fd
		f.fd = -1 // for goroutines
		if r, ok := q.(*ringQueue); ok {
			r.fd, r.fixed = -1, 0 // and in the ring
		}
		r := &Request{Op: OpRead, Off: 4096, Buf: make([]byte, 8192)[:4096]}
		p := NewPool(PoolOptions{})
		b := p.Get(4096)
		r.Buf = b.Data
		q.Submit([]*Request{r})
		if err := q.Close(); err != nil {
			t.Fatal(err)
		}
		f.fd = good
		b.Release()
		var e *IOError
		if !errors.Is(r.Err, unix.EBADF) || !errors.As(r.Err, &e) {
			t.Fatal(r.Err)
		}
		if *e != (IOError{Device: f.path, Op: OpRead, Off: 4096, Len: 4096, Err: unix.EBADF}) {
			t.Errorf("%+v", *e)
		}
		if want := f.path + ": read 4096 bytes at 4096: bad file descriptor"; e.Error() != want {
			t.Errorf("%q, want %q", e.Error(), want)
		}
	})
}

// What the ring brings back unfinished goes on in a goroutine.
func TestRingSettle(t *testing.T) {
	f := &file{path: "x"}
	q := &ringQueue{f: f}
	for _, c := range []struct {
		res   int32
		flags Flags
		want  outcome
		err   error
		done  int
		op    Op
	}{
		{op: OpWrite, res: 4096, want: complete, done: 4096},
		{op: OpWrite, res: 1000, want: elsewhere, done: 1000},
		{op: OpRead, res: 0, want: elsewhere},
		{op: OpRead, res: -int32(unix.EINTR), want: elsewhere},
		{op: OpRead, res: -int32(unix.EAGAIN), want: elsewhere},
		{op: OpFlush, res: -int32(unix.ECANCELED), want: elsewhere},
		{op: OpWrite, res: -int32(unix.EIO), want: complete, err: unix.EIO},
		{op: OpWrite, res: -int32(unix.EOPNOTSUPP), want: complete, err: unix.EOPNOTSUPP},
		{op: OpWrite, res: -int32(unix.EOPNOTSUPP), flags: FUA, want: elsewhere},
		{op: OpWrite, res: -int32(unix.EOPNOTSUPP), flags: FUA, want: elsewhere},
		{op: OpFlush, res: 0, want: complete},
		{op: OpFlush, res: -int32(unix.EIO), want: complete, err: unix.EIO},
		{op: OpDiscard, res: 0, want: complete},
		{op: OpDiscard, res: 0, flags: FUA, want: again, done: stepFlush},
		{op: OpDiscard, res: -int32(unix.EOPNOTSUPP), want: elsewhere},
		{op: OpWriteZeroes, res: 0, want: complete},
		{op: OpWriteZeroes, res: 0, flags: FUA, want: again, done: stepFlush},
		{op: OpWriteZeroes, res: -int32(unix.EOPNOTSUPP), want: elsewhere},
	} {
		r := &Request{Op: c.op, Buf: make([]byte, 4096), Len: 4096, Flags: c.flags}
		if got := q.settle(r, c.res); got != c.want || !errors.Is(r.Err, c.err) || r.done != c.done {
			t.Errorf("%+v: outcome %v, %v, done %d", c, got, r.Err, r.done)
		}
	}
	if !f.noDsync.Load() {
		t.Error("RWF_DSYNC is tried again")
	}
}

func TestWithoutDsyncAWriteIsFlushed(t *testing.T) {
	eachEngine(t, func(t *testing.T, engine string) {
		f := openFile(t, 1<<20, Options{Engine: engine})
		f.noDsync.Store(true)
		o := newIO(t, f, 1)
		if err := o.WriteAt(bytes.Repeat([]byte("x"), 4096), 0, FUA); err != nil {
			t.Error(err)
		}
	})
}

func TestZeroesWithoutHelpOfTheFileSystem(t *testing.T) {
	f := openFile(t, 4<<20, Options{})
	f.noPunch.Store(true)
	f.noZeroRange.Store(true)
	o := newIO(t, f, 1)
	want := bytes.Repeat([]byte("x"), 3<<20)
	if err := o.WriteAt(want, 0, 0); err != nil {
		t.Fatal(err)
	}
	if err := o.WriteZeroes(512, 2<<20+1024, FastZero); !errors.Is(err, ErrNotSupported) {
		t.Errorf("FastZero: %v", err)
	}
	if err := o.WriteZeroes(512, 2<<20+1024, NoUnmap); err != nil {
		t.Fatal(err)
	}
	clear(want[512 : 512+2<<20+1024])
	got := make([]byte, len(want))
	if err := o.ReadAt(got, 0); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("content is wrong")
	}
}

func TestSizeStays(t *testing.T) {
	f := openFile(t, 1<<20, Options{})
	o := newIO(t, f, 1)
	for _, err := range []error{
		o.WriteAt(make([]byte, 4096), 1<<20-4096, 0), o.Discard(1<<20-4096, 4096),
		o.WriteZeroes(1<<20-8192, 8192, NoUnmap), o.WriteZeroes(0, 1<<20, 0), o.Discard(0, 1<<20),
	} {
		if err != nil {
			t.Error(err)
		}
	}
	if st, err := os.Stat(f.path); err != nil || st.Size() != 1<<20 {
		t.Errorf("%v, %v", st.Size(), err)
	}
}

func TestReadOnly(t *testing.T) {
	f := openFile(t, 1<<20, Options{ReadOnly: true})
	o := newIO(t, f, 1)
	for name, err := range map[string]error{
		"write": o.WriteAt(make([]byte, 512), 0, 0), "zeroes": o.WriteZeroes(0, 512, 0), "discard": o.Discard(0, 512),
	} {
		if !errors.Is(err, ErrReadOnly) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := errors.Join(o.ReadAt(make([]byte, 512), 0), o.Flush()); err != nil {
		t.Error(err)
	}
}

func TestEngineFallsBack(t *testing.T) {
	var log bytes.Buffer
	f := &file{path: "x", rt: rt.New(), log: slog.New(slog.NewTextHandler(&log, nil))}
	refused := func() error { return uring.ErrUnavailable }
	if err := f.chooseEngine(EngineAuto, refused); err != nil || f.info.Engine != EnginePread {
		t.Errorf("auto: %q, %v", f.info.Engine, err)
	}
	if !strings.Contains(log.String(), "no io_uring") {
		t.Errorf("no notice: %q", &log)
	}
	if err := f.chooseEngine(EngineUring, refused); !errors.Is(err, uring.ErrUnavailable) {
		t.Errorf("uring: %v", err)
	}
	f.rt = rt.NewSim(1).Runtime()
	if err := f.chooseEngine(EngineAuto, refused); err != nil || f.info.Engine != EngineInline {
		t.Errorf("simulated: %q, %v", f.info.Engine, err)
	}
}

func TestBufferedIsSaidToBe(t *testing.T) {
	f := openFile(t, 1<<20, Options{Buffered: true})
	if f.info.Direct || f.info.BufferAlign != 1 {
		t.Errorf("%+v", f.info)
	}
}

// The rest of a file that is no whole block is not used.
func TestOddSizes(t *testing.T) {
	for _, c := range []struct{ size, block, want int64 }{{1<<20 + 100, 512, 1 << 20}, {1<<20 + 512, 4096, 1 << 20}, {511, 512, 0}, {0, 512, 0}} {
		f := openFile(t, c.size, Options{LogicalBlock: int(c.block)})
		if f.info.Size != c.want {
			t.Errorf("%d bytes in blocks of %d: size %d, want %d", c.size, c.block, f.info.Size, c.want)
		}
	}
}
