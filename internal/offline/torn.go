package offline

import (
	"cmp"
	"slices"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A leaf whose last set has a wrong checksum was cut off in the middle of an append, or its bytes went bad later.
// In the first case every key of the set that matters is in the needed journal entries, and the leaf counts without
// the set. In the second the entries may be long gone, and without the set older data comes back. The two are told
// apart by the keys themselves: the leaf counts only if each of them stands in the needed entries, mapping the same
// sectors to the same place. So a real torn append that held fills of read misses, which are not journalled, is
// taken for damage too: that costs a range, never right data.
//
// In an interior node a bad last set is always damage: its keys are in no journal, and the children that it replaced
// read as if they were current.

// readBadSet takes the keys of a leaf's bad last set, if they can be those of an append to this leaf.
func (r *nodeResult) readBadSet(g *ondisk.Geometry) {
	n := r.node
	if r.ref.Level > 0 || !n.Torn || n.Bad == nil {
		return
	}
	// What an append did not get to write may still be zeroes: the keys end with the last sector that is not.
	written := *n.Bad
	end := len(written.Data)
	for end > 0 && written.Data[end-1] == 0 {
		end--
	}
	end = (ondisk.BSetHeaderBytes+end+ondisk.SectorSize-1)/ondisk.SectorSize*ondisk.SectorSize - ondisk.BSetHeaderBytes
	cut := end < len(written.Data)
	written.Data = written.Data[:min(end, len(written.Data))]

	sound := true
	var prev Pos
	err := written.EachKey(func(k *ondisk.Key) bool {
		switch g.LeafFault(k) {
		case ondisk.FaultEmpty:
			return true
		case ondisk.FaultNone:
		default:
			sound = false
			return false
		}
		e := newExtent(k, ondisk.FaultNone)
		sound = e.pos().Compare(prev) >= 0 && e.end().Compare(r.ref.Range.To) <= 0 && e.pos().Compare(r.ref.Range.From) >= 0
		prev = e.end()
		r.bad = append(r.bad, e)
		return sound
	})
	r.torn = (err == nil || cut) && sound // where it was cut, so may be the last key
}

// A mapping is what extents have in common that map sectors of an inode to the cache in the same way: where sector
// 0 would lie, or that there is no pointer.
type mapping struct {
	inode uint32
	ptr   bool
	zero  ondisk.Ptr
}

func (e *Extent) mapping() mapping {
	if e.flags&extPtr == 0 {
		return mapping{inode: e.Inode}
	}
	return mapping{e.Inode, true, e.P.Advance(-e.Start)} // modulo the pointer's 43 bits, as Advance is
}

// explained reports whether every sector of keys is mapped in the same way by a key of a needed journal entry.
func (s *Set) explained(keys []Extent) bool {
	known := make(map[mapping][]Extent)
	for _, e := range s.replayed {
		known[e.mapping()] = append(known[e.mapping()], e)
	}
	for _, list := range known {
		slices.SortFunc(list, func(a, b Extent) int { return cmp.Compare(a.Start, b.Start) })
	}
	for i := range keys {
		at := keys[i].Start
		for _, j := range known[keys[i].mapping()] {
			if j.Start > at {
				break
			}
			at = max(at, j.End())
		}
		if at < keys[i].End() {
			return false
		}
	}
	return true
}
