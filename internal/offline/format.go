package offline

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"strings"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// An Overwrite says what Format may overwrite.
type Overwrite uint8

// Values of Overwrite. Unflushed data is in none of them.
const (
	OverwriteNothing  Overwrite = iota
	OverwriteBcache             // bcache superblocks
	OverwriteAnything           // whatever is there, readable or not
)

// Defaults and limits of FormatOptions.
const (
	DefaultBucketBytes = 512 << 10
	MaxPlainBucket     = 32768 * ondisk.SectorSize // larger ones need version 5
	minBlockBytes      = ondisk.SectorSize
)

// FormatOptions are the devices that Format makes a set of, and how. All sizes are in bytes.
type FormatOptions struct {
	Cache   blockdev.Device   // at most one; nil: none
	Backing []blockdev.Device // they attach to the set by themselves

	Bucket     int64 // of the cache device: a power of two, 4096 or more. Default: 512 KiB
	Block      int64 // a power of two from 512 to 4096. Default: the largest logical block of the devices
	DataOffset int64 // of backing devices: where their data begins, 8192 or more. Default: 8192

	SetUUID ondisk.UUID // default: random
	UUID    ondisk.UUID // of the only device; default: random
	Label   string      // of the only backing device, or of the cache device where there is none; up to 32 bytes

	CacheMode   ondisk.CacheMode   // of backing devices
	Discard     bool               // the cache device is told which buckets are free
	Replacement ondisk.Replacement // of the cache device

	Overwrite        Overwrite
	DiscardUnflushed bool // also overwrite where unflushed data is recorded or possible

	// Unflushed finds out whether a cache device that is in the way holds unflushed data; nil: it counts as
	// possible where the device has been used. See ScanDirty.
	Unflushed ScanUnflushed
}

// Formatted is a device that Format has made.
type Formatted struct {
	Device      string
	Super       *ondisk.Superblock
	Overwritten []Signature // what was there before and is no longer found
	Left        []Signature // what is still there: on a backing device, beyond the data offset

	info blockdev.Info
}

// Shown returns what Show would say of the device.
func (f *Formatted) Shown() *Shown {
	return showSuper(f.Super, f.info.Name, f.info.Size, f.info.LogicalBlock)
}

// A FormatRefusal says why a device is not overwritten. Nothing was written to any device.
type FormatRefusal struct {
	Device string
	Found  []Signature
	Unread []Unread

	// What would allow it.
	NeedsOverwrite        Overwrite
	NeedsDiscardUnflushed bool
}

func (e *FormatRefusal) Error() string {
	var what []string
	for i := range e.Found {
		what = append(what, e.Found[i].String())
	}
	for i := range e.Unread {
		what = append(what, e.Unread[i].String())
	}
	return fmt.Sprintf("%s will not be formatted: %s", e.Device, strings.Join(what, "; "))
}

// A FormatRuleError says which rule a size, or a device, breaks. Nothing was written to any device.
type FormatRuleError struct {
	Device string // "" where it is about the options alone
	Field  string // "bucket size"
	Value  string
	Rule   string // what must hold
	Remedy string
}

func (e *FormatRuleError) Error() string {
	s := e.Field + " " + e.Value + ": " + e.Rule
	if e.Device != "" {
		s = e.Device + ": " + s
	}
	if e.Remedy != "" {
		s += "; " + e.Remedy
	}
	return s
}

// Format writes superblocks, so that the devices are one set when they are next activated, here or by a kernel.
// All of them are looked at first, and only then is any of them written to. It returns the cache device, if any,
// then the backing devices in their order.
//
// Before the first write, ctx can stop it, and the error joins a *FormatRuleError or *FormatRefusal for each
// thing that is wrong. Later errors are *FormatError.
//
// What is written, and what stays, is in writeAll.
func Format(ctx context.Context, o FormatOptions) ([]Formatted, error) {
	targets, err := o.plan()
	if err != nil {
		return nil, err
	}
	defer func() {
		for _, t := range targets {
			t.close()
		}
	}()
	var refused []error
	for _, t := range targets {
		if t.probed, err = Probe(ctx, t.dev, o.Unflushed); err != nil {
			return nil, fmt.Errorf("look at %s: %w", t.info.Name, err)
		}
		refused = append(refused, o.judge(t.probed))
	}
	if err := errors.Join(refused...); err != nil {
		return nil, err
	}
	return writeAll(ctx, targets)
}

// judge decides whether what was found may be overwritten.
func (o *FormatOptions) judge(p *Probed) error {
	if p.Empty() {
		return nil
	}
	needs := OverwriteBcache
	for i := range p.Signatures {
		if p.Signatures[i].Bcache == nil {
			needs = OverwriteAnything
		}
	}
	if len(p.Unread) > 0 {
		needs = OverwriteAnything
	}
	unflushed := p.Unflushed() != UnflushedNone
	if o.Overwrite >= needs && (o.DiscardUnflushed || !unflushed) {
		return nil
	}
	return &FormatRefusal{
		Device: p.Device, Found: p.Signatures, Unread: p.Unread,
		NeedsOverwrite: needs, NeedsDiscardUnflushed: unflushed,
	}
}

