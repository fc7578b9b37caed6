package offline

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// A Signature is a sign that a device holds something.
type Signature struct {
	Name   string       `json:"name"`   // "ext4 file system"
	Offset int64        `json:"offset"` // where its mark begins, in bytes
	Length int64        `json:"length"` // of what has to be cleared so that it is not found any more, in bytes
	Detail string       `json:"detail,omitempty"`
	Bcache *BcacheFound `json:"bcache,omitempty"` // for a superblock of our own format
}

// String returns what was found and where.
func (s *Signature) String() string {
	text := fmt.Sprintf("%s at byte %d", s.Name, s.Offset)
	if s.Detail != "" {
		text += " (" + s.Detail + ")"
	}
	return text
}

// BcacheFound is what a bcache superblock that is in the way says of itself.
type BcacheFound struct {
	Role      string      `json:"role"` // "cache device", "backing device", "unknown"
	Version   uint64      `json:"version"`
	UUID      ondisk.UUID `json:"uuid"`
	SetUUID   ondisk.UUID `json:"set_uuid"`
	State     string      `json:"state,omitempty"` // of a backing device
	Unflushed Unflushed   `json:"unflushed"`
	Why       string      `json:"why"` // what Unflushed was concluded from
}

// Unflushed says whether data is recorded that exists in the cache alone.
type Unflushed uint8

// Values of Unflushed.
const (
	UnflushedNone     Unflushed = iota // the superblock, or a scan, says there is none
	UnflushedPossible                  // nothing proves that there is none
	UnflushedRecorded                  // there is
)

var unflushedNames = [...]string{"none", "possible", "recorded"}

func (u Unflushed) String() string { return unflushedNames[u] }

// MarshalText makes an Unflushed a string in JSON.
func (u Unflushed) MarshalText() ([]byte, error) { return []byte(u.String()), nil }

// An Unread is a part that should have been looked at and could not be read: anything may be there.
type Unread struct {
	Offset, Length int64 // bytes
	Err            error
}

func (u *Unread) String() string {
	text := u.Err.Error()
	if e := (*blockdev.IOError)(nil); errors.As(u.Err, &e) { // the place is being said here
		text = strings.Replace(text, e.Error(), e.Err.Error(), 1)
	}
	return fmt.Sprintf("bytes %d to %d cannot be read (%s), so something may be there", u.Offset, u.Offset+u.Length-1, text)
}

// Probed is what is on a device, as far as marks tell.
type Probed struct {
	Device     string
	Signatures []Signature // by offset
	Unread     []Unread    // by offset
}

// Empty reports whether nothing was found and everything could be read.
func (p *Probed) Empty() bool { return len(p.Signatures) == 0 && len(p.Unread) == 0 }

// Unflushed returns the worst that is known of unflushed data on the device. Where the superblock's place cannot
// be read, it is possible.
func (p *Probed) Unflushed() Unflushed {
	worst := UnflushedNone
	for i := range p.Signatures {
		if b := p.Signatures[i].Bcache; b != nil {
			worst = max(worst, b.Unflushed)
		}
	}
	for _, u := range p.Unread {
		if u.Offset < ondisk.SuperblockOffset+ondisk.SuperblockBytes && u.Offset+u.Length > ondisk.SuperblockOffset {
			worst = max(worst, UnflushedPossible)
		}
	}
	return worst
}

// ScanUnflushed returns how many bytes of a cache device's content exist there alone. It fails where that cannot
// be told.
type ScanUnflushed func(ctx context.Context, dev blockdev.Device) (int64, error)

