package journal

import (
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// An Identity says whose acknowledged writes a shared mapping holds: those of one activation of one set on one
// boot of the machine. Whatever happens to the set elsewhere raises its superblock's seq, and a power cut ends the
// boot.
type Identity struct {
	Set      ondisk.UUID
	Boot     ondisk.UUID // BootID
	SuperSeq uint64      // of the cache superblock during the activation, that is after it was raised
}

// BootID returns the kernel's name for this boot of the machine.
func BootID() (ondisk.UUID, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ondisk.UUID{}, err
	}
	return ondisk.ParseUUID(strings.TrimSpace(string(b)))
}

// A Shared is memory that outlasts the process: it holds the keys of the open entry and of the one being written.
// Numbers are in the machine's byte order, offsets in bytes:
//
//	0 magic u64    8 set uuid [16]    24 boot id [16]    40 superblock seq u64    48 check u64
//	64 state of slot 0 u64            128 state of slot 1 u64
//	4096 keys of slot 0 [32768]       36864 keys of slot 1 [32768]
//
// A state is seq<<16 | words. Keys are stored first, then the one word of the state, so that a process killed
// between any two instructions leaves whole keys and their true number. A slot goes to its next entry by one store
// too, and only when the entry that it held is durable on disk. check is the checksum of what stands before it;
// it is cleared before anything else changes hands and set last.
//
// Package offline reads the file with code of its own, while no process has the set: a change here is one there.
type Shared struct {
	mem  []byte
	path string // "": memory only
	// the two words in which mem changes while others may look
	state [2]*atomic.Uint64
	check *atomic.Uint64
}

const (
	sharedMagic = 0x31746e6561636275 // "ubcaent1"
	sharedHead  = 48                 // bytes that check covers

	slotBytes   = ondisk.MaxJSetBytes
	sharedKeys  = 4096
	sharedBytes = sharedKeys + 2*slotBytes
)

// OpenShared maps the file at path, which it makes if there is none, and leaves what it holds. The file belongs into
// a directory in memory (/run, $XDG_RUNTIME_DIR); its space is allocated, so that storing to it cannot fail later.
// One process at a time may use it: whoever opens the set's cache device for writing.
func OpenShared(path string) (*Shared, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() != sharedBytes {
		if err := f.Truncate(sharedBytes); err != nil {
			return nil, err
		}
	}
	err = unix.EINTR
	for err == unix.EINTR { // the Go runtime's own signals interrupt it
		err = unix.Fallocate(int(f.Fd()), 0, 0, sharedBytes)
	}
	if err != nil {
		return nil, &os.PathError{Op: "fallocate", Path: path, Err: err}
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, sharedBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, &os.PathError{Op: "mmap", Path: path, Err: err}
	}
	return newShared(mem, path), nil
}

// NewShared returns a mapping in plain memory: for simulations, where it outlasts a simulated process if whoever
// simulates the death keeps a Clone.
func NewShared() *Shared {
	words := make([]uint64, sharedBytes/8) // for the alignment
	return newShared(unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), sharedBytes), "")
}

func newShared(mem []byte, path string) *Shared {
	word := func(at int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&mem[at])) }
	return &Shared{mem: mem, path: path, state: [2]*atomic.Uint64{word(64), word(128)}, check: word(sharedHead)}
}

// Clone returns a copy in plain memory: what the next process would find if this one died now.
func (s *Shared) Clone() *Shared {
	c := NewShared()
	copy(c.mem, s.mem)
	return c
}

// Close unmaps the file, which stays. The journal that uses it must be closed.
func (s *Shared) Close() error {
	if s.path == "" || s.mem == nil {
		return nil
	}
	mem := s.mem
	s.mem = nil
	return unix.Munmap(mem)
}

// keys returns the memory for the keys of a slot.
func (s *Shared) keys(slot int) []byte {
	at := sharedKeys + slot*slotBytes
	return s.mem[at : at+slotBytes : at+slotBytes]
}

// publish says that slot holds the first words of entry seq.
func (s *Shared) publish(slot int, seq uint64, words int) {
	s.state[slot].Store(seq<<16 | uint64(words))
}

// invalidate makes the mapping hold nothing.
func (s *Shared) invalidate() { s.check.Store(0) }

// reset makes the mapping id's, empty, with entry seq open in slot 0.
func (s *Shared) reset(id Identity, seq uint64) {
	s.invalidate()
	s.publish(1, 0, 0)
	s.publish(0, seq, 0)
	binary.NativeEndian.PutUint64(s.mem, sharedMagic)
	copy(s.mem[8:], id.Set[:])
	copy(s.mem[24:], id.Boot[:])
	binary.NativeEndian.PutUint64(s.mem[40:], id.SuperSeq)
	s.check.Store(s.sum())
}

// sum is what check must be. It is never 0.
func (s *Shared) sum() uint64 { return ondisk.Checksum(s.mem[:sharedHead]) | 1 }

// A sharedEntry is what a slot holds.
type sharedEntry struct {
	seq  uint64
	keys []byte // a copy
}

// read returns the entries behind newest that the mapping holds for id, oldest first, as far as they follow on each
// other.
func (s *Shared) read(id Identity, newest uint64) ([]sharedEntry, error) {
	m := s.mem
	if s.check.Load() != s.sum() || binary.NativeEndian.Uint64(m) != sharedMagic ||
		ondisk.UUID(m[8:24]) != id.Set || ondisk.UUID(m[24:40]) != id.Boot || binary.NativeEndian.Uint64(m[40:]) != id.SuperSeq {
		return nil, nil
	}
	var list []sharedEntry
	for slot := range s.state {
		state := s.state[slot].Load()
		seq, n := state>>16, 8*int(state&0xffff)
		if seq <= newest {
			continue
		}
		if n > slotBytes {
			return nil, &SharedError{Path: s.path, Reason: fmt.Sprintf("entry %d would have %d bytes", seq, n)}
		}
		list = append(list, sharedEntry{seq: seq, keys: slices.Clone(s.keys(slot)[:n])})
	}
	if len(list) == 2 && list[0].seq > list[1].seq {
		list[0], list[1] = list[1], list[0]
	}
	for i := range list {
		e := &list[i]
		if e.seq != newest+1+uint64(i) {
			return list[:i], nil
		}
		for at := 0; at < len(e.keys); {
			_, n, err := ondisk.DecodeKey(e.keys[at:])
			if err != nil {
				return nil, &SharedError{Path: s.path, Reason: fmt.Sprintf("entry %d, byte %d: %v", e.seq, at, err)}
			}
			at += n
		}
	}
	return list, nil
}
