package blockdev

import "github.com/ubcache/ubcache/internal/rt"

// A Completer is the delivery side of a Queue, for devices outside of this package that are made of others: it
// calls the queue's complete function, never twice at the same time, whichever goroutines finish requests. See
// Device.NewQueue for what it promises the function. Its methods may be called at the same time, also from
// within the function, except Close.
type Completer struct{ c completer }

// NewCompleter makes a Completer for fn.
func NewCompleter(r *rt.Runtime, fn func(done []*Request)) *Completer {
	c := new(Completer)
	c.c.init(r, fn)
	return c
}

// Begin counts n requests in. If it returns false the queue is closed: finish them with ErrClosed.
func (c *Completer) Begin(n int) bool { return c.c.begin(n) }

// Finish delivers requests that Begin has counted, or sees to it that someone else does. reqs may be reused.
func (c *Completer) Finish(reqs ...*Request) { c.c.finish(reqs...) }

// Close makes Begin return false from now on and waits until all is delivered. It reports whether this was the
// first call.
func (c *Completer) Close() bool { return c.c.close() }
