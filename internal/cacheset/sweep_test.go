package cacheset

import (
	"fmt"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// put inserts 16 sectors, and returns where they lie; a fill is not journalled.
func (w *world) put(inode uint32, at uint64, fill bool) (ondisk.Ptr, error) {
	for {
		w.set.Lock()
		p, n := w.set.SpaceLocked(bucket.ForClean, inode, at, 16, 1, 1)
		w.set.Unlock()
		if n == 0 {
			w.rt.Sleep(100 * time.Millisecond)
			continue
		}
		in := Insertion{Keys: []ondisk.Key{ondisk.NewExtent(inode, at+uint64(n), n, p, false)}, Pinned: true, Unjournalled: fill}
		return p, w.set.Insert(&in)
	}
}

// A stale pointer is on the disk until what covers it is there too: a sweep in between must not find its bucket
// without old pointers.
func TestSweepOverOpenKeys(t *testing.T) {
	simulate(t, 1, func(w *world) error {
		s := w.set
		old, err := w.put(0, 0, false)
		if err != nil {
			return err
		}
		w.rt.Sleep(40 * time.Second) // on the disk
		for at, good := uint64(64), true; good; at += 64 {
			if _, err := w.put(1, at, false); err != nil {
				return err
			}
			w.rt.Sleep(20 * time.Millisecond)
			s.Lock()
			good = s.GoodLocked(old)
			s.Unlock()
		}
		w.rt.Sleep(70 * time.Second) // nothing waits to be written; that the bucket was evicted is durable
		if err := s.Sync(); err != nil {
			return err
		}
		if _, err := w.put(0, 0, true); err != nil { // a miss
			return err
		}
		if err := s.sweep(); err != nil {
			return err
		}
		s.Lock()
		defer s.Unlock()
		i := s.table.Info(s.bucketOf(old))
		leaf, miss := s.tree.NodeAt(0, s.tree.Root().Low)
		if !miss.IsZero() {
			return fmt.Errorf("the leaf of sector 0 is not in memory")
		}
		if i.Gen != old.Gen() && i.Oldest == i.Gen && leaf.OpenBytes() > 0 {
			return fmt.Errorf("the pointer of generation %d is on the disk still, and the sweep has found none: %v", old.Gen(), i)
		}
		return nil
	})
}
