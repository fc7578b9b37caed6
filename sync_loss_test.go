package ubcache

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// A dsync is a forgetful device that makes a write with FUA as a file does: written, then synced. When armed, the first
// sync behind a certain write fails, be it the write's own, for it has FUA, or the next flush: what was written since
// the last flush is lost, and no later one tells of it.
type dsync struct {
	*forgetful
	armed func(r *blockdev.Request) bool // is it the write? nil: not armed
	early time.Duration                  // when, of the millisecond that its own sync takes, the loss happens
}

func (d *dsync) NewQueue(depth int, complete func(done []*blockdev.Request)) (blockdev.Queue, error) {
	q := &dsyncQueue{d: d, up: blockdev.NewCompleter(d.Runtime(), complete)}
	var err error
	q.below, err = d.forgetful.NewQueue(depth, func(done []*blockdev.Request) { q.up.Finish(done...) })
	return q, err
}

type dsyncQueue struct {
	d     *dsync
	up    *blockdev.Completer
	below blockdev.Queue
}

func (q *dsyncQueue) Submit(reqs []*blockdev.Request) {
	d := q.d
	if !q.up.Begin(len(reqs)) {
		for _, r := range reqs {
			r.Err = blockdev.ErrClosed
		}
		q.up.Finish(reqs...)
		return
	}
	var pass []*blockdev.Request
	for _, r := range reqs {
		if d.armed != nil && r.Op.Writes() && d.armed(r) {
			d.armed = nil
			if r.Flags&blockdev.FUA != 0 {
				d.Runtime().AfterFunc(d.early, func() {
					d.forgetful.lose()
					d.told++
				})
				d.Runtime().AfterFunc(time.Millisecond, func() {
					r.Err = unix.EIO
					q.up.Finish(r)
				})
				continue
			}
			d.forgetful.armed = time.Millisecond
		}
		pass = append(pass, r)
	}
	if len(pass) > 0 {
		q.below.Submit(pass)
	}
}

func (q *dsyncQueue) Close() error {
	if !q.up.Close() {
		return blockdev.ErrClosed
	}
	return q.below.Close()
}

// at arms a dsync for a write that begins there.
func at(off int64) func(r *blockdev.Request) bool {
	return func(r *blockdev.Request) bool { return r.Off == off }
}

// dsync puts such a device in the place of the first backing device.
func (b *bench) dsync(mode string) (*dsync, error) { return b.dsyncAt(&b.backing[0], mode) }

func (b *bench) dsyncAt(dev *blockdev.Device, mode string) (*dsync, error) {
	err := b.set.Close(context.Background())
	b.set = nil
	d := &dsync{forgetful: newForgetful(*dev)}
	*dev = d
	return d, errors.Join(err, b.open(mode))
}

// eachStep calls fn in a simulation with what happens beside at another moment each time. It reports whether the case has
// come about, which it must now and then.
func eachStep(t *testing.T, fn func(b *bench, beside time.Duration) (came bool, err error)) {
	t.Helper()
	came := 0
	for step := range 60 {
		simulate(t, 1, 10*time.Minute, breakable(t), func(b *bench) error {
			yes, err := fn(b, time.Duration(step)*10*time.Microsecond)
			if yes {
				came++
			}
			if err != nil {
				return fmt.Errorf("step %d: %w", step, err)
			}
			b.errOfClose() // it tells of the flush once more if nobody was told
			return nil
		})
		if t.Failed() {
			return
		}
	}
	if came == 0 {
		t.Error("the case did not come about")
	}
}

// errOfClose closes the set; what that says is no matter.
func (b *bench) errOfClose() {
	_ = b.set.Close(context.Background())
	b.set = nil
}

// What is written back stays dirty when a write with FUA that goes round the cache fails between its being written and its
// flush: the failed write may be what was told that the device has lost it.
func TestFailedFUAWhileWritingBack(t *testing.T) {
	eachStep(t, func(b *bench, beside time.Duration) (bool, error) {
		d, err := b.dsync("writeback")
		if err != nil {
			return false, err
		}
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(hold(v, true), v.WriteAt(ctx, page('D'), 0, FUA), v.Flush(ctx)); err != nil {
			return false, err
		}
		var group rt.WaitGroup
		group.Init(b.rt)
		var told error
		group.Go("fua", func() {
			b.rt.Sleep(beside)
			d.armed = at(crashOffset + 4<<20)
			told = v.WriteZeroes(ctx, 4<<20, 4096, FUA)
		})
		_ = v.WriteBack(ctx)
		group.Wait()
		if told == nil {
			return false, errors.New("the write with FUA did not fail")
		}
		if v.Stats().DirtyBytes > 0 {
			return true, nil
		}
		if err := b.alone(0, 'D'); err != nil {
			return true, fmt.Errorf("nothing is dirty any more, state %v: %w", v.v.State(), err)
		}
		return d.told > 0, nil
	})
}

