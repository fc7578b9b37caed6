package journal

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// begin starts a world on a new disk of a simulation, with its first entry written.
func begin(t testing.TB, r *rt.Runtime, l layout, latency blockdev.Latency, shared *Shared) *world {
	d := newDisk(t, l, r)
	t.Cleanup(func() { d.Close() })
	w := newWorld(t, blockdev.NewDelaying(d, latency), newModel(l), 1, shared)
	must(t, w.format(context.Background()))
	return w
}

// TestNeverStuck is case 20 (a): the smallest journal, 32 writers, ten minutes, and never five seconds without a
// completion. Leaves take 20 ms to write, of which there are more than fit into one bucket of the journal.
func TestNeverStuck(t *testing.T) {
	for _, c := range []struct {
		name   string
		shared *Shared
		most   int // keys at once
		pause  time.Duration
	}{
		{"mapping", NewShared(), 12, 120 * time.Millisecond},
		{"no mapping", nil, 3, 250 * time.Millisecond},
	} {
		t.Run(c.name, func(t *testing.T) {
			length := 10 * time.Minute
			if testing.Short() {
				length = time.Minute
			}
			simulate(t, 20, func(r *rt.Runtime) {
				l := smallest
				l.leaves = 24
				w := begin(t, r, l, blockdev.Latency{Write: 10 * time.Millisecond, Flush: 10 * time.Millisecond, Jitter: 0.5, Parallel: 4}, c.shared)
				w.structural = 3
				ctx := context.Background()
				var longest, last time.Duration
				done, syncs := 0, 0
				last = r.Now()
				end := last + length
				completed := func() {
					longest = max(longest, r.Now()-last)
					last = r.Now()
				}
				var g rt.WaitGroup
				g.Init(r)
				for n := range 32 {
					g.Go(fmt.Sprintf("writer %d", n), func() {
						for r.Now() < end {
							must(t, w.append(ctx, w.rng.IntN(l.leaves), 1+w.rng.IntN(c.most), false))
							completed()
							done++
							if w.rng.IntN(4) == 0 {
								must(t, w.sync(ctx))
								completed()
								syncs++
							}
							if w.rng.IntN(2) == 0 {
								r.Sleep(time.Duration(w.rng.Int64N(int64(2 * c.pause))))
							}
						}
					})
				}
				g.Wait()
				s := w.j.Stats()
				t.Logf("%d appends, %d flushes, %d entries in %d laps; longest pause %v; %d waits for room, %v on average; %d reclaims",
					done, syncs, s.Entries, w.check.laps, longest, s.ReserveWaits, s.ReserveWait/time.Duration(max(1, s.ReserveWaits)), s.Reclaims)
				if longest > 5*time.Second {
					t.Errorf("%v without a completion", longest)
				}
				if w.check.laps < 20 {
					t.Errorf("only %d laps", w.check.laps)
				}
				must(t, w.close(ctx))
			})
		})
	}
}

// TestModel holds the journal, in one life after the other, against the model, with everything drawn by rapid.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := smallest
		l.buckets = rapid.IntRange(4, 9).Draw(t, "buckets")
		l.leaves = rapid.IntRange(1, 12).Draw(t, "leaves")
		l.bucket = rapid.SampledFrom([]int{8, 16, 64}).Draw(t, "bucket")
		l.block = rapid.SampledFrom([]int{1, 1, 8}).Draw(t, "block")
		var shared *Shared
		if rapid.Bool().Draw(t, "kill") {
			shared = NewShared()
		}
		floor := synced
		if shared != nil {
			floor = appended
		}
		// One that is cut before the first entry is durable is no set yet.
		s := life(t, newDisk(t, l, nil), newModel(l), rapid.Uint64().Draw(t, "seed"), 4+rapid.IntRange(0, 300).Draw(t, "cut"), shared,
			birth(rapid.IntRange(1, 8).Draw(t, "writers"), 30, rapid.IntRange(1, 60).Draw(t, "most")))
		for range rapid.IntRange(1, 3).Draw(t, "lives") {
			i := rapid.IntRange(0, len(s.images)-1).Draw(t, "crash")
			for n, d := range s.images {
				judge(t, d)
				if n != i {
					d.Close()
				}
			}
			s = life(t, s.images[i], s.model, rapid.Uint64().Draw(t, "seed"), rapid.IntRange(0, 300).Draw(t, "cut"), s.shared,
				reopen(floor, rapid.IntRange(1, 8).Draw(t, "writers"), 20, rapid.IntRange(1, 60).Draw(t, "most")))
		}
		s.close()
	})
}

