package cacheset

import (
	"context"

	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// A dirtyMap counts the dirty sectors of an inode, in all and by region, so that who looks for them need not read the
// nodes that have none. A region costs 4 bytes for 4 MiB of the volume, where there is anything dirty near it.
type dirtyMap struct {
	total int64
	pages []*dirtyPage
	entry uint64 // of the journal, the newest one that has a dirty key
}

type dirtyPage struct {
	total   int64
	regions [pageRegions]uint32
}

const (
	regionSectors = 8192
	pageRegions   = 1024
	pageSectors   = regionSectors * pageRegions
	maxPages      = 1 << 14 // what lies behind 64 TiB counts for the last region before
	lastRegion    = maxPages*pageRegions - 1
)

// add counts n sectors from start on, or discounts them.
func (m *dirtyMap) add(start, n uint64, sign int) {
	m.total += int64(sign) * int64(n)
	for end := start + n; start < end; {
		r := min(start/regionSectors, lastRegion)
		part := end - start
		if r < lastRegion {
			part = min(part, (r+1)*regionSectors-start)
		}
		m.page(r/pageRegions).add(r%pageRegions, int64(part)*int64(sign))
		start += part
	}
}

// page returns a page, which it makes if there is none.
func (m *dirtyMap) page(i uint64) *dirtyPage {
	for uint64(len(m.pages)) <= i {
		m.pages = append(m.pages, nil)
	}
	if m.pages[i] == nil {
		m.pages[i] = new(dirtyPage)
	}
	return m.pages[i]
}

// add counts n sectors; a region never has less than none, so that a bucket whose counts are in doubt hides nothing.
func (p *dirtyPage) add(region uint64, n int64) {
	n = max(n, -int64(p.regions[region]))
	p.total += n
	p.regions[region] = uint32(int64(p.regions[region]) + n)
}

// next returns the first sector from from on that may be dirty, and whether there is one.
func (m *dirtyMap) next(from uint64) (uint64, bool) {
	r := min(from/regionSectors, lastRegion)
	for r/pageRegions < uint64(len(m.pages)) {
		p := m.pages[r/pageRegions]
		if p == nil || p.total == 0 {
			r = (r/pageRegions + 1) * pageRegions
			continue
		}
		if p.regions[r%pageRegions] > 0 {
			return max(from, r*regionSectors), true
		}
		r++
	}
	return 0, false
}

// countDirtyLocked counts the sectors of a dirty extent, or discounts them.
func (s *Set) countDirtyLocked(inode uint32, start, n uint64, sign int) {
	if int(inode) < len(s.dirty) {
		s.dirty[inode].add(start, n, sign)
	}
}

// DirtyLocked returns the dirty sectors of an inode.
func (s *Set) DirtyLocked(inode uint32) int64 { return s.dirty[inode].total }

// DirtyEntryLocked returns the newest journal entry that has a dirty key of an inode: when it is durable, all are.
func (s *Set) DirtyEntryLocked(inode uint32) uint64 { return max(s.started, s.dirty[inode].entry) }

// AnyDirtyLocked reports whether there may be dirty data near the sectors from start to end of an inode: within 4 MiB.
func (s *Set) AnyDirtyLocked(inode uint32, start, end uint64) bool {
	at, ok := s.dirty[inode].next(start)
	return ok && at < end
}

// ScanDirtyLocked calls fn with the dirty extents of an inode that are in [from, to), cut to that, in order, until fn
// returns false. It returns where to go on: at to when it is through. It looks at some hundred extents, and then returns
// so that others get the lock. Where a node is missing, miss names it, for ReadNode.
func (s *Set) ScanDirtyLocked(inode uint32, from, to uint64, fn func(start, end uint64, p ondisk.Ptr) bool) (next uint64, miss btree.Ref) {
	stopped := false
	for limit := dirtyScan; limit > 0 && !stopped; limit -= dirtyScan / 16 {
		var ok bool
		if from, ok = s.dirty[inode].next(from); !ok || from >= to {
			return to, btree.Ref{}
		}
		end := to
		if r := from / regionSectors; r < lastRegion {
			end = min(end, (r+1)*regionSectors)
		}
		seen := from
		at, miss := s.tree.Scan(btree.Pos{Inode: inode, Sector: from}, btree.Pos{Inode: inode, Sector: end}, limit, func(x btree.Extent) bool {
			limit--
			if !x.HasPtr() || !x.Dirty() || !s.GoodLocked(x.Ptr) {
				return true
			}
			start, end := max(x.Start, from), min(x.End(), to)
			seen = end // it may reach into the next region
			stopped = !fn(start, end, x.Ptr.Advance(start-x.Start))
			return !stopped
		})
		from = max(from, at.Sector, seen)
		if !miss.IsZero() || from < end {
			return from, miss
		}
	}
	return from, btree.Ref{}
}

// dirtyScan is how many extents a scan looks at in one hold of the lock; a region counts for a sixteenth of them.
const dirtyScan = 512

// DropLost invalidates the clean keys of an inode that count no more since a flush of its backing device has failed: they
// take up buckets, and keep their leaves in memory. What it misses, LosingLocked goes on telling of.
func (s *Set) DropLost(ctx context.Context, inode uint32) error {
	in := &Insertion{}
	var list []ondisk.Key
	for from := 0; ; {
		s.mu.Lock()
		list, from = s.tree.Lost(list[:0], inode, from)
		s.mu.Unlock()
		for at := 0; at < len(list); at += insertGroup {
			if err := ctx.Err(); err != nil {
				return err
			}
			in.Keys, in.Old = in.Keys[:0], list[at:min(at+insertGroup, len(list))]
			for i := range in.Old {
				k := &in.Old[i]
				in.Keys = append(in.Keys, ondisk.NewInvalidation(inode, k.End(), uint32(k.Size())))
			}
			if err := s.Insert(in); err != nil {
				return err
			}
		}
		if from == 0 {
			return nil
		}
	}
}
