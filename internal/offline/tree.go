package offline

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A NodeRef says where a node of the tree is and what it may hold.
type NodeRef struct {
	Level int        // 0: a leaf
	Key   ondisk.Key // that refers to it: position, size, pointer
	Range Range      // of the extents that it may hold
}

// Sector returns where the node begins on the cache device.
func (r *NodeRef) Sector() uint64 { return r.Key.P[0].Sector() }

func keyPos(k *ondisk.Key) Pos { return Pos{k.Inode(), k.End()} }

// A nodeResult is what a worker made of a node.
type nodeResult struct {
	ref  NodeRef
	err  error // of the read
	node *ondisk.Node

	extents  []Extent     // of a leaf, merged
	stray    []Extent     // what of its keys lies outside of the node's range
	disorder bool         // in the set at hand
	keys     []ondisk.Key // of an interior node, all of them, oldest first
	bad      []Extent     // keys of a bad last set
	torn     bool         // which can be an append cut off
	problem  []problem    // in the order of keys
	counts   nodeCounts
}

type problem struct {
	code Code
	text string
}

type nodeCounts struct{ keys, check, manyPtrs int64 }

func (r *nodeResult) note(code Code, format string, args ...any) {
	if len(r.problem) < 16 {
		r.problem = append(r.problem, problem{code, fmt.Sprintf(format, args...)})
	}
}

// readTree walks the tree level by level: all nodes of a level are read, then their keys raise generations,
// then what is live among them makes up the next level.
func (s *Set) readTree(ctx context.Context) error {
	root := &s.Newest.Root
	fault := s.Geo.NodeFault(root)
	if fault != ondisk.FaultNone || !root.P[0].Available() || s.Geo.Remainder(root.P[0].Sector()) != 0 {
		s.findInNewest(RootPointer, "btree_root is %v: %v; want one pointer to the start of a bucket (kernel: %q)", root, fault, "bad btree root")
		return nil
	}
	if s.Newest.Level > 8 {
		s.findInNewest(RootPointer, "btree_level is %d; real trees have at most 3", s.Newest.Level)
		return nil
	}
	uuids := s.Geo.Bucket(s.Newest.UUIDBucket.P[0].Sector())
	s.setMeta(uuids, RoleUUID, "the uuid array is in it")
	s.raise(&s.Newest.UUIDBucket)
	s.raise(root)
	s.setMeta(s.Geo.Bucket(root.P[0].Sector()), RoleBtree, "the root of the tree is in it")
	s.replayed, s.overlay = s.overlay, newestWins(nil, s.overlay)
	level := []NodeRef{{Level: int(s.Newest.Level), Key: *root, Range: Range{To: keyPos(root)}}}
	s.Stats.Depth = int(s.Newest.Level) + 1
	var done, known int64 = 0, 1
	for len(level) > 0 {
		var interior []nodeResult
		err := s.readNodes(ctx, level, func(r *nodeResult) {
			done++
			if s.opt.Progress != nil {
				s.opt.Progress(done, known)
			}
			if !s.accept(r) {
				s.Unknown = append(s.Unknown, r.ref.Range)
				return
			}
			s.Stats.Nodes++
			if s.opt.EachNode != nil {
				s.opt.EachNode(r.ref, r.node)
			}
			if r.ref.Level == 0 {
				s.addLeaf(r)
				return
			}
			for i := range r.keys {
				s.raise(&r.keys[i])
			}
			interior = append(interior, nodeResult{ref: r.ref, keys: r.keys})
		})
		if err != nil {
			return err
		}
		level = nil
		for i := range interior {
			level = append(level, s.children(&interior[i])...)
		}
		known += int64(len(level))
	}
	s.Unknown = joinUnknown(s.Unknown)
	return nil
}