// A formatTarget is one device on its way.
type formatTarget struct {
	dev     blockdev.Device
	info    blockdev.Info
	io      *blockdev.IO
	sb      *ondisk.Superblock
	limit   int64 // bytes from here on are not touched
	journal bool  // an earlier life of the set could be found in the journal buckets
	probed  *Probed
	undo    []formatSaved
	written bool
	lost    bool // something was overwritten that cannot be put back
}

// plan checks the options and makes the superblocks.
func (o *FormatOptions) plan() ([]*formatTarget, error) {
	var devs []blockdev.Device
	if o.Cache != nil {
		devs = append(devs, o.Cache)
	}
	devs = append(devs, o.Backing...)
	f := *o
	if err := f.fill(devs); err != nil {
		return nil, err
	}
	var targets []*formatTarget
	var errs []error
	for _, dev := range devs {
		t := &formatTarget{dev: dev, info: dev.Info(), journal: !o.SetUUID.IsZero()}
		var err error
		if dev == o.Cache {
			err = f.cacheSuper(t)
		} else {
			err = f.backingSuper(t)
		}
		if err == nil {
			t.sb.SetChecksum()
			// What we write, we would accept: this is the net below the rules above, which say more.
			access, limits := t.sb.Check(ondisk.Host{DeviceBytes: t.info.Size, LogicalBlock: t.info.LogicalBlock})
			if access != ondisk.AccessWrite {
				err = fmt.Errorf("%s: %w", t.info.Name, limits[0])
			}
		}
		targets = append(targets, t)
		errs = append(errs, err)
	}
	return targets, errors.Join(errs...)
}

// fill checks what concerns all devices and puts in the defaults.
func (o *FormatOptions) fill(devs []blockdev.Device) error {
	var errs []error
	rule := func(field, value, rule, remedy string) {
		errs = append(errs, &FormatRuleError{Field: field, Value: value, Rule: rule, Remedy: remedy})
	}
	if len(devs) == 0 {
		return errors.New("no device to format")
	}
	largest := devs[0].Info()
	for _, d := range devs {
		if i := d.Info(); i.LogicalBlock > largest.LogicalBlock {
			largest = i
		}
	}
	if o.Block == 0 {
		o.Block = int64(largest.LogicalBlock)
	}
	switch {
	case !formatPow2(o.Block) || o.Block < minBlockBytes || o.Block > ondisk.PageSize:
		remedy := ""
		if o.Block == int64(largest.LogicalBlock) {
			remedy = "it is the logical block of " + largest.Name + ", which cannot be part of a set"
		}
		rule("block size", SizeText(o.Block), "must be a power of two from 512 to 4096 bytes", remedy)
	case o.Block < int64(largest.LogicalBlock):
		rule("block size", SizeText(o.Block), fmt.Sprintf("must not be smaller than the logical block of %s, %d bytes", largest.Name, largest.LogicalBlock),
			fmt.Sprintf("use %d", largest.LogicalBlock))
	}
	if o.Bucket == 0 {
		o.Bucket = DefaultBucketBytes
	}
	switch {
	case !formatPow2(o.Bucket):
		rule("bucket size", SizeText(o.Bucket), "must be a power of two", "")
	case o.Bucket < o.Block:
		rule("bucket size", SizeText(o.Bucket), "must not be smaller than the block size, "+SizeText(o.Block), "")
	case o.Bucket < ondisk.PageSize:
		rule("bucket size", SizeText(o.Bucket), "must be at least 4096 bytes, a page", "")
	case o.Bucket > 1<<31*ondisk.SectorSize:
		rule("bucket size", SizeText(o.Bucket), "must be at most 1TiB", "")
	}
	if o.DataOffset == 0 {
		o.DataOffset = ondisk.DefaultDataOffset * ondisk.SectorSize
	}
	if o.DataOffset < ondisk.DefaultDataOffset*ondisk.SectorSize {
		rule("data offset", formatSectors(o.DataOffset), "must be at least 16 sectors (8192 bytes): the superblock ends there", "")
	} else if unit := max(o.Block, minBlockBytes); formatPow2(unit) && o.DataOffset%unit != 0 {
		rule("data offset", formatSectors(o.DataOffset), "must be a multiple of the block size, "+SizeText(unit), "")
	}
	if o.SetUUID.IsZero() {
		o.SetUUID = ondisk.NewUUID()
	}
	if !o.UUID.IsZero() && len(devs) > 1 {
		rule("uuid", o.UUID.String(), fmt.Sprintf("is for one device, and %d are given", len(devs)), "the set uuid is a different one")
	}
	if o.Label != "" && len(o.Backing) > 1 {
		rule("label", strconv.Quote(o.Label), fmt.Sprintf("is for one backing device, and %d are given", len(o.Backing)), "")
	}
	if o.Replacement > ondisk.Random {
		rule("replacement policy", o.Replacement.String(), "is not known", "")
	}
	if o.CacheMode > ondisk.ModeNone {
		rule("cache mode", o.CacheMode.String(), "is not known", "")
	}
	return errors.Join(errs...)
}

