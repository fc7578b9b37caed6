package blockdev

import (
	"runtime"
	"sync"
	"time"
)

// maxThreads bounds the goroutines, and so the threads that wait in the kernel, of one queue.
const maxThreads = 128

// settling is how long a thread set apart waits before its first work, for what it had put into a ring before to
// complete.
const settling = 2 * time.Millisecond

// A threadPool does requests one by one in goroutines that may wait, up to max of them, started when needed.
// It is the whole of the pread engine, and does for a ring what that cannot do.
type threadPool struct {
	f      *file
	out    func(*Request) // gets what is finished
	max    int
	apart  bool // each goroutine has a thread of its own, which does nothing else
	ending sync.WaitGroup

	mu     sync.Mutex // held for memory operations only
	work   sync.Cond  // the list is not empty, or stop
	list   requestList
	idle   int // goroutines that wait and have not been signalled
	n      int // goroutines
	closed bool
}

func (t *threadPool) init(f *file, most int, out func(*Request)) {
	t.f, t.out, t.max = f, out, most
	t.work.L = &t.mu
}

// add takes over requests that have been checked; list is empty afterwards.
func (t *threadPool) add(list *requestList) {
	n := list.n
	t.mu.Lock()
	t.list.append(list)
	wake := min(n, t.idle)
	t.idle -= wake
	start := min(n-wake, t.max-t.n)
	t.n += start
	for range start {
		t.ending.Go(t.run) // under the lock, so that close waits for it: add may still run when its requests are done
	}
	t.mu.Unlock()
	for range wake {
		t.work.Signal()
	}
}

func (t *threadPool) run() {
	if t.apart {
		runtime.LockOSThread() // until the goroutine ends, and the thread with it
		time.Sleep(settling)
	}
	t.mu.Lock()
	for {
		r := t.list.pop()
		if r == nil {
			if t.closed {
				break
			}
			t.idle++ // whoever signals takes this back
			t.work.Wait()
			continue
		}
		t.mu.Unlock()
		t.f.do(r)
		t.out(r)
		t.mu.Lock()
	}
	t.mu.Unlock()
}

// close ends the goroutines. All requests have completed before.
func (t *threadPool) close() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.work.Broadcast()
	t.ending.Wait()
}

// A threadQueue is a queue of the pread engine.
type threadQueue struct {
	completer
	f    *file
	pool threadPool
}

func newThreadQueue(f *file, depth int, complete func([]*Request)) *threadQueue {
	q := &threadQueue{f: f}
	q.completer.init(f.rt, complete)
	q.pool.init(f, min(depth, maxThreads), func(r *Request) { q.finish(r) })
	return q
}

func (q *threadQueue) Submit(reqs []*Request) {
	if !q.begin(len(reqs)) {
		q.refuse(reqs, ErrClosed)
		return
	}
	var list requestList
	var refused requestList
	for _, r := range reqs {
		r.done = 0
		if r.Err = q.f.info.Check(r); r.Err != nil {
			refused.push(r)
		} else {
			list.push(r)
		}
	}
	if list.n > 0 {
		q.pool.add(&list)
	}
	for r := refused.pop(); r != nil; r = refused.pop() {
		q.finish(r)
	}
}

func (q *threadQueue) Close() error {
	if !q.close() {
		return ErrClosed
	}
	q.pool.close()
	return q.f.release()
}

// A requestList is a list of requests, linked by their next, first in first out.
type requestList struct {
	head, tail *Request
	n          int
}

func (l *requestList) push(r *Request) {
	r.next = nil
	if l.tail == nil {
		l.head = r
	} else {
		l.tail.next = r
	}
	l.tail = r
	l.n++
}

func (l *requestList) pop() *Request {
	r := l.head
	if r == nil {
		return nil
	}
	l.head, r.next = r.next, nil
	if l.head == nil {
		l.tail = nil
	}
	l.n--
	return r
}

// append moves all of m to the end of l.
func (l *requestList) append(m *requestList) {
	if m.head == nil {
		return
	}
	if l.tail == nil {
		l.head = m.head
	} else {
		l.tail.next = m.head
	}
	l.tail = m.tail
	l.n += m.n
	*m = requestList{}
}
