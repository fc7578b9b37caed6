package cacheset

import (
	"cmp"
	"context"
	"slices"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/journal"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

// A scan walks the tree once, level by level, several nodes at a time, and counts. It leaves in memory what there is
// room for.
type scan struct {
	s      *Set
	ctx    context.Context
	loader *bucket.Loader
	rec    *journal.Recovery

	// Guarded by the set's lock.
	level    []btree.Ref
	next     int // of level
	children []btree.Ref
	err      error
	replayed []mapping // keys of the needed entries, once someone has asked for them
}

// scan makes the tree and counts what is in it.
func (s *Set) scan(ctx context.Context, l *bucket.Loader, rec *journal.Recovery) error {
	k := rec.Newest.Root
	if f := s.geo.NodeFault(&k); f != ondisk.FaultNone || !k.P[0].Available() || s.geo.Remainder(k.P[0].Sector()) != 0 {
		return s.errCorrupt("key", 0, "btree_root of journal entry %d is %v", rec.Newest.Seq, k)
	}
	root := btree.Ref{Level: uint8(rec.Newest.Level), Sectors: k.Size(), Ptr: k.P[0], High: btree.MaxPos}
	s.tree = btree.New(&s.geo, root, func(b uint64) uint8 {
		if s.table == nil {
			return l.Gen(uint32(b))
		}
		return s.gen(b)
	})
	l.Node(root.Ptr)
	w := &scan{s: s, ctx: ctx, loader: l, rec: rec, level: []btree.Ref{root}}
	for len(w.level) > 0 {
		var group rt.WaitGroup
		group.Init(s.rt)
		for range min(scanners, len(w.level)) {
			group.Go("scan", w.work)
		}
		group.Wait()
		if w.err != nil {
			return w.err
		}
		w.level, w.next, w.children = w.children, 0, nil
	}
	return nil
}

// work reads nodes of the level until there are no more.
func (w *scan) work() {
	s := w.s
	s.mu.Lock()
	defer s.mu.Unlock()
	for w.next < len(w.level) && w.err == nil {
		if w.err = w.ctx.Err(); w.err != nil {
			return
		}
		ref := w.level[w.next]
		w.next++
		s.mu.Unlock()
		n, err := w.read(ref)
		s.mu.Lock()
		if err == nil {
			err = w.take(n, ref)
		}
		if err != nil && w.err == nil {
			w.err = err
		}
	}
}

// read reads a node; one whose last append was torn counts without it, where the journal has its keys.
func (w *scan) read(ref btree.Ref) (*btree.Node, error) {
	s := w.s
	buf := s.pool.Get(int(ref.Sectors) * ondisk.SectorSize)
	defer buf.Release()
	if err := s.io.WithPurpose(blockdev.ForScan).ReadAt(buf.Data, int64(ref.Ptr.Sector())*ondisk.SectorSize); err != nil {
		return nil, err
	}
	n, err := btree.Parse(&s.geo, ref, buf.Data)
	if err == nil {
		return n, nil
	}
	if n != nil {
		ok, eerr := w.explained(ref, buf.Data)
		if eerr != nil {
			return nil, eerr
		}
		if ok {
			s.log.Warn("the last append to a node was torn; the journal has its keys", "set", s.UUID().String(), "node", ref.String())
			s.mu.Lock()
			s.torn[ref.Ptr] = true
			s.mu.Unlock()
			return n, nil
		}
	}
	return nil, ondisk.At(err, s.info.Name, int64(ref.Ptr.Sector()))
}

// take counts what a node has, and makes it part of the tree.
func (w *scan) take(n *btree.Node, ref btree.Ref) error {
	s := w.s
	if ref.Level > 0 {
		n.EachRef(w.loader.Pointer) // raises generations; then it is known which children are live
		if o, err := s.tree.Attach(n); err != nil || o != btree.Done {
			if err == nil {
				err = s.errCorrupt("bset", ref.Ptr.Sector(), "%v cannot be attached: %v", ref, o)
			}
			return err
		}
		n.EachChild(func(c btree.Ref) {
			w.loader.Node(c.Ptr)
			w.children = append(w.children, c)
		})
		return nil
	}
	n.EachExtent(func(x *btree.Extent) {
		if x.HasPtr() && w.loader.Extent(x.Ptr, uint32(x.Size), x.Dirty()) && x.Dirty() {
			s.countDirtyLocked(x.Inode, x.Start, uint64(x.Size), 1)
		}
	})
	if _, err := s.tree.Attach(n); err != nil {
		return err
	}
	s.tree.Evict(int(s.opt.NodeCache), 64)
	return nil
}

// recountDirty counts dirty sectors by inode again: a generation was raised after some had been counted.
func (s *Set) recountDirty() error {
	clear(s.dirty)
	s.mu.Lock()
	defer s.mu.Unlock()
	for from := (btree.Pos{}); from.Less(btree.MaxPos); {
		next, miss := s.tree.Scan(from, btree.MaxPos, 4096, func(x btree.Extent) bool {
			if x.HasPtr() && x.Dirty() && s.GoodLocked(x.Ptr) {
				s.countDirtyLocked(x.Inode, x.Start, uint64(x.Size), 1)
			}
			return true
		})
		from = next
		s.mu.Unlock()
		var err error
		if !miss.IsZero() {
			err = s.readEarly(miss)
		}
		s.mu.Lock()
		if err != nil {
			return err
		}
	}
	return nil
}

// readEarly reads a node before the set runs.
func (s *Set) readEarly(ref btree.Ref) error {
	n, err := s.fetch(ref, nil)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err = s.tree.Attach(n)
	s.tree.Evict(int(s.opt.NodeCache), 64)
	return err
}

// tornNode reports whether a node is one that the scan took without its last append.
func (s *Set) tornNode(ref btree.Ref) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.torn[ref.Ptr]
}

