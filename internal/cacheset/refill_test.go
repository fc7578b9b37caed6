package cacheset

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/bucket"
)

// Where the generations cannot be written, no bucket is handed out on the strength of them: the set stops. What was
// inserted before is there at the next start.
func TestGenerationsThatCannotBeWritten(t *testing.T) {
	for _, op := range []blockdev.Op{blockdev.OpWrite, blockdev.OpFlush} {
		t.Run(op.String(), func(t *testing.T) {
			simulate(t, 1, func(w *world) error {
				ctx := context.Background()
				if err := w.set.Close(ctx); err != nil {
					return err
				}
				disk := blockdev.NewFaulty(w.dev, 1)
				plain := w.dev
				w.dev = disk
				if err := w.open(); err != nil {
					return err
				}
				if err := w.store(0, 0, 8, "dirty", 0); err != nil {
					return err
				}
				if err := w.set.Sync(); err != nil {
					return err
				}
				fault := blockdev.Fault{Ops: []blockdev.Op{op}}
				if op == blockdev.OpWrite {
					fault.Purposes = []blockdev.Purpose{blockdev.ForPrio}
				}
				disk.Add(fault)
				handed := uint64(0)
				for at := uint64(100); w.set.Err() == nil; at += 16 {
					w.set.Lock()
					p, n := w.set.SpaceLocked(bucket.ForClean, 1, at, 16, 1, 1)
					if n > 0 {
						w.set.LetGoLocked(p) // a bucket taken for nothing, so that a batch is wanted
					}
					handed = w.set.table.Stats().Handed
					w.set.Unlock()
					if at > 100_000 {
						return fmt.Errorf("%d buckets were handed out, and the set goes on", handed)
					}
					w.rt.Sleep(time.Millisecond)
				}
				if n := w.set.Info().Table.Handed; n > handed {
					return fmt.Errorf("%d buckets were handed out after the failure", n-handed)
				}
				_ = w.set.Close(ctx) // says why it has stopped
				w.dev = plain
				if err := w.open(); err != nil {
					return err
				}
				return w.compare(true)
			})
		})
	}
}
