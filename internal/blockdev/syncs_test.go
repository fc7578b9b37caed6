package blockdev_test

import (
	"errors"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

// A flush that succeeds while another is under way is believed only when that has succeeded too; after a failure none is.
func TestSyncsTellOfEachOther(t *testing.T) {
	for _, fails := range []bool{false, true} {
		s := rt.NewSim(1)
		err := s.Run(func() {
			r := s.Runtime()
			mem, err := blockdev.Memory(1<<20, blockdev.MemoryOptions{Runtime: r})
			if err != nil {
				panic(err)
			}
			dev := blockdev.NewFaulty(mem, 1)
			// The first flush takes a second.
			slow := blockdev.Fault{Ops: []blockdev.Op{blockdev.OpFlush}, Hang: time.Second, Count: 1}
			if fails {
				slow.Err = errors.New("lost")
			}
			dev.Add(slow)
			syncs := blockdev.NewSyncs(dev)
			var ios [2]*blockdev.IO
			for i := range ios {
				if ios[i], err = blockdev.NewIO(dev, 2); err != nil {
					panic(err)
				}
				defer ios[i].Close()
				ios[i].Join(syncs)
			}
			var group rt.WaitGroup
			group.Init(r)
			var first error
			group.Go("first", func() { first = ios[0].Flush() })
			r.Sleep(time.Millisecond)
			second := ios[1].WriteAt(make([]byte, 4096), 0, blockdev.FUA)
			took := r.Now()
			group.Wait()
			if (first != nil) != fails || (second != nil) != fails || took < time.Second {
				t.Errorf("first: %v, second: %v, after %v; they should fail: %v", first, second, took, fails)
			}
			if err := ios[1].WriteAt(make([]byte, 4096), 0, 0); err != nil {
				t.Errorf("a write without FUA: %v", err)
			}
			if err := ios[1].Flush(); (err != nil) != fails {
				t.Errorf("later: %v", err)
			}
		})
		if err != nil {
			t.Error(err)
		}
	}
}
