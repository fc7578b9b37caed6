package volume

import (
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// Writes go with their batch only where nothing has to be waited for, and leave nothing behind where they do not.
func TestPlaced(t *testing.T) {
	simulateVolume(t, 4000, func(v *Volume, q *queue) error {
		place := func(name string, off int64, n int, want bool) (end func()) {
			t.Helper()
			c := v.use()
			o := v.newOp(q, &blockdev.Request{Op: blockdev.OpWrite, Off: off, Buf: make([]byte, n)}, c, accepted, false)
			v.unuse(c)
			v.set.Lock()
			before, dirtying := len(v.ranges.writes), v.dirty.writes
			b := &batch{}
			got := o.placeLocked(b, v.rt.Now())
			if got != want || got != (len(b.toCache) > 0) || got != (len(v.ranges.writes) > before) || got != (v.dirty.writes > dirtying) {
				t.Errorf("%s: placed: %v, parts %d, writes %d, dirtying %d", name, got, len(b.toCache), len(v.ranges.writes), v.dirty.writes)
			}
			v.set.Unlock()
			return func() {
				v.set.Lock()
				if got {
					v.set.DropLocked(o.keys, true)
					o.endWriteLocked(o.span())
				}
				v.set.Unlock()
				v.putOp(o)
			}
		}
		if err := v.makeDirty(); err != nil {
			return err
		}
		place("write-through", 0, 4096, false)()
		if err := v.SetMode(ondisk.Writeback); err != nil {
			return err
		}
		end := place("writeback", 0, 4096, true)
		place("the same block once more", 0, 4096, false)()
		place("another block", 4096, 4096, true)()
		end()
		place("the same block, after that", 0, 4096, true)()
		place("more than a bucket", 0, 20<<10, true)()
		place("more than is ready", 0, 8<<20, false)()
		place("no whole block", 0, 512, false)()
		v.set.Lock()
		v.dirty.durable = false
		v.set.Unlock()
		place("clean", 0, 4096, false)()
		return nil
	})
}