// TestStartsCutShort starts a set with a full journal again and again, each start being cut when it has written some
// entries, far more often than the ring has blocks. The last start replays and goes on.
func TestStartsCutShort(t *testing.T) {
	ctx := context.Background()
	for _, l := range []layout{smallest, {buckets: 4, bucket: 32, block: 8, leaves: 6}, {buckets: 4, bucket: 8, block: 8, leaves: 6, logicalBlock: 4096}, {buckets: 6, bucket: 16, block: 1, leaves: 6}} {
		simulate(t, 1, func(r *rt.Runtime) {
			d := newDisk(t, l, r)
			defer d.Close()
			m := newModel(l)
			w := newWorld(t, d, m, 1, nil)
			must(t, w.format(ctx))
			w.hold = true // leaves are not written: the journal fills up
			for {
				short, cancel := r.WithTimeout(ctx, time.Second)
				err := w.append(short, w.rng.IntN(l.leaves), 5, false)
				cancel()
				if err != nil {
					break
				}
			}
			must(t, w.sync(ctx))
			must(t, w.close(ctx))
			amended := 0
			for start := range 150 {
				w = newWorld(t, d, m, uint64(start), nil)
				w.check.resume(d.Bytes())
				rec, err := w.read(ctx, m.synced)
				must(t, err)
				w.hold = true
				w.j, err = Open(ctx, w.config(), rec)
				must(t, err)
				if start%5 == 0 { // one that gets further
					must(t, w.replay(ctx, rec))
				}
				for range start % 3 {
					must(t, w.changeRoot(ctx, false, true))
				}
				must(t, w.close(ctx))
				judge(t, d)
				d.SetRuntime(r)
				amended += w.check.amended
			}
			if amended < 50 {
				t.Errorf("%d entries were amended", amended)
			}
			w = newWorld(t, d, m, 3, nil)
			w.check.resume(d.Bytes())
			rec, err := w.read(ctx, m.synced)
			must(t, err)
			must(t, w.open(ctx, rec))
			must(t, w.append(ctx, 0, 5, false)) // waits until there is room
			must(t, w.sync(ctx))
			must(t, w.close(ctx))
			judge(t, d)
		})
	}
}

