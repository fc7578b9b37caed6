package nbd

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// Clients that ask for as much as they can and take no replies do not keep others waiting.
func TestStalledClientsHoldNobodyUp(t *testing.T) {
	for _, n := range []int{8, 64} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			d := memory(t, 32<<20, blockdev.MemoryOptions{})
			s, path := serve(t, DeviceExport(d, "", false), Options{})
			for range n {
				c := dialRaw(t, path)
				c.goTo("disk", false)
				for i := range 4 {
					c.request(cmdRead, 0, uint64(i), 0, 32<<20)
				}
			}
			settled(t, s)
			start := time.Now()
			fresh := dialRaw(t, path)
			fresh.SetDeadline(start.Add(5 * time.Second))
			fresh.goTo("disk", false)
			for _, length := range []uint32{512, 1 << 20, 512, 1 << 20} {
				fresh.request(cmdRead, 0, 7, 0, length)
				fresh.want(0, 7)
				fresh.bytes(int(length))
			}
			t.Logf("answered in %v with %d MiB free", time.Since(start), s.budget.free.Load()>>20)
		})
	}
}

// settled waits until the free bytes have not changed for a while.
func settled(t *testing.T, s *Server) {
	t.Helper()
	last, same := int64(-1), 0
	eventually(t, "the budget is taken", func() bool {
		free := s.budget.free.Load()
		if same++; free != last || free == s.opts.BufferBudget {
			last, same = free, 0
		}
		return same > 50
	})
}

// However connections choose what they hold on to, a small request is served.
func TestBudgetKeepsQuanta(t *testing.T) {
	b := newBudget(512 << 20)
	var held []*account
	for range 1000 {
		a := newAccount()
		for n := int64(32 << 20); n >= 512; {
			if !b.tryTake(a, n) {
				n /= 2
			}
		}
		held = append(held, a)
	}
	if free := b.free.Load(); free < -1000*quantum {
		t.Errorf("%d bytes over the budget", -free)
	}
	if a := newAccount(); !b.tryTake(a, 512) || !b.tryTake(a, quantum-512) {
		t.Error("a small request has to wait")
	}
	for _, a := range held {
		b.give(a, a.held.Load())
	}
}

func TestBudgetOrder(t *testing.T) {
	const mib = 1 << 20
	b := newBudget(32 * mib)
	start := func(a *account, n int64) chan bool {
		done := make(chan bool, 1)
		before := b.waiting.Load()
		go func() { done <- b.take(a, n, nil) }()
		eventually(t, "it waits or is served", func() bool { return len(done) > 0 || b.waiting.Load() > before })
		return done
	}
	big, second, other, greedy := newAccount(), newAccount(), newAccount(), newAccount()
	if !<-start(big, 32*mib) {
		t.Fatal("the whole of an idle budget is refused")
	}
	b.give(big, 32*mib)

	if !b.tryTake(greedy, 8*mib) || b.tryTake(greedy, 8*mib) {
		t.Fatal("half of what is free is wrong")
	}
	more := start(greedy, 8*mib) // waits for itself
	large := start(big, 30*mib)
	later := start(second, 14*mib)
	if b.tryTake(other, 2*mib) || !b.tryTake(other, mib) {
		t.Error("while others are in line, a sixteenth may be taken")
	}
	if len(more)+len(large)+len(later) > 0 {
		t.Fatal("served too early")
	}
	b.give(other, mib)
	b.give(greedy, 8*mib) // "more" is oldest and fits now, "large" then does not
	<-more
	if len(large)+len(later) > 0 {
		t.Fatal("served too early")
	}
	b.give(greedy, 8*mib)
	<-large
	if len(later) > 0 {
		t.Fatal("served too early")
	}
	b.give(big, 30*mib)
	<-later
	b.give(second, 14*mib)
	if f := b.free.Load(); f != 32*mib {
		t.Errorf("%d bytes are free", f)
	}
}

// Many that take, give back and sometimes give up: nobody waits for ever, no byte is lost.
func TestBudgetUnderLoad(t *testing.T) {
	b := newBudget(1 << 20)
	var wg sync.WaitGroup
	for w := range 16 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 1))
			a := newAccount()
			gave := make(chan int64, 4) // what is held, given back by another goroutine as replies are
			var giver sync.WaitGroup
			giver.Go(func() {
				for n := range gave {
					b.give(a, n)
				}
			})
			for range 2000 {
				n := int64(1) << r.IntN(21)
				if !b.tryTake(a, n) {
					var cancel chan struct{}
					if r.IntN(4) == 0 {
						cancel = make(chan struct{})
						time.AfterFunc(time.Duration(r.IntN(50))*time.Microsecond, func() { close(cancel) })
					}
					if !b.take(a, n, cancel) {
						continue
					}
				}
				gave <- n
			}
			close(gave)
			giver.Wait()
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		b.mu.Lock()
		t.Fatalf("stuck: %d wait, %d bytes are free", len(b.queue), b.free.Load())
	}
	if f := b.free.Load(); f != b.total || b.waiting.Load() != 0 {
		t.Errorf("%d bytes of %d are free, %d wait", f, b.total, b.waiting.Load())
	}
}

// Waiting does not allocate, once the queue is there.
func TestBudgetDoesNotAllocate(t *testing.T) {
	b := newBudget(4 * quantum)
	a := newAccount()
	cancel := make(chan struct{})
	run := func() {
		if b.tryTake(a, 3*quantum) {
			t.Error("more than half was taken at once")
		}
		b.take(a, 3*quantum, cancel)
		b.give(a, 3*quantum)
	}
	run()
	if n := testing.AllocsPerRun(100, run); n >= 1 {
		t.Errorf("%.1f allocations", n)
	}
}
