package offline

import (
	"bytes"
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// piecemeal is a volume of many short pieces from both devices.
func piecemeal(t testing.TB, s shape) (*build, *Volume) {
	b := newBuildOf(t, s)
	b.onlyLeaf(keySet(manyKeys(200, 16, 0)...), keySet(goneKey(20, 4)))
	return b, b.volume(b.open())
}

// waits collects requests until n are done.
func waits(n int) (complete func([]*blockdev.Request), wait func()) {
	done := make(chan struct{})
	return func(reqs []*blockdev.Request) {
		if n -= len(reqs); n == 0 {
			close(done)
		}
	}, func() { <-done }
}

// A read submitted from within complete, as the contract of queues allows, by devices that complete at once.
func TestVolumeResubmits(t *testing.T) {
	_, v := piecemeal(t, shape{})
	pool := blockdev.NewPool(blockdev.PoolOptions{})
	buf := pool.Get(64 << 10)
	defer buf.Release()
	done := make(chan struct{})
	left := 1000
	var q blockdev.Queue
	q, err := v.NewQueue(1, func(reqs []*blockdev.Request) {
		for _, r := range reqs {
			if left--; left == 0 {
				close(done)
				return
			}
			r.Off = (r.Off + 512) % (v.Info().Size - int64(len(r.Buf)))
			q.Submit([]*blockdev.Request{r})
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	q.Submit([]*blockdev.Request{{Op: blockdev.OpRead, Buf: buf.Data[:64<<10]}})
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatal("hangs")
	}
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
	if err := q.Close(); !errors.Is(err, blockdev.ErrClosed) {
		t.Errorf("closed twice: %v", err)
	}
}

// What is not a read within the volume is refused, and only that.
func TestVolumeRefuses(t *testing.T) {
	_, v := piecemeal(t, shape{})
	size := v.Info().Size
	buf := make([]byte, 8192+512)
	buf = buf[-addr(buf)&511:][:8192]
	reqs := []*blockdev.Request{
		{Op: blockdev.OpWrite, Buf: buf[:512]},
		{Op: blockdev.OpDiscard, Len: 512},
		{Op: blockdev.OpWriteZeroes, Len: 512},
		{Op: blockdev.OpRead, Off: 1, Buf: buf[:512]},
		{Op: blockdev.OpRead, Off: 0, Buf: buf[:100]},
		{Op: blockdev.OpRead, Off: 0, Buf: buf[1:513]},
		{Op: blockdev.OpRead, Off: size - 512, Buf: buf[:1024]},
		{Op: blockdev.OpRead, Off: math.MaxInt64 - 511, Buf: buf[:512]},
		{Op: blockdev.OpRead, Off: -512, Buf: buf[:512]},
		{Op: blockdev.OpRead, Off: size, Buf: nil},
		{Op: blockdev.OpFlush},
		{Op: blockdev.OpRead, Off: size - 512, Buf: buf[512:1024]},
	}
	want := []error{
		blockdev.ErrReadOnly, blockdev.ErrReadOnly, blockdev.ErrReadOnly, blockdev.ErrUnaligned, blockdev.ErrUnaligned, blockdev.ErrUnaligned,
		blockdev.ErrOutOfRange, blockdev.ErrOutOfRange, blockdev.ErrOutOfRange, nil, nil, nil,
	}
	complete, wait := waits(len(reqs))
	q, err := v.NewQueue(4, complete)
	if err != nil {
		t.Fatal(err)
	}
	q.Submit(reqs)
	wait()
	for i, r := range reqs {
		if !errors.Is(r.Err, want[i]) {
			t.Errorf("%v: %v, want %v", r, r.Err, want[i])
		}
	}
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
	if len(v.Failed()) != 0 {
		t.Errorf("refused requests count as failed: %v", v.Failed())
	}
}

// Where a request needs what a device cannot read, it fails; others go on. What failed is remembered, once.
func TestVolumeErrors(t *testing.T) {
	for _, align := range []int{512, 4096} { // with 4096 the short pieces go through buffers of their own
		b, v := piecemeal(t, shape{align: align})
		b.cache.breaks(dataAt(0, 10), 1)   // key 16 + 2*10
		b.disks[0].breaks(101, 1)          // between two keys
		b.cache.breaks(dataAt(0, 150), 20) // hidden by nothing
		var want [][2]int64
		for _, s := range []int64{36, 101} {
			want = append(want, [2]int64{(s - 16) * 512, 512})
		}
		for i := int64(150); i < 170; i++ {
			want = append(want, [2]int64{2 * i * 512, 512})
		}
		for range 2 {
			got := sectorsOf(t, v)
			bad := 0
			for _, s := range got {
				if s.what == fromError {
					bad++
				}
			}
			if bad != len(want) {
				t.Errorf("align %d: %d sectors cannot be read, want %d", align, bad, len(want))
			}
		}
		failed := v.Failed()
		slices.SortFunc(failed, func(a, b [2]int64) int { return int(a[0] - b[0]) })
		slices.SortFunc(want, func(a, b [2]int64) int { return int(a[0] - b[0]) })
		if !slices.Equal(failed, want) {
			t.Errorf("align %d: failed %v, want %v", align, failed, want)
		}
		if u := v.Unreadable(); len(u) != 0 {
			t.Errorf("unknown from the start: %v", u)
		}
		io, err := blockdev.NewIO(v, 1)
		if err != nil {
			t.Fatal(err)
		}
		var e *blockdev.IOError
		if err := io.ReadAt(make([]byte, 64<<10), 0); !errors.Is(err, unix.EIO) || !errors.As(err, &e) || e.Device != "cache" && e.Device != "backing0" {
			t.Errorf("error is %v", err)
		}
		if err := io.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// The parts whose content nobody knows are named before anyone reads.
func TestVolumeUnknown(t *testing.T) {
	b := newBuild(t)
	l, _ := b.twoLeaves(keySet(dirtyKey(16, 8, dataAt(0, 0))), keySet())
	b.journal(dirtyKey(100, 100, dataAt(1, 0))) // leaves its bucket: bad
	b.journal(dirtyKey(120, 8, dataAt(2, 0)))
	b.then(func() { flip(b.cache.at(l.P[0].Sector(), 1)) })
	v := b.volume(b.open())
	want := [][2]int64{{0, (120 - 16) * 512}, {(128 - 16) * 512, (1000 - 128) * 512}}
	if got := v.Unreadable(); !slices.Equal(got, want) {
		t.Errorf("unknown: %v, want %v", got, want)
	}
	mustRead(t, v, unknown(16, 1000), cached(120, 128, dataAt(2, 0)))
	io, err := blockdev.NewIO(v, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer io.Close()
	var e *blockdev.IOError
	if err := io.ReadAt(make([]byte, 512), 0); !errors.Is(err, ErrUnreadable) || !errors.As(err, &e) || e.Device != "backing0" {
		t.Errorf("error is %v", err)
	}
	for _, r := range v.Failed() {
		if !within([][2]int64{r}, want) {
			t.Errorf("failed: %v is not unknown", r)
		}
	}
}

// A flash-only volume reads as zeroes where it has no extent, and its size is what the slot says.
func TestFlashVolume(t *testing.T) {
	b := newBuild(t)
	b.flash(1, "one", 100)
	b.flash(2, "two", 1<<63)
	b.flash(3, "7", 8)
	b.flash(7, "two", math.MaxUint64)
	b.onlyLeaf(keySet(dirtyKey(16, 8, dataAt(0, 0)), inInode(1, dirtyKey(0, 8, dataAt(1, 0))), inInode(1, dirtyKey(96, 8, dataAt(2, 0)))), keySet(inInode(1, goneKey(2, 2))))
	b.journal(inInode(1, cleanKey(50, 1, dataAt(3, 0))))
	s := b.open()
	v, err := OpenFlash(s, "one")
	if err != nil {
		t.Fatal(err)
	}
	mustRead(t, v, cached(0, 8, dataAt(1, 0)), span{2, 4, source{}}, cached(50, 51, dataAt(3, 0)), cached(96, 100, dataAt(2, 0)))
	for name, size := range map[string]int64{"1": 100 * 512, "2": math.MaxInt64 / 512 * 512, "7": 8 * 512} {
		v, err := OpenFlash(s, name)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else if v.Info().Size != size {
			t.Errorf("%s: size %d, want %d", name, v.Info().Size, size)
		}
	}
	for name, says := range map[string]string{"two": "slots 2 and 7 both", "0": "no flash-only volume", "64": `it has "one" (slot 1)`, "-1": "no flash", "": "no flash", "1x": "no flash"} {
		if _, err := OpenFlash(s, name); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v, want %q", name, err, says)
		}
	}
	if _, err := OpenFlash(newBuild(t).open(), "x"); err == nil || !strings.Contains(err.Error(), "it has none") {
		t.Error(err)
	}
}

// Without its cache a backing device is read only where nothing of it can be cached.
func TestOpenAlone(t *testing.T) {
	for state, ok := range map[ondisk.State]bool{ondisk.StateNone: true, ondisk.StateStale: true, ondisk.StateClean: false, ondisk.StateDirty: false} {
		b := newBuild(t)
		b.disks[0].super.SetState(state)
		b.seal()
		back, err := OpenBacking(nil, b.disks[0])
		if err != nil {
			t.Fatal(err)
		}
		v, err := OpenAlone(back)
		var refusal *RefusedError
		switch {
		case ok && err == nil:
			mustRead(t, v)
		case ok || !errors.As(err, &refusal) || !strings.Contains(err.Error(), b.super.SetUUID.String()):
			t.Errorf("%v: %v", state, err)
		}
	}
}

// Case 06: the data offset, and a size that is no multiple of the block.
func TestDataOffset(t *testing.T) {
	for _, off := range []uint64{16, 17, 1000, 2040} {
		for _, block := range []uint16{1, 8} {
			b := newBuild(t)
			super := &b.disks[0].super
			super.Version, super.Word184, super.BlockSize = ondisk.VersionBackingOff, off, block
			b.onlyLeaf(keySet(dirtyKey(off, 2, dataAt(0, 0))))
			v := b.volume(b.open())
			if want := int64((2048-off)/uint64(block)*uint64(block)) * 512; v.Info().Size != want || v.Info().LogicalBlock != int(block)*512 {
				t.Fatalf("offset %d, block %d: size %d in blocks of %d", off, block, v.Info().Size, v.Info().LogicalBlock)
			}
			buf := make([]byte, v.Info().Size)
			io, err := blockdev.NewIO(v, 2)
			if err != nil {
				t.Fatal(err)
			}
			if err := io.ReadAt(buf, 0); err != nil {
				t.Fatal(err)
			}
			want := append(slices.Clone(b.cache.at(dataAt(0, 0), 2)), b.disks[0].at(off+2, len(buf)/512-2)...)
			if !bytes.Equal(buf, want) {
				t.Errorf("offset %d, block %d: content", off, block)
			}
			if err := io.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Copy goes on around what cannot be read, says how far it is, and ends with its writer or its context.
func TestCopyEnds(t *testing.T) {
	b, v := piecemeal(t, shape{})
	b.cache.breaks(dataAt(0, 3), 1)
	var last int64
	var out sliceWriter
	if _, err := Copy(context.Background(), &out, v, CopyOptions{Progress: func(done, of int64) {
		if done <= last || of != v.Info().Size {
			t.Errorf("progress %d of %d after %d", done, of, last)
		}
		last = done
	}}); err != nil || last != v.Info().Size {
		t.Errorf("%v, progress ends at %d", err, last)
	}
	if _, err := Copy(context.Background(), failingWriter{}, v, CopyOptions{}); !errors.Is(err, unix.EPIPE) {
		t.Errorf("writer failed: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Copy(ctx, &out, v, CopyOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("context ended: %v", err)
	}
	// A disk that takes a long time over each of its errors does not keep Copy from ending.
	b.cache.Clear()
	b.cache.Add(blockdev.Fault{Err: unix.EIO, Hang: 50 * time.Millisecond})
	ctx, cancel = context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	begin := time.Now()
	if _, err := Copy(ctx, &out, v, CopyOptions{}); !errors.Is(err, context.DeadlineExceeded) || time.Since(begin) > 10*time.Second {
		t.Errorf("after %v: %v", time.Since(begin), err)
	}
}

type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, unix.EPIPE }

// Many queues and submitters at the same time, while some sectors give errors.
func TestVolumeConcurrent(t *testing.T) {
	b, v := piecemeal(t, shape{align: 4096})
	want := sectorsOf(t, v)
	b.cache.breaks(dataAt(0, 5), 1)
	broken := 16 + 2*5 - int(v.first)
	var wg sync.WaitGroup
	for g := range 6 {
		wg.Go(func() {
			pool := blockdev.NewPool(blockdev.PoolOptions{})
			for round := range 60 {
				reqs := make([]*blockdev.Request, 8)
				for i := range reqs {
					n := 1 + (round*7+i*13+g)%120
					at := (round*31 + i*97 + g*211) % (len(want) - n)
					buf := pool.Get(n * 512)
					defer buf.Release()
					reqs[i] = &blockdev.Request{Op: blockdev.OpRead, Off: int64(at) * 512, Buf: buf.Data[:n*512]}
				}
				complete, wait := waits(len(reqs))
				q, err := v.NewQueue(1+round%5, complete)
				if err != nil {
					t.Error(err)
					return
				}
				q.Submit(reqs[:3])
				q.Submit(reqs[3:])
				wait()
				if err := q.Close(); err != nil {
					t.Error(err)
				}
				for _, r := range reqs {
					at := int(r.Off / 512)
					if fails := at <= broken && broken < at+len(r.Buf)/512; fails != (r.Err != nil) {
						t.Errorf("%v: %v", r, r.Err)
					}
					for i := 0; r.Err == nil && i < len(r.Buf)/512; i++ {
						if got := sourceOf(r.Buf[i*512:]); got != want[at+i] {
							t.Errorf("%v: sector %d is %v, want %v", r, i, got, want[at+i])
						}
					}
				}
			}
		})
	}
	wg.Wait()
}
