package journal

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/rt"
)

// A scene is one life that is cut short, and what it leaves.
type scene struct {
	model   *model // when it was cut
	shared  *Shared
	images  []*blockdev.MemoryDevice // one for each way in which the crash may turn out
	ended   bool                     // the work was done before the cut
	entries int
	amended int
}

func (s *scene) close() {
	for _, d := range s.images {
		d.Close()
	}
}

// life runs work on disk, which it takes over, until operation cut, and returns what the crash leaves. With shared
// set the process is killed: one image, and the mapping as it was. Without, the power is cut.
func life(t tb, disk *blockdev.MemoryDevice, m *model, seed uint64, cut int, shared *Shared, work func(ctx context.Context, w *world) error) *scene {
	t.Helper()
	out := &scene{}
	simulate(t, seed, func(r *rt.Runtime) {
		disk.SetRuntime(r)
		crash, err := blockdev.NewCrashable(blockdev.NewDelaying(disk, blockdev.Latency{Write: 20000, Flush: 150000, Read: 80000, Jitter: 0.5, Parallel: 8}), blockdev.CrashableOptions{})
		must(t, err)
		w := newWorld(t, crash, m, seed, shared)
		w.check.resume(disk.Bytes())
		w.structural = 3
		images := func() {
			out.model = w.m.clone()
			rng := rand.New(rand.NewPCG(seed, uint64(cut)))
			ways := []blockdev.Strength{blockdev.Prefix, blockdev.Reordered, blockdev.Torn, blockdev.Torn}
			if shared != nil {
				out.shared = shared.Clone()
				ways = ways[:1]
			}
			for _, s := range ways {
				d, err := crash.Crash(rng, s)
				must(t, err)
				out.images = append(out.images, d)
			}
		}
		w.check.cutAt = cut
		w.check.onCut = func() {
			if out.model == nil {
				images()
				crash.Power().Cut()
				w.stop = true
			}
		}
		if cut > 0 && cut%3 == 0 { // not at an operation but at some time before
			r.AfterFunc(time.Duration(cut)*200*time.Microsecond, w.check.onCut)
		}
		ctx := context.Background()
		err = work(ctx, w)
		if out.model == nil { // it was not cut
			must(t, err)
			out.ended = true
			images()
		} else if err != nil && !errors.Is(err, blockdev.ErrPowerCut) {
			t.Fatal(err)
		}
		out.entries, out.amended = w.check.entries, w.check.amended
		if err := w.close(ctx); err != nil && out.ended {
			t.Fatal(err)
		}
		must(t, crash.Close())
	})
	if t.Failed() {
		t.FailNow()
	}
	return out
}

// judge has the independent reader look at an image.
func judge(t tb, d *blockdev.MemoryDevice) {
	t.Helper()
	d.SetRuntime(rt.New())
	set, err := offline.Open(context.Background(), d, offline.Options{})
	var found *offline.FindingError // the test's sets have no tree and no prio sets
	if err != nil && !errors.As(err, &found) {
		t.Fatal(err)
	}
	defer set.Close()
	for _, f := range set.Report.Findings() {
		switch f.Code {
		case offline.JournalGap, offline.JournalOrder, offline.JournalEmpty, offline.JournalDamaged, offline.JournalUnreadable, offline.JournalDiscarded:
			t.Errorf("%v", f.String())
		}
	}
	if len(set.Needed) == 0 {
		t.Error("the independent reader finds no entries")
	}
}

// reopen opens a set that a life left, checks it, and works with it.
func reopen(floor func(m *model) []uint64, writers, ops, most int) func(ctx context.Context, w *world) error {
	return func(ctx context.Context, w *world) error {
		rec, err := w.read(ctx, floor(w.m))
		if err != nil {
			return err
		}
		if err := w.open(ctx, rec); err != nil {
			return err
		}
		w.load(ctx, writers, ops, most)
		if w.stop {
			return nil
		}
		return w.sync(ctx)
	}
}

