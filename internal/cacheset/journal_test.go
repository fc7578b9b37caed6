package cacheset

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/journal"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// entries makes a set whose journal needs several entries, and gives it up without a stop. It returns what the device
// holds then, and the entries, oldest first.
func entries(w *world) (image []byte, rec *journal.Recovery, err error) {
	for i := range uint64(6) {
		if err := w.store(0, 100*i, 100*i+8, "dirty", 0); err != nil {
			return nil, nil, err
		}
		if err := w.set.Sync(); err != nil {
			return nil, nil, err
		}
	}
	image = bytes.Clone(w.dev.(*blockdev.MemoryDevice).Bytes())
	rec, err = journal.Read(context.Background(), w.set.source())
	return image, rec, err
}

// place returns where an entry lies on the device.
func place(s *Set, e journal.Entry) int64 {
	return int64(s.geo.BucketStart(s.super.D[e.Bucket]))*ondisk.SectorSize + e.At
}

// openImage opens a set on a copy of an image, and returns what the image is afterwards.
func openImage(w *world, image []byte) (after []byte, found error) {
	dev, err := blockdev.Memory(int64(len(image)), blockdev.MemoryOptions{Runtime: w.rt})
	if err != nil {
		return nil, err
	}
	copy(dev.Bytes(), image)
	s, err := Open(context.Background(), dev, Options{})
	if err == nil {
		err = s.Close(context.Background())
	}
	after = bytes.Clone(dev.Bytes())
	return after, errors.Join(err, dev.Close())
}

// Case 20 (d): an entry is missing in the middle of what is needed. The set is not opened, nothing is written, and the
// check names the entry.
func TestMissingJournalEntry(t *testing.T) {
	var broken []byte
	var seq uint64
	simulate(t, 1, func(w *world) error {
		image, rec, err := entries(w)
		if err != nil {
			return err
		}
		if len(rec.Entries) < 4 {
			return fmt.Errorf("%d entries are needed, too few for this test", len(rec.Entries))
		}
		gone := rec.Entries[len(rec.Entries)/2]
		image[place(w.set, gone)+100] ^= 1 // its checksum does not hold
		after, err := openImage(w, image)
		var missing *journal.MissingError
		if !errors.As(err, &missing) || len(missing.Missing) == 0 || missing.Missing[0].From != gone.Seq {
			return fmt.Errorf("entry %d is gone, Open says %v", gone.Seq, err)
		}
		if !bytes.Equal(after, image) {
			return errors.New("a set that was not opened has been written to")
		}
		broken, seq = image, gone.Seq
		return nil
	})
	dev, err := blockdev.Memory(int64(len(broken)), blockdev.MemoryOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	copy(dev.Bytes(), broken)
	s, _, _ := offline.Check(context.Background(), dev, nil, offline.CheckOptions{})
	defer s.Close()
	for _, f := range s.Report.Findings() {
		if f.Severity == offline.Fatal && strings.Contains(f.String(), fmt.Sprint(seq)) {
			return
		}
	}
	t.Errorf("the check does not name entry %d: %v", seq, s.Report.Findings())
}

// Case 20 (c): the newest entry is torn, so that it has never been; all before it is there.
func TestTornNewestEntry(t *testing.T) {
	simulate(t, 1, func(w *world) error {
		image, rec, err := entries(w)
		if err != nil {
			return err
		}
		last := rec.Entries[len(rec.Entries)-1]
		for i := range image[place(w.set, last)+8:][:last.Bytes-8] {
			image[place(w.set, last)+8+int64(i)] ^= 0x5a
		}
		dev, err := blockdev.Memory(int64(len(image)), blockdev.MemoryOptions{Runtime: w.rt})
		if err != nil {
			return err
		}
		defer dev.Close()
		copy(dev.Bytes(), image)
		s, err := Open(context.Background(), dev, Options{})
		if err != nil {
			return err
		}
		s.Lock()
		dirty := s.DirtyLocked(0)
		s.Unlock()
		if dirty != 5*8 {
			err = fmt.Errorf("%d dirty sectors, want those of the five entries before the torn one", dirty)
		}
		return errors.Join(err, s.Close(context.Background()))
	})
}