// TestFullToTheLastBlock: a ring in which no block is left, as a kernel may leave one that was cut off while it started,
// and whose newest entry has keys, takes new roots all the same, and more keys once the leaves are written.
func TestFullToTheLastBlock(t *testing.T) {
	ctx := context.Background()
	for _, keys := range []int{0, 1, 20} { // of the newest: one sector, and two
		simulate(t, 1, func(r *rt.Runtime) {
			l := smallest
			d := newDisk(t, l, r)
			defer d.Close()
			m := newModel(l)
			m.super = uint64(l.superblock().Seq)
			w := newWorld(t, d, m, 1, nil)
			set := ondisk.JSet{Magic: w.geo.JSetMagic(), Version: 1, LastSeq: 1}
			var h Header
			w.JournalHeader(&h)
			set.Root, set.UUIDBucket, set.PrioBucket[0] = h.Root, h.UUIDBucket, h.Prio
			put := func(bucket, block, n int) int {
				set.Seq++
				set.Data = nil
				for range n {
					m.total++
					m.appended[0]++
					k := ondisk.NewExtent(0, m.appended[0]*8, 8, ondisk.MakePtr(1, m.total, 0), true)
					set.Data = append(set.Data, make([]byte, 24)...)
					ondisk.AppendKey(set.Data[:len(set.Data)-24], &k)
				}
				buf := make([]byte, l.bucket*512)
				at := int64(w.geo.BucketStart(w.sb.D[bucket]))*512 + int64(block)*512
				copy(d.Bytes()[at:], buf[:(set.Encode(buf)+511)/512*512])
				return (set.Bytes() + 511) / 512
			}
			for b := range l.buckets {
				last := (240 + 24*keys + 511) / 512
				at := 0
				for b == l.buckets-1 && at < l.bucket-last || b < l.buckets-1 && at < l.bucket {
					at += put(b, at, 1)
				}
				if b == l.buckets-1 {
					put(b, at, keys)
				}
			}
			m.synced = slices.Clone(m.appended)
			for life := range 6 {
				w = newWorld(t, d, m, uint64(life), nil)
				w.check.resume(d.Bytes())
				rec, err := w.read(ctx, m.synced)
				must(t, err)
				w.j, err = Open(ctx, w.config(), rec)
				must(t, err)
				for range 4 {
					must(t, w.changeRoot(ctx, false, false))
				}
				if w.check.amended != 4 {
					t.Errorf("%d keys in the newest entry: %d entries were amended, want 4", keys, w.check.amended)
				}
				must(t, w.close(ctx))
				judge(t, d)
				d.SetRuntime(r)
			}
			w = newWorld(t, d, m, 3, nil)
			w.check.resume(d.Bytes())
			rec, err := w.read(ctx, m.synced)
			must(t, err)
			must(t, w.open(ctx, rec))
			for range 100 {
				must(t, w.append(ctx, 1, 5, false))
				must(t, w.sync(ctx))
			}
			must(t, w.close(ctx))
			judge(t, d)
		})
	}
}

// TestKilledWhenFull: however full the journal, what a dead process had acknowledged finds room at the next start.
func TestKilledWhenFull(t *testing.T) {
	ctx := context.Background()
	fill := func(ctx context.Context, w *world) error {
		if err := w.format(ctx); err != nil {
			return err
		}
		// Keys are appended all the time, as many as there is room for, and the root changes; leaves are let go of
		// late, so that entries which free buckets are in flight while others fill up behind them.
		w.hold = true
		for range 40 {
			w.r.Go("writer", func() {
				for !w.stop && w.append(ctx, w.rng.IntN(smallest.leaves), 1+w.rng.IntN(30), false) == nil {
				}
			})
		}
		for i := 0; !w.stop && i < 15; i++ {
			w.r.Sleep(time.Duration(w.rng.IntN(20)) * time.Millisecond)
			if i%3 == 0 {
				_ = w.changeRoot(ctx, false, true)
			}
			w.hold = i%2 == 0
		}
		w.stop = true
		_ = w.sync(ctx)
		return nil
	}
	step := 2
	if testing.Short() {
		step = 10
	}
	for seed := range uint64(2) {
		for cut := 20 + int(seed); cut < 400; cut += step {
			s := life(t, newDisk(t, smallest, nil), newModel(smallest), seed, cut, NewShared(), fill)
			simulate(t, seed, func(r *rt.Runtime) {
				d := s.images[0]
				d.SetRuntime(r)
				w := newWorld(t, d, s.model, seed, s.shared)
				w.check.resume(d.Bytes())
				rec, err := w.read(ctx, s.model.appended)
				must(t, err)
				w.j, err = Open(ctx, w.config(), rec)
				must(t, err)
				must(t, w.close(ctx))
				must(t, d.Close())
			})
			if s.ended {
				break
			}
		}
	}
}

