package volume

import (
	"errors"
	"regexp"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/writeback"
)

// Before data is written back its key is on the disk; that others were marked clean meanwhile need not be.
func TestKeysAreDurableBeforeWriteback(t *testing.T) {
	simulateTraced(t, 4000, func(v *Volume, _ *queue, log *blockdev.TraceLog) error {
		v.set.SetJournalDelay(time.Hour) // so that entries are written on demand only
		running := func(yes bool) error {
			return v.ChangeWriteback(func(s *writeback.Settings) error { s.Running = yes; return nil })
		}
		io, err := blockdev.NewIO(v, 1)
		if err != nil {
			return err
		}
		defer io.Close()
		if err := errors.Join(v.SetMode(ondisk.Writeback), running(false)); err != nil {
			return err
		}
		for i := range int64(5) {
			if err := io.WriteAt(make([]byte, 4096), i*8192, 0); err != nil {
				return err
			}
		}
		log.Take()
		if err := running(true); err != nil { // at the least rate, a block each second
			return err
		}
		v.rt.Sleep(20 * time.Second)
		got := regexp.MustCompile(` \d+\+\d+`).ReplaceAllString(log.Take(), "")
		entry := "write journal fua\ndone write journal fua\n"
		want := entry
		for range 5 {
			want += "write writeback\ndone write writeback\n"
		}
		want += entry // so that the superblock may say CLEAN
		if got != want {
			t.Errorf("got:\n%swant:\n%s", got, want)
		}
		return nil
	})
}

// While requests use the set, also other volumes' of it, writeback has few I/Os under way.
func TestStepsBack(t *testing.T) {
	simulateVolume(t, 4000, func(v *Volume, q *queue) error {
		w := v.drainer
		stepsBack := func() bool { return w.queues() == [2]*below{&w.beside[0], &w.beside[1]} }
		io, err := blockdev.NewIO(v, 1)
		if err != nil {
			return err
		}
		defer io.Close()
		for range 2 {
			if stepsBack() {
				t.Error("without requests")
			}
			if err := io.ReadAt(make([]byte, 4096), 0); err != nil {
				return err
			}
			if !stepsBack() {
				t.Error("not after a request")
			}
			v.rt.Sleep(besideFor / 2)
			if !stepsBack() {
				t.Error("not soon after a request")
			}
			v.rt.Sleep(besideFor)
		}
		return nil
	})
}