// joinUnknown sorts ranges and joins those that touch.
func joinUnknown(list []Range) []Range {
	slices.SortFunc(list, func(a, b Range) int { return a.From.Compare(b.From) })
	out := list[:0]
	for _, r := range list {
		if n := len(out); n > 0 && out[n-1].To.Compare(r.From) >= 0 {
			if out[n-1].To.Compare(r.To) < 0 {
				out[n-1].To = r.To
			}
			continue
		}
		out = append(out, r)
	}
	return out
}

// readNodes reads nodes several at a time and calls fn with each in order.
func (s *Set) readNodes(ctx context.Context, refs []NodeRef, fn func(*nodeResult)) error {
	results := make([]nodeResult, min(len(refs), 4*s.opt.Parallel))
	bufs := make([][]byte, len(results))
	for len(refs) > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		batch := refs[:min(len(refs), len(results))]
		refs = refs[len(batch):]
		next := make(chan int)
		var wg sync.WaitGroup
		for range min(s.opt.Parallel, len(batch)) {
			wg.Go(func() {
				for i := range next {
					results[i] = nodeResult{ref: batch[i]}
					size := int(batch[i].Key.Size()) * ondisk.SectorSize
					if cap(bufs[i]) < size {
						bufs[i] = make([]byte, size)
					}
					s.readNode(&results[i], bufs[i][:size])
				}
			})
		}
		for i := range batch {
			next <- i
		}
		close(next)
		wg.Wait()
		for i := range batch {
			fn(&results[i])
		}
	}
	return nil
}

// readNode reads one node and makes of it what can be made without knowing any other. It runs beside others
// of its kind and changes nothing but r.
func (s *Set) readNode(r *nodeResult, buf []byte) {
	g := &s.Geo
	if r.err = s.io.ReadAt(buf, int64(r.ref.Sector())*ondisk.SectorSize); r.err != nil {
		return
	}
	r.node = ondisk.DecodeNode(buf, g, &r.ref.Key)
	for i := range r.node.Sets {
		set := &r.node.Sets[i]
		first := len(r.extents)
		r.disorder = false
		var prev Pos
		err := set.EachKey(func(k *ondisk.Key) bool {
			r.counts.keys++
			if r.ref.Level > 0 {
				r.interiorKey(k, set, &prev)
			} else {
				r.leafKey(g, k, set, &prev)
			}
			return true
		})
		if err != nil {
			r.node.Err, r.node.Torn = err, false
			return
		}
		if r.disorder {
			r.extents = append(r.extents, contradictions(r.extents[first:])...)
		}
	}
	if r.ref.Level > 0 {
		return
	}
	r.readBadSet(g)
	r.extents = joinAdjacent(g, newestWins(nil, r.extents))
	words := 0
	for i := range r.extents {
		words += 2 + int(r.extents[i].flags&extPtr)/extPtr
	}
	if need, have := ondisk.BSetHeaderBytes+8*words, int(r.node.Used)*g.BlockBytes(); need > have && r.node.Err == nil {
		r.note(NodeOverfull, "the merged keys take %d bytes, the %d blocks written so far have %d", need, r.node.Used, have)
	}
}

func (r *nodeResult) interiorKey(k *ondisk.Key, set *ondisk.BSet, prev *Pos) {
	r.keys = append(r.keys, *k)
	if k.IsFreeing() {
		return
	}
	p := keyPos(k)
	if p.Compare(*prev) < 0 {
		r.note(NodeOrder, "set at block %d: key %v comes after %v", set.Block, k, *prev)
	}
	*prev = p
	if p.Compare(r.ref.Range.To) > 0 || p.Compare(r.ref.Range.From) <= 0 {
		r.note(NodeBounds, "set at block %d: key %v in the node of %v", set.Block, k, r.ref.Range)
	}
}

