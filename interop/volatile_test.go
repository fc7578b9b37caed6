//go:build interop

package interop

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/nbd"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// A volatileDisk is an image of a cache for a guest, behind a memory that loses its content when the power goes: of what was
// written since the last flush any writes may be gone then, or parts of them. (Of an image that the guest has by itself
// nothing is lost that was written, for this machine stays up.)
//
// But the nodes of the tree are written whole, and after all that was written before them. A kernel needs that: it appends to
// a leaf without a flush before, so a key could be there and its data not (F 11), and does not attach a set with a torn
// append (F 5.10).
type volatileDisk struct {
	image  string
	memory *blockdev.MemoryDevice
	disk   *blockdev.Crashable
	server *nbd.Server
	uri    string // for vm/run
}

// openVolatile serves the content of an image; the image does not change until lose.
func openVolatile(t *testing.T, image string) *volatileDisk {
	t.Helper()
	content, err := os.ReadFile(image)
	if err != nil {
		t.Fatal(err)
	}
	d := &volatileDisk{image: image, server: nbd.NewServer(nbd.Options{})}
	if d.memory, err = blockdev.Memory(int64(len(content)), blockdev.MemoryOptions{}); err != nil {
		t.Fatal(err)
	}
	o, err := blockdev.NewIO(d.memory, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(o.WriteAt(content, 0, 0), o.Close()); err != nil {
		t.Fatal(err)
	}
	super, err := ondisk.DecodeSuperblock(content[ondisk.SuperblockOffset:])
	if err != nil {
		t.Fatal(err)
	}
	if d.disk, err = blockdev.NewCrashable(d.memory, blockdev.CrashableOptions{Barrier: nodesOf(super)}); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(filepath.Dir(image), "disk.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.server.AddExport("disk", nbd.DeviceExport(d.disk, "", false)); err != nil {
		t.Fatal(err)
	}
	go d.server.Serve(l)
	t.Cleanup(func() { d.server.Close() })
	d.uri = "nbd+unix:///disk?socket=" + socket
	return d
}

// nodesOf returns what recognizes writes of nodes, or to them, in the set of that superblock.
func nodesOf(super *ondisk.Superblock) func(data []byte) bool {
	g := ondisk.NewGeometry(super)
	magic := binary.LittleEndian.AppendUint64(nil, g.BSetMagic())
	return func(data []byte) bool {
		for b := range slices.Chunk(data, sector) {
			if bytes.HasPrefix(b[8:], magic) {
				return true
			}
		}
		return false
	}
}

// lose puts into the image what a power cut leaves, by rnd, and ends the disk. Nobody uses it any more.
func (d *volatileDisk) lose(t *testing.T, rnd *rand.Rand) {
	t.Helper()
	if err := d.server.Close(); err != nil {
		t.Fatal(err)
	}
	unflushed := d.disk.Unflushed()
	strength := []blockdev.Strength{blockdev.Reordered, blockdev.Torn}[rnd.IntN(2)]
	left, err := d.disk.Crash(rnd, strength)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(d.image, left.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(left.Close(), d.disk.Close()); err != nil {
		t.Fatal(err)
	}
	t.Logf("%s: %d writes had not been flushed: %v", filepath.Base(d.image), unflushed, strength)
}
