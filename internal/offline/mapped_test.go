package offline

import (
	"context"
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/ubcache/ubcache/internal/ondisk"
)

var mappedBoot = ondisk.UUID{0xb0, 15: 7}

// mappedFile is the content of such a file, sealed, with entries from seq on in its slots.
func mappedFile(h mappedHolder, seq uint64, entries ...[]ondisk.Key) []byte {
	b := make([]byte, mappedBytes)
	n := binary.NativeEndian
	n.PutUint64(b, mappedMagic)
	copy(b[8:], h.set[:])
	copy(b[24:], h.boot[:])
	n.PutUint64(b[40:], h.seq)
	for i, keys := range entries {
		at := mappedKeys + i*ondisk.MaxJSetBytes
		words := b[at:at:mappedBytes]
		for j := range keys {
			words = ondisk.AppendKey(words, &keys[j])
		}
		n.PutUint64(b[mappedState*(i+1):], (seq+uint64(i))<<16|uint64(len(words)/8))
	}
	n.PutUint64(b[mappedSum:], ondisk.Checksum(b[:mappedSum])|1)
	return b
}

// Entries of a process that died are laid over the journal's, and what is anyone else's, or cannot be, is not.
func TestMappedEntries(t *testing.T) {
	build := func() *build {
		b := newBuild(t)
		b.journal(dirtyKey(16, 8, dataAt(0, 0))) // entry 1
		b.seal()
		return b
	}
	first, second := []ondisk.Key{dirtyKey(18, 2, dataAt(1, 0))}, []ondisk.Key{goneKey(40, 1), cleanKey(18, 1, dataAt(2, 0))}
	h := mappedHolder{buildSet, mappedBoot, 1}
	other := func(change func(h *mappedHolder)) mappedHolder {
		h := h
		change(&h)
		return h
	}
	le := binary.NativeEndian
	for _, tt := range []struct {
		name    string
		file    func() []byte // nil: none
		entries int
		unused  string // part of why; "": nothing is said
	}{
		{"no file", nil, 0, ""},
		{"both slots", func() []byte { return mappedFile(h, 2, first, second) }, 2, ""},
		{"both slots, the other way round", func() []byte {
			b := mappedFile(h, 2, second, first)
			le.PutUint64(b[64:], le.Uint64(b[64:])+1<<16)
			le.PutUint64(b[128:], le.Uint64(b[128:])-1<<16)
			return b
		}, 2, ""},
		{"one that is on the disk too", func() []byte { return mappedFile(h, 1, first, second) }, 1, ""},
		{"all on the disk", func() []byte { return mappedFile(h, 0, first, second) }, 0, ""},
		{"a gap to the disk", func() []byte { return mappedFile(h, 3, first, second) }, 0, ""},
		{"a gap between them", func() []byte {
			b := mappedFile(h, 2, first, second)
			le.PutUint64(b[128:], le.Uint64(b[128:])+1<<16)
			return b
		}, 1, ""},
		{"an open entry without keys", func() []byte { return mappedFile(h, 2, first, nil) }, 1, ""},
		{"another boot", func() []byte { return mappedFile(other(func(h *mappedHolder) { h.boot[1] = 1 }), 2, first) }, 0, ""},
		{"another set", func() []byte { return mappedFile(other(func(h *mappedHolder) { h.set[1] = 1 }), 2, first) }, 0, "it is of set 5e01"},
		{"an earlier start", func() []byte { return mappedFile(other(func(h *mappedHolder) { h.seq = 0 }), 2, first) }, 0, ""},
		{"a later start", func() []byte { return mappedFile(other(func(h *mappedHolder) { h.seq = 2 }), 2, first) }, 0, "an older copy of the device"},
		{"a later start that acknowledged nothing", func() []byte { return mappedFile(other(func(h *mappedHolder) { h.seq = 2 }), 2, nil) }, 0, ""},
		{"invalidated", func() []byte {
			b := mappedFile(h, 2, first)
			le.PutUint64(b[48:], 0)
			return b
		}, 0, ""},
		{"just made", func() []byte { return make([]byte, 0) }, 0, ""},
		{"cut off", func() []byte { return mappedFile(h, 2, first)[:mappedBytes-1] }, 0, "bytes, not"},
		{"another magic number", func() []byte {
			b := mappedFile(h, 2, first)
			b[0]++
			return b
		}, 0, "head is damaged"},
		{"more words than a slot has", func() []byte {
			b := mappedFile(h, 2, first)
			le.PutUint64(b[64:], 2<<16|0xffff)
			return b
		}, 0, "would have"},
		{"keys cut off", func() []byte {
			b := mappedFile(h, 2, first)
			le.PutUint64(b[64:], le.Uint64(b[64:])-1)
			return b
		}, 0, "key"},
		{"a key into nowhere, behind a good entry", func() []byte { return mappedFile(h, 2, first, []ondisk.Key{dirtyKey(18, 2, 1<<40)}) }, 0, "entry 3: key"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := build()
			dir := t.TempDir()
			if err := os.Chmod(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, buildSet.String()+".journal")
			if tt.file != nil {
				if err := os.WriteFile(path, tt.file(), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			s, err := Open(context.Background(), b.cache, Options{RuntimeDirs: []string{filepath.Join(dir, "none"), dir}, boot: mappedBoot})
			defer func() { s.Close() }()
			if err != nil {
				t.Fatal(err)
			}
			if n := len(s.Mapped.Entries); n != tt.entries || s.Stats.MappedEntries != int64(n) || n > 0 && s.Mapped.Path != path {
				t.Errorf("%d entries from %q, want %d", n, s.Mapped.Path, tt.entries)
			}
			text := ""
			for _, err := range s.Mapped.Unused {
				text += err.Error()
			}
			if (text == "") != (tt.unused == "") || !strings.Contains(text, tt.unused) || text != "" && !strings.HasPrefix(text, path) {
				t.Errorf("unused: %q, want %q", text, tt.unused)
			}
			want := []span{cached(16, 24, dataAt(0, 0))}
			switch {
			case tt.entries == 2:
				want = []span{cached(16, 18, dataAt(0, 0)), cached(18, 19, dataAt(2, 0)), cached(19, 20, dataAt(1, 1)), cached(20, 24, dataAt(0, 4))}
			case tt.entries == 1 && tt.name == "one that is on the disk too":
				want = []span{cached(16, 18, dataAt(0, 0)), cached(18, 19, dataAt(2, 0)), cached(19, 24, dataAt(0, 3))}
			case tt.entries == 1:
				want = []span{cached(16, 18, dataAt(0, 0)), cached(18, 20, dataAt(1, 0)), cached(20, 24, dataAt(0, 4))}
			}
			mustRead(t, b.volume(s), want...)
		})
	}
}

// A file that somebody else can have put there, or that is none, is left alone.
func TestMappedFileOfOthers(t *testing.T) {
	b := newBuild(t)
	b.seal()
	h := mappedHolder{buildSet, mappedBoot, 1}
	file := mappedFile(h, 2, []ondisk.Key{dirtyKey(18, 2, dataAt(1, 0))})
	for name, put := range map[string]func(dir, path string) error{
		"a folder for all": func(dir, path string) error {
			if err := os.Chmod(dir, 0o777); err != nil {
				return err
			}
			return os.WriteFile(path, file, 0o600)
		},
		"a link": func(dir, path string) error {
			if err := os.WriteFile(path+"2", file, 0o600); err != nil {
				return err
			}
			return os.Symlink(path+"2", path)
		},
		"a folder": func(_, path string) error { return os.Mkdir(path, 0o700) },
		"a pipe":   func(_, path string) error { return syscall.Mkfifo(path, 0o600) },
	} {
		dir := t.TempDir()
		if err := os.Chmod(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := put(dir, filepath.Join(dir, mappedName(buildSet))); err != nil {
			t.Fatal(err)
		}
		s, err := Open(context.Background(), b.cache, Options{RuntimeDirs: []string{dir}, boot: mappedBoot})
		if err != nil || len(s.Mapped.Entries) != 0 || len(s.Mapped.Unused) != 1 {
			t.Errorf("%s: %v, %+v", name, err, s.Mapped)
		}
		s.Close()
	}
}

// What only such a file has is unflushed data too, and where it may have some that cannot be told, nobody knows.
func TestScanDirtyLooksIntoFolders(t *testing.T) {
	b := newBuild(t)
	b.seal()
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	boot, err := ondisk.ParseUUID(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, mappedName(buildSet))
	file := mappedFile(mappedHolder{buildSet, boot, 1}, 2, []ondisk.Key{dirtyKey(18, 2, dataAt(1, 0))})
	scan := func(scan ScanUnflushed) (int64, error) {
		if err := os.WriteFile(path, file, 0o600); err != nil {
			t.Fatal(err)
		}
		return scan(context.Background(), b.cache)
	}
	if n, err := scan(ScanDirty); n != 0 || err != nil {
		t.Errorf("on the device: %d, %v", n, err)
	}
	if n, err := scan(ScanDirtyWith(dir)); n != 1024 || err != nil {
		t.Errorf("in the folder: %d, %v", n, err)
	}
	file[0]++
	if n, err := scan(ScanDirtyWith(dir)); err == nil {
		t.Errorf("a damaged file: %d", n)
	}
}

// What is in such a file is believed as a whole or not at all, and what is believed follows on the disk.
func FuzzMapped(f *testing.F) {
	b := newBuildOf(alive{}, shape{})
	h := mappedHolder{buildSet, mappedBoot, 1}
	f.Add(uint16(0), []byte{}, uint64(2<<16), uint64(0), true)
	for _, keys := range [][]ondisk.Key{{dirtyKey(18, 2, dataAt(1, 0))}, {goneKey(16, 8), cleanKey(30, 4, dataAt(2, 0))}} {
		var words []byte
		for i := range keys {
			words = ondisk.AppendKey(words, &keys[i])
		}
		n := uint64(len(words) / 8)
		f.Add(uint16(mappedKeys), words, 2<<16|n, uint64(3<<16), true)
		f.Add(uint16(mappedKeys+ondisk.MaxJSetBytes), words, uint64(2<<16), 3<<16|n, true)
		f.Add(uint16(0), words, 2<<16|n, 2<<16|n, false)
	}
	f.Fuzz(func(t *testing.T, at uint16, piece []byte, one, two uint64, seal bool) {
		file := mappedFile(h, 2)
		n := binary.NativeEndian
		n.PutUint64(file[mappedState:], one)
		n.PutUint64(file[2*mappedState:], two)
		copy(file[at:], piece)
		if seal {
			n.PutUint64(file[mappedSum:], ondisk.Checksum(file[:mappedSum])|1)
		}
		before := slices.Clone(file)
		list, err := decodeMapped(file, h, 1, &b.geo)
		if err != nil && list != nil {
			t.Fatal("an error, and entries")
		}
		if !slices.Equal(before, file) {
			t.Fatal("the file was changed")
		}
		last := uint64(1)
		for _, e := range list {
			if e.Seq <= last || e.Seq > 3 || len(e.Keys) == 0 {
				t.Fatalf("entry %d after %d, %d keys", e.Seq, last, len(e.Keys))
			}
			last = e.Seq
			for i := range e.Keys {
				if f := b.geo.LeafFault(&e.Keys[i]); f != ondisk.FaultNone {
					t.Fatalf("%v: %v", e.Keys[i], f)
				}
			}
		}
	})
}
