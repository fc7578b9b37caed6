package offline

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/fixture"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// flipped is a device that gives back one bit turned over.
type flipped struct {
	blockdev.Device
	at  int64 // byte
	bit byte
}

func (f *flipped) NewQueue(depth int, complete func([]*blockdev.Request)) (blockdev.Queue, error) {
	return f.Device.NewQueue(depth, func(done []*blockdev.Request) {
		for _, r := range done {
			if i := f.at - r.Off; r.Op == blockdev.OpRead && i >= 0 && i < int64(len(r.Buf)) {
				r.Buf[i] ^= f.bit
			}
		}
		complete(done)
	})
}

// An area is a run of bytes that a checksum covers.
type area struct {
	what     string
	at, size int64
}

// checksummed lists what is covered by checksums in a set: kinds, and the areas of each.
func checksummed(t *testing.T, l *lab) (kinds [][]area) {
	t.Helper()
	var super, journal, prio, nodes []area
	s, err := Open(context.Background(), l.cache, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	again, err := Open(context.Background(), l.cache, Options{EachNode: func(ref NodeRef, n *ondisk.Node) {
		for i := range n.Sets {
			set := &n.Sets[i]
			nodes = append(nodes, area{
				fmt.Sprintf("node of level %d, set %d of %d", ref.Level, i, len(n.Sets)),
				int64(ref.Sector())*512 + int64(set.Block)*int64(s.Geo.BlockBytes()), int64(set.Bytes()),
			})
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	super = []area{{"superblock", 4096, 208 + 8*int64(s.Super.NJournal)}}
	for _, e := range s.Needed {
		journal = append(journal, area{fmt.Sprintf("journal entry %d", e.Seq), int64(e.Sector) * 512, int64(e.Bytes)})
	}
	for b, r := range s.Role {
		if r == RolePrio {
			prio = append(prio, area{"prio set", int64(s.Geo.BucketStart(uint64(b))) * 512, int64(s.Geo.MetaBytes())})
		}
	}
	return [][]area{super, journal, prio, nodes}
}

// TestEveryFlippedBitIsReported turns over one random bit of checksummed metadata at a time, UBCACHE_FLIPS (default
// 2000) in all, over all fixtures: each is reported with its place, whatever else follows from it, and the
// check ends.
func TestEveryFlippedBitIsReported(t *testing.T) {
	total := 2000
	if v, err := strconv.Atoi(os.Getenv("UBCACHE_FLIPS")); err == nil {
		total = v
	}
	all, err := fixture.All()
	if err != nil {
		t.Fatal(err)
	}
	if testing.Short() {
		all, total = all[:1], 50
	}
	const seed = 20
	perFixture := (total + len(all) - 1) / len(all)
	var reported atomic.Int64
	t.Run("fixtures", func(t *testing.T) {
		for n, f := range all {
			t.Run(f.Name, func(t *testing.T) {
				t.Parallel()
				l := openLab(t, f)
				kinds := checksummed(t, l)
				before, _, err := Check(context.Background(), l.cache, l.backings, CheckOptions{})
				if err != nil {
					t.Fatal(err)
				}
				defer before.Close()
				r := rand.New(rand.NewPCG(seed, uint64(n)))
				for i := range perFixture {
					kind := kinds[(i+n)%len(kinds)]
					a := kind[r.IntN(len(kind))]
					fl := &flipped{l.cache, a.at + r.Int64N(a.size), 1 << r.IntN(8)}
					ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
					s, _, err := Check(ctx, fl, l.backings, CheckOptions{})
					cancel()
					if err != nil {
						t.Fatalf("%s, byte %d: %v", a.what, fl.at, err)
					}
					if !s.Report.covers(fl.at/512, before.Report) {
						t.Errorf("%s at byte %d: byte %d (+%d), bit %#x: not reported", a.what, a.at, fl.at, fl.at-a.at, fl.bit)
						for _, x := range s.Report.Findings() {
							t.Log(&x)
						}
					} else {
						reported.Add(1)
					}
					s.Close()
				}
			})
		}
	})
	t.Logf("%d of %d flips reported with their places", reported.Load(), perFixture*len(all))
}

// covers reports whether a finding that is not in before names a place that sector lies in.
func (r *Report) covers(sector int64, before *Report) bool {
	known := make(map[Finding]bool)
	for _, f := range before.Findings() {
		known[f] = true
	}
	for _, f := range r.Findings() {
		if f.Sector >= 0 && f.Sector <= sector && sector < f.Sector+f.Sectors && !known[f] && f.Code != KeyStale && f.Code != KeyStaleDirty {
			return true
		}
	}
	return false
}