func (r *nodeResult) leafKey(g *ondisk.Geometry, k *ondisk.Key, set *ondisk.BSet, prev *Pos) {
	fault := g.LeafFault(k)
	switch fault {
	case ondisk.FaultEmpty:
		return
	case ondisk.FaultNone:
	default:
		r.note(KeyBad, "set at block %d: key %v: %v", set.Block, k, fault)
		if fault == ondisk.FaultTooBig {
			r.node.Err, r.node.Torn = fmt.Errorf("set at block %d: key %v: %v: what it hides is not known", set.Block, k, fault), false
			return
		}
	}
	e := newExtent(k, fault)
	if e.pos().Compare(*prev) < 0 {
		r.disorder = true
		r.note(NodeOrder, "set at block %d: key %v begins before %v, where the one before it ends", set.Block, k, *prev)
	}
	*prev = e.end()
	if k.Ptrs() > 1 {
		r.counts.manyPtrs++
	}
	if e.flags&extCheck != 0 {
		r.counts.check++
	}
	if e.end().Compare(r.ref.Range.To) > 0 || e.pos().Compare(r.ref.Range.From) < 0 {
		r.note(NodeBounds, "set at block %d: key %v in the node of %v", set.Block, k, r.ref.Range)
		whole := Range{e.pos(), e.end()}
		for _, out := range []Range{whole.clip(Range{To: r.ref.Range.From}), whole.clip(Range{r.ref.Range.To, whole.To})} {
			if !out.empty() {
				r.stray = append(r.stray, e.cut(out.From.Sector, out.To.Sector))
			}
		}
		if whole = whole.clip(r.ref.Range); whole.empty() {
			return
		}
		e = e.cut(whole.From.Sector, whole.To.Sector)
	}
	r.extents = append(r.extents, e)
}

// contradictions returns the parts in which extents of one set overlap, as extents that break the format: which
// one is newer nobody knows. Later sets may hide them.
func contradictions(set []Extent) (bad []Extent) {
	set = slices.Clone(set)
	slices.SortFunc(set, func(a, b Extent) int { return a.pos().Compare(b.pos()) })
	var reach Pos
	for _, e := range set {
		if e.pos().Compare(reach) < 0 {
			bad = append(bad, Extent{Start: e.Start, Size: uint16(min(e.End(), reach.Sector) - e.Start), Inode: e.Inode, flags: extBad})
		}
		if reach.Compare(e.end()) < 0 {
			reach = e.end()
		}
	}
	return bad
}

// joinAdjacent joins neighbours that one key could say, as the kernel does when it sorts. Source: F 5.8.
func joinAdjacent(g *ondisk.Geometry, list []Extent) []Extent {
	out := list[:0]
	for _, e := range list {
		if n := len(out); n > 0 {
			l := &out[n-1]
			if l.end() == e.pos() && l.flags == e.flags && int(l.Size)+int(e.Size) <= ondisk.MaxKeySize &&
				(l.flags&extPtr == 0 || l.P.Advance(uint64(l.Size)) == e.P && g.Bucket(l.P.Sector()) == g.Bucket(e.P.Sector())) {
				l.Size += e.Size
				continue
			}
		}
		out = append(out, e)
	}
	return out
}

// accept reports what is wrong with a node, and whether its keys may be believed.
func (s *Set) accept(r *nodeResult) bool {
	at, length := r.ref.Sector(), int64(r.ref.Key.Size())
	name := fmt.Sprintf("node of level %d in bucket %d, range %v", r.ref.Level, s.Geo.Bucket(at), r.ref.Range)
	isRoot := r.ref.Level == int(s.Newest.Level)
	if r.err != nil {
		code := NodeUnreadable
		if isRoot {
			code = RootUnreadable
		}
		s.find(code, at, length, "%s: %v", name, r.err)
		return false
	}
	if n := r.node; n.Err != nil {
		bad := at + uint64(n.BadBlock)*uint64(s.Geo.BlockSectors)
		if r.torn && n.Torn && s.explained(r.bad) {
			s.find(NodeTorn, bad, length-int64(bad-at), "%s: block %d: %v", name, n.BadBlock, n.Err)
		} else {
			code := NodeDamaged
			if isRoot {
				code = RootDamaged
			}
			s.find(code, bad, length-int64(bad-at), "%s: block %d: %v", name, n.BadBlock, n.Err)
			return false
		}
	}
	for _, p := range r.problem {
		s.find(p.code, at, length, "%s: %s", name, p.text)
	}
	s.Stats.Keys += r.counts.keys
	for range r.counts.check {
		s.tally(KeyCheck, at, length, "%s: a placeholder", name)
	}
	for range r.counts.manyPtrs {
		s.tally(KeyManyPtrs, at, length, "%s: an extent with several pointers", name)
	}
	return true
}

