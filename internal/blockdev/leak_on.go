//go:build invariants

package blockdev

import (
	"runtime/debug"
	"sort"
	"sync"
)

// A leakTracker knows where each buffer in use was taken from, under the build tag invariants.
type leakTracker struct {
	mu    sync.Mutex
	taken map[*Buffer]string
}

func (t *leakTracker) got(b *Buffer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.taken == nil {
		t.taken = map[*Buffer]string{}
	}
	t.taken[b] = string(debug.Stack())
}

// released also overwrites the buffer, so that whoever still reads it notices.
func (t *leakTracker) released(b *Buffer) {
	t.mu.Lock()
	delete(t.taken, b)
	t.mu.Unlock()
	for i := range b.Data {
		b.Data[i] = 0xdb
	}
}

// Leaks returns, under the build tag invariants, where each buffer that is in use was taken from.
func (p *Pool) Leaks() []string {
	p.leaks.mu.Lock()
	defer p.leaks.mu.Unlock()
	var all []string
	for _, stack := range p.leaks.taken {
		all = append(all, stack)
	}
	sort.Strings(all)
	return all
}
