package btree

import "github.com/ubcache/ubcache/internal/ondisk"

func entryPtr(e entry) ondisk.Ptr { return ondisk.Ptr(e.b & ptrMask) }

// poolMax is how many chunks of each size the pool keeps.
const poolMax = 64

// A memory is what the leaves of a tree share: chunks that wait for their next use, and the holds. It belongs
// to whoever may change the tree.
type memory struct {
	free  [chunkMax/chunkStep + 1][][]entry // by capacity
	holds holds
}

// get returns an empty chunk with room for n entries, n <= chunkMax.
func (m *memory) get(n int) []entry {
	class := (n + chunkStep - 1) / chunkStep
	if f := m.free[class]; len(f) > 0 {
		m.free[class] = f[:len(f)-1]
		return f[len(f)-1]
	}
	return make([]entry, 0, class*chunkStep)
}

// put takes a chunk back.
func (m *memory) put(e []entry) {
	if class := cap(e) / chunkStep; class > 0 && len(m.free[class]) < poolMax {
		m.free[class] = append(m.free[class], e[:0])
	}
}

// A hold keeps the pointers of clean extents off the disk until a flush of their backing device that is younger
// than their data is done. Extents refer to holds by number; an inode has few at a time, and the extents of
// later epochs share the youngest.
type hold struct {
	inode  uint32
	epoch  uint64 // passed once a flush with a greater number is done
	refs   int    // entries
	passed bool
	lost   bool // a flush has failed: what the backing device has is not known; the pointers count no more
}

// holdsPerInode is how many holds an inode has that have not passed. With three the oldest never gets younger,
// so that what waits for it is done at the flush it asked for.
const holdsPerInode = 3

// holds are all holds of a tree, index: number-1. A number is free where nothing refers to it.
type holds struct{ list []hold }

// take returns the number of a hold for extents of that epoch, 0 where none is left.
func (s *holds) take(inode uint32, epoch uint64) uint16 {
	free, young, count := -1, -1, 0
	for i := range s.list {
		h := &s.list[i]
		switch {
		case h.refs == 0:
			free = i
		case h.inode != inode || h.passed || h.lost:
		case h.epoch == epoch:
			return uint16(i + 1)
		default:
			count++
			if young < 0 || h.epoch > s.list[young].epoch {
				young = i
			}
		}
	}
	if count >= holdsPerInode {
		s.list[young].epoch = max(s.list[young].epoch, epoch)
		return uint16(young + 1)
	}
	if free < 0 {
		if len(s.list) >= maxHolds {
			return 0
		}
		s.list = append(s.list, hold{})
		free = len(s.list) - 1
	}
	s.list[free] = hold{inode: inode, epoch: epoch}
	return uint16(free + 1)
}

// ref counts an entry more or less of a hold.
func (s *holds) ref(id uint16, sign int) {
	h := &s.list[id-1]
	if h.refs += sign; h.refs < 0 {
		panic("btree: a hold has fewer entries than none")
	}
}

// done says that the flush of that number of the inode's backing device is done.
func (s *holds) done(inode uint32, flush uint64) {
	for i := range s.list {
		if h := &s.list[i]; h.inode == inode && h.epoch < flush && !h.lost {
			h.passed = true
		}
	}
}

// failed says that a flush of the inode's backing device, the youngest that has begun, has failed.
func (s *holds) failed(inode uint32) {
	for i := range s.list {
		if h := &s.list[i]; h.inode == inode && !h.passed {
			h.lost = true
		}
	}
}

// waiting reports whether any extent of the inode has a hold that has not passed and may do so.
func (s *holds) waiting(inode uint32) bool {
	for i := range s.list {
		if h := &s.list[i]; h.refs > 0 && h.inode == inode && !h.passed && !h.lost {
			return true
		}
	}
	return false
}

// losing reports whether any extent of the inode has a hold that is lost.
func (s *holds) losing(inode uint32) bool {
	for i := range s.list {
		if h := &s.list[i]; h.refs > 0 && h.inode == inode && h.lost {
			return true
		}
	}
	return false
}

// void reports whether a pointer with that hold counts no more.
func (s *holds) void(id uint16) bool { return id != 0 && s.list[id-1].lost }

// blocks reports whether a pointer with that hold must stay off the disk.
func (s *holds) blocks(id uint16) bool { return id != 0 && !s.list[id-1].passed }

// Forget lets go of a node, if it can be read again as it is: one that was read to be looked at once, which is no reason
// for others to go.
func (t *Tree) Forget(n *Node) {
	if n.gone || !t.evictable(n) {
		return
	}
	t.letGo(n)
}

// letGo leaves of a node the reference in its parent.
func (t *Tree) letGo(n *Node) {
	p, i := t.parent(n)
	p.kids[i].node = nil
	p.cached--
	t.drop(n)
}