// raise lets a node reference, a freeing key among them, tell the generation of its bucket. Source: F 5.6, 9.1.
func (s *Set) raise(k *ondisk.Key) {
	if s.Geo.NodeFault(k) != ondisk.FaultNone {
		return
	}
	for i := range k.Ptrs() {
		if k.P[i].Available() {
			s.raisePtr(k.P[i], !k.IsFreeing())
		}
	}
}

func (s *Set) raisePtr(p ondisk.Ptr, counts bool) {
	b := s.Geo.Bucket(p.Sector())
	if ondisk.GenAfter(s.Gen[b], p.Gen()) == 0 {
		s.Gen[b] = p.Gen()
	}
	if counts && ondisk.GenAfter(s.OldestGen[b], p.Gen()) != 0 {
		s.OldestGen[b] = p.Gen()
	}
}

// children returns the live children of an interior node, once all generations that its level knows are in.
func (s *Set) children(r *nodeResult) []NodeRef {
	at, length := r.ref.Sector(), int64(r.ref.Key.Size())
	name := fmt.Sprintf("node of level %d in bucket %d", r.ref.Level, s.Geo.Bucket(at))
	live := r.keys[:0]
	for i := range r.keys {
		k := &r.keys[i]
		if k.IsFreeing() {
			continue
		}
		if fault := s.Geo.NodeFault(k); fault != ondisk.FaultNone || !k.P[0].Available() || s.Geo.Remainder(k.P[0].Sector()) != 0 {
			s.find(NodeChild, at, length, "%s: child %v: %v; want one pointer to the start of a bucket", name, k, fault)
			live = append(live, ondisk.NewInvalidation(k.Inode(), k.End(), 0)) // its range is there, the node is not
			continue
		}
		if ondisk.GenAfter(s.Gen[s.Geo.Bucket(k.P[0].Sector())], k.P[0].Gen()) == 0 {
			live = append(live, *k)
		}
	}
	slices.SortStableFunc(live, func(a, b ondisk.Key) int { return a.ComparePos(&b) })
	var refs []NodeRef
	from := r.ref.Range.From
	for i := range live {
		k := &live[i]
		to := keyPos(k)
		if to.Compare(r.ref.Range.To) > 0 || to.Compare(r.ref.Range.From) <= 0 { // found as NodeBounds; no search comes here
			s.doubt = append(s.doubt, Range{r.ref.Range.To, to})
			continue
		}
		rng := Range{from, to}
		if rng.empty() {
			continue // another one of that position
		}
		switch b := s.Geo.Bucket(k.P[0].Sector()); {
		case i+1 < len(live) && live[i+1].ComparePos(k) == 0:
			s.find(NodeOrder, at, length, "%s: children %v and %v have the same position and are both live", name, k, &live[i+1])
			s.Unknown = append(s.Unknown, rng)
		case k.Ptrs() == 0:
			s.Unknown = append(s.Unknown, rng)
		case s.Role[b] != RoleFree:
			s.find(BucketTwoRoles, s.Geo.BucketStart(b), int64(s.Geo.BucketSectors), "bucket %d is %v, and %s has it as child %v", b, s.Role[b], name, k)
			s.Unknown = append(s.Unknown, rng)
		default:
			s.Role[b] = RoleBtree
			refs = append(refs, NodeRef{Level: r.ref.Level - 1, Key: *k, Range: rng})
		}
		from = to
	}
	if from.Compare(r.ref.Range.To) < 0 {
		s.find(NodeCoverage, at, length, "%s: its %d live children end at %v, its range at %v", name, len(refs), from, r.ref.Range.To)
		s.Unknown = append(s.Unknown, Range{from, r.ref.Range.To})
	}
	return refs
}