// Probe looks for marks of file systems, containers, RAID, partition tables and bcache on a device. It only
// reads. What cannot be read is part of the result; the error is that of ctx, or of a device that cannot be used
// at all. scan may be nil: then a cache device that has been used counts as possibly holding unflushed data.
func Probe(ctx context.Context, dev blockdev.Device, scan ScanUnflushed) (*Probed, error) {
	bio, err := blockdev.NewIO(dev, 1)
	if err != nil {
		return nil, err
	}
	defer bio.Close()
	p := &prober{
		ctx: ctx, dev: dev, io: bio.WithPurpose(blockdev.ForScan), size: dev.Info().Size,
		logical: int64(dev.Info().LogicalBlock), blocks: make(map[int64][]byte),
		found: &Probed{Device: dev.Info().Name},
	}
	p.prefetch(0, 256<<10)
	p.prefetch(p.size-64<<10, 64<<10)
	p.table()
	for _, look := range []func(){p.ext, p.weak, p.swap, p.luks, p.raid, p.gpt, p.mbr, p.zfs} {
		look()
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	p.bcache(scan)
	p.finish()
	return p.found, ctx.Err()
}

// probeBlock is the unit in which a device is read and kept; most marks lie at the start, the rest near the end.
const probeBlock = 4096

// probePatience is how many unreadable blocks are enough to stop looking: each can take a dying disk a minute.
const probePatience = 8

type prober struct {
	ctx     context.Context
	dev     blockdev.Device
	io      *blockdev.IO
	size    int64
	logical int64
	blocks  map[int64][]byte // by number; nil: cannot be read
	bad     int              // how many cannot be read
	found   *Probed
}

// prefetch reads a range in one go. Where that fails, at sorts out what is readable.
func (p *prober) prefetch(off, n int64) {
	off = max(off, 0) &^ (probeBlock - 1)
	if off >= p.size || p.bad > 0 || p.ctx.Err() != nil {
		return
	}
	b := make([]byte, min(n+probeBlock, p.size-off))
	if p.io.ReadAt(b, off) != nil {
		return
	}
	for ; len(b) > 0; off += probeBlock {
		m := min(probeBlock, len(b))
		if m < probeBlock && off+int64(m) < p.size {
			return // part of a block only
		}
		p.blocks[off/probeBlock] = b[:m:m]
		b = b[m:]
	}
}

// at returns n bytes at off, or nil where they do not lie on the device or cannot be read.
func (p *prober) at(off int64, n int) []byte {
	if off < 0 || off > p.size-int64(n) {
		return nil
	}
	out := make([]byte, 0, n)
	for len(out) < n {
		pos := off + int64(len(out))
		b := p.block(pos / probeBlock)
		if b == nil {
			return nil
		}
		b = b[pos%probeBlock:]
		out = append(out, b[:min(len(b), n-len(out))]...)
	}
	return out
}

func (p *prober) block(i int64) []byte {
	b, known := p.blocks[i]
	if known || p.bad >= probePatience || p.ctx.Err() != nil {
		return b
	}
	off := i * probeBlock
	b = make([]byte, min(probeBlock, p.size-off))
	if err := p.io.ReadAt(b, off); err != nil {
		p.bad++
		p.found.Unread = append(p.found.Unread, Unread{Offset: off, Length: int64(len(b)), Err: err})
		b = nil
	}
	p.blocks[i] = b
	return b
}

// is reports whether the bytes at off are magic.
func (p *prober) is(off int64, magic string) bool { return string(p.at(off, len(magic))) == magic }

func (p *prober) add(name string, off, length int64, detail string, args ...any) {
	p.found.Signatures = append(p.found.Signatures, Signature{Name: name, Offset: off, Length: length, Detail: fmt.Sprintf(detail, args...)})
}

// probeMarks are what can be told by bytes at one place. A negative offset counts from the end.
var probeMarks = []struct {
	name  string
	off   int64
	magic string
}{
	{"XFS file system", 0, "XFSB"},
	{"btrfs file system", 64<<10 + 64, "_BHRfS_M"},
	{"btrfs file system (second superblock)", 64<<20 + 64, "_BHRfS_M"},
	{"btrfs file system (third superblock)", 256<<30 + 64, "_BHRfS_M"},
	{"LVM2 physical volume", 0, "LABELONE"},
	{"LVM2 physical volume", 512, "LABELONE"},
	{"LVM2 physical volume", 1024, "LABELONE"},
	{"LVM2 physical volume", 1536, "LABELONE"},
	{"bcachefs file system", 4096 + 24, "\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"},
	{"vfat file system", 0x52, "FAT32   "},
	{"vfat file system", 0x36, "FAT12   "},
	{"vfat file system", 0x36, "FAT16   "},
	{"exfat file system", 3, "EXFAT   "},
	{"ntfs file system", 3, "NTFS    "},
	{"ntfs file system (second boot sector)", -512 + 3, "NTFS    "},
	{"BitLocker volume", 3, "-FVE-FS-"},
	{"iso9660 file system", 32768 + 1, "CD001"},
	{"udf file system", 32768 + 1, "BEA01"},
	{"f2fs file system", 1024, "\x10\x20\xf5\xf2"},
	{"f2fs file system (second superblock)", 4096 + 1024, "\x10\x20\xf5\xf2"},
	{"erofs file system", 1024, "\xe2\xe1\xf5\xe0"},
	{"squashfs file system", 0, "hsqs"},
	{"reiserfs file system", 64<<10 + 52, "ReIsEr"},
	{"jfs file system", 32768, "JFS1"},
	{"gfs2 file system", 64 << 10, "\x01\x16\x19\x70"},
	{"ufs2 file system", 64<<10 + 1372, "\x19\x01\x54\x19"},
	{"apfs container", 32, "NXSB"},
	{"ocfs2 file system", 1024, "OCFSV2"},
	{"ocfs2 file system", 2048, "OCFSV2"},
	{"ocfs2 file system", 4096, "OCFSV2"},
	{"ocfs2 file system", 8192, "OCFSV2"},
	{"Ceph BlueStore", 0, "bluestore block device"},
	{"dm-integrity volume", 0, "integrt\x00"},
	{"dm-verity volume", 0, "verity\x00\x00"},
	{"dm snapshot store", 0, "SnAp"},
	{"dm thin pool metadata", 32, "\xba\x52\x9c\x01\x00\x00\x00\x00"},
	{"dm-cache metadata", 32, "\x03\xc4\x18\x00\x00\x00\x00\x00"},
	{"VDO volume", 0, "dmvdo001"},
	{"Stratis pool member", 512 + 4, "!Stra0tis\x86\xff\x02^\x41rh"},
	{"Stratis pool member", 4608 + 4, "!Stra0tis\x86\xff\x02^\x41rh"},
	{"DDF RAID member", -512, "\xde\x11\xde\x11"},
	{"Intel RAID member", -1024, "Intel Raid ISM Cfg Sig. "},
	{"DRBD metadata", -4096 + 60, "\x83\x74\x02\x6b"},
	{"DRBD metadata", -4096 + 60, "\x83\x74\x02\x6d"},
	{"qcow2 image", 0, "QFI\xfb"},
}

func (p *prober) table() {
	for _, m := range probeMarks {
		off := m.off
		if off < 0 {
			off += p.size
		}
		if p.is(off, m.magic) {
			p.add(m.name, off, int64(len(m.magic)), "%s", p.label(m.name))
		}
	}
}

// label names the file system where it is easy to find.
func (p *prober) label(name string) string {
	var b []byte
	switch name {
	case "XFS file system":
		b = p.at(108, 12)
	case "btrfs file system":
		b = p.at(64<<10+0x12b, 64)
	}
	return probeLabel(b)
}

func probeLabel(b []byte) string {
	s, _, _ := strings.Cut(string(b), "\x00")
	if s == "" {
		return ""
	}
	return fmt.Sprintf("label %q", s)
}

// ext looks for ext2, ext3 and ext4: magic 0xef53 at 1080, told apart by the features that need ext4.
func (p *prober) ext() {
	const at = 1024
	b := p.at(at, 264)
	le := binary.LittleEndian
	if b == nil || le.Uint16(b[56:]) != 0xef53 || le.Uint32(b[24:]) > 6 {
		return
	}
	compat, incompat, ro := le.Uint32(b[92:]), le.Uint32(b[96:]), le.Uint32(b[100:])
	name := "ext2 file system"
	switch {
	case incompat&0x8 != 0:
		name = "ext3 or ext4 journal"
	case incompat&^0x1f != 0 || ro&^0x7 != 0:
		name = "ext4 file system"
	case compat&0x4 != 0:
		name = "ext3 file system"
	}
	p.add(name, at+56, 2, "%s", probeLabel(b[120:136]))
}

// weak looks for marks of two bytes that need more evidence.
func (p *prober) weak() {
	be, le := binary.BigEndian, binary.LittleEndian
	if b := p.at(1024, 12); b != nil {
		if v := be.Uint16(b[2:]); (string(b[:2]) == "H+" || string(b[:2]) == "HX") && (v == 4 || v == 5) {
			p.add("hfsplus file system", 1024, 2, "")
		}
	}
	for _, off := range []int64{1024, p.size&^4095 - 4096} {
		if b := p.at(off, 12); b != nil && le.Uint32(b) == 2 && le.Uint16(b[6:]) == 0x3434 && le.Uint16(b[8:]) >= 100 && le.Uint16(b[8:]) <= 1024 {
			p.add("nilfs2 file system", off+6, 2, "")
		}
	}
}

// swap looks for swap space, whose mark ends its first page, of whatever size; a hibernated system is there too.
func (p *prober) swap() {
	for _, page := range []int64{4096, 8192, 16384, 32768, 65536} {
		switch s := string(p.at(page-10, 10)); {
		case s == "SWAPSPACE2" || s == "SWAP-SPACE":
			p.add("swap space", page-10, 10, "%s", probeLabel(p.at(1024+28, 16)))
		case s == "LINHIB0001" || strings.HasPrefix(s, "S1SUSPEND") || strings.HasPrefix(s, "S2SUSPEND") || strings.HasPrefix(s, "ULSUSPEND"):
			p.add("hibernated system in swap space", page-10, 10, "")
		}
	}
}

// luks looks for LUKS headers; version 2 has a second one at one of nine places.
func (p *prober) luks() {
	if b := p.at(0, 8); b != nil && string(b[:6]) == "LUKS\xba\xbe" {
		p.add(fmt.Sprintf("LUKS%d header", binary.BigEndian.Uint16(b[6:])), 0, 6, "")
	}
	for off := int64(0x4000); off <= 0x400000; off *= 2 {
		if p.is(off, "SKUL\xba\xbe") {
			p.add("LUKS2 header (second)", off, 6, "")
		}
	}
}

// raid looks for members of Linux software RAID: metadata 0.90 and 1.0 near the end, 1.1 at the start, 1.2 at 4096.
func (p *prober) raid() {
	for _, m := range []struct {
		version string
		off     int64
	}{
		{"0.90", p.size&^(64<<10-1) - 64<<10},
		{"1.0", (p.size/512 - 16) &^ 7 * 512},
		{"1.1", 0},
		{"1.2", 4096},
	} {
		b := p.at(m.off, 64)
		if b == nil {
			continue
		}
		le, v0 := binary.LittleEndian, m.version == "0.90"
		switch {
		case le.Uint32(b) == 0xa92b4efc && (v0 && le.Uint32(b[4:]) == 0 || !v0 && le.Uint32(b[4:]) == 1):
		case v0 && binary.BigEndian.Uint32(b) == 0xa92b4efc:
		default:
			continue
		}
		detail := ""
		if !v0 {
			if name, _, _ := strings.Cut(string(b[32:64]), "\x00"); name != "" {
				detail = fmt.Sprintf("array %q", name)
			}
		}
		p.add("md RAID member, metadata "+m.version, m.off, 4, "%s", detail)
	}
}

// gpt looks for both copies of a GUID partition table, in units of 512 and 4096 bytes, and where the first copy
// says that the second is.
func (p *prober) gpt() {
	const magic = "EFI PART"
	seen := map[int64]bool{}
	for _, unit := range []int64{512, 4096} {
		if p.is(unit, magic) {
			seen[unit] = true
			p.add("GPT", unit, 8, "")
			if b := p.at(unit+32, 8); b != nil {
				if lba := binary.LittleEndian.Uint64(b); lba > 1 && lba < uint64(p.size/unit) {
					p.gptBackup(int64(lba)*unit, seen)
				}
			}
		}
		p.gptBackup(p.size&^(unit-1)-unit, seen)
	}
}

func (p *prober) gptBackup(off int64, seen map[int64]bool) {
	if !seen[off] && p.is(off, "EFI PART") {
		seen[off] = true
		p.add("GPT (second copy)", off, 8, "")
	}
}

// mbr looks for a DOS partition table: the boot mark and at least one entry, and entries that make sense, for a
// boot sector has the mark too.
func (p *prober) mbr() {
	b := p.at(0, 512)
	if b == nil || b[510] != 0x55 || b[511] != 0xaa {
		return
	}
	var kinds []string
	for e := b[446:510]; len(e) > 0; e = e[16:] {
		if e[0]&0x7f != 0 {
			return
		}
		if e[4] != 0 && binary.LittleEndian.Uint32(e[12:]) != 0 {
			kinds = append(kinds, fmt.Sprintf("%#02x", e[4]))
		}
	}
	if len(kinds) > 0 {
		p.add("MBR partition table", 446, 66, "%d of 4 entries in use, types %s", len(kinds), strings.Join(kinds, ", "))
	}
}

// zfs looks for uberblocks in the four labels, two at each end.
func (p *prober) zfs() {
	const label, from, to = 256 << 10, 128 << 10, 256 << 10
	end := p.size &^ (label - 1)
	var seen []int64
	for i, at := range []int64{0, label, end - 2*label, end - label} {
		if slices.Contains(seen, at) {
			continue
		}
		seen = append(seen, at)
		p.prefetch(at+from, to-from)
		for off := at + from; off < at+to; off += 1024 {
			b := p.at(off, 8)
			if b != nil && (binary.LittleEndian.Uint64(b) == 0x00bab10c || binary.BigEndian.Uint64(b) == 0x00bab10c) {
				p.add(fmt.Sprintf("ZFS pool member, label %d", i), off, at+to-off, "")
				break
			}
		}
	}
}

// bcache looks for a superblock of our own format and says whether unflushed data is recorded.
func (p *prober) bcache(scan ScanUnflushed) {
	const at = ondisk.SuperblockOffset
	if !p.is(at+24, string(ondisk.Magic[:])) {
		return
	}
	sb, err := ondisk.DecodeSuperblock(p.at(at, ondisk.SuperblockBytes))
	if err != nil { // the device ends within it
		p.add("bcache superblock, cut off", at, p.size-at, "")
		return
	}
	f := &BcacheFound{Role: "unknown", Version: sb.Version, UUID: sb.UUID, SetUUID: sb.SetUUID}
	name := "bcache superblock of an unknown version"
	access, limits := sb.Check(ondisk.Host{})
	damaged := sb.NJournal > ondisk.MaxJournalBuckets || !sb.ChecksumOK()
	switch {
	case sb.IsBacking():
		f.Role, name = "backing device", "bcache backing superblock"
		f.State = sb.State().String()
	case sb.IsCache():
		f.Role, name = "cache device", "bcache cache superblock"
	}
	switch {
	case damaged:
		f.Unflushed, f.Why = UnflushedPossible, "its checksum is wrong"
	case f.Role == "unknown":
		f.Unflushed, f.Why = UnflushedPossible, fmt.Sprintf("version %d is not known", sb.Version)
	case sb.IsBacking() && sb.State() == ondisk.StateDirty:
		f.Unflushed, f.Why = UnflushedRecorded, "the state is dirty: its cache has newer data"
	case sb.IsBacking():
		f.Why = "the state is " + f.State
	case !sb.Sync():
		f.Why = "never used since it was formatted"
	default:
		f.Unflushed, f.Why = p.scan(scan, access, limits)
	}
	p.found.Signatures = append(p.found.Signatures, Signature{
		Name: name, Offset: at, Length: ondisk.SuperblockBytes, Bcache: f,
		Detail: fmt.Sprintf("%s of set %v; unflushed data: %v, %s", f.Role, sb.SetUUID, f.Unflushed, f.Why),
	})
}

// scan finds out about unflushed data in a cache device that has been used.
func (p *prober) scan(scan ScanUnflushed, access ondisk.Access, limits []*ondisk.Limit) (Unflushed, string) {
	if access == ondisk.AccessNone {
		return UnflushedPossible, fmt.Sprintf("it has been used, and cannot be looked into: %v", limits[0])
	}
	if scan == nil {
		return UnflushedPossible, "it has been used"
	}
	switch n, err := scan(p.ctx, p.dev); {
	case err != nil:
		return UnflushedPossible, fmt.Sprintf("it has been used, and cannot be looked into: %v", err)
	case n > 0:
		return UnflushedRecorded, fmt.Sprintf("%d bytes", n)
	}
	return UnflushedNone, "it has been used, and all its data is on the backing devices"
}

// finish sorts what was found and joins neighbours.
func (p *prober) finish() {
	slices.SortStableFunc(p.found.Signatures, func(a, b Signature) int { return cmp.Compare(a.Offset, b.Offset) })
	slices.SortFunc(p.found.Unread, func(a, b Unread) int { return cmp.Compare(a.Offset, b.Offset) })
	joined := p.found.Unread[:0]
	for _, u := range p.found.Unread {
		if n := len(joined); n > 0 && joined[n-1].Offset+joined[n-1].Length == u.Offset {
			joined[n-1].Length += u.Length
			joined[n-1].Err = u.Err
			continue
		}
		joined = append(joined, u)
	}
	p.found.Unread = joined
	if p.bad >= probePatience {
		last := &joined[len(joined)-1]
		last.Err = fmt.Errorf("%w; too many such places, the rest was not looked at", last.Err)
	}
}

// ScanDirty is a ScanUnflushed that reads the whole index of the set.
func ScanDirty(ctx context.Context, dev blockdev.Device) (int64, error) {
	return ScanDirtyWith()(ctx, dev)
}

// ScanDirtyWith is ScanDirty that also looks into folders for what a process that died has left: see
// Options.RuntimeDirs. Where such a file cannot be used it fails.
func ScanDirtyWith(runtimeDirs ...string) ScanUnflushed {
	return func(ctx context.Context, dev blockdev.Device) (int64, error) {
		s, err := Open(ctx, dev, Options{RuntimeDirs: runtimeDirs})
		defer func() { s.Close() }() // it is there after an error too
		if err != nil {
			return 0, err
		}
		if f := s.Report.first(AtRisk); f != nil {
			return 0, &FindingError{*f}
		}
		return s.Stats.DirtyBytes, errors.Join(s.Mapped.Unused...)
	}
}
