package uring

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// newRing makes a ring, or skips where there is none.
func newRing(t testing.TB, entries uint32, o Options) *Ring {
	t.Helper()
	r, err := New(entries, o)
	if errors.Is(err, ErrUnavailable) {
		t.Skip("needs io_uring: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r
}

func TestLayouts(t *testing.T) {
	for name, got := range map[string][2]uintptr{
		"SQE":          {unsafe.Sizeof(SQE{}), 64},
		"SQE.UserData": {unsafe.Offsetof(SQE{}.UserData), 32},
		"CQE":          {unsafe.Sizeof(CQE{}), 16},
		"params":       {unsafe.Sizeof(params{}), 120},
		"probe":        {unsafe.Sizeof(probe{}), 16 + 256*8},
	} {
		if got[0] != got[1] {
			t.Errorf("%s: %d, want %d", name, got[0], got[1])
		}
	}
}

// reapAll reaps n completions by looking again and again.
func reapAll(t *testing.T, r *Ring, n int) []CQE {
	t.Helper()
	var all []CQE
	dst := make([]CQE, 7)
	for end := time.Now().Add(10 * time.Second); len(all) < n; {
		k := r.Reap(dst)
		all = append(all, dst[:k]...)
		if k == 0 {
			runtime.Gosched()
			if time.Now().After(end) {
				t.Fatalf("%d of %d completions arrived", len(all), n)
			}
		}
	}
	return all
}

func TestFullRingHandsOutNoMore(t *testing.T) {
	r := newRing(t, 8, Options{CQEntries: 16})
	for batch := range 2 {
		for i := range 8 {
			s := r.Get()
			if s == nil {
				t.Fatalf("batch %d: no SQE %d of 8", batch, i)
			}
			s.UserData = uint64(batch*8 + i)
		}
		if r.Get() != nil {
			t.Fatal("a ninth SQE of 8")
		}
		if err := r.Submit(); err != nil {
			t.Fatal(err)
		}
	}
	if r.Get() != nil {
		t.Fatal("an SQE for whose completion there is no room")
	}
	seen := map[uint64]bool{}
	for _, c := range reapAll(t, r, 16) {
		if c.Res != 0 || seen[c.UserData] {
			t.Fatalf("completion %+v, twice: %v", c, seen[c.UserData])
		}
		seen[c.UserData] = true
	}
	if r.Get() == nil {
		t.Fatal("no SQE though all have completed")
	}
}

// A storm of empty operations through a small ring, reaped by the goroutine that sleeps on the eventfd: each
// completes exactly once.
func TestNopStorm(t *testing.T) {
	const total = 200_000
	r := newRing(t, 32, Options{})
	var count, sum atomic.Uint64
	done := make(chan struct{})
	var dst [16]CQE
	err := r.Start(func() {
		for {
			n := r.Reap(dst[:])
			if n == 0 {
				return
			}
			for _, c := range dst[:n] {
				sum.Add(c.UserData)
			}
			if count.Add(uint64(n)) == total {
				close(done)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < total; {
		if s := r.Get(); s != nil {
			s.UserData = uint64(i)
			i++
			if i%5 != 0 && i != total {
				continue
			}
		}
		if err := r.Submit(); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatalf("%d of %d completions arrived", count.Load(), total)
	}
	if want := uint64(total) * (total - 1) / 2; sum.Load() != want {
		t.Fatalf("the sum of user data is %d, want %d", sum.Load(), want)
	}
}

// Single operations with pauses, so that the reaper really goes to sleep each time.
func TestEachCompletionWakesTheReaper(t *testing.T) {
	r := newRing(t, 4, Options{})
	arrived := make(chan uint64, 4)
	err := r.Start(func() {
		var c [1]CQE
		for r.Reap(c[:]) == 1 {
			arrived <- c[0].UserData
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range uint64(2000) {
		r.Get().UserData = i
		if err := r.Submit(); err != nil {
			t.Fatal(err)
		}
		select {
		case got := <-arrived:
			if got != i {
				t.Fatalf("got %d, want %d", got, i)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("completion %d did not wake the reaper", i)
		}
		if i%500 == 0 {
			time.Sleep(time.Millisecond)
		}
	}
}

// The CQ overflows when its room is not counted: the kernel keeps what does not fit, and Reap gets it.
func TestOverflowLosesNothing(t *testing.T) {
	r := newRing(t, 4, Options{CQEntries: 4})
	const total = 100
	for i := range total {
		r.outstanding.Store(0) // pretend
		s := r.Get()
		if s == nil {
			t.Fatal("no SQE")
		}
		s.UserData = uint64(i)
		if err := r.Submit(); err != nil && !errors.Is(err, unix.EBUSY) {
			t.Fatal(err)
		}
	}
	seen := map[uint64]bool{}
	for _, c := range reapAll(t, r, total) {
		seen[c.UserData] = true
	}
	if len(seen) != total {
		t.Fatalf("%d different completions of %d", len(seen), total)
	}
}

func TestReadAndWriteAFile(t *testing.T) {
	for _, o := range []Options{{}, {SQE128: true}} {
		r := newRing(t, 8, o)
		f, err := os.Create(filepath.Join(t.TempDir(), "f"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := r.RegisterFiles([]int32{int32(f.Fd())}); err != nil {
			t.Fatal(err)
		}
		want := bytes.Repeat([]byte("ring"), 2048)
		s := r.Get()
		s.WriteAt(int(f.Fd()), want, 4096, unix.RWF_DSYNC)
		if err := r.Submit(); err != nil {
			t.Fatal(err)
		}
		if c := reapAll(t, r, 1)[0]; int(c.Res) != len(want) {
			t.Fatalf("write: %d", c.Res)
		}
		got := make([]byte, len(want)+100)
		s = r.Get()
		s.ReadAt(0, got, 4096)
		s.Flags = FixedFile
		s.UserData = 7
		if err := r.Submit(); err != nil {
			t.Fatal(err)
		}
		if c := reapAll(t, r, 1)[0]; int(c.Res) != len(want) || c.UserData != 7 {
			t.Fatalf("read: %+v", c)
		}
		if !bytes.Equal(got[:len(want)], want) {
			t.Fatal("read back something else")
		}
		runtime.KeepAlive(want)
	}
}

func TestBadOperationCompletesWithAnError(t *testing.T) {
	r := newRing(t, 8, Options{})
	for i := range 5 {
		s := r.Get()
		s.UserData = uint64(i)
		if i == 2 {
			s.Opcode = 250
		}
	}
	if err := r.Submit(); err != nil {
		t.Fatal(err)
	}
	for _, c := range reapAll(t, r, 5) {
		if bad := c.UserData == 2; bad != (c.Res < 0) {
			t.Errorf("operation %d: %d", c.UserData, c.Res)
		}
	}
}

func TestRefusals(t *testing.T) {
	for _, e := range []unix.Errno{unix.ENOSYS, unix.EPERM, unix.ENOMEM, unix.EINVAL} {
		s := &sys{enter: sysEnter, setup: func(uint32, *params) (int, error) { return -1, e }}
		if err := tryRing(Options{sys: s}); !errors.Is(err, ErrUnavailable) {
			t.Errorf("%v: %v", e, err)
		} else {
			t.Log(err)
		}
	}
	s := &sys{enter: sysEnter, setup: func(uint32, *params) (int, error) { return -1, unix.EMFILE }}
	if err := tryRing(Options{sys: s}); err == nil || errors.Is(err, ErrUnavailable) {
		t.Errorf("EMFILE: %v", err)
	}
	newRing(t, 4, Options{}) // skips where the next cannot work
	s = &sys{enter: sysEnter, setup: func(n uint32, p *params) (int, error) {
		fd, err := sysSetup(n, p)
		p.features &^= FeatNoDrop
		return fd, err
	}}
	if err := tryRing(Options{sys: s}); !errors.Is(err, ErrUnavailable) {
		t.Errorf("a kernel that drops completions: %v", err)
	}
	s = &sys{setup: sysSetup, enter: func(int, uint32, uint32, uint32) (int, error) { return 0, unix.EPERM }}
	if err := tryRing(Options{sys: s}); !errors.Is(err, ErrUnavailable) {
		t.Errorf("io_uring_enter forbidden: %v", err)
	}
}

// What the kernel does not take stays, to be submitted again or withdrawn.
func TestWithdraw(t *testing.T) {
	busy := true
	calls := 0
	r := newRing(t, 8, Options{sys: &sys{setup: sysSetup, enter: func(fd int, n, wait, flags uint32) (int, error) {
		calls++
		if calls == 1 {
			return 0, unix.EINTR
		}
		if busy && calls > 2 {
			return 0, unix.EAGAIN
		}
		return sysEnter(fd, min(n, 2), wait, flags)
	}}})
	for i := range 5 {
		r.Get().UserData = uint64(i)
	}
	if err := r.Submit(); !errors.Is(err, unix.EAGAIN) {
		t.Fatal(err)
	}
	var back []uint64
	r.Withdraw(func(s *SQE) { back = append(back, s.UserData) })
	if len(back) != 3 || back[0] != 2 || back[2] != 4 {
		t.Fatalf("withdrew %v, want 2 to 4", back)
	}
	busy = false
	for range 8 {
		r.Get().UserData = 9
	}
	if err := r.Submit(); err != nil {
		t.Fatal(err)
	}
	if n := len(reapAll(t, r, 10)); n != 10 {
		t.Fatalf("%d completions, want 2 and 8", n)
	}
}

func TestCloseWhileTheReaperSleepsOrRuns(t *testing.T) {
	for range 50 {
		r := newRing(t, 4, Options{})
		var mu sync.Mutex
		closed := false
		err := r.Start(func() {
			mu.Lock()
			defer mu.Unlock()
			if closed {
				t.Error("called after Close")
			}
			var c [1]CQE
			r.Reap(c[:])
		})
		if err != nil {
			t.Fatal(err)
		}
		r.Get()
		if err := r.Submit(); err != nil {
			t.Fatal(err)
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		mu.Lock()
		closed = true
		mu.Unlock()
		if err := r.Close(); !errors.Is(err, os.ErrClosed) {
			t.Fatal(err)
		}
	}
}

func BenchmarkNop(b *testing.B) {
	for _, batch := range []int{1, 32} {
		b.Run(map[int]string{1: "batch=1", 32: "batch=32"}[batch], func(b *testing.B) {
			r := newRing(b, 64, Options{})
			dst := make([]CQE, 64)
			b.ReportAllocs()
			for n := 0; n < b.N; n += batch {
				for range batch {
					r.Get()
				}
				if err := r.Submit(); err != nil {
					b.Fatal(err)
				}
				for got := 0; got < batch; {
					got += r.Reap(dst)
				}
			}
		})
	}
}
