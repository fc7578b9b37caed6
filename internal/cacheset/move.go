package cacheset

import (
	"errors"
	"math/bits"
	"sync/atomic"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/btree"
	"github.com/ubcache/ubcache/internal/bucket"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

const (
	moveDepth   = 16   // I/Os of moving at a time
	moveBatch   = 64   // extents that are moved together
	moveSectors = 2048 // or as many sectors

	moveRetry = 10 * time.Second      // after a pass that was of no use
	moveSpace = 50 * time.Millisecond // after one that found no room
	moveStuck = 10 * time.Minute      // what cannot be moved is not tried again for so long
)

// moveSteps say how much is moved, by the percent of the buckets in use. The less space there is, the fuller are the
// buckets that are emptied: half full costs a write for each sector gained, seven eighths seven.
var moveSteps = [...]moveStep{
	{used: 50, eighths: 4, gain: 20},
	{used: 65, eighths: 5, gain: 50, pressing: true}, // from 70 on writeback takes nothing new
	{used: 80, eighths: 6, gain: 100, pressing: true},
	{used: 90, eighths: 7, pressing: true},
}

type moveStep struct {
	used     int // percent of the buckets, at least
	eighths  int // dirty, at most, in a bucket that is emptied
	gain     int // a pass has to gain more than one of so many buckets; 0: any
	pressing bool
}

// errNoRoom: no bucket could be had to move to.
var errNoRoom = errors.New("no bucket for what is moved")

// A mover makes whole buckets of those that have little dirty data left: it brings that together. What is clean there is
// left behind, since it can be evicted.
//
// There is no way from a bucket to its keys. So a pass marks the emptiest buckets, as many as there is room to move, and
// looks at the dirty extents of all volumes for those that lie there.
type mover struct {
	set    *Set
	io     *blockdev.IO
	marked []uint64 // a bit a bucket
	left   uint64   // sectors in marked buckets that have not been seen yet
	moved  uint64   // sectors, in this pass

	pressing bool          // in this pass
	cut      bool          // this pass has not looked at all
	unread   error         // why a node could not be read, in this pass
	told     time.Duration // when that was logged last

	stuck   []uint64      // buckets that a pass could not empty, a bit each; nil: none
	stuckAt time.Duration // when there were none

	list    []piece
	sectors uint64
	in      Insertion
	old     []ondisk.Key
	err     []error
	runs    []run
}

// A piece is a dirty extent, whose bucket is held.
type piece struct {
	key ondisk.Key
	at  uint64 // sectors of the batch before it
	bad bool
}

// A run is what one write takes: neighbours in the batch that are neighbours where they go.
type run struct {
	at, sectors uint64
	to          ondisk.Ptr
}

// A movePlan is what a pass is to do.
type movePlan struct {
	eighths  int    // dirty, at most, in what is moved
	sectors  uint64 // room for them
	pressing bool
}

// moveLoop is the goroutine that moves dirty data together.
func (s *Set) moveLoop() {
	m := mover{set: s}
	defer m.close() // the lock is let go before
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.stop.Err() == nil && s.Err() == nil {
		plan, due := s.planMoveLocked()
		if !due {
			s.move.Wait()
			continue
		}
		s.moving = true
		s.mu.Unlock()
		freed, err := m.pass(plan)
		s.mu.Lock()
		s.moving = false
		s.ready.Broadcast() // who waits for space may have to go without
		waits := s.needSpace > 0
		s.mu.Unlock()
		m.tell()
		pause := time.Duration(0)
		switch {
		case errors.Is(err, errNoRoom):
			pause = moveSpace
		case err != nil && s.stop.Err() == nil && s.Err() == nil:
			s.log.Warn("dirty data could not be moved", "set", s.UUID().String(), "err", err)
			if pause = moveRetry; waits {
				pause = time.Second
			}
		case freed <= 0 && waits:
			pause = moveSpace // or a pass of no use would follow the other
		case freed <= 0:
			pause = moveRetry
		}
		if pause < moveRetry || s.opt.Restless {
			_ = s.rest(pause)
			s.mu.Lock()
			continue
		}
		s.mu.Lock()
		ctx, cancel := s.rt.WithTimeout(s.stop, pause)
		for ctx.Err() == nil && s.needSpace == 0 && s.Err() == nil { // who begins to wait wakes us
			_ = s.move.WaitContext(ctx)
		}
		cancel()
	}
}

// tell logs what a pass has passed over, now and then.
func (m *mover) tell() {
	s := m.set
	if now := s.rt.Now(); m.unread != nil && (m.told == 0 || now-m.told >= moveRetry) {
		m.told = now
		s.log.Warn("dirty data whose node cannot be read is not moved", "set", s.UUID().String(), "err", m.unread)
	}
}

func (m *mover) close() {
	if m.io != nil {
		_ = m.io.Close()
	}
}

// planMoveLocked says what to move, if anything. It is for the mover, at no cost.
func (s *Set) planMoveLocked() (p movePlan, due bool) {
	room := s.moveRoomLocked()
	if !s.serving || s.noMove || room == 0 {
		return p, false
	}
	used := s.table.InUse()
	if s.needSpace > 0 {
		used = 100
	}
	var step moveStep
	for _, m := range moveSteps {
		if used >= m.used {
			step = m
		}
	}
	p.pressing = step.pressing
	if s.opt.Restless {
		step = moveSteps[len(moveSteps)-1]
	}
	least := uint64(0)
	if step.gain > 0 {
		least = uint64(s.table.NBuckets()) / uint64(step.gain)
	}
	eighth := uint64(s.geo.BucketSectors) / 8
	gain, planned := uint64(0), uint64(0)
	for f := 1; f <= step.eighths && planned < room; f++ {
		count := uint64(s.table.Sparse(f))
		if count == 0 {
			continue
		}
		p.eighths = f
		if fit := (room - planned) / max(eighth*uint64(f), 1); count > fit {
			count = fit
		}
		planned += count * eighth * uint64(f)
		gain += count * uint64(8-f)
	}
	p.sectors = room
	return p, gain > 8*least
}

// moveRoomLocked returns how many sectors there is room to move: in a quarter of the buckets that could be had, and in the one
// that is open. What a pass takes from lies all over the key space, so that hardly a bucket is empty before its end: the
// index may grow meanwhile, and if that took the rest the pass would have used up space and gained none.
func (s *Set) moveRoomLocked() uint64 {
	n := s.table.Movable()
	room := uint64((n+3)/4) * uint64(s.geo.BucketSectors)
	if o := &s.open[bucket.ForMoving].list[0]; o.held {
		room += uint64(s.geo.BucketSectors - o.used)
	}
	return room
}

// pass moves the dirty data of the emptiest buckets, and returns how many buckets more there are with none than before.
func (m *mover) pass(p movePlan) (freed int, err error) {
	s := m.set
	m.pressing = p.pressing
	if m.io == nil {
		io, err := blockdev.NewIO(s.dev, moveDepth)
		if err != nil {
			return 0, err
		}
		m.io = io.WithPurpose(blockdev.ForMoving)
	}
	m.moved, m.unread, m.cut = 0, nil, false
	m.mark(p)
	for inode := uint32(0); int(inode) < len(s.dirty) && m.left > 0; inode++ {
		if err = m.volume(inode); err != nil {
			m.cut = true
			break
		}
	}
	emptied := m.emptied()
	m.marked = nil
	s.mu.Lock()
	s.stats.MovePasses++
	s.stats.MovedBuckets += uint64(emptied)
	s.mu.Unlock()
	return emptied - int(m.moved/uint64(s.geo.BucketSectors)), err
}

func (m *mover) hurryLocked() bool { return m.pressing }

// emptied counts the marked buckets that have nothing dirty any more. After a pass that has looked at all, the others have what cannot
// be moved, since it, or its node, cannot be read. They are the emptiest soon, and have to be passed over: else they would be
// all that later passes have room for.
func (m *mover) emptied() (n int) {
	s := m.set
	for i, word := range m.marked {
		if word == 0 {
			continue
		}
		s.mu.Lock()
		for ; word != 0; word &= word - 1 {
			b := bits.TrailingZeros64(word)
			switch {
			case s.table.Info(uint32(i*64+b)).Dirty == 0:
				n++
			case !m.cut:
				if m.stuck == nil {
					m.stuck, m.stuckAt = make([]uint64, len(m.marked)), s.rt.Now()
				}
				m.stuck[i] |= 1 << b
			}
		}
		s.mu.Unlock()
	}
	return n
}

// mark marks the emptiest buckets.
func (m *mover) mark(p movePlan) {
	s := m.set
	m.marked = make([]uint64, (uint64(s.table.NBuckets())+63)/64)
	m.left = 0
	if s.rt.Now()-m.stuckAt >= moveStuck {
		m.stuck = nil
	}
	for fill := 1; fill <= p.eighths; fill++ {
		for from, done := uint32(0), false; !done; {
			s.mu.Lock()
			from, done = s.table.EachSparse(from, fill, func(b, dirty uint32) bool {
				if m.marked[b/64]>>(b%64)&1 != 0 || m.stuck != nil && m.stuck[b/64]>>(b%64)&1 != 0 {
					return true
				}
				if m.left+uint64(dirty) > p.sectors {
					return false
				}
				m.marked[b/64] |= 1 << (b % 64)
				m.left += uint64(dirty)
				return true
			})
			s.mu.Unlock()
			if m.left+uint64(s.geo.BucketSectors)/8 > p.sectors {
				return
			}
			s.rt.Yield()
		}
	}
}

// volume moves what an inode has in marked buckets. What is found far apart goes together: a pass takes a few extents of each
// leaf. What a node has that cannot be read stays where it is.
func (m *mover) volume(inode uint32) error {
	s := m.set
	defer m.letGo()
	began, requests, rested := s.rt.Now(), uint64(0), true
	for from := uint64(0); from < ondisk.MaxOffset && m.left > 0; {
		s.mu.Lock()
		if err := s.errLocked(); err != nil || s.slots[inode].Retired() || s.noMove {
			m.cut = true
			s.mu.Unlock()
			return err
		}
		if rested {
			began, requests, rested = s.rt.Now(), s.requests, false
		}
		next, miss := s.ScanDirtyLocked(inode, from, ondisk.MaxOffset, func(start, end uint64, p ondisk.Ptr) bool {
			m.takeLocked(inode, start, end, p)
			return len(m.list) < moveBatch && m.sectors < moveSectors
		})
		s.mu.Unlock()
		from = next
		if !miss.IsZero() {
			if err := s.readNode(miss, m.hurryLocked, nil); err != nil {
				if from, err = m.passOver(inode, miss, err); err != nil {
					return err
				}
			}
		}
		switch whole := len(m.list) >= moveBatch || m.sectors >= moveSectors || m.left == 0 || from >= ondisk.MaxOffset; {
		case whole && len(m.list) > 0:
			if err := m.moveOver(); err != nil {
				return err
			}
		case miss.IsZero():
			s.rt.Yield()
			continue
		}
		if err := m.pause(s.rt.Now()-began, requests); err != nil {
			return err
		}
		rested = true
	}
	return nil
}

// passOver notes that a node cannot be read, and returns where the inode goes on behind it. An error says that nothing goes on.
func (m *mover) passOver(inode uint32, n btree.Ref, err error) (next uint64, _ error) {
	s := m.set
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.errLocked(); err != nil {
		return 0, err
	}
	if m.unread == nil {
		m.unread = err
	}
	s.stats.MoveErrors++
	if n.High.Inode != inode {
		return ondisk.MaxOffset, nil
	}
	return n.High.Sector, nil
}

// letGo lets go of what is in the batch.
func (m *mover) letGo() {
	m.set.mu.Lock()
	defer m.set.mu.Unlock()
	m.letGoLocked()
}

func (m *mover) letGoLocked() {
	for i := range m.list {
		m.set.LetGoLocked(m.list[i].key.P[0])
	}
	m.list, m.sectors = m.list[:0], 0
}

// pause rests, so that moving takes a fifth of the time, half of it where space is short and requests come; while data
// waits for space it does not rest.
func (m *mover) pause(took time.Duration, requests uint64) error {
	s := m.set
	s.mu.Lock()
	wait, came := s.needSpace > 0, s.requests != requests
	s.mu.Unlock()
	switch {
	case wait || m.pressing && !came:
		return s.stop.Err()
	case m.pressing:
		return s.rest(took)
	}
	return s.rest(4 * took)
}

// takeLocked takes an extent that lies in a marked bucket into the batch. Extents that are not whole blocks, which kernels
// leave if the set's blocks are smaller than the device's, stay where they are.
func (m *mover) takeLocked(inode uint32, start, end uint64, p ondisk.Ptr) {
	s := m.set
	b := s.bucketOf(p)
	block := uint64(s.info.LogicalBlock / ondisk.SectorSize)
	block = max(block, uint64(s.geo.BlockSectors))
	if m.marked[b/64]>>(b%64)&1 == 0 || (end-start)%block != 0 || p.Sector()%block != 0 || !s.HoldLocked(p) {
		return
	}
	m.list = append(m.list, piece{key: ondisk.NewExtent(inode, end, uint32(end-start), p, true), at: m.sectors})
	m.sectors += end - start
	m.left -= min(m.left, end-start)
}

// moveOver moves the batch.
//
// Order (V2, J1 of B 9.3): the data is read, its buckets held; it is written elsewhere; where the index still says what
// was read, the new keys take the place of the old ones, in the journal too, whose entry comes behind a flush of the data.
// The buckets it came from wait for that entry, as all do that are emptied (V1).
func (m *mover) moveOver() error {
	s := m.set
	buf := s.pool.Get(int(m.sectors) * ondisk.SectorSize)
	defer buf.Release()
	m.each(len(m.list), func(i int) error {
		x := &m.list[i]
		p := buf.Data[x.at*ondisk.SectorSize:][:uint64(x.key.Size())*ondisk.SectorSize]
		return s.gently(p, int64(x.key.P[0].Sector())*ondisk.SectorSize, m.hurryLocked, m.io.ReadAt)
	})
	unread := 0
	for i := range m.list {
		if m.list[i].bad = m.err[i] != nil; m.list[i].bad {
			unread++
		}
	}
	full := m.place()
	m.each(len(m.runs), func(i int) error {
		r := &m.runs[i]
		p := buf.Data[r.at*ondisk.SectorSize:][:r.sectors*ondisk.SectorSize]
		write := func(p []byte, off int64) error { return m.io.WriteAt(p, off, 0) }
		return s.gently(p, int64(r.to.Sector())*ondisk.SectorSize, m.hurryLocked, write)
	})
	failed := errors.Join(m.err...)
	in := &m.in
	in.Pinned, in.Unjournalled = true, s.opt.Broken&SkipJ1 != 0
	if failed != nil {
		s.mu.Lock()
		s.DropLocked(in.Keys, true)
		s.mu.Unlock()
		in.Keys = in.Keys[:0]
	}
	in.Old = m.old[:len(in.Keys)]
	err := s.Insert(in)

	s.mu.Lock()
	defer s.mu.Unlock()
	m.letGoLocked()
	s.stats.MovedKeys += uint64(len(in.Old))
	s.stats.MovedSectors += in.Replaced
	m.moved += in.Replaced
	s.stats.MoveErrors += uint64(unread)
	switch {
	case err != nil:
		return err
	case failed != nil:
		s.stats.MoveErrors++
		return failed
	case full:
		return errNoRoom
	}
	return nil
}

// place finds room for what was read, and makes the keys. full says that there was not enough: the rest stays.
func (m *mover) place() (full bool) {
	s := m.set
	in := &m.in
	in.Keys, m.old, m.runs = in.Keys[:0], m.old[:0], m.runs[:0]
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range m.list {
		x := &m.list[i]
		if x.bad {
			continue
		}
		k := &x.key
		for at := uint64(0); at < uint64(k.Size()); {
			p, n := s.SpaceLocked(bucket.ForMoving, k.Inode(), k.Start()+at, k.Size()-uint32(at), s.geo.BlockSectors, 0)
			if n == 0 {
				return true
			}
			end := k.Start() + at + uint64(n)
			in.Keys = append(in.Keys, ondisk.NewExtent(k.Inode(), end, n, p, true))
			m.old = append(m.old, ondisk.NewExtent(k.Inode(), end, n, k.P[0].Advance(at), true))
			m.run(x.at+at, uint64(n), p)
			at += uint64(n)
		}
	}
	return false
}

// run adds to what is written.
func (m *mover) run(at, sectors uint64, to ondisk.Ptr) {
	if n := len(m.runs); n > 0 {
		if r := &m.runs[n-1]; r.at+r.sectors == at && r.to.Advance(r.sectors) == to {
			r.sectors += sectors
			return
		}
	}
	m.runs = append(m.runs, run{at, sectors, to})
}

// each calls fn with 0 to n-1, several at a time, and keeps what it returns in m.err.
func (m *mover) each(n int, fn func(i int) error) {
	m.err = append(m.err[:0], make([]error, n)...)
	var next atomic.Int32
	var group rt.WaitGroup
	group.Init(m.set.rt)
	for range min(n, moveDepth) {
		group.Go("mover", func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				m.err[i] = fn(i)
			}
		})
	}
	group.Wait()
}

// SetMoving changes whether dirty data is moved together; Moving tells. It is, as a rule.
func (s *Set) SetMoving(yes bool) {
	s.mu.Lock()
	s.noMove = !yes
	s.move.Signal()
	s.mu.Unlock()
}

// Moving reports whether dirty data is moved together.
func (s *Set) Moving() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.noMove
}
