package sim

import (
	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

// A death is the end that one life is to come to.
type death struct {
	limit int    // operations that change something, on all devices, before it; negative: none
	ops   int    // so far
	dead  bool   // it has come
	die   func() // what happens then, once
}

func (d *death) come() {
	if !d.dead {
		d.dead = true
		d.die()
	}
}

// A tap is a device that counts what changes something, and dies just before an operation.
type tap struct {
	blockdev.Device
	d *death
}

// Runtime returns the runtime of the wrapped device.
func (t *tap) Runtime() *rt.Runtime { return blockdev.RuntimeOf(t.Device) }

// Unwrap returns the wrapped device.
func (t *tap) Unwrap() blockdev.Device { return t.Device }

// NewQueue makes a queue whose requests are counted.
func (t *tap) NewQueue(depth int, complete func(done []*blockdev.Request)) (blockdev.Queue, error) {
	q, err := t.Device.NewQueue(depth, complete)
	if err != nil {
		return nil, err
	}
	return &tapQueue{Queue: q, d: t.d}, nil
}

type tapQueue struct {
	blockdev.Queue
	d *death
}

func (q *tapQueue) Submit(reqs []*blockdev.Request) {
	d := q.d
	for i, r := range reqs {
		if r.Op == blockdev.OpRead || d.dead {
			continue
		}
		if d.ops == d.limit {
			if i > 0 {
				q.Queue.Submit(reqs[:i]) // these made it
			}
			d.come()
			q.Queue.Submit(reqs[i:])
			return
		}
		d.ops++
	}
	q.Queue.Submit(reqs)
}
