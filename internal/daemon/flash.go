package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/ubcache/ubcache"
	"github.com/ubcache/ubcache/internal/control"
)

// maxLabel is how many bytes a label has in the set.
const maxLabel = 32

// CheckFlashLabel says whether a new flash-only volume can have that label, which is also the name of its export.
func CheckFlashLabel(label string) error {
	switch {
	case len(label) > maxLabel:
		return fmt.Errorf("the label has %d bytes, at most %d are possible", len(label), maxLabel)
	case label != "" && strings.Trim(label, "0123456789") == "":
		return fmt.Errorf("a flash-only volume cannot be named %q: a number names the slot of another", label)
	}
	return CheckNames([]string{label})
}

// findFlash returns the flash-only volume of that name, and one that names no other.
func findFlash(set cacheSet, name string) (f ubcache.FlashVolume, unique string, err error) {
	list := set.FlashVolumes()
	f, err = ubcache.FindFlash(list, name)
	if errors.Is(err, ubcache.ErrNoVolume) {
		var known []string
		for _, f := range list {
			known = append(known, cmp.Or(f.Label, strconv.Itoa(f.Slot)))
		}
		return f, "", control.NoVolume(name, known)
	}
	if err == nil {
		unique, err = ubcache.FlashName(list, f.Slot)
	}
	return f, unique, err
}

// flashAtRest is a flash-only volume that is not served, as the control socket tells it.
func flashAtRest(f ubcache.FlashVolume) *control.FlashVolume {
	return &control.FlashVolume{Slot: control.Num(f.Slot), Label: f.Label, SizeBytes: control.Num(f.Size), DirtyBytes: control.Num(f.Dirty)}
}

// flashIn returns the flash-only volume in a slot.
func flashIn(set cacheSet, slot int) (ubcache.FlashVolume, error) {
	list := set.FlashVolumes()
	i := slices.IndexFunc(list, func(f ubcache.FlashVolume) bool { return f.Slot == slot })
	if i < 0 {
		return ubcache.FlashVolume{}, fmt.Errorf("the flash-only volume in slot %d is gone", slot)
	}
	return list[i], nil
}

// createFlash makes a volume.
func createFlash(ctx context.Context, set cacheSet, label string, size int64) (slot int, err error) {
	if err := CheckFlashLabel(label); err != nil {
		return 0, control.BadFlash(err)
	}
	slot, err = set.CreateFlash(ctx, label, size)
	if errors.Is(err, ubcache.ErrFlashExists) {
		return 0, control.Exists(label)
	}
	return slot, flashError(err)
}

// growFlash makes a volume larger.
func growFlash(ctx context.Context, set cacheSet, name string, size int64) (slot int, err error) {
	f, unique, err := findFlash(set, name)
	if err != nil {
		return 0, err
	}
	return f.Slot, flashError(set.GrowFlash(ctx, unique, size))
}

// flashError gives an error of a set the form of the control socket.
func flashError(err error) error {
	if errors.Is(err, ubcache.ErrFlashSize) || errors.Is(err, ubcache.ErrFlashLabel) {
		return control.BadFlash(err)
	}
	return err
}

// A Flash changes the flash-only volumes of a set that is not served. Errors are those of the control socket.
type Flash struct{ set cacheSet }

// FlashAtRest opens the set that c names for work, and closes it again. It is as if a daemon had been started and stopped:
// what the last one left is recovered, for which it wants the same RuntimeDir.
func FlashAtRest(ctx context.Context, c Config, work func(f Flash) error) (err error) {
	c.setDefaults()
	s := &serving{Config: c, down: teardown{log: c.Log}}
	s.controls = func() error { return nil }
	defer func() { err = s.down.run(err) }()
	if err := s.openSet(ctx); err != nil {
		return err
	}
	return work(Flash{s.set})
}

// Create makes a volume.
func (f Flash) Create(ctx context.Context, label string, size int64) (*control.FlashVolume, error) {
	slot, err := createFlash(ctx, f.set, label, size)
	if err != nil {
		return nil, err
	}
	v, err := flashIn(f.set, slot)
	return flashAtRest(v), err
}

// Grow makes a volume larger.
func (f Flash) Grow(ctx context.Context, name string, size int64) (*control.FlashVolume, error) {
	slot, err := growFlash(ctx, f.set, name, size)
	if err != nil {
		return nil, err
	}
	v, err := flashIn(f.set, slot)
	return flashAtRest(v), err
}

// Delete takes a volume and its data away, and returns what it was.
func (f Flash) Delete(ctx context.Context, name string) (*control.FlashVolume, error) {
	v, unique, err := findFlash(f.set, name)
	if err != nil {
		return nil, err
	}
	return flashAtRest(v), f.set.DeleteFlash(ctx, unique)
}

