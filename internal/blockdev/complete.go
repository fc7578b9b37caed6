package blockdev

import "github.com/ubcache/ubcache/internal/rt"

// A completer hands a queue's finished requests to its complete function, never twice at the same time:
// whoever finishes one while nobody is handing over becomes the one who does, and goes on until there are no
// more. What finishes meanwhile, inside the function or elsewhere, is added to the list. So batches form when
// there is much to do, nothing recurses, and no goroutine is needed.
//
// It also counts the requests between Submit and the end of their complete call, for Close to wait for.
type completer struct {
	fn func(done []*Request)

	mu         rt.Mutex // held for memory operations only
	idle       rt.Cond  // nothing is pending
	done       []*Request
	spare      []*Request // the slice of the last batch, for the next
	delivering bool
	closed     bool
	pending    int
}

func (c *completer) init(r *rt.Runtime, fn func([]*Request)) {
	c.fn = fn
	c.mu.Init(r)
	c.idle.Init(&c.mu)
}

// begin counts n requests in. If it returns false the queue is closed: finish them with ErrClosed.
func (c *completer) begin(n int) bool {
	c.mu.Lock()
	c.pending += n
	ok := !c.closed
	c.mu.Unlock()
	return ok
}

// finish delivers requests that begin has counted, or sees to it that someone else does.
func (c *completer) finish(reqs ...*Request) {
	c.mu.Lock()
	c.done = append(c.done, reqs...)
	if c.delivering {
		c.mu.Unlock()
		return
	}
	c.delivering = true
	for len(c.done) > 0 {
		batch := c.done
		c.done, c.spare = c.spare[:0], nil
		c.mu.Unlock()
		c.fn(batch)
		n := len(batch)
		clear(batch) // keeps no request alive
		c.mu.Lock()
		c.spare = batch[:0]
		c.pending -= n
	}
	c.delivering = false
	if c.pending == 0 {
		c.idle.Broadcast()
	}
	c.mu.Unlock()
}

// refuse finishes all of a batch with err.
func (c *completer) refuse(reqs []*Request, err error) {
	for _, r := range reqs {
		r.Err = err
	}
	c.finish(reqs...)
}

// close makes begin return false from now on and waits until all is delivered. It reports whether this was
// the first call.
func (c *completer) close() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	first := !c.closed
	c.closed = true
	for c.pending > 0 || c.delivering {
		c.idle.Wait()
	}
	return first
}