// TestUrgent: in a full journal urgent entries do not wait, however many, and none takes the place of what is reserved.
func TestUrgent(t *testing.T) {
	simulate(t, 4, func(r *rt.Runtime) {
		ctx := context.Background()
		w := begin(t, r, smallest, blockdev.Latency{}, nil)
		w.hold = true
		res, err := w.j.Reserve(ctx, 300, 0)
		must(t, err)
		bounded := func(fn func(ctx context.Context) error) bool {
			short, cancel := r.WithTimeout(ctx, time.Second)
			defer cancel()
			err := fn(short)
			if err != nil && !errors.Is(err, context.DeadlineExceeded) {
				t.Fatal(err)
			}
			return err == nil
		}
		for bounded(func(ctx context.Context) error { return w.append(ctx, 1, 8, false) }) {
		}
		for range 200 {
			if !bounded(func(ctx context.Context) error { return w.changeRoot(ctx, false, true) }) { // checks the place of what is reserved
				t.Fatal("an urgent entry waits")
			}
		}
		if w.check.amended < 150 {
			t.Errorf("%d entries were amended", w.check.amended)
		}
		w.mu.Lock()
		for range 10 {
			w.appendLocked(&res, 2, 10)
		}
		w.mu.Unlock()
		w.hold = false
		must(t, w.sync(ctx))
		must(t, w.append(ctx, 1, 8, false))
		must(t, w.close(ctx))
	})
}

// TestReclaimAtHalf: leaves are written out when half of the ring is taken, and not before.
func TestReclaimAtHalf(t *testing.T) {
	simulate(t, 4, func(r *rt.Runtime) {
		ctx := context.Background()
		w := begin(t, r, smallest, blockdev.Latency{}, nil)
		for range 23 { // entries of one block; with the first one 24 of 48 are taken
			if s := w.j.Stats(); s.Reclaims != 0 {
				t.Fatalf("leaves are written out with %d of %d blocks taken", s.UsedBlocks, s.Blocks)
			}
			must(t, w.append(ctx, 0, 1, false))
		}
		r.Sleep(time.Millisecond)
		if s := w.j.Stats(); s.Reclaims != 1 || s.Oldest != s.Seq || s.UsedBlocks != 24 {
			t.Errorf("%+v", s)
		}
		must(t, w.close(ctx))
	})
}

// TestFailedWrite: a journal write that fails ends all acknowledging, and what was acknowledged is in the mapping.
func TestFailedWrite(t *testing.T) {
	for _, op := range []blockdev.Op{blockdev.OpWrite, blockdev.OpFlush} {
		simulate(t, 3, func(r *rt.Runtime) {
			ctx := context.Background()
			d := newDisk(t, smallest, r)
			defer d.Close()
			faulty := blockdev.NewFaulty(blockdev.NewDelaying(d, blockdev.Latency{Write: time.Millisecond, Flush: time.Millisecond}), 1)
			m := newModel(smallest)
			shared := NewShared()
			w := newWorld(t, faulty, m, 1, shared)
			must(t, w.format(ctx))
			must(t, w.append(ctx, 1, 7, false))
			must(t, w.sync(ctx))
			must(t, w.append(ctx, 2, 3, true))
			faulty.Add(blockdev.Fault{Ops: []blockdev.Op{op}, Purposes: []blockdev.Purpose{blockdev.ForJournal}})
			var g rt.WaitGroup
			g.Init(r)
			for range 4 {
				g.Go("flush", func() {
					var f *FailedError
					if err := w.j.Sync(ctx); !errors.As(err, &f) || f.Seq != 3 || !errors.Is(err, ErrFailed) || !errors.Is(err, unix.EIO) {
						t.Errorf("flush: %v", err)
					}
				})
			}
			g.Wait()
			faulty.Clear()
			if _, err := w.j.Reserve(ctx, 3, 1); !errors.Is(err, ErrFailed) {
				t.Errorf("Reserve: %v", err)
			}
			if err := w.j.Acknowledge(ctx, 3); !errors.Is(err, ErrFailed) {
				t.Errorf("Acknowledge: %v", err)
			}
			if err := w.j.WriteEntry(ctx); !errors.Is(err, ErrFailed) {
				t.Errorf("WriteEntry: %v", err)
			}
			if err := w.close(ctx); !errors.Is(err, ErrFailed) {
				t.Errorf("Close: %v", err)
			}
			w = newWorld(t, d, m, 1, shared.Clone())
			w.check.resume(d.Bytes())
			rec, err := w.read(ctx, m.appended)
			must(t, err)
			must(t, w.open(ctx, rec))
			must(t, w.close(ctx))
		})
	}
}

