package lab

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/ubcache/ubcache"
	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

// A load sends requests to a volume, so many at a time for each job: when one is done, the next of its job takes its
// place.
type load struct {
	rt     *rt.Runtime
	volume *ubcache.Volume
	file   int64
	pool   *blockdev.Pool

	// Guarded by mu.
	mu         rt.Mutex
	over       rt.Cond
	flying     int
	stopped    bool
	collecting bool // a collection is under way
	err        error
}

// A fieldRequest is one request of a job.
type fieldRequest struct {
	blockdev.Request
	job   int
	begin time.Duration
	in    bool // a collection was under way when it was sent
}

func newLoad(r *rt.Runtime, v *ubcache.Volume, file int64, pool *blockdev.Pool) *load {
	l := &load{rt: r, volume: v, file: file, pool: pool}
	l.mu.Init(r)
	l.over.Init(&l.mu)
	return l
}

// run sends the jobs' requests, in an order and to places that rng chooses, until stopped is set, an error, the end of ctx, or until
// done says false. done is called with each request that is complete, one at a time. Data has no meaning: all requests
// share their memory.
func (l *load) run(ctx context.Context, jobs []Job, rng *rand.Rand, done func(q *fieldRequest) bool) error {
	depth, most := 0, 0
	for _, j := range jobs {
		depth += j.Depth
		most = max(most, j.Size)
	}
	data := l.pool.Get(2 * most)
	defer data.Release()
	next := func(q *fieldRequest) {
		j := &jobs[q.job]
		op, buf := blockdev.OpWrite, data.Data[:j.Size]
		if j.Reads > 0 && rng.IntN(100) < j.Reads {
			op, buf = blockdev.OpRead, data.Data[most:][:j.Size]
		}
		off := rng.Int64N(l.file/int64(j.Size)) * int64(j.Size)
		q.Request = blockdev.Request{Op: op, Off: off, Buf: buf, Owner: q}
		q.begin, q.in = l.rt.Now(), l.collecting
	}
	var queue blockdev.Queue
	var batch []*blockdev.Request
	queue, err := l.volume.Device().NewQueue(depth, func(finished []*blockdev.Request) {
		again := batch[:0]
		ended := ctx.Err()
		l.mu.Lock()
		for _, r := range finished {
			q := r.Owner.(*fieldRequest)
			if r.Err != nil || ended != nil {
				l.err = errors.Join(l.err, r.Err)
				l.stopped = true
			}
			if !done(q) {
				l.stopped = true
			}
			if l.stopped {
				l.flying--
				continue
			}
			next(q)
			again = append(again, &q.Request)
		}
		if l.flying == 0 {
			l.over.Broadcast()
		}
		l.mu.Unlock()
		if len(again) > 0 {
			queue.Submit(again)
		}
		batch = again
	})
	if err != nil {
		return err
	}
	requests := make([]fieldRequest, 0, depth)
	var first []*blockdev.Request
	l.mu.Lock()
	for i, j := range jobs {
		for range j.Depth {
			requests = append(requests, fieldRequest{job: i})
			q := &requests[len(requests)-1]
			next(q)
			first = append(first, &q.Request)
		}
	}
	l.flying = depth
	l.mu.Unlock()
	queue.Submit(first)
	l.mu.Lock()
	for l.flying > 0 {
		l.over.Wait()
	}
	err = errors.Join(l.err, ctx.Err())
	l.mu.Unlock()
	return errors.Join(err, queue.Close())
}