// The same, where what the device loses lies under zeroes over dirty data.
func TestFailedFUABesideZeroesOverDirtyData(t *testing.T) {
	eachStep(t, func(b *bench, beside time.Duration) (bool, error) {
		d, err := b.dsync("none")
		if err != nil {
			return false, err
		}
		ctx, v := context.Background(), b.volumes[0]
		err = errors.Join(v.WriteAt(ctx, page('O'), 0, FUA), b.attribute("cache_mode", "writeback"), hold(v, true),
			v.WriteAt(ctx, page('D'), 0, FUA), v.Flush(ctx))
		if err != nil {
			return false, err
		}
		var group rt.WaitGroup
		group.Init(b.rt)
		group.Go("fua", func() {
			b.rt.Sleep(beside)
			d.armed = at(crashOffset + 4<<20)
			_ = v.WriteZeroes(ctx, 4<<20, 4096, FUA)
		})
		err = v.WriteZeroes(ctx, 0, 4096, 0)
		group.Wait()
		if err != nil || b.expect(0, 0) == nil || b.expect(0, 'D') == nil {
			return d.told > 0, nil
		}
		return true, fmt.Errorf("the write was acknowledged: %w", b.expect(0, 0))
	})
}

// The same, where the write that the device has told is the one of the superblock: what it says may come later than what
// the flush of what was written back says.
func TestFailedSuperblockWhileWritingBack(t *testing.T) {
	eachStep(t, func(b *bench, beside time.Duration) (bool, error) {
		d, err := b.dsync("writeback")
		if err != nil {
			return false, err
		}
		ctx, v := context.Background(), b.volumes[0]
		if err := errors.Join(hold(v, true), v.WriteAt(ctx, page('D'), 0, FUA), v.Flush(ctx)); err != nil {
			return false, err
		}
		var group rt.WaitGroup
		group.Init(b.rt)
		var failed error
		group.Go("mode", func() {
			d.armed, d.early = at(ondisk.SuperblockOffset), 60*time.Microsecond
			failed = b.attribute("cache_mode", "writearound")
		})
		b.rt.Sleep(beside)
		_ = v.WriteBack(ctx)
		group.Wait()
		if v.Stats().DirtyBytes > 0 {
			return true, nil
		}
		if err := b.alone(0, 'D'); err != nil {
			return true, fmt.Errorf("nothing is dirty any more, state %v: %w", v.v.State(), err)
		}
		return failed != nil && d.told > 0, nil
	})
}

// A node of the index whose write fails on the cache device is written again. But what has failed may be the sync behind
// the write, and have been told that data is lost which was acknowledged: no flush succeeds then. Neither does one of
// the journal's beside it.
func TestFailedSyncOfANode(t *testing.T) {
	eachStep(t, func(b *bench, beside time.Duration) (bool, error) {
		d, err := b.dsyncAt(&b.cache, "writeback")
		if err != nil {
			return false, err
		}
		ctx, v := context.Background(), b.volumes[0]
		if err := hold(v, true); err != nil {
			return false, err
		}
		nodes := int(beside / (200 * time.Microsecond))
		d.early = beside
		d.armed = func(r *blockdev.Request) bool {
			if r.Purpose != blockdev.ForBtree {
				return false
			}
			nodes--
			return nodes < 0
		}
		const pieces = 1000
		for i := range int64(pieces) {
			if v.WriteAt(ctx, page(byte('a' + i%26))[:512], i*1024, 0) != nil {
				return d.told > 0, nil
			}
		}
		if v.Flush(ctx) != nil {
			return d.told > 0, nil
		}
		got := make([]byte, 512)
		for i := range int64(pieces) {
			if err := v.ReadAt(ctx, got, i*1024); err != nil {
				return true, err
			}
			if got[0] != byte('a'+i%26) {
				return true, fmt.Errorf("a flush succeeded, and piece %d reads as %q; %d syncs have failed", i, got[0], d.told)
			}
		}
		return d.told > 0, nil
	})
}