// TestFailedReclaim: an owner that cannot make room fails the journal.
func TestFailedReclaim(t *testing.T) {
	simulate(t, 3, func(r *rt.Runtime) {
		ctx := context.Background()
		d := newDisk(t, smallest, r)
		defer d.Close()
		faulty := blockdev.NewFaulty(d, 1)
		w := newWorld(t, faulty, newModel(smallest), 1, NewShared())
		must(t, w.format(ctx))
		faulty.Add(blockdev.Fault{Purposes: []blockdev.Purpose{blockdev.ForBtree}})
		for {
			if err := w.append(ctx, 0, 20, false); err != nil {
				var f *FailedError
				if !errors.As(err, &f) || f.Seq != 0 || !errors.Is(err, unix.EIO) {
					t.Errorf("%v", err)
				}
				break
			}
			if err := w.sync(ctx); err != nil && !errors.Is(err, ErrFailed) {
				t.Fatal(err)
			}
		}
		if err := w.close(ctx); !errors.Is(err, ErrFailed) {
			t.Errorf("Close: %v", err)
		}
	})
}

// TestReserve: order, limits, giving up.
func TestReserve(t *testing.T) {
	simulate(t, 4, func(r *rt.Runtime) {
		ctx := context.Background()
		w := begin(t, r, smallest, blockdev.Latency{Write: time.Millisecond, Flush: time.Millisecond}, nil)
		most := w.j.MaxReserve()
		if _, err := w.j.Reserve(ctx, most+1, 0); !errors.Is(err, ErrTooLarge) {
			t.Errorf("more than the most: %v", err)
		}
		all, err := w.j.Reserve(ctx, most-3, 1)
		must(t, err)
		w.mu.Lock()
		if _, ok := w.j.TryReserveLocked(1, 0); ok {
			t.Error("one more than the most")
		}
		w.mu.Unlock()
		var order []int
		var g rt.WaitGroup
		g.Init(r)
		for i, n := range []int{most, 3, 3} {
			g.Go("waiter", func() {
				res, err := w.j.Reserve(ctx, n, 0)
				must(t, err)
				order = append(order, i)
				w.j.Release(&res)
			})
			r.Sleep(time.Millisecond)
		}
		short, cancel := r.WithTimeout(ctx, time.Second)
		if _, err := w.j.Reserve(short, 3, 0); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("given up: %v", err)
		}
		cancel()
		w.j.Release(&all)
		g.Wait()
		if fmt.Sprint(order) != "[0 1 2]" {
			t.Errorf("served in the order %v", order)
		}
		if s := w.j.Stats(); s.Reserved != 0 || s.ReserveWaits != 4 {
			t.Errorf("%+v", s)
		}
		must(t, w.close(ctx))
		if _, err := w.j.Reserve(ctx, 3, 0); !errors.Is(err, ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
		if err := w.j.Close(ctx); !errors.Is(err, ErrClosed) {
			t.Errorf("second Close: %v", err)
		}
	})
}

// TestDelay: keys that nobody asks about are on disk after the delay; a flush of nothing writes nothing.
func TestDelay(t *testing.T) {
	simulate(t, 4, func(r *rt.Runtime) {
		ctx := context.Background()
		w := begin(t, r, smallest, blockdev.Latency{Write: time.Millisecond, Flush: time.Millisecond}, NewShared())
		for _, delay := range []time.Duration{DefaultDelay, 7 * time.Millisecond} {
			w.j.SetDelay(delay)
			before := w.j.Stats().Entries
			must(t, w.append(ctx, 0, 3, false))
			r.Sleep(delay - time.Millisecond)
			must(t, w.append(ctx, 0, 3, false))
			if s := w.j.Stats(); s.Entries != before || s.Durable == s.Seq-1 && s.Seq == 1 {
				t.Errorf("%v: written early", delay)
			}
			r.Sleep(5 * time.Millisecond)
			if s := w.j.Stats(); s.Entries != before+1 || s.Durable != s.Seq-1 {
				t.Errorf("%v: not written: %+v", delay, s)
			}
		}
		ops := w.check.ops.Load()
		must(t, w.j.Sync(ctx))
		if w.check.ops.Load() != ops {
			t.Error("a flush wrote although nothing was to be written")
		}
		w.mu.Lock()
		seq := w.j.RequestEntryLocked(false)
		w.mu.Unlock()
		must(t, w.j.WaitDurable(ctx, seq))
		if s := w.j.Stats(); s.EmptyEntries != 2 {
			t.Errorf("%d empty entries, want 2: the first of all, and the one asked for", s.EmptyEntries)
		}
		must(t, w.close(ctx))
	})
}

