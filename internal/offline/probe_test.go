package offline

import (
	"encoding/binary"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// TestProbeMarks puts each mark of the table on a disk by itself.
func TestProbeMarks(t *testing.T) {
	for _, m := range probeMarks {
		size := int64(128 << 20)
		if m.off > size {
			size = m.off + 1<<20
		}
		dev := formatMemory(t, size)
		off := m.off
		if off < 0 {
			off += size
		}
		copy(dev.Bytes()[off:], m.magic)
		p, err := Probe(t.Context(), dev, nil)
		if err != nil {
			t.Fatal(err)
		}
		if len(p.Signatures) != 1 || p.Signatures[0].Name != m.name || p.Signatures[0].Offset != off {
			t.Errorf("%s at %d: found %v", m.name, off, p.Signatures)
		}
		dev.Close()
	}
}

func TestProbeOthers(t *testing.T) {
	const size = 128 << 20
	le, be := binary.LittleEndian, binary.BigEndian
	for _, c := range []struct {
		want string
		put  func(b []byte)
	}{
		{"ZFS pool member, label 0 at byte 135168", func(b []byte) { le.PutUint64(b[135168:], 0x00bab10c) }},
		{"ZFS pool member, label 3 at byte 134086656", func(b []byte) { be.PutUint64(b[134086656:], 0x00bab10c) }},
		{"hfsplus file system at byte 1024", func(b []byte) { copy(b[1024:], "H+\x00\x04") }},
		{"nilfs2 file system at byte 134213638", func(b []byte) {
			le.PutUint32(b[size-4096:], 2)
			le.PutUint16(b[size-4096+6:], 0x3434)
			le.PutUint16(b[size-4096+8:], 280)
		}},
		{"swap space at byte 65526", func(b []byte) { copy(b[65526:], "SWAPSPACE2") }},
		{"hibernated system in swap space at byte 4086", func(b []byte) { copy(b[4086:], "S1SUSPEND\x00") }},
		{"LUKS2 header (second) at byte 4194304", func(b []byte) { copy(b[4<<20:], "SKUL\xba\xbe") }},
		{"GPT at byte 4096", func(b []byte) { copy(b[4096:], "EFI PART") }},
		{"GPT (second copy) at byte 134213632", func(b []byte) { copy(b[size-4096:], "EFI PART") }},
		{"ext3 file system at byte 1080", func(b []byte) {
			le.PutUint16(b[1080:], 0xef53)
			le.PutUint32(b[1024+92:], 4)
		}},
		{"ext2 file system at byte 1080", func(b []byte) { le.PutUint16(b[1080:], 0xef53) }},
		{"ext3 or ext4 journal at byte 1080", func(b []byte) {
			le.PutUint16(b[1080:], 0xef53)
			le.PutUint32(b[1024+96:], 8)
		}},
		{"md RAID member, metadata 0.90 at byte 134152192", func(b []byte) { be.PutUint32(b[134152192:], 0xa92b4efc) }},
	} {
		dev := formatMemory(t, size)
		c.put(dev.Bytes())
		p, err := Probe(t.Context(), dev, nil)
		if err != nil {
			t.Fatal(err)
		}
		if len(p.Signatures) != 1 || p.Signatures[0].String() != c.want {
			t.Errorf("found %v, want %s", p.Signatures, c.want)
		}
		// And a cache format leaves none of it.
		made, err := Format(t.Context(), FormatOptions{Cache: dev, Bucket: 64 << 10, Overwrite: OverwriteAnything})
		if err != nil || len(made[0].Overwritten) != 1 {
			t.Errorf("%s: %v, %v", c.want, made, err)
		}
		dev.Close()
	}
}

// A boot sector has the mark of a partition table, and no table.
func TestProbeBootSectorIsNoTable(t *testing.T) {
	for name, put := range map[string]func(b []byte){
		"no entry":        func([]byte) {},
		"entry of size 0": func(b []byte) { b[446+4] = 0x83 },
		"code": func(b []byte) {
			copy(b[446:], "Remove disks or other media. Press any key to restart the disk.")
		},
	} {
		dev := formatMemory(t, 1<<20)
		b := dev.Bytes()
		b[510], b[511] = 0x55, 0xaa
		put(b)
		p, err := Probe(t.Context(), dev, nil)
		if err != nil || !p.Empty() {
			t.Errorf("%s: %v, %v", name, p, err)
		}
	}
}

// TestProbeEmptyAndSmall looks at disks of all small sizes, empty and full of noise.
func TestProbeEmptyAndSmall(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for _, size := range []int64{512, 1024, 4096, 4608, 8192, 8704, 64 << 10, 100 << 10, 128 << 10, 256 << 10, 300 << 10, 1 << 20, 1<<20 + 512} {
		dev := formatMemory(t, size)
		p, err := Probe(t.Context(), dev, nil)
		if err != nil || !p.Empty() {
			t.Errorf("empty disk of %d bytes: %v, %v", size, p, err)
		}
		for i := range dev.Bytes() {
			dev.Bytes()[i] = byte(rng.Uint32())
		}
		if p, err = Probe(t.Context(), dev, nil); err != nil || !p.Empty() {
			t.Errorf("noise of %d bytes: %v, %v", size, p, err)
		}
		dev.Close()
	}
	empty := withInfo(formatMemory(t, 512), func(i *blockdev.Info) { i.Size = 0 })
	if p, err := Probe(t.Context(), empty, nil); err != nil || !p.Empty() {
		t.Errorf("disk of no bytes: %v, %v", p, err)
	}
}

// TestProbeUnreadJoins holds that neighbouring places that cannot be read are one range, and that there is an end.
func TestProbeUnreadJoins(t *testing.T) {
	f := blockdev.NewFaulty(formatMemory(t, 1<<20), 1)
	f.Add(blockdev.Fault{Off: 0, Len: 12288})
	p, err := Probe(t.Context(), f, nil)
	if err != nil || len(p.Unread) != 1 || p.Unread[0].Offset != 0 || p.Unread[0].Length != 12288 {
		t.Errorf("%v, %v", p.Unread, err)
	}
	f.Clear()
	f.Add(blockdev.Fault{})
	p, err = Probe(t.Context(), f, nil)
	if err != nil || len(p.Unread) == 0 || p.Unflushed() != UnflushedPossible {
		t.Errorf("%v, %v", p, err)
	}
	last := p.Unread[len(p.Unread)-1].String()
	if want := "too many such places, the rest was not looked at"; !strings.Contains(last, want) {
		t.Errorf("%q is not in %q", want, last)
	}
}