// lockFlash waits until nobody else makes or deletes a flash-only volume.
func (b *backend) lockFlash(ctx context.Context) (unlock func(), err error) {
	select {
	case b.flash <- struct{}{}:
		return func() { <-b.flash }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// FlashVolumes implements control.Backend.
func (b *backend) FlashVolumes(context.Context) ([]control.FlashVolume, error) {
	set, err := b.running(false)
	if err != nil {
		return nil, err
	}
	list := []control.FlashVolume{}
	for _, f := range set.FlashVolumes() {
		list = append(list, *b.flashStatus(f))
	}
	return list, nil
}

func (b *backend) flashStatus(f ubcache.FlashVolume) *control.FlashVolume {
	s := flashAtRest(f)
	if name, ok := b.servedAs(f.Slot); ok {
		s.Volume, s.NBD, s.Connections = name, b.uris(name), control.Num(b.connections()[name])
	}
	return s
}

// servedAs returns the name under which a flash-only volume is served.
func (b *backend) servedAs(slot int) (name string, ok bool) {
	for _, v := range b.served() {
		if s := v.Stats(); s.Flash && s.Slot == slot {
			return v.name, true
		}
	}
	return "", false
}

// CreateFlash implements control.Backend.
func (b *backend) CreateFlash(ctx context.Context, label string, size int64) (*control.FlashVolume, error) {
	set, err := b.running(true)
	if err != nil {
		return nil, err
	}
	unlock, err := b.lockFlash(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if _, err := b.find(label); err == nil {
		return nil, control.Exists(label)
	}
	slot, err := createFlash(ctx, set, label, size)
	if err != nil {
		return nil, err
	}
	return b.serveNew(ctx, set, slot)
}

// flashVolCreate sets the attribute of that name.
func (b *backend) flashVolCreate(ctx context.Context, set cacheSet, value string) error {
	unlock, err := b.lockFlash(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	before := set.FlashVolumes()
	if err := set.SetAttribute(ctx, "set", "flash_vol_create", value); err != nil {
		return attributeError(set, "set", "flash_vol_create", value, err)
	}
	for _, f := range set.FlashVolumes() {
		if !slices.ContainsFunc(before, func(old ubcache.FlashVolume) bool { return old.Slot == f.Slot }) {
			_, err = b.serveNew(ctx, set, f.Slot)
		}
	}
	return err
}

// serveNew serves a volume that was just made, and deletes it again where that does not work.
func (b *backend) serveNew(ctx context.Context, set cacheSet, slot int) (*control.FlashVolume, error) {
	name, err := ubcache.FlashName(set.FlashVolumes(), slot)
	if err != nil {
		return nil, err
	}
	if err = CheckNames([]string{name}); err == nil {
		err = b.export(ctx, set, name)
	}
	if err != nil {
		return nil, errors.Join(err, set.DeleteFlash(context.WithoutCancel(ctx), name))
	}
	return b.flashOf(set, slot)
}

// export opens a flash-only volume and serves it.
func (b *backend) export(ctx context.Context, set cacheSet, name string) error {
	v, err := set.OpenVolume(ctx, ubcache.VolumeOptions{Name: name, Flash: name})
	if err != nil {
		return err
	}
	if err := b.nbd.AddExport(name, newVolumeExport(v, true)); err != nil {
		return errors.Join(err, set.CloseVolume(context.WithoutCancel(ctx), name))
	}
	b.add(name, v)
	return nil
}

// flashOf returns a volume as it is now.
func (b *backend) flashOf(set cacheSet, slot int) (*control.FlashVolume, error) {
	f, err := flashIn(set, slot)
	return b.flashStatus(f), err
}

// GrowFlash implements control.Backend.
func (b *backend) GrowFlash(ctx context.Context, name string, size int64) (*control.FlashVolume, error) {
	set, err := b.running(true)
	if err != nil {
		return nil, err
	}
	unlock, err := b.lockFlash(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	slot, err := growFlash(ctx, set, name, size)
	if err != nil {
		return nil, err
	}
	return b.flashOf(set, slot)
}

// DeleteFlash implements control.Backend. A volume that cannot be deleted is served on.
func (b *backend) DeleteFlash(ctx context.Context, name string, force bool) (*control.FlashVolume, error) {
	set, err := b.running(true)
	if err != nil {
		return nil, err
	}
	unlock, err := b.lockFlash(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	f, unique, err := findFlash(set, name)
	if err != nil {
		return nil, err
	}
	was := b.flashStatus(f)
	as, served := b.servedAs(f.Slot)
	if served {
		if n := b.connections()[as]; n > 0 && !force {
			return nil, control.Connected(as, n)
		}
		if err := b.withdraw(ctx, set, as); err != nil {
			return nil, err
		}
	}
	if err := set.DeleteFlash(ctx, unique); err != nil {
		if served {
			err = errors.Join(err, b.export(context.WithoutCancel(ctx), set, as))
		}
		return nil, err
	}
	b.log.Info("flash-only volume deleted", "label", f.Label, "slot", f.Slot, "size", f.Size, "held", f.Dirty)
	return was, nil
}

// withdraw ends the connections to a volume and closes it.
func (b *backend) withdraw(ctx context.Context, set cacheSet, name string) error {
	v, err := b.find(name)
	if err != nil {
		return err
	}
	drained, cancel := context.WithTimeout(ctx, b.drainLimit)
	defer cancel()
	if err := b.nbd.RemoveExport(drained, name); err != nil {
		// A request of a client may still be under way.
		return errors.Join(fmt.Errorf("end the connections to %s: %w", name, err), b.nbd.AddExport(name, newVolumeExport(v, true)))
	}
	b.remove(name)
	err = set.CloseVolume(ctx, name)
	switch {
	case err == nil:
	case slices.Contains(set.Objects(), name): // it is open still
		err = errors.Join(err, b.nbd.AddExport(name, newVolumeExport(v, true)))
		b.add(name, v)
	default:
		err = errors.Join(err, b.export(context.WithoutCancel(ctx), set, name))
	}
	return err
}
