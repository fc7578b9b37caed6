package btree

import (
	"testing"

	"github.com/ubcache/ubcache/internal/ondisk"
	"pgregory.net/rapid"
)

var shapes = []shape{
	{buckets: 2048, bucketSectors: 2, blockSectors: 1, inodes: 2, sectors: 1500}, // nodes of 1 KiB: three levels and more
	{buckets: 2048, bucketSectors: 4, blockSectors: 1, inodes: 2, sectors: 1500},
	{buckets: 2048, bucketSectors: 8, blockSectors: 1, inodes: 2, sectors: 1500},
	{buckets: 1024, bucketSectors: 16, blockSectors: 2, inodes: 3, sectors: 1500},
	{buckets: 1024, bucketSectors: 32, blockSectors: 8, inodes: 1, sectors: 4000}, // four blocks a node
}

func TestTreeEqualsModel(t *testing.T) {
	splits, grown := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		r := newRig(t, rapid.SampledFrom(shapes).Draw(t, "shape"))
		// Weights differ from run to run, so that some runs never invalidate, or hardly ever write.
		w := rapid.SliceOfN(rapid.IntRange(0, 8), 12, 12).Draw(t, "weights")
		run := rapid.IntRange(20, 120).Draw(t, "steps")
		big := rapid.Bool().Draw(t, "big")
		r.fill(rapid.IntRange(0, 3000).Draw(t, "fill"))
		for step := range run {
			r.step(t, w, big)
			r.compare()
			if step%7 == 0 {
				r.compareDisk()
			}
		}
		r.compareDisk()
		r.sync()
		r.compare()
		r.lastSeq = r.seq // what is on the disk has to do
		r.compareDisk()
		r.rest()
		splits += r.splits
		if r.tree.Root().Level > 1 {
			grown++
		}
	})
	if splits == 0 || grown == 0 {
		t.Errorf("%d splits, %d times three levels: the test does not test", splits, grown)
	}
}

// fill writes small extents anywhere, without a look at the result.
func (r *rig) fill(n int) {
	r.rand = uint64(n)
	draw := func(n int) int { return int(r.random() % uint64(n)) }
	for range n {
		r.insertData(draw, Pos{uint32(draw(r.inodes)), uint64(draw(int(r.sectors)))}, draw(2) == 0, 0)
		if draw(10) == 0 && len(r.tree.nodes) > 0 {
			leaf := r.tree.nodes[draw(len(r.tree.nodes))]
			if o := r.freeze(leaf); o == NeedsRewrite {
				r.begin(leaf)
			}
		}
		if draw(200) == 0 {
			r.settle()
		}
	}
}

// rest lets everything that waits go, and sees that nothing is left in memory that the disk does not have.
func (r *rig) rest() {
	r.Helper()
	for i := range r.flushes {
		r.flushes[i] += 10
		r.tree.FlushDone(uint32(i), r.flushes[i])
	}
	r.sync()
	if seq, n := r.tree.OldestPin(); n != nil {
		r.Fatalf("%v needs entry %d", n.Ref(), seq)
	}
	for range 10 {
		r.tree.Evict(0, 1000)
	}
	if n := r.tree.Nodes(); n > 1 {
		r.Fatalf("%d nodes cannot be evicted", n)
	}
	r.compare()
}

// step does one thing.
func (r *rig) step(t *rapid.T, weights []int, big bool) {
	total := 8
	for _, w := range weights {
		total += w
	}
	pick := rapid.IntRange(0, total-1).Draw(t, "op")
	op := len(weights)
	for i, w := range weights {
		if pick < w {
			op = i
			break
		}
		pick -= w
	}
	draw := func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "n") }
	pos := func() Pos { return Pos{uint32(draw(r.inodes)), uint64(draw(int(r.sectors)))} }
	switch op {
	case 0: // a range is invalidated
		p := pos()
		n := min(uint64(1+draw(300)), r.sectors-p.Sector)
		r.insert(ondisk.NewInvalidation(p.Inode, p.Sector+n, uint32(n)), 0)
	case 1: // dirty extents are cleaned, as far as they are still there
		from, n := pos(), 1+draw(10)
		var list []Extent
		r.each(func(x Extent) bool {
			if x.HasPtr() && x.Dirty() && !x.Pos().Less(from) {
				list = append(list, x)
			}
			return len(list) < n
		})
		for _, x := range list {
			old := x.Key()
			if x.Size > 2 && draw(2) == 0 { // something comes between
				r.insert(ondisk.NewInvalidation(x.Inode, x.Start+2, 1), 0)
			}
			r.replace(old, ondisk.NewExtent(x.Inode, x.End(), uint32(x.Size), x.Ptr, false))
		}
	case 2: // a bucket is reused
		r.invalidate(uint64(r.buckets/4 + draw(r.buckets*3/4)))
	case 3: // a few appends begin
		for range 1 + draw(4) {
			n := r.tree.nodes
			if len(n) == 0 {
				break
			}
			leaf := n[draw(len(n))]
			if r.freeze(leaf) == NeedsRewrite {
				r.begin(leaf)
			}
		}
	case 4: // an append is done
		if len(r.appends) > 0 {
			r.finish(draw(len(r.appends)))
		}
	case 5: // a node is rewritten, or some become fewer
		p, level := pos(), draw(int(r.tree.Root().Level)+1)
		victims := r.tree.Siblings(nil, r.node(level, p), 1+draw(4))
		if o := r.begin(victims...); o != Done && o != Busy && o != Nothing {
			t.Fatalf("begin: %v", o)
		}
	case 6: // a rewrite is installed
		if len(r.rewrites) > 0 {
			r.install(draw(len(r.rewrites)))
		}
	case 7: // parents are appended to
		for i := len(r.parents) - 1; i >= 0; i-- {
			if o := r.freeze(r.parents[i]); o != Busy {
				r.parents = append(r.parents[:i], r.parents[i+1:]...)
			}
		}
		r.rootDurable()
	case 8: // memory gets short, or the tree may be lower
		if draw(2) == 0 {
			r.lower()
		} else {
			r.tree.Evict(draw(r.tree.Bytes()+1), 100)
		}
	case 9: // a backing device is flushed
		i := draw(r.inodes)
		r.flushes[i]++
		r.tree.FlushDone(uint32(i), r.flushes[i])
	case 10: // what is in flight comes to its end, or is given up, or power fails
		switch draw(3) {
		case 0:
			if len(r.rewrites) > 0 {
				r.giveUp(draw(len(r.rewrites)))
			}
		case 1:
			r.settle()
		case 2:
			r.crash()
		}
	case 11: // extents that must wait for the flush of the backing device
		p := pos()
		for range 1 + draw(20) {
			r.insertData(draw, p, false, r.flushes[p.Inode]+uint64(draw(3)))
			p = pos()
		}
	default: // writes, in order, or anywhere
		p := pos()
		n := 1 + draw(60)
		dirty := draw(2) == 0
		for range n {
			p.Sector = r.insertData(draw, p, dirty, 0)
			if !big || p.Sector >= r.sectors {
				p = pos()
			}
		}
	}
}

// insertData caches some sectors at p and returns where they end.
func (r *rig) insertData(draw func(int) int, p Pos, dirty bool, epoch uint64) uint64 {
	n := min(uint64(1+draw(min(6, r.bucketSectors))), r.sectors-p.Sector)
	if draw(8) == 0 {
		n = min(uint64(1+draw(r.bucketSectors)), r.sectors-p.Sector)
	}
	r.insert(ondisk.NewExtent(p.Inode, p.Sector+n, uint32(n), r.space(int(n)), dirty), epoch)
	return p.Sector + n
}