// A mapping is a range of an inode and where it lies.
type mapping struct {
	inode      uint32
	hasPtr     bool
	zero       ondisk.Ptr // where sector 0 would lie
	start, end uint64
}

func mappingOf(k *ondisk.Key) mapping {
	m := mapping{inode: k.Inode(), start: k.Start(), end: k.End()}
	if k.Ptrs() > 0 {
		m.hasPtr, m.zero = true, k.P[0].Advance(-k.Start())
	}
	return m
}

func (m *mapping) compare(o *mapping) int {
	b := func(v bool) int {
		if v {
			return 1
		}
		return 0
	}
	return cmp.Or(cmp.Compare(m.inode, o.inode), cmp.Compare(b(m.hasPtr), b(o.hasPtr)), cmp.Compare(m.zero, o.zero))
}

// explained reports whether the bad last set of a leaf is an append that a power cut tore, and the leaf good without
// it: every key of the set then stands in the needed journal entries. If the bytes went bad later, the entries may be
// gone, and without the set old data would come back. (F 5.3 asks for less: any key in the leaf's range. That is not
// enough.) In an interior node a bad set is damage always.
func (w *scan) explained(ref btree.Ref, b []byte) (bool, error) {
	s := w.s
	key := ref.Key()
	d := ondisk.DecodeNode(b, &s.geo, &key)
	if ref.Level > 0 || !d.Torn || d.Bad == nil {
		return false, nil
	}
	bad := *d.Bad
	end := len(bad.Data)
	for end > 0 && bad.Data[end-1] == 0 {
		end--
	}
	end = min((ondisk.BSetHeaderBytes+end+ondisk.SectorSize-1)/ondisk.SectorSize*ondisk.SectorSize-ondisk.BSetHeaderBytes, len(bad.Data))
	cut := end < len(bad.Data)
	bad.Data = bad.Data[:end]
	var keys []mapping
	sound := true
	err := bad.EachKey(func(k *ondisk.Key) bool {
		switch s.geo.LeafFault(k) {
		case ondisk.FaultEmpty:
		case ondisk.FaultNone:
			keys = append(keys, mappingOf(k))
		default:
			sound = false
		}
		return sound
	})
	if !sound || err != nil && !cut {
		return false, nil
	}
	if err := w.loadReplayed(); err != nil {
		return false, err
	}
	for i := range keys {
		if !w.covered(&keys[i]) {
			return false, nil
		}
	}
	return true, nil
}

// loadReplayed gathers the keys of the needed entries, sorted by what they map, then by place.
func (w *scan) loadReplayed() error {
	w.s.mu.Lock()
	have := w.replayed != nil
	w.s.mu.Unlock()
	if have {
		return nil
	}
	list := []mapping{}
	err := w.rec.EachKey(w.ctx, func(_ uint64, k *ondisk.Key) error {
		list = append(list, mappingOf(k))
		return nil
	})
	if err != nil {
		return err
	}
	slices.SortFunc(list, func(a, b mapping) int { return cmp.Or(a.compare(&b), cmp.Compare(a.start, b.start)) })
	w.s.mu.Lock()
	w.replayed = list
	w.s.mu.Unlock()
	return nil
}

// covered reports whether every sector of m is mapped in the same way by a needed entry.
func (w *scan) covered(m *mapping) bool {
	from, _ := slices.BinarySearchFunc(w.replayed, *m, func(a, b mapping) int { return a.compare(&b) })
	at := m.start
	for _, r := range w.replayed[from:] {
		if r.compare(m) != 0 || r.start > at {
			break
		}
		at = max(at, r.end)
	}
	return at >= m.end
}
