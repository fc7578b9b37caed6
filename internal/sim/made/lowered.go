package made

import (
	"fmt"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/writeback"
)

// Lowered is an index of many small dirty extents, most of which are discarded, so that its nodes are coalesced and the tree
// gets lower. The power is cut when that is done, first of all, and at so many moments in the
// middle of it, each time with what another strength leaves.
func Lowered(seed uint64, moments int) ([]*Left, error) {
	left, from, ops, err := lowered(seed, "lowered", -1, Strengths...)
	if err != nil {
		return nil, err
	}
	for i := range moments {
		at := from + (ops-from)*(i+1)/(moments+1)
		one, _, _, err := lowered(seed, fmt.Sprintf("lowering-%d", i), at, Strengths[i%len(Strengths)])
		if err != nil {
			return nil, err
		}
		left = append(left, one...)
	}
	return left, nil
}

// lowered cuts the power when the tree has got lower, or after so many operations on the way there. It returns how many there
// were, and how many of them before all that was to be discarded was.
func lowered(seed uint64, name string, at int, strengths ...blockdev.Strength) (left []*Left, from, ops int, err error) {
	const (
		bucket  = 8 << 10
		extents = 4000
		kept    = 20 // that are left in the end
	)
	p := plan{
		cache: 1400 * bucket, bucket: bucket, backing: 2*extents*ondisk.SectorSize + 16*ondisk.SectorSize,
		options: cacheset.Options{NodeCache: 64 << 10},
	}
	left, err = run(seed, p, func(m *maker) ([]*Left, error) {
		m.v.SetSequentialCutoff(0)
		if err := m.v.SetMode(ondisk.Writeback); err != nil {
			return nil, err
		}
		if err := m.v.ChangeWriteback(func(s *writeback.Settings) error { s.Running = false; return nil }); err != nil {
			return nil, err
		}
		for i := range extents { // no two of them are neighbours
			if err := m.write(2*(i*1013%extents), 1); err != nil {
				return nil, err
			}
		}
		if err := m.flush(); err != nil {
			return nil, err
		}
		m.rt.Sleep(time.Minute) // all nodes are written
		before := m.set.Info()
		if before.Root.Level < 1 {
			return nil, fmt.Errorf("the root is at level %d", before.Root.Level)
		}
		begin := m.power.Ops()
		if at >= 0 {
			m.power.CutAfter(at)
		}
		part := 2 * extents / kept
		for i := range kept {
			// A sector stays, and sometimes it is one that is written again.
			if err := m.discard(i*part+2, part-2); err != nil {
				break
			}
			if err := m.write(i*part+part/2, 1); err != nil || i%4 == 3 && m.flush() != nil {
				break
			}
		}
		from = m.power.Ops() - begin
		for try := 0; !m.power.IsCut() && m.set.Info().TreesLowered == before.TreesLowered; try++ {
			if try == 2000 {
				return nil, fmt.Errorf("the tree did not get lower: %+v", m.set.Info())
			}
			m.rt.Sleep(100 * time.Millisecond)
		}
		ops = m.power.Ops() - begin
		if at >= 0 && !m.power.IsCut() {
			return nil, fmt.Errorf("no cut in %d operations", ops)
		}
		return m.cut(name, seed+uint64(at+1), strengths...)
	})
	return left, from, ops, err
}