// super makes what both kinds of superblock have in common.
func (o *FormatOptions) super() *ondisk.Superblock {
	uuid := o.UUID
	if uuid.IsZero() {
		uuid = ondisk.NewUUID()
	}
	sb := &ondisk.Superblock{
		Offset: ondisk.SuperblockSector, Magic: ondisk.Magic, UUID: uuid, SetUUID: o.SetUUID,
		BlockSize: uint16(o.Block / ondisk.SectorSize),
	}
	if o.Bucket <= MaxPlainBucket {
		sb.BucketSize16 = uint16(o.Bucket / ondisk.SectorSize)
	}
	return sb
}

// cacheSuper makes the superblock of the cache device, as one that no kernel has activated: version 0, or 5 where
// the bucket size does not fit its field.
func (o *FormatOptions) cacheSuper(t *formatTarget) error {
	t.limit = t.info.Size
	sb := o.super()
	if o.Bucket > MaxPlainBucket {
		sb.Version = ondisk.VersionCacheFeature
		sb.Incompat = ondisk.IncompatLargeBucket
		sb.BucketSize16 = uint16(bits.TrailingZeros64(uint64(o.Bucket / ondisk.SectorSize)))
	}
	n := t.info.Size / o.Bucket
	if n < ondisk.MinCacheBuckets {
		return o.tooFew(t, n)
	}
	if n > maxBuckets {
		return &FormatRuleError{
			Device: t.info.Name, Field: "bucket size", Value: SizeText(o.Bucket),
			Rule:   fmt.Sprintf("gives %d buckets on %s, and this program reads sets of up to %d", n, SizeText(t.info.Size), maxBuckets),
			Remedy: "use a larger bucket size",
		}
	}
	sb.Word184 = uint64(n)
	sb.NrInSet = 1
	sb.FirstBucket = uint16(23*ondisk.SectorSize/o.Bucket + 1) // 24 sectors are kept clear
	if o.Discard {
		sb.Flags |= ondisk.FlagDiscard
	}
	sb.SetReplacement(o.Replacement)
	if len(o.Backing) == 0 {
		if err := sb.SetLabel(o.Label); err != nil {
			return err
		}
	}
	t.sb = sb
	return nil
}

// tooFew says how many buckets there are, and what would do.
func (o *FormatOptions) tooFew(t *formatTarget, n int64) error {
	remedy := fmt.Sprintf("use a device of at least %s", SizeText(ondisk.MinCacheBuckets*o.Bucket))
	fits := o.Bucket
	for fits > max(o.Block, ondisk.PageSize) && t.info.Size/fits < ondisk.MinCacheBuckets {
		fits /= 2
	}
	if t.info.Size/fits >= ondisk.MinCacheBuckets {
		remedy += fmt.Sprintf(", or a bucket size of %s", SizeText(fits))
	}
	if o.Bucket > math.MaxInt64/ondisk.MinCacheBuckets {
		remedy = ""
	}
	return &FormatRuleError{
		Device: t.info.Name, Field: "bucket size", Value: SizeText(o.Bucket),
		Rule:   fmt.Sprintf("gives %d buckets on %s, and at least %d are needed", n, SizeText(t.info.Size), ondisk.MinCacheBuckets),
		Remedy: remedy,
	}
}

// backingSuper makes the superblock of a backing device.
func (o *FormatOptions) backingSuper(t *formatTarget) error {
	t.limit = o.DataOffset
	if o.DataOffset > t.info.Size-o.Block {
		return &FormatRuleError{
			Device: t.info.Name, Field: "data offset", Value: formatSectors(o.DataOffset),
			Rule:   fmt.Sprintf("leaves no room for one block of %d bytes on a device of %d bytes", o.Block, t.info.Size),
			Remedy: "",
		}
	}
	sb := o.super()
	sb.Version = ondisk.VersionBacking
	if o.DataOffset != ondisk.DefaultDataOffset*ondisk.SectorSize {
		sb.Version = ondisk.VersionBackingOff
		sb.Word184 = uint64(o.DataOffset / ondisk.SectorSize)
	}
	sb.SetCacheMode(o.CacheMode)
	if err := sb.SetLabel(o.Label); err != nil {
		return err
	}
	t.sb = sb
	return nil
}

func formatPow2(n int64) bool { return n > 0 && n&(n-1) == 0 }

func formatSectors(n int64) string {
	if n%ondisk.SectorSize != 0 {
		return fmt.Sprintf("%d bytes", n)
	}
	return fmt.Sprintf("%d sectors (%d bytes)", n/ondisk.SectorSize, n)
}

// SizeText writes a size in bytes with the largest binary unit that divides it: 524288 is "512KiB".
func SizeText(n int64) string {
	units := []string{"", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}
	i := 0
	for n != 0 && n&1023 == 0 && i < len(units)-1 {
		n >>= 10
		i++
	}
	if i == 0 {
		return strconv.FormatInt(n, 10) + " bytes"
	}
	return strconv.FormatInt(n, 10) + units[i]
}
