package blockdev

import "sync/atomic"

// Counting counts what passes to the device below, by purpose and operation.
type Counting struct {
	layer
	counts [NumPurposes][NumOps]struct{ ops, bytes, errors atomic.Int64 }
}

// Counts is what Counting has seen of one purpose and operation. Requests count when they complete, bytes only if
// there was no error.
type Counts struct{ Ops, Bytes, Errors int64 }

// NewCounting wraps dev.
func NewCounting(dev Device) *Counting { return &Counting{layer: newLayer(dev)} }

// Counts returns the counts so far of one purpose and operation.
func (c *Counting) Counts(p Purpose, op Op) Counts {
	n := &c.counts[p][op]
	return Counts{Ops: n.ops.Load(), Bytes: n.bytes.Load(), Errors: n.errors.Load()}
}

// Total returns the counts so far of an operation, for all purposes together.
func (c *Counting) Total(op Op) Counts {
	var t Counts
	for p := range NumPurposes {
		n := c.Counts(p, op)
		t = Counts{Ops: t.Ops + n.Ops, Bytes: t.Bytes + n.Bytes, Errors: t.Errors + n.Errors}
	}
	return t
}

// NewQueue makes a queue of the device below whose completions are counted.
func (c *Counting) NewQueue(depth int, complete func(done []*Request)) (Queue, error) {
	return c.Device.NewQueue(depth, func(done []*Request) {
		for _, r := range done {
			if r.Purpose >= NumPurposes || r.Op >= NumOps {
				continue
			}
			n := &c.counts[r.Purpose][r.Op]
			n.ops.Add(1)
			switch {
			case r.Err != nil:
				n.errors.Add(1)
			case r.Op != OpFlush:
				n.bytes.Add(r.Length())
			}
		}
		complete(done)
	})
}
