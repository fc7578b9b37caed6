package cacheset

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// faulty starts the set again, with all nodes on the disk, on a device that can be made to fail. The nodes that are in
// memory then are few.
func (w *world) faulty() (*blockdev.Faulty, error) {
	if err := w.set.Close(context.Background()); err != nil {
		return nil, err
	}
	disk := blockdev.NewFaulty(w.dev, 1)
	w.dev = disk
	return disk, w.open()
}

// collected waits until a collection has ended, well or not, at most a minute.
func (w *world) collected() error {
	s := w.set
	s.mu.Lock()
	before := s.gc.serial
	s.triggerGCLocked()
	s.mu.Unlock()
	for until := w.rt.Now() + time.Minute; ; w.rt.Sleep(time.Millisecond) {
		s.mu.Lock()
		over := s.gc.serial > before
		s.mu.Unlock()
		if over {
			return nil
		}
		if w.rt.Now() > until {
			return errors.New("the collection does not end")
		}
	}
}

// A collection whose copies of nodes cannot be written stops the set, as any other writer of nodes does: the nodes that it
// has begun to replace would wait for ever, and with them whoever wants to change them.
func TestCollectionThatCannotWrite(t *testing.T) {
	simulate(t, 1, func(w *world) error {
		if err := w.small(); err != nil {
			return err
		}
		disk, err := w.faulty()
		if err != nil {
			return err
		}
		if err := w.set.SetGCPolicy("classic"); err != nil {
			return err
		}
		for inode := range uint32(2) { // nodes that can be fewer
			if err := w.store(inode, 0, worldSectors, "nothing", 0); err != nil {
				return err
			}
		}
		if err := w.set.Sync(); err != nil {
			return err
		}
		w.rt.Sleep(2 * time.Minute) // all keys are in their leaves on the disk
		disk.Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpWrite}, Purposes: []blockdev.Purpose{blockdev.ForBtree}})
		_ = w.collected()
		w.rt.Sleep(10 * time.Second)
		failed := w.set.Err()
		_ = w.set.Close(context.Background())
		w.set = nil
		if failed == nil {
			return errors.New("the set goes on")
		}
		return nil
	})
}
