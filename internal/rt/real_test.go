package rt

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"
)

func TestRealClock(t *testing.T) {
	r := New()
	a := r.Now()
	r.Sleep(2 * time.Millisecond)
	r.Sleep(0)
	if b := r.Now(); b < a+2*time.Millisecond || a < 0 {
		t.Errorf("%v then %v", a, b)
	}
	if d := time.Since(r.WallTime()); d < 0 || d > time.Minute {
		t.Errorf("off by %v", d)
	}
	if r.Simulated() || !NewSim(1).Runtime().Simulated() {
		t.Error("Simulated is wrong")
	}
}

func TestRealContexts(t *testing.T) {
	r := New()
	ctx, cancel := r.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	if err := r.SleepContext(ctx, time.Hour); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if err := r.SleepContext(context.Background(), time.Microsecond); err != nil {
		t.Error(err)
	}

	var mu Mutex
	var cond Cond
	mu.Init(r)
	cond.Init(&mu)
	ctx, cancel = context.WithCancel(context.Background())
	r.AfterFunc(5*time.Millisecond, cancel)
	mu.Lock()
	for {
		if err := cond.WaitContext(ctx); err != nil {
			if !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			break
		}
	}
	if mu.TryLock() {
		t.Error("WaitContext returned without the lock")
	}
	mu.Unlock()

	var sem Semaphore
	sem.Init(r, 3)
	if !sem.TryAcquire(2) || sem.TryAcquire(2) {
		t.Error("TryAcquire is wrong")
	}
	if err := sem.Acquire(ctx, 2); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	r.AfterFunc(time.Millisecond, func() { sem.Release(2) })
	if err := sem.Acquire(context.Background(), 3); err != nil {
		t.Error(err)
	}
}

func TestRealTimer(t *testing.T) {
	r := New()
	fired := make(chan bool, 2)
	a := r.AfterFunc(time.Hour, func() { fired <- true })
	if !a.Reset(time.Microsecond) {
		t.Error("it waited")
	}
	<-fired
	if a.Stop() {
		t.Error("it has fired")
	}
}

func TestZeroValuesAreReal(t *testing.T) {
	var mu Mutex
	var rw RWMutex
	var all WaitGroup
	var cond Cond
	cond.Init(&mu)
	n := 0
	all.Go("adder", func() {
		mu.Lock()
		n++
		mu.Unlock()
		cond.Signal()
	})
	mu.Lock()
	for n == 0 {
		cond.Wait()
	}
	mu.Unlock()
	all.Wait()
	rw.RLock()
	if rw.TryLock() || !rw.TryRLock() {
		t.Error("RWMutex is wrong")
	}
	rw.RUnlock()
	rw.RUnlock()
	rw.Lock()
	n++
	rw.Unlock()
}

func TestRealRandom(t *testing.T) {
	r := New()
	var b [16]byte
	if n, err := r.Read(b[:]); n != 16 || err != nil || b == [16]byte{} {
		t.Error(n, err, b)
	}
	if a, b := r.Uint64(), r.Uint64(); a == b {
		t.Error("the same number twice")
	}
	if x := r.Float64(); x < 0 || x >= 1 {
		t.Error(x)
	}
}

// These show that the real runtime costs nothing worth measuring.

func BenchmarkMutex(b *testing.B) {
	var mu Mutex
	n := 0
	for b.Loop() {
		mu.Lock()
		n++
		mu.Unlock()
	}
}

func BenchmarkMutexStd(b *testing.B) {
	var mu sync.Mutex
	n := 0
	for b.Loop() {
		mu.Lock()
		n++
		mu.Unlock()
	}
}

func BenchmarkRWMutex(b *testing.B) {
	var mu RWMutex
	n := 0
	for b.Loop() {
		mu.RLock()
		n++
		mu.RUnlock()
	}
}

func BenchmarkRWMutexStd(b *testing.B) {
	var mu sync.RWMutex
	n := 0
	for b.Loop() {
		mu.RLock()
		n++
		mu.RUnlock()
	}
}

func BenchmarkNow(b *testing.B) {
	r := New()
	for b.Loop() {
		_ = r.Now()
	}
}

func BenchmarkNowStd(b *testing.B) {
	for b.Loop() {
		_ = time.Now()
	}
}

func TestRealLockTimed(t *testing.T) {
	r := New()
	var mu Mutex
	mu.Init(r)
	if d := mu.LockTimed(); d != 0 || mu.TryLock() {
		t.Errorf("a free mutex took %v, or is not taken", d)
	}
	r.AfterFunc(20*time.Millisecond, mu.Unlock)
	begin := r.Now()
	if d := mu.LockTimed(); d <= 0 || d > r.Now()-begin || mu.TryLock() {
		t.Errorf("a mutex that was held took %v, or is not taken", d)
	}
}
