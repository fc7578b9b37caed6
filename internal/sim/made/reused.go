package made

import (
	"errors"
	"fmt"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/volume"
)

// Uses is how often Reused has the same buckets used again.
const Uses = 200

// Reused is rule J3: a cache full of dirty data but for a few hundred buckets, of which a small range is overwritten over
// and over, so that it is always the same buckets that are used again, while the journal never is short of room. With held
// no node can be written, from the beginning of that: so nothing passes out of the journal window, and the range is overwritten until
// dirty data is refused, since what a kernel would have to replay needs the buckets that are left. Without it, that goes on until
// Uses uses of each on an average; sweeps make the window shorter.
func Reused(seed uint64, held bool) ([]*Left, error) {
	const (
		bucket  = 8 << 10
		buckets = 16384
		piece   = bucket / ondisk.SectorSize
		pieces  = 64 // that are overwritten
	)
	p := plan{cache: buckets * bucket, bucket: bucket, flash: buckets * bucket}
	return run(seed, p, func(m *maker) ([]*Left, error) {
		filled := 0
		for ; ; filled++ {
			err := m.write(filled*piece, piece)
			if errors.Is(err, volume.ErrNoSpace) {
				break
			}
			if err != nil {
				return nil, err
			}
		}
		// What is discarded now is all that there is to write to, beside the head-room.
		if err := m.discard((filled-pieces)*piece, (pieces+1)*piece); err != nil {
			return nil, err
		}
		if err := m.flush(); err != nil {
			return nil, err
		}
		m.rt.Sleep(2 * time.Minute) // all nodes are written
		name := "reused"
		if held {
			name = "reused-in-one-window"
			m.faults.Add(blockdev.Fault{Purposes: []blockdev.Purpose{blockdev.ForBtree}, Ops: []blockdev.Op{blockdev.OpWrite}, Hang: 20 * time.Hour})
		}
		begin := m.set.Info()
		free := int(begin.Table.Handed)
		used := func() int { return int(m.set.Info().Table.Handed) - free }
		pool := buckets - ondisk.JournalBuckets(buckets) - filled + pieces // and those of the head-room and metadata
		for n := 0; ; n++ {
			err := m.write(n%(pieces/4)*piece, piece)
			if held && errors.Is(err, volume.ErrNoSpace) {
				break
			}
			if err != nil {
				return nil, err
			}
			if n%97 == 0 {
				if err := m.flush(); err != nil {
					return nil, err
				}
			}
			if !held && used() >= Uses*pool {
				break
			}
			if n > 2*Uses*pool {
				return nil, fmt.Errorf("%d writes, and there are still buckets: %+v", n, m.set.Info())
			}
		}
		if now := m.set.Info().Journal.LastSeq; held && now > begin.Journal.Seq+1 {
			return nil, fmt.Errorf("the journal window begins with entry %d, and was to begin with %d", now, begin.Journal.Seq)
		}
		left, err := m.cut(name, seed, Strengths...)
		for _, l := range left {
			l.Uses, l.Pool = used(), pool
		}
		return left, err
	})
}
