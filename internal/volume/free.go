package volume

import "github.com/ubcache/ubcache/internal/rt"

// A freeList keeps things for their next use, so that requests allocate nothing.
type freeList[T any] struct {
	mu   rt.Mutex
	list []*T
}

func (l *freeList[T]) init(r *rt.Runtime) { l.mu.Init(r) }

// get returns one that was put back, as it was then, or a new one.
func (l *freeList[T]) get() *T {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := len(l.list); n > 0 {
		t := l.list[n-1]
		l.list = l.list[:n-1]
		return t
	}
	return new(T)
}

func (l *freeList[T]) put(t *T) {
	l.mu.Lock()
	l.list = append(l.list, t)
	l.mu.Unlock()
}
