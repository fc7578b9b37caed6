package offline

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/ubcache/ubcache/internal/ondisk"
)

// A MappedEntry is a journal entry that is on no disk yet: a process that served the set had its keys in a file in
// memory when it died, and has acknowledged them. The next start writes it to the ring.
type MappedEntry struct {
	Seq  uint64
	Keys []ondisk.Key
}

// Mapped is what such files say of a set.
type Mapped struct {
	Path    string        // of the file that Entries are from
	Entries []MappedEntry // behind the newest on the disk, oldest first, without a gap; none is empty
	Unused  []error       // files that belong to the set and were left alone, and why
}

// Keys returns how many keys the entries have.
func (m *Mapped) Keys() (n int) {
	for i := range m.Entries {
		n += len(m.Entries[i].Keys)
	}
	return n
}

// The file, of which internal/journal/shared.go says how it is written. Numbers are in the machine's byte order, offsets
// in bytes:
//
//	0 magic u64    8 set uuid [16]    24 boot id [16]    40 superblock seq u64    48 checksum of bytes 0-47, | 1; 0: void
//	64 seq<<16 | words of slot 0 u64    128 the same of slot 1    4096 keys of slot 0 [32768]    36864 of slot 1
const (
	mappedMagic = 0x31746e6561636275
	mappedSum   = 48
	mappedState = 64
	mappedKeys  = 4096
	mappedBytes = mappedKeys + 2*ondisk.MaxJSetBytes
)

// mappedName is the name of the file of a set.
func mappedName(set ondisk.UUID) string { return set.String() + ".journal" }

// A mappedHolder is whose entries count: those of one activation of a set, on one boot of the machine.
type mappedHolder struct {
	set, boot ondisk.UUID
	seq       uint64 // of the superblock
}

// errVoid: the file is nobody's, or of an activation that others have come after.
var errVoid = errors.New("void")

// readMapped looks for entries in the folders of the options.
func (s *Set) readMapped(ctx context.Context) error {
	if len(s.opt.RuntimeDirs) == 0 || len(s.Journal.Entries) == 0 || !s.Super.Sync() {
		return nil
	}
	boot := s.opt.boot
	if boot.IsZero() {
		b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
		if err == nil {
			boot, err = ondisk.ParseUUID(string(bytes.TrimSpace(b)))
		}
		if err != nil {
			return fmt.Errorf("which boot of the machine this is: %w", err)
		}
	}
	h := mappedHolder{s.Super.SetUUID, boot, s.Super.Seq}
	for _, dir := range s.opt.RuntimeDirs {
		if err := ctx.Err(); err != nil {
			return err
		}
		path := filepath.Join(dir, mappedName(h.set))
		b, err := readMappedFile(dir, path)
		var list []MappedEntry
		if err == nil {
			list, err = decodeMapped(b, h, s.Newest.Seq, &s.Geo)
		}
		switch {
		case errors.Is(err, errVoid), errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		case err != nil:
			s.Mapped.Unused = append(s.Mapped.Unused, fmt.Errorf("%s: %w", path, err))
		case len(list) > 0 && len(s.Mapped.Entries) == 0: // one process at a time has the set
			s.Mapped.Path, s.Mapped.Entries = path, list
		}
	}
	for i := range s.Mapped.Entries {
		e := &s.Mapped.Entries[i]
		s.Stats.MappedEntries++
		for j := range e.Keys {
			s.Stats.ReplayedKeys++
			s.overlayKey(&e.Keys[j], ondisk.FaultNone)
		}
	}
	return nil
}

// readMappedFile reads a file that nobody but its owner can have written.
func readMappedFile(dir, path string) ([]byte, error) {
	if info, err := os.Stat(dir); err == nil && info.Mode().Perm()&0o022 != 0 {
		if _, err := os.Lstat(path); err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("others can write to that folder: its mode is %04o", info.Mode().Perm())
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, errors.Unwrap(err)
	}
	defer f.Close()
	info, err := f.Stat()
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, errors.New("it is not a file")
	case info.Size() == 0: // just made
		return nil, errVoid
	case info.Size() != mappedBytes:
		return nil, fmt.Errorf("it has %d bytes, not %d", info.Size(), mappedBytes)
	}
	b := make([]byte, mappedBytes)
	_, err = io.ReadFull(f, b)
	return b, err
}

// decodeMapped returns the entries in b behind newest, as far as they follow on each other. Where anything in b cannot
// be so, nothing of it is believed.
func decodeMapped(b []byte, h mappedHolder, newest uint64, g *ondisk.Geometry) ([]MappedEntry, error) {
	n := binary.NativeEndian
	if len(b) != mappedBytes {
		return nil, fmt.Errorf("it has %d bytes, not %d", len(b), mappedBytes)
	}
	sum := n.Uint64(b[mappedSum:])
	if sum == 0 {
		return nil, errVoid
	}
	if sum != ondisk.Checksum(b[:mappedSum])|1 || n.Uint64(b) != mappedMagic {
		return nil, errors.New("its head is damaged")
	}
	if set := ondisk.UUID(b[8:24]); set != h.set {
		return nil, fmt.Errorf("it is of set %v", set)
	}
	words := [2]uint64{n.Uint64(b[mappedState:]), n.Uint64(b[2*mappedState:])}
	switch seq := n.Uint64(b[40:]); {
	case ondisk.UUID(b[24:40]) != h.boot, seq < h.seq, seq > h.seq && (words[0]|words[1])&0xffff == 0:
		return nil, errVoid
	case seq > h.seq:
		return nil, fmt.Errorf("it is of a start that raised the superblock's seq to %d, and on the device that is %d: an older copy of the device?", seq, h.seq)
	}
	var list []MappedEntry
	for slot, word := range words {
		e := MappedEntry{Seq: word >> 16}
		size := 8 * int(word&0xffff)
		if e.Seq <= newest {
			continue
		}
		if size > ondisk.MaxJSetBytes-ondisk.JSetHeaderBytes {
			return nil, fmt.Errorf("entry %d would have %d bytes of keys", e.Seq, size)
		}
		at := mappedKeys + slot*ondisk.MaxJSetBytes
		for keys := b[at : at+size]; len(keys) > 0; {
			k, used, err := ondisk.DecodeKey(keys)
			if err != nil {
				return nil, fmt.Errorf("entry %d: %w", e.Seq, err)
			}
			keys = keys[used:]
			switch f := g.LeafFault(&k); {
			case f == ondisk.FaultEmpty:
			case f != ondisk.FaultNone:
				return nil, fmt.Errorf("entry %d: key %v: %v", e.Seq, &k, f)
			default:
				e.Keys = append(e.Keys, k)
			}
		}
		list = append(list, e)
	}
	slices.SortFunc(list, func(a, b MappedEntry) int {
		if a.Seq < b.Seq {
			return -1
		}
		return 1
	})
	for i := range list {
		if list[i].Seq != newest+1+uint64(i) {
			list = list[:i]
			break
		}
	}
	return slices.DeleteFunc(list, func(e MappedEntry) bool { return len(e.Keys) == 0 }), nil
}