func synced(m *model) []uint64   { return m.synced }
func appended(m *model) []uint64 { return m.appended }

// birth formats and works.
func birth(writers, ops, most int) func(ctx context.Context, w *world) error {
	return func(ctx context.Context, w *world) error {
		if err := w.format(ctx); err != nil {
			return err
		}
		w.load(ctx, writers, ops, most)
		if w.stop {
			return nil
		}
		return w.sync(ctx)
	}
}

// TestPowerCutAtEveryOperation cuts a short life before each of its operations, in each way that counts, and the
// second life at some operation too.
func TestPowerCutAtEveryOperation(t *testing.T) {
	step := 1
	if testing.Short() {
		step = 5
	}
	for seed := range uint64(1) {
		cuts := 0
		for cut := 4; ; cut += step { // the first entry is there from then on
			s := life(t, newDisk(t, smallest, nil), newModel(smallest), seed, cut, nil, birth(4, 12, 12))
			for i, d := range s.images {
				cuts++
				judge(t, d)
				second := life(t, d, s.model.clone(), seed+uint64(i), (cut*7+i)%40, nil, reopen(synced, 3, 4, 12))
				for n, d := range second.images {
					judge(t, d)
					if n != (cut+i)%len(second.images) {
						d.Close()
						continue
					}
					life(t, d, second.model.clone(), seed, -1, nil, reopen(synced, 1, 1, 3)).close()
				}
			}
			if s.ended {
				break
			}
		}
		t.Logf("seed %d: %d images", seed, cuts)
	}
}

// TestKillAtEveryOperation kills a process before each of its operations: all that was appended is there.
func TestKillAtEveryOperation(t *testing.T) {
	seeds := 4
	if testing.Short() {
		seeds = 1
	}
	for seed := range uint64(seeds) {
		for cut := 4; ; cut++ {
			s := life(t, newDisk(t, smallest, nil), newModel(smallest), seed, cut, NewShared(), birth(4, 12, 12))
			second := life(t, s.images[0], s.model.clone(), seed, cut*5%30, s.shared, reopen(appended, 3, 4, 12))
			judge(t, second.images[0])
			life(t, second.images[0], second.model, seed+1, -1, second.shared, reopen(appended, 1, 1, 3)).close()
			if s.ended {
				break
			}
		}
	}
}

// TestManyLives lets one set live and die again and again, its journal full most of the time, by cuts and kills
// after a random number of operations.
func TestManyLives(t *testing.T) {
	sets := 12
	if testing.Short() {
		sets = 6
	}
	for seed := range uint64(sets) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 5))
			l := smallest
			l.buckets = []int{4, 4, 5, 9}[seed%4]
			if seed%3 == 2 {
				l.block, l.bucket, l.logicalBlock = 8, 16, []int{512, 4096}[seed%2]
			}
			m, disk := newModel(l), newDisk(t, l, nil)
			kill := seed%2 == 0
			var shared *Shared
			if kill {
				shared = NewShared()
			}
			s := life(t, disk, m, seed, -1, shared, birth(1, 1, 1))
			entries, amended := 0, 0
			for n := range 25 {
				floor := synced
				if kill {
					floor = appended
				}
				d := s.images[rng.IntN(len(s.images))]
				for _, o := range s.images {
					if o != d {
						o.Close()
					}
				}
				cut := 1 + rng.IntN(400)
				if rng.IntN(3) == 0 {
					cut = rng.IntN(12) // during start
				}
				s = life(t, d, s.model, seed<<8+uint64(n), cut, s.shared, reopen(floor, 1+rng.IntN(12), 60, 1+rng.IntN(40)))
				entries += s.entries
				amended += s.amended
				for _, d := range s.images {
					judge(t, d)
				}
			}
			t.Logf("%d entries, %d of them into the header of the newest", entries, amended)
			s.close()
		})
	}
}
