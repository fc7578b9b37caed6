package lab

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

// A Load keeps Depth requests under way on one queue of a device: those that have completed are followed by as many others, in one
// batch, from one goroutine, as the reader of an NBD connection would hand them over. After each batch it lets other goroutines
// go first, as a system call would: on a device that completes within Submit it would else keep the processor for itself,
// and the goroutines of requests that take longer would wait for it.
//
// The clock is read once for each submission and once for each batch of completions.
type Load struct {
	RT      *rt.Runtime
	Device  blockdev.Device
	Content *Content
	Depth   int
	Reads   float64 // share of the requests; the others are writes
	Seed    uint64  // of the sequence of blocks
	Pool    *blockdev.Pool

	// It ends, when the requests under way are over, after For (0: no limit), after Limit requests (0: no limit), or when
	// ctx ends, which is no error.
	For   time.Duration
	Limit uint64

	Recorder *Recorder // nil: nothing is recorded

	done atomic.Uint64

	// The rest belongs to Run.
	rng   *rand.Rand
	until time.Duration
	sent  uint64
	err   error

	mu    rt.Mutex // guards what follows
	came  rt.Cond  // to ready
	ready []*loadSlot
}

// A loadSlot is one of Depth requests.
type loadSlot struct {
	blockdev.Request
	block       int64
	began, over time.Duration
	buf         *blockdev.Buffer
}

// Done returns how many requests have completed. It may be called at any time.
func (l *Load) Done() uint64 { return l.done.Load() }

// Run makes the load, once, and returns when it is over. The error is that of the first request that failed, or what is wrong
// with what one has read.
func (l *Load) Run(ctx context.Context) error {
	l.mu.Init(l.RT)
	l.came.Init(&l.mu)
	l.rng = rand.New(rand.NewPCG(l.Seed, uint64(l.Depth)))
	q, err := l.Device.NewQueue(l.Depth, l.complete)
	if err != nil {
		return err
	}
	slots := make([]loadSlot, l.Depth)
	free := make([]*loadSlot, l.Depth) // taken from ready
	for i := range slots {
		slots[i].buf = l.Pool.Get(l.Content.block)
		free[i] = &slots[i]
	}
	batch := make([]*blockdev.Request, 0, l.Depth)
	now := l.RT.Now()
	if l.For > 0 {
		l.until = now + l.For
	}
	for under := 0; ; {
		batch = batch[:0]
		for _, s := range free {
			if l.goesOn(ctx, now) {
				l.next(s)
				batch = append(batch, &s.Request)
			}
		}
		if under += len(batch); under == 0 {
			break
		}
		if len(batch) > 0 {
			now = l.RT.Now()
			for _, r := range batch {
				r.Owner.(*loadSlot).began = now
			}
			q.Submit(batch)
			l.RT.Yield()
		}
		free = l.await(free[:0])
		for _, s := range free {
			l.over(s)
			now = max(now, s.over)
		}
		under -= len(free)
		l.done.Add(uint64(len(free)))
	}
	if l.Recorder != nil {
		l.Recorder.End(l.RT.Now())
	}
	err = q.Close()
	for i := range slots {
		slots[i].buf.Release()
	}
	if l.err != nil {
		err = l.err
	}
	return err
}

// goesOn reports whether another request is to be sent.
func (l *Load) goesOn(ctx context.Context, now time.Duration) bool {
	return l.err == nil && (l.until == 0 || now < l.until) && (l.Limit == 0 || l.sent < l.Limit) && ctx.Err() == nil
}

// next makes s the next request.
func (l *Load) next(s *loadSlot) {
	l.sent++
	s.block = l.Content.Claim(l.rng.Int64N(l.Content.Blocks()))
	s.Request = blockdev.Request{Op: blockdev.OpRead, Off: s.block * int64(l.Content.block), Buf: s.buf.Data, Owner: s}
	if l.Reads < 1 && (l.Reads == 0 || l.rng.Float64() >= l.Reads) {
		s.Op = blockdev.OpWrite
		l.Content.Write(s.Buf, s.block)
	}
}

// complete is the queue's: it notes when requests were over.
func (l *Load) complete(list []*blockdev.Request) {
	now := l.RT.Now()
	l.mu.Lock()
	for _, r := range list {
		s := r.Owner.(*loadSlot)
		s.over = now
		l.ready = append(l.ready, s)
	}
	l.mu.Unlock()
	l.came.Signal()
}

// await waits until some requests are over, and adds them to list.
func (l *Load) await(list []*loadSlot) []*loadSlot {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.ready) == 0 {
		l.came.Wait()
	}
	list = append(list, l.ready...)
	l.ready = l.ready[:0]
	return list
}

// over records and checks a request.
func (l *Load) over(s *loadSlot) {
	read := s.Op == blockdev.OpRead
	if l.Recorder != nil {
		l.Recorder.Record(s.over, s.over-s.began, read, len(s.Buf), s.Off)
	}
	err := s.Err
	if err == nil && read {
		err = l.Content.Check(s.Buf, s.block)
	}
	if err != nil && l.err == nil {
		l.err = fmt.Errorf("%v at %d: %w", s.Op, s.Off, err)
	}
	l.Content.Release(s.block)
}

// newGroup makes a group of goroutines of a runtime.
func newGroup(r *rt.Runtime) *rt.WaitGroup {
	g := new(rt.WaitGroup)
	g.Init(r)
	return g
}