// TestFewBuckets: such a ring can be read and not written.
func TestFewBuckets(t *testing.T) {
	l := smallest
	l.buckets = 3
	simulate(t, 1, func(r *rt.Runtime) {
		d := newDisk(t, l, r)
		defer d.Close()
		w := newWorld(t, d, newModel(l), 1, nil)
		if _, err := Open(context.Background(), w.config(), nil); !errors.Is(err, ErrFewBuckets) {
			t.Errorf("%v", err)
		}
		must(t, w.io.Close())
	})
}

// TestBadCalls: what would break the set later panics now.
func TestBadCalls(t *testing.T) {
	simulate(t, 1, func(r *rt.Runtime) {
		w := begin(t, r, smallest, blockdev.Latency{}, nil)
		res, err := w.j.Reserve(context.Background(), 30, 0)
		must(t, err)
		panics := func(what string, fn func()) {
			defer func() {
				if recover() == nil {
					t.Errorf("%s does not panic", what)
				}
			}()
			fn()
		}
		w.mu.Lock()
		var pin, other Pin
		panics("a key without size", func() { w.j.AppendLocked(&res, []ondisk.Key{ondisk.NewInvalidation(0, 8, 0)}) })
		panics("a key larger than its end", func() { w.j.AppendLocked(&res, []ondisk.Key{ondisk.NewInvalidation(0, 8, 9)}) })
		panics("a key without reservation", func() { w.j.AppendLocked(&Reservation{}, []ondisk.Key{ondisk.NewInvalidation(0, 8, 8)}) })
		panics("a pin of the future", func() { w.j.PinLocked(&pin, w.j.seq+1) })
		panics("a pin of the past", func() { w.j.OldestPinLocked(); w.j.PinLocked(&pin, 1) })
		w.j.PinLocked(&other, w.j.seq)
		cp := other
		w.j.UnpinLocked(&other)
		panics("unpinning a copy", func() { w.j.UnpinLocked(&cp) })
		w.mu.Unlock()
		w.j.Release(&res)
		must(t, w.close(context.Background()))
	})
}

// TestSpan: the entries that are needed never become too many for the kernel's table, though the ring has room.
func TestSpan(t *testing.T) {
	l := layout{buckets: 40, bucket: 1024, block: 1, leaves: 2}
	simulate(t, 1, func(r *rt.Runtime) {
		ctx := context.Background()
		d := newDisk(t, l, r)
		defer d.Close()
		w := newWorld(t, d, newModel(l), 1, nil)
		must(t, w.format(ctx))
		w.hold = true // nothing is written out
		w.mu.Lock()
		w.j.PinLocked(&w.leaves[1].pin, w.j.seq)
		w.mu.Unlock()
		n := 0
		for ; n < 40000; n++ {
			short, cancel := r.WithTimeout(ctx, time.Second)
			err := w.append(short, 0, 1, false)
			cancel()
			if err != nil {
				break
			}
		}
		if s := w.j.Stats(); s.Seq-s.Oldest > maxSpan || n < 30000 {
			t.Errorf("%d entries, %d of them needed", n, s.Seq-s.Oldest)
		}
		w.hold = false
		must(t, w.append(ctx, 0, 1, false))
		must(t, w.close(ctx))
	})
}
