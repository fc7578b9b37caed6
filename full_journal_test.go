package ubcache

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
)

// What stops Linux 6.12 and 7.2 in the job of bench/stall.sh stops nobody here: small random writes over so many leaves that
// the journal goes round before a leaf has got a page of keys or is old, so that nearly all of them pin its oldest entries. The disk is
// slow to flush, so that they cannot be written one at a time.
func TestFullJournalStopsNobody(t *testing.T) {
	o := collected("writeback")
	o.cache, o.backing = 1<<30, []int64{512 << 20}
	disk := blockdev.Latency{Read: 300 * time.Microsecond, Write: time.Millisecond, Flush: 10 * time.Millisecond, PerMiB: 2 * time.Millisecond, Parallel: 16}
	o.cacheLatency, o.backingLatency, o.dir = disk, disk, t.TempDir()
	simulate(t, 1, time.Hour, o, func(b *bench) error {
		w := &overwriter{b: b, v: b.volumes[0], pages: 400 << 10, size: 1024, clients: 16}
		if err := errors.Join(b.attribute("sequential_cutoff", "0"), b.attribute("writeback_percent", "40")); err != nil {
			return err
		}
		for run, requests := range []int{500_000, 250_000} {
			before := b.set.set.Info()
			if err := w.run(uint64(run), w.untilRequests(requests)); err != nil {
				return err
			}
			i := b.set.set.Info()
			keys, appends := i.Journal.Keys-before.Journal.Keys, i.NodeAppends-before.NodeAppends
			rounds := float64(i.Journal.Bytes-before.Journal.Bytes) / float64(i.Journal.Blocks*512)
			t.Logf("p50 %v, p99.9 %v, longest %v; %d nodes; the journal went round %.1f times, %d of %d blocks are needed; %d keys an append; room was waited for %+v",
				w.quantile(500), w.quantile(999), w.longest, i.Nodes, rounds, i.Journal.UsedBlocks, i.Journal.Blocks, keys/appends,
				b.set.set.Stalls()[cacheset.StallJournalSpace])
			if w.longest > 100*time.Millisecond {
				return fmt.Errorf("a request took %v", w.longest)
			}
			if run > 0 && (rounds < 2 || keys/appends > 80) { // a page holds 168
				return errors.New("that is not what stops them: the journal lets go of leaves that are full, or old")
			}
		}
		return b.set.Verify(context.Background())
	})
}
