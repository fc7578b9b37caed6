package made

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/journal"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
	"github.com/ubcache/ubcache/internal/volume"
)

// atRest looks at what is left with the checker, which shares no code with the engine. It returns the greatest distance of
// a bucket's generation from the oldest pointer to it, in the index or in a needed journal entry.
func (l *Left) atRest() (lag uint8, err error) {
	var backings []blockdev.Device
	if l.Backing != nil {
		backings = append(backings, l.Backing)
	}
	s, _, err := offline.Check(context.Background(), l.Cache, backings, offline.CheckOptions{})
	if s != nil {
		defer s.Close()
	}
	if err != nil {
		return 0, fmt.Errorf("%s: %w", l.Name, err)
	}
	for _, f := range s.Report.Findings() {
		if f.Severity > offline.Harmless {
			return 0, fmt.Errorf("%s: check: %s", l.Name, f.String())
		}
	}
	for b, gen := range s.Gen {
		lag = max(lag, ondisk.GenAfter(gen, s.OldestGen[b]))
	}
	return lag, nil
}

// opened opens what is left with the engine, reads all of the volume, and then what of it there is after some time, in
// which whatever there is to do in the background has been done, and after another start.
func (l *Left) opened() error {
	s := rt.NewSim(1)
	s.Limit = 24 * time.Hour
	var failed error
	err := s.Run(func() {
		r := s.Runtime()
		l.Cache.SetRuntime(r)
		if l.Backing != nil {
			l.Backing.SetRuntime(r)
		}
		for range 2 {
			if failed = l.open(r); failed != nil {
				failed = fmt.Errorf("%s: %w", l.Name, failed)
				return
			}
		}
	})
	if err != nil {
		return err
	}
	return failed
}

func (l *Left) open(r *rt.Runtime) error {
	ctx := context.Background()
	set, err := cacheset.Open(ctx, l.Cache, cacheset.Options{Shared: journal.NewShared()})
	if err != nil {
		return err
	}
	defer func() { _ = set.Close(ctx) }()
	if lag := set.Info().MaxLag; lag > ondisk.MaxStale {
		return fmt.Errorf("a lag of %d", lag)
	}
	var v *volume.Volume
	if l.Backing != nil {
		v, err = volume.Open(set, l.Backing)
	} else {
		v, err = volume.OpenFlash(set, l.Flash)
	}
	if err != nil {
		return err
	}
	defer func() { _ = v.Close() }()
	for range 2 {
		got, err := content(v)
		if err != nil {
			return err
		}
		if err := l.Verify(got); err != nil {
			return err
		}
		r.Sleep(3 * time.Minute)
	}
	if err := set.Verify(ctx); err != nil {
		return err
	}
	i := set.Info()
	if i.VerifyMismatches > 0 || i.Table.Anomalies > 0 || i.Table.OverLag > 0 || i.MaxLag > ondisk.MaxStale {
		return fmt.Errorf("%+v", i)
	}
	return set.Err()
}

func content(dev blockdev.Device) ([]byte, error) {
	io, err := blockdev.NewIO(dev, 4)
	if err != nil {
		return nil, err
	}
	defer io.Close()
	got := make([]byte, dev.Info().Size)
	for off := 0; off < len(got); off += 64 << 10 {
		if err := io.ReadAt(got[off:min(off+64<<10, len(got))], int64(off)); err != nil {
			return nil, err
		}
	}
	return got, nil
}

// J3: buckets that are used again and again within one journal window never have a pointer there that is more than 96
// generations old, neither in memory nor in what any power cut leaves; and nothing is lost.
func TestReused(t *testing.T) {
	for _, held := range []bool{true, false} {
		t.Run(fmt.Sprint("held=", held), func(t *testing.T) {
			left, err := Reused(1, held)
			if err != nil {
				t.Fatal(err)
			}
			i := left[0].Info
			t.Logf("%d uses of %d buckets; lag %d, entries %d to %d, %d sweeps; %v", left[0].Uses, left[0].Pool, i.MaxLag, i.Journal.LastSeq, i.Journal.Seq,
				i.Table.Sweeps, i.Buckets)
			if held && (i.MaxLag < 30 || left[0].Uses < 15*left[0].Pool) {
				t.Errorf("that was not long: lag %d", i.MaxLag)
			}
			if !held && left[0].Uses < Uses*left[0].Pool {
				t.Errorf("%d uses", left[0].Uses)
			}
			if i.MaxLag > ondisk.MaxStale || i.Table.OverLag > 0 {
				t.Errorf("a lag of %d", i.MaxLag)
			}
			for _, l := range left {
				defer l.Close()
				lag, err := l.atRest()
				if err != nil {
					t.Error(err)
				}
				t.Logf("%s: lag %d at rest", l.Name, lag)
				if lag > ondisk.MaxStale || held && lag < 30 {
					t.Errorf("%s: a lag of %d", l.Name, lag)
				}
				if err := l.opened(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// Whatever a power cut leaves of an index that is coalesced and lowered, the checker finds in order, and it reads right.
func TestLowered(t *testing.T) {
	left, err := Lowered(1, 24)
	if err != nil {
		t.Fatal(err)
	}
	i := left[0].Info
	t.Logf("%d nodes coalesced, %d rewritten, tree lowered %d times, to level %d, in %d sweeps", i.NodesCoalesced, i.NodesStale, i.TreesLowered,
		i.Root.Level, i.Table.Sweeps)
	if i.NodesCoalesced < 10 || i.TreesLowered == 0 {
		t.Errorf("%+v", i)
	}
	var coalesced []uint64
	for _, l := range left {
		defer l.Close()
		if _, err := l.atRest(); err != nil {
			t.Error(err)
		}
		if err := l.opened(); err != nil {
			t.Error(err)
		}
		if l.Info.Root.Level > 0 {
			coalesced = append(coalesced, l.Info.NodesCoalesced)
		}
	}
	t.Logf("nodes coalesced before the cuts: %v", coalesced)
	if len(coalesced) < 5 || slices.Max(coalesced) == 0 {
		t.Error("no cut was in the middle of it")
	}
}