// addLeaf takes over the extents of a leaf.
func (s *Set) addLeaf(r *nodeResult) {
	for i := range r.extents {
		s.raiseExtent(&r.extents[i])
	}
	s.Extents = append(s.Extents, r.extents...)
	for i := range r.stray {
		e := &r.stray[i]
		s.raiseExtent(e)
		s.doubt = append(s.doubt, Range{e.pos(), e.end()})
	}
}

func (s *Set) raiseExtent(e *Extent) {
	if e.flags&(extPtr|extCheck|extBad) == extPtr {
		s.raisePtr(e.P, true)
	}
}

// replay lays the keys of the needed journal entries over those of the tree. They count even where they are
// stale: they hide older ones. Source: F 6.4.
func (s *Set) replay(context.Context) error {
	for _, p := range s.journalPtrs {
		s.raisePtr(p, true)
	}
	if doubt := slices.DeleteFunc(s.doubt, Range.empty); len(doubt) > 0 {
		doubt = joinUnknown(doubt)
		s.Extents = cutOut(s.Extents, doubt)
		s.Unknown = joinUnknown(append(s.Unknown, doubt...))
	}
	if len(s.overlay) > 0 {
		s.Extents = overlay(make([]Extent, 0, len(s.Extents)+len(s.overlay)), s.Extents, s.overlay)
	}
	s.overlay, s.journalPtrs, s.doubt = nil, nil, nil
	return nil
}

// account counts sectors and finds the role of every bucket, once the generations are final.
func (s *Set) account() {
	g := &s.Geo
	if s.Access == ondisk.AccessNone {
		return
	}
	for b := range min(g.FirstBucket, g.NBuckets) {
		s.Role[b] = RoleSuper
	}
	for i := range s.Extents {
		e := &s.Extents[i]
		if e.flags&(extPtr|extCheck|extBad) != extPtr {
			continue
		}
		b := g.Bucket(e.P.Sector())
		if stale := ondisk.GenAfter(s.Gen[b], e.P.Gen()); stale != 0 {
			e.flags |= extStale
			if stale > ondisk.MaxStale {
				s.find(KeyTooStale, e.P.Sector(), int64(e.Size), "extent %v is %d generations behind its bucket (kernel: %q)", e.Key(), stale, "key too stale")
			}
			continue
		}
		if s.Role[b].isMeta() {
			s.tally(BucketTwoRoles, e.P.Sector(), int64(e.Size), "bucket %d is %v, and extent %v points into it", b, s.Role[b], e.Key())
			e.flags |= extBad
			continue
		}
		s.Used[b] += uint32(e.Size)
		s.Stats.Extents++
		s.Stats.CachedBytes += int64(e.Size) * ondisk.SectorSize
		role := RoleClean
		if e.Dirty() {
			role = RoleDirty
			s.Stats.DirtyExtents++
			s.Stats.DirtyBytes += int64(e.Size) * ondisk.SectorSize
		}
		if s.Role[b] != RoleDirty {
			s.Role[b] = role
		}
	}
}

// setMeta gives bucket b a metadata role; a bucket has one role at a time.
func (s *Set) setMeta(b uint64, role Role, what string) {
	if have := s.Role[b]; have != RoleFree {
		s.find(BucketTwoRoles, s.Geo.BucketStart(b), int64(s.Geo.BucketSectors), "bucket %d is %v, and %s", b, have, what)
		return
	}
	s.Role[b] = role
}
