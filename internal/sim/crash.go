package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
)

// A Kind says how a life ended, and so what must be there in the next.
type Kind int

const (
	Cut  Kind = iota // the power was cut: what was flushed is there
	Kill             // the process was killed: what was acknowledged is there
	Stop             // it was stopped in good order: what was acknowledged is there, for good
)

func (k Kind) String() string { return [...]string{"cut", "kill", "stop"}[k] }

// Crashed ends a life: from now on each block holds one of the values that the end may have left there, which one its
// first read tells. Operations without a reply have either happened or never will.
func (h *History) Crashed(kind Kind) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.frozen = false
	h.now++
	number := uint64(len(h.ops))
	h.ops = append(h.ops, op{kind: opCrash, start: h.now, end: h.now})
	for _, v := range h.volumes {
		for b, list := range v.blocks {
			if list == nil {
				continue
			}
			e := entry{op: number, effect: h.now, held: h.now, end: h.now, stable: kind != Kill, wild: true, past: list}
			if kind == Cut {
				e.from = v.left(list, v.durable)
			} else {
				e.from = v.left(list, acknowledged)
			}
			if kind == Kill {
				e.uncertain = v.left(list, v.durable)
			}
			if !e.from.any && len(e.from.values) == 1 {
				e.bound, e.value = true, e.from.values[0]
			}
			v.blocks[b] = append(make([]entry, 0, 4), e)
		}
	}
}

func acknowledged(e *entry) bool { return e.end != 0 }

// left returns what a crash may leave of a block, when the entries that count cannot be lost.
func (v *volume) left(list []entry, counts func(*entry) bool) choice {
	var c choice
	for i := range list {
		e := &list[i]
		if v.overtaken(list, i, counts) {
			continue
		}
		switch {
		case !e.wild, e.bound && counts(e):
			c.add(e.value)
		case counts(e):
			c.join(e.from)
		default: // a discard of which any part may be lost, or a kill that left what no flush has made durable
			c.join(e.from)
			c.join(e.uncertain)
		}
	}
	return c
}

// allows checks what all of a volume holds, as a read would that began now. It tells the History nothing.
func (h *History) allows(vol int, p []byte) error {
	if size := h.volumes[vol].Size; int64(len(p)) != size {
		return fmt.Errorf("%d bytes, want %d", len(p), size)
	}
	c := h.Clone()
	return c.read(vol, 0, p, c.tick())
}

// ReadAll reads all of a volume, in pieces of random size and order, and checks each block.
func (c *Client) ReadAll(ctx context.Context, rng *rand.Rand) error {
	blocks := c.t.Size() / c.block
	const most = 64
	var pieces [][2]int64
	for b := int64(0); b < blocks; {
		n := min(1+rng.Int64N(most), blocks-b)
		pieces = append(pieces, [2]int64{b, n})
		b += n
	}
	rng.Shuffle(len(pieces), func(i, j int) { pieces[i], pieces[j] = pieces[j], pieces[i] })
	for _, p := range pieces {
		if err := c.Read(ctx, p[0]*c.block, p[1]*c.block); err != nil {
			return fmt.Errorf("read of blocks %d-%d of volume %d: %w", p[0], p[0]+p[1]-1, c.volume, err)
		}
	}
	return nil
}

// ReadAll reads all volumes; targets are in the order of the volumes.
func (h *History) ReadAll(ctx context.Context, targets []Target, rng *rand.Rand) error {
	for i, t := range targets {
		if err := h.Client(i, t).ReadAll(ctx, rng); err != nil {
			return err
		}
	}
	return nil
}
