package ubcache

import (
	"context"
	"fmt"
	"slices"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// FormatOptions say what Format writes. The zero value of each field but the devices is its default.
type FormatOptions struct {
	Cache   string   // path of the cache device; empty: none
	Backing []string // paths of backing devices; they attach to the set when they are opened

	// CacheDevice and BackingDevices are instead of paths, for use inside this module. They stay open.
	CacheDevice    blockdev.Device
	BackingDevices []blockdev.Device

	BucketSize int64 // bytes, of the cache device: a power of two, 4096 or more; default 512 KiB
	BlockSize  int64 // bytes, a power of two from 512 to 4096; default: the largest logical block of the devices
	DataOffset int64 // bytes, of backing devices: where their data begins, 8192 or more; default 8192

	SetUUID     string // default: random
	Label       string // of the only backing device, or of the cache device where there is none; up to 32 bytes
	CacheMode   string // of backing devices: writethrough (default), writeback, writearound, none
	Replacement string // of the cache device: lru (default), fifo, random

	Discard bool // the cache device is told which buckets are empty, if it supports that

	// Force overwrites what is there, file systems and other bcache superblocks. What may hold unflushed data is
	// refused even so: DiscardUnflushed gives that up.
	Force, DiscardUnflushed bool
}

// Format writes the superblocks of a cache device, of backing devices, or of both for one set, and returns the set's
// uuid. It refuses devices that carry data, before it writes anything, with an error that says which and what.
func Format(ctx context.Context, o FormatOptions) (setUUID string, err error) {
	f := offline.FormatOptions{
		Bucket: o.BucketSize, Block: o.BlockSize, DataOffset: o.DataOffset, Label: o.Label, DiscardUnflushed: o.DiscardUnflushed,
		Discard: o.Discard,
	}
	if o.Force {
		f.Overwrite = offline.OverwriteAnything
	}
	if o.SetUUID != "" {
		if f.SetUUID, err = ondisk.ParseUUID(o.SetUUID); err != nil {
			return "", err
		}
	}
	pick := func(what, value string, words []string) int {
		i := slices.Index(words, value)
		if value == "" {
			i = 0
		}
		if i < 0 {
			err = &ValueError{what, value, fmt.Sprintf("one of %v", words)}
		}
		return max(i, 0)
	}
	f.CacheMode = ondisk.CacheMode(pick("cache mode", o.CacheMode, modes))
	f.Replacement = ondisk.Replacement(pick("replacement policy", o.Replacement, policies))
	if err != nil {
		return "", err
	}
	f.Cache, f.Backing = o.CacheDevice, slices.Clone(o.BackingDevices)
	var open []blockdev.Device
	defer func() {
		for _, d := range open {
			if cerr := d.Close(); err == nil {
				err = cerr
			}
		}
	}()
	for i, path := range append([]string{o.Cache}, o.Backing...) {
		if path == "" && i == 0 {
			continue
		}
		dev, err := blockdev.Open(path, blockdev.Options{})
		if err != nil {
			return "", err
		}
		open = append(open, dev)
		if i == 0 {
			f.Cache = dev
		} else {
			f.Backing = append(f.Backing, dev)
		}
	}
	done, err := offline.Format(ctx, f)
	if err != nil {
		return "", err
	}
	return done[0].Super.SetUUID.String(), nil
}
