package blockdev_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/blockdev/devtest"
)

func mustHollow(t testing.TB, size int64, o blockdev.HollowOptions) *blockdev.HollowDevice {
	t.Helper()
	d, err := blockdev.Hollow(size, o)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func keepAll(*blockdev.Request) bool { return true }

// A device that keeps everything is a disk like any other, and so is a clone of one.
func TestHollowConformance(t *testing.T) {
	for _, block := range []int{512, 4096} {
		devtest.Run(t, func(t *testing.T) blockdev.Device {
			return mustHollow(t, 5<<20, blockdev.HollowOptions{LogicalBlock: block, Keep: keepAll, NoDiscard: block == 4096})
		})
	}
	t.Run("clone", func(t *testing.T) {
		devtest.Run(t, func(t *testing.T) blockdev.Device {
			d := mustHollow(t, 5<<20, blockdev.HollowOptions{Keep: keepAll})
			at(t, d, func(io *blockdev.IO) error { return io.WriteAt(bytes.Repeat([]byte{7}, 3<<20), 1<<20, 0) })
			c, err := d.Clone(nil)
			if err != nil {
				t.Fatal(err)
			}
			at(t, c, func(io *blockdev.IO) error { return io.WriteZeroes(0, 5<<20, 0) })
			if err := d.Close(); err != nil {
				t.Fatal(err)
			}
			return c
		})
	})
}

// at calls fn with an IO.
func at(t testing.TB, d blockdev.Device, fn func(io *blockdev.IO) error) {
	t.Helper()
	io, err := blockdev.NewIO(d, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(fn(io), io.Close()); err != nil {
		t.Fatal(err)
	}
}

// filledWith reads a range and says whether it is all of one byte.
func filledWith(t testing.TB, d blockdev.Device, off int64, n int, b byte) bool {
	t.Helper()
	p := make([]byte, n)
	at(t, d, func(io *blockdev.IO) error { return io.ReadAt(p, off) })
	return bytes.Equal(p, bytes.Repeat([]byte{b}, n))
}

func TestHollowKeepsMetadataOnly(t *testing.T) {
	d := mustHollow(t, 1<<40, blockdev.HollowOptions{})
	defer d.Close()
	const off = 700 << 30
	ones := bytes.Repeat([]byte{1}, 64<<10)
	at(t, d, func(io *blockdev.IO) error {
		for p := range blockdev.NumPurposes {
			if err := io.WithPurpose(p).WriteAt(ones, off+int64(p)<<20, 0); err != nil {
				return err
			}
		}
		return nil
	})
	for p := range blockdev.NumPurposes {
		want := byte(1)
		switch p {
		case blockdev.ForData, blockdev.ForWriteback, blockdev.ForMoving:
			want = 0
		}
		if !filledWith(t, d, off+int64(p)<<20, 64<<10, want) {
			t.Errorf("%v: not %d", p, want)
		}
	}
	if n := d.Stored(); n != 6*64<<10 {
		t.Errorf("%d bytes are stored", n)
	}
	// Data in the place of metadata: what is left of that is what the data has not overwritten.
	const at512 = off + int64(blockdev.ForBtree)<<20
	at(t, d, func(io *blockdev.IO) error { return io.WriteAt(ones[:8192], at512+512, 0) })
	if !filledWith(t, d, at512, 512, 1) || !filledWith(t, d, at512+512, 8192, 0) || !filledWith(t, d, at512+8704, 64<<10-8704, 1) {
		t.Error("data over metadata")
	}
	if n := d.Stored(); n != 6*64<<10-4096 {
		t.Errorf("%d bytes are stored after the data", n)
	}
}

func TestHollowClones(t *testing.T) {
	d := mustHollow(t, 1<<30, blockdev.HollowOptions{Keep: keepAll})
	write := func(d blockdev.Device, b byte, off int64, n int) {
		t.Helper()
		at(t, d, func(io *blockdev.IO) error { return io.WriteAt(bytes.Repeat([]byte{b}, n), off, 0) })
	}
	write(d, 1, 0, 1<<20)
	a, err := d.Clone(nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := d.Clone(nil)
	if err != nil {
		t.Fatal(err)
	}
	io, err := blockdev.NewIO(d, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := io.WriteAt(make([]byte, 512), 0, 0); !errors.Is(err, blockdev.ErrReadOnly) {
		t.Errorf("a device that has clones is written to: %v", err)
	}
	if err := io.Close(); err != nil {
		t.Fatal(err)
	}
	write(a, 2, 4096+512, 512)
	at(t, b, func(io *blockdev.IO) error { return io.Discard(0, 64<<10) })
	if a.Stored() != 4096 || b.Stored() != 0 {
		t.Errorf("stored: %d, %d", a.Stored(), b.Stored())
	}
	if !filledWith(t, d, 0, 1<<20, 1) || !filledWith(t, a, 4096+512, 512, 2) || !filledWith(t, a, 5<<10, 1<<20-5<<10, 1) ||
		!filledWith(t, a, 0, 4096+512, 1) || !filledWith(t, b, 0, 64<<10, 0) || !filledWith(t, b, 64<<10, 1<<20-64<<10, 1) {
		t.Error("wrong content")
	}
	c, err := a.Clone(nil) // of a clone
	if err != nil {
		t.Fatal(err)
	}
	write(c, 3, 0, 512)
	if !filledWith(t, c, 0, 512, 3) || !filledWith(t, c, 512, 4096, 1) || !filledWith(t, c, 4096+512, 512, 2) {
		t.Error("a clone of a clone has something else")
	}
	for _, x := range []blockdev.Device{d, a, b, c} { // the base goes when the last one goes
		if err := x.Close(); err != nil {
			t.Error(err)
		}
	}
}

// What is dropped was written for an index, and is not used any more.
func TestHollowDropsWhatIsUnused(t *testing.T) {
	d := mustHollow(t, 1<<30, blockdev.HollowOptions{})
	defer d.Close()
	const part = 256 << 10
	write := func(p blockdev.Purpose, n int64) {
		t.Helper()
		at(t, d, func(io *blockdev.IO) error {
			return io.WithPurpose(p).WriteAt(bytes.Repeat([]byte{byte(n)}, part), n*part, 0)
		})
	}
	for n := int64(1); n <= 4; n++ {
		write(blockdev.ForBtree, n)
	}
	write(blockdev.ForJournal, 5)
	write(blockdev.ForPrio, 6)
	d.NoteUse()
	if !filledWith(t, d, 2*part, part, 2) { // reads it
		t.Error("wrong content")
	}
	write(blockdev.ForBtree, 3)
	if err := d.DropUnused(); err != nil {
		t.Fatal(err)
	}
	for n, want := range []byte{0, 0, 2, 3, 0, 5, 6} {
		if !filledWith(t, d, int64(n)*part, part, want) {
			t.Errorf("part %d is not %d", n, want)
		}
	}
	if s := d.Stored(); s != 4*part {
		t.Errorf("%d bytes are stored", s)
	}
	write(blockdev.ForBtree, 7) // in pages that were given back
	at(t, d, func(io *blockdev.IO) error {
		return io.WithPurpose(blockdev.ForPrio).WriteAt(make([]byte, 512), 8*part, 0)
	})
	if !filledWith(t, d, 7*part, part, 7) || !filledWith(t, d, 8*part, part, 0) {
		t.Error("wrong content after pages were used again")
	}
}
