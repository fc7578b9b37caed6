package bucket

import "fmt"

// An entry is all that is kept of one bucket, three words:
//
//	lo   0..7 gen    8..27 live sectors    28..31 dirty sectors, low 4 bits
//	hi   0..15 dirty sectors, high 16 bits    16..31 pins
//	side 0..15 stamp    16..23 oldest gen    24..26 state    27 residue    28 fresh residue    29 in window    30..31 room
//
// lo and hi together are one 64-bit value, a word. Only side is ever touched by those who hold the set's lock
// shared (Touch), by atomic operations; they never look at it otherwise.
type entry struct{ lo, hi, side uint32 }

func (e *entry) word() word { return word(e.hi)<<32 | word(e.lo) }

// A word is the part of an entry that accounting changes.
type word uint64

const (
	maxSectors = 1<<20 - 1 // of live and dirty: buckets are smaller than 512 MiB
	maxPins    = 1<<16 - 1 // a count that got here stays: the bucket is held until the next start
)

func (w word) gen() uint8    { return uint8(w) }
func (w word) live() uint32  { return uint32(w>>8) & maxSectors }
func (w word) dirty() uint32 { return uint32(w>>28) & maxSectors }
func (w word) pins() uint32  { return uint32(w >> 48) }

func (w word) withGen(g uint8) word { return w&^0xff | word(g) }

func (w word) withCounts(live, dirty uint32) word {
	return w&^(maxSectors<<8|maxSectors<<28) | word(live)<<8 | word(dirty)<<28
}

func (w word) withPins(n uint32) word { return w&^(maxPins<<48) | word(n)<<48 }

// A side is the rest of an entry.
type side uint32

const (
	residueBit side = 1 << 27 // an older generation may be found in the index on disk
	freshBit   side = 1 << 28 // residue that the sweep under way must not clear
	windowBit  side = 1 << 29 // has an entry in Table.window
)

func (s side) stamp() uint16  { return uint16(s) }
func (s side) oldest() uint8  { return uint8(s >> 16) }
func (s side) state() state   { return state(s >> 24 & 7) }
func (s side) residue() bool  { return s&residueBit != 0 }
func (s side) inWindow() bool { return s&windowBit != 0 }

// room is kept for a bucket in a batch: what it was worth when it was picked.
func (s side) room() room { return room(s >> 30) }

func (s side) withRoom(r room) side { return s&^(3<<30) | side(r)<<30 }

func (s side) withStamp(v uint16) side { return s&^0xffff | side(v) }
func (s side) withOldest(g uint8) side { return s&^(0xff<<16) | side(g)<<16 }
func (s side) withState(v state) side  { return s&^(7<<24) | side(v)<<24 }

// A state says who owns a bucket. What a bucket of data is, follows from its counts and pins: see Category.
type state uint8

const (
	stateData    state = iota
	stateFixed         // superblock, journal
	stateMeta          // btree node, prio set, uuid array
	stateGated         // metadata, freed, but what is on disk still refers to it
	stateSuspect       // its counts are in doubt
	stateInc           // in the batch under way
	stateReady         // may be handed out
)

// A Category is where a bucket stands: each is in exactly one.
type Category uint8

// The categories. Only those of Empty and Clean may be picked for reuse.
const (
	Fixed   Category = iota // superblock, journal
	Meta                    // btree nodes, freed ones that are still waited for, prio sets, the uuid array
	Pinned                  // data that somebody holds
	Empty                   // data, no live sectors
	Clean                   // data, all of it also on the backing device
	Dirty                   // data that is nowhere else, some of it
	Suspect                 // data whose counts are in doubt: rests until it is verified
	Inc                     // in a batch, generation raised, not durable yet
	Ready                   // may be handed out
	categories
)

var categoryText = [...]string{"fixed", "meta", "pinned", "empty", "clean", "dirty", "suspect", "inc", "ready"}

func (c Category) String() string { return categoryText[c] }

func categoryOf(w word, s side) Category {
	switch s.state() {
	case stateData:
		switch {
		case w.pins() != 0:
			return Pinned
		case w.live() == 0:
			return Empty
		case w.dirty() == 0:
			return Clean
		}
		return Dirty
	case stateFixed:
		return Fixed
	case stateMeta, stateGated:
		return Meta
	case stateSuspect:
		return Suspect
	case stateReady:
		return Ready
	}
	return Inc
}

// A room is what a bucket is worth to a kernel that activates the set after a crash now: see Table.roomFor.
type room uint8

const (
	roomNone     room = iota
	roomReusable      // unused or clean
	roomUnused        // unused
	rooms
)

func roomOf(w word, s side) room {
	switch categoryOf(w, s) {
	case Ready:
		return roomUnused
	case Inc:
		return s.room()
	case Empty:
		if s&(windowBit|residueBit) == 0 {
			return roomUnused
		}
	case Clean:
	default:
		return roomNone
	}
	if s.inWindow() {
		return roomNone
	}
	return roomReusable
}

// A tier is a class of buckets to pick from, in order of preference within Empty and within Clean.
type tier uint8

const (
	tierNone  tier = iota // not to be picked
	emptyFree             // empty, and no older pointer anywhere: reuse costs no generation
	emptyLow              // empty, lag below emptyLimit
	cleanLow              // clean, lag below cleanLimit
	emptyHigh             // empty, lag below pickLimit
	cleanHigh             // clean, lag below pickLimit
	tiers
)

// Limits of lag for each step of the allocator's order. A bucket may be at ondisk.MaxStale at most. Picking
// raises the generation by one, and so does freeing it again if a btree node comes to live there, hence one is
// left.
const (
	emptyLimit = 32
	cleanLimit = 64
	pickLimit  = 95
)

func tierOf(w word, s side) tier {
	if s.state() != stateData || w.pins() != 0 || w.dirty() != 0 {
		return tierNone
	}
	lag := w.gen() - s.oldest()
	empty := w.live() == 0
	switch {
	case lag >= pickLimit:
		return tierNone
	case empty && s&(residueBit|windowBit) == 0:
		return emptyFree
	case empty && lag < emptyLimit:
		return emptyLow
	case empty:
		return emptyHigh
	case lag < cleanLimit:
		return cleanLow
	}
	return cleanHigh
}

// Info is what is known of one bucket.
type Info struct {
	Bucket      uint32
	Gen, Oldest uint8
	Category    Category
	Pins        uint32
	Live, Dirty uint32 // sectors
	Prio        uint16 // as it would be stored
	Residue     bool   // keys with older generations may be in the index on disk
	Gated       bool   // metadata that what is on disk still refers to
	EmptySeq    uint64 // newest journal entry that may hold a pointer into it; 0: none that is needed
}

// String returns one line: "bucket 17 gen 4 (oldest 3) clean, 128 live, 0 dirty, prio 32768, residue".
func (i Info) String() string {
	s := fmt.Sprintf("bucket %d gen %d (oldest %d) %v, %d live, %d dirty, prio %d", i.Bucket, i.Gen, i.Oldest, i.Category, i.Live, i.Dirty, i.Prio)
	if i.Pins != 0 {
		s += fmt.Sprintf(", %d pins", i.Pins)
	}
	if i.Residue {
		s += ", residue"
	}
	if i.Gated {
		s += ", gated"
	}
	if i.EmptySeq != 0 {
		s += fmt.Sprintf(", in entry %d", i.EmptySeq)
	}
	return s
}
