package offline

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
)

const formatSize64 = 64 << 20

// case01 are the things that format meets: 64 MiB images.
var case01 = []struct {
	name string
	make func(t *testing.T, path string)
	want []string // "NAME at byte OFFSET", all of them
	// For our own formats: what the message says, and whether a plain overwrite is enough.
	says      string
	unflushed bool
}{
	{"ext4", func(t *testing.T, path string) { formatRun(t, "mkfs.ext4", "-q", "-L", "data", path) }, []string{"ext4 file system at byte 1080"}, `label "data"`, false},
	{"XFS", func(t *testing.T, path string) { formatRun(t, "mkfs.xfs", "-q", "--unsupported", path) }, []string{"XFS file system at byte 0"}, "", false},
	{"btrfs", func(t *testing.T, path string) { formatRun(t, "mkfs.btrfs", "-q", "--mixed", path) }, []string{"btrfs file system at byte 65600"}, "", false},
	{"swap", func(t *testing.T, path string) { formatRun(t, "mkswap", path) }, []string{"swap space at byte 4086"}, "", false},
	{
		"LUKS1",
		func(t *testing.T, path string) {
			formatRun(t, "cryptsetup", "luksFormat", "-q", "--type", "luks1", "--pbkdf-force-iterations", "1000", path, "-")
		},
		[]string{"LUKS1 header at byte 0"},
		"", false,
	},
	{
		"LUKS2",
		func(t *testing.T, path string) {
			formatRun(t, "cryptsetup", "luksFormat", "-q", "--type", "luks2", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000", path, "-")
		},
		[]string{"LUKS2 header at byte 0", "LUKS2 header (second) at byte 16384"},
		"", false,
	},
	{"LVM", func(_ *testing.T, path string) {
		putBytes(path, 512, []byte("LABELONE\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x20\x00\x00\x00LVM2 001"))
	}, []string{"LVM2 physical volume at byte 512"}, "", false},
	{"md 0.90", func(_ *testing.T, path string) {
		putUint32(path, formatSize64-64<<10, binary.LittleEndian, 0xa92b4efc, 0, 90)
	}, []string{"md RAID member, metadata 0.90 at byte 67043328"}, "", false},
	{"md 1.0", func(_ *testing.T, path string) {
		putUint32(path, formatSize64-8<<10, binary.LittleEndian, 0xa92b4efc, 1)
	}, []string{"md RAID member, metadata 1.0 at byte 67100672"}, "", false},
	{
		"md 1.1", func(_ *testing.T, path string) {
			putUint32(path, 0, binary.LittleEndian, 0xa92b4efc, 1)
			putBytes(path, 32, []byte("host:0"))
		},
		[]string{"md RAID member, metadata 1.1 at byte 0"},
		`array "host:0"`, false,
	},
	{"md 1.2", func(_ *testing.T, path string) {
		putUint32(path, 4096, binary.LittleEndian, 0xa92b4efc, 1)
	}, []string{"md RAID member, metadata 1.2 at byte 4096"}, "", false},
	{
		"GPT", func(t *testing.T, path string) { formatRun(t, "sgdisk", "-n", "1", path) },
		[]string{"MBR partition table at byte 446", "GPT at byte 512", "GPT (second copy) at byte 67108352"},
		"types 0xee", false,
	},
	{
		"GPT, only the second copy", func(t *testing.T, path string) {
			formatRun(t, "sgdisk", "-n", "1", path)
			putBytes(path, 0, make([]byte, 4096))
		},
		[]string{"GPT (second copy) at byte 67108352"},
		"", false,
	},
	{"MBR", func(t *testing.T, path string) {
		cmd := exec.Command(formatTool(t, "sfdisk"), "-q", path)
		cmd.Stdin = strings.NewReader("label: dos\nstart=2048, type=83\n")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("sfdisk: %v\n%s", err, out)
		}
	}, []string{"MBR partition table at byte 446"}, "1 of 4 entries in use, types 0x83", false},
	{"vfat", func(t *testing.T, path string) { formatRun(t, "mkfs.vfat", "-F", "32", path) }, []string{"vfat file system at byte 82"}, "", false},
	{
		"cache set, never used", func(t *testing.T, path string) { formatOurs(t, path, true, func(*ondisk.Superblock) {}) },
		[]string{"bcache cache superblock at byte 4096"},
		"cache device of set " + formatSet + "; unflushed data: none, never used", false,
	},
	{
		"cache set in use", func(t *testing.T, path string) {
			formatOurs(t, path, true, func(sb *ondisk.Superblock) { sb.Flags |= ondisk.FlagSync })
		},
		[]string{"bcache cache superblock at byte 4096"},
		"cache device of set " + formatSet + "; unflushed data: possible, it has been used", true,
	},
	{
		"backing, none", func(t *testing.T, path string) { formatState(t, path, ondisk.StateNone) },
		[]string{"bcache backing superblock at byte 4096"},
		"backing device of set " + formatSet + "; unflushed data: none, the state is none", false,
	},
	{
		"backing, clean", func(t *testing.T, path string) { formatState(t, path, ondisk.StateClean) },
		[]string{"bcache backing superblock at byte 4096"},
		"unflushed data: none, the state is clean", false,
	},
	{
		"backing, dirty", func(t *testing.T, path string) { formatState(t, path, ondisk.StateDirty) },
		[]string{"bcache backing superblock at byte 4096"},
		"unflushed data: recorded, the state is dirty", true,
	},
	{
		"backing, stale", func(t *testing.T, path string) { formatState(t, path, ondisk.StateStale) },
		[]string{"bcache backing superblock at byte 4096"},
		"unflushed data: none, the state is stale", false,
	},
	{
		"bcache, damaged", func(t *testing.T, path string) {
			formatOurs(t, path, true, func(*ondisk.Superblock) {})
			putBytes(path, 4096+112, []byte{1}) // seq
		},
		[]string{"bcache cache superblock at byte 4096"},
		"unflushed data: possible, its checksum is wrong", true,
	},
	{
		"bcache, unknown version", func(t *testing.T, path string) {
			formatOurs(t, path, true, func(sb *ondisk.Superblock) { sb.Version = 7 })
		},
		[]string{"bcache superblock of an unknown version at byte 4096"},
		"version 7 is not known", true,
	},
}

const formatSet = "11111111-2222-4333-8444-555555555555"

// formatOurs puts a superblock of our own format into an image.
func formatOurs(t *testing.T, path string, cache bool, change func(*ondisk.Superblock)) {
	t.Helper()
	dev, err := blockdev.Open(path, blockdev.Options{Engine: blockdev.EnginePread})
	if err != nil {
		t.Fatal(err)
	}
	o := FormatOptions{Bucket: 64 << 10}
	o.SetUUID, _ = ondisk.ParseUUID(formatSet)
	if cache {
		o.Cache = dev
	} else {
		o.Backing = []blockdev.Device{dev}
	}
	made, err := Format(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if err := dev.Close(); err != nil {
		t.Fatal(err)
	}
	sb := made[0].Super
	change(sb)
	sb.SetChecksum()
	var b [ondisk.SuperblockBytes]byte
	sb.Encode(b[:])
	if err := putBytes(path, ondisk.SuperblockOffset, b[:]); err != nil {
		t.Fatal(err)
	}
}

func formatState(t *testing.T, path string, s ondisk.State) {
	formatOurs(t, path, false, func(sb *ondisk.Superblock) { sb.SetState(s) })
}

func TestCase01FormatMeetsSomething(t *testing.T) {
	dir := t.TempDir()
	for _, c := range case01 {
		master := ""
		for _, cache := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/cache=%v", c.name, cache), func(t *testing.T) {
				if master == "" {
					master = filepath.Join(dir, c.name)
					if err := os.WriteFile(master, nil, 0o600); err != nil {
						t.Fatal(err)
					}
					if err := os.Truncate(master, formatSize64); err != nil {
						t.Fatal(err)
					}
					c.make(t, master)
				}
				path := filepath.Join(t.TempDir(), "disk.img")
				formatRun(t, "cp", "--sparse=always", master, path)
				dev := formatOpen(t, path)
				before := digest(t, path)
				o := FormatOptions{Backing: []blockdev.Device{dev}, Bucket: 64 << 10}
				if cache {
					o.Cache, o.Backing = dev, nil
				}

				// Without an option: refused, unchanged, and the message says what and where.
				_, err := Format(t.Context(), o)
				var refusal *FormatRefusal
				if !errors.As(err, &refusal) {
					t.Fatalf("not refused: %v", err)
				}
				var got []string
				for _, s := range refusal.Found {
					got = append(got, fmt.Sprintf("%s at byte %d", s.Name, s.Offset))
				}
				if !slices.Equal(got, c.want) {
					t.Errorf("found %q, want %q", got, c.want)
				}
				for _, text := range append(c.want, c.says, path) {
					if !strings.Contains(err.Error(), text) {
						t.Errorf("%q is not in the message %q", text, err)
					}
				}
				if refusal.NeedsDiscardUnflushed != c.unflushed {
					t.Errorf("needs the option for unflushed data: %v", refusal.NeedsDiscardUnflushed)
				}
				if digest(t, path) != before {
					t.Fatal("refused, and changed")
				}

				// A plain overwrite is not enough for unflushed data.
				o.Overwrite = OverwriteAnything
				if c.unflushed {
					if _, err := Format(t.Context(), o); !errors.As(err, &refusal) {
						t.Fatalf("not refused: %v", err)
					}
					if digest(t, path) != before {
						t.Fatal("refused, and changed")
					}
					o.DiscardUnflushed = true
				}
				made, err := Format(t.Context(), o)
				if err != nil {
					t.Fatal(err)
				}
				checkOverwritten(t, dev, made[0], master, cache)
			})
		}
	}
}

// checkOverwritten holds what a format with an overwrite option promises; before is a copy of the old content.
func checkOverwritten(t *testing.T, dev blockdev.Device, made Formatted, before string, cache bool) {
	t.Helper()
	p, err := Probe(t.Context(), dev, nil)
	if err != nil {
		t.Fatal(err)
	}
	var left []string
	for _, s := range p.Signatures {
		if s.Bcache == nil {
			left = append(left, s.String())
		}
	}
	var named []string
	for i := range made.Left {
		named = append(named, made.Left[i].String())
	}
	if !slices.Equal(left, named) {
		t.Errorf("left %q, named %q", left, named)
	}
	if cache {
		if len(left) > 0 {
			t.Errorf("a cache device still has %q", left)
		}
		if out := strings.TrimSpace(formatRun(t, "wipefs", "-n", "-p", "-O", "TYPE,OFFSET", dev.Info().Name)); out != "bcache,0x1018" {
			t.Errorf("libblkid finds\n%s", out)
		}
		return
	}
	if at := firstChange(t, before, dev.Info().Name, 8192); at >= 0 {
		t.Errorf("byte %d has changed, beyond the data offset", at)
	}
	for _, s := range made.Left {
		if s.Offset < 8192 {
			t.Errorf("%v was to be cleared", &s)
		}
	}
}

// firstChange returns the first byte from off on in which two files differ, -1 if there is none. Holes are skipped.
func firstChange(t *testing.T, a, b string, off int64) int64 {
	t.Helper()
	var files [2]*os.File
	for i, path := range []string{a, b} {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		files[i] = f
	}
	next := func(f *os.File) int64 {
		at, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
		if err != nil {
			return -1
		}
		return at
	}
	x, y := make([]byte, 64<<10), make([]byte, 64<<10)
	for {
		at := next(files[0])
		if o := next(files[1]); at < 0 || o >= 0 && o < at {
			at = o
		}
		if at < 0 {
			return -1
		}
		n, _ := files[0].ReadAt(x, at)
		m, _ := files[1].ReadAt(y, at)
		if n != m || n == 0 {
			return at + int64(min(n, m))
		}
		for i := range n {
			if x[i] != y[i] {
				return at + int64(i)
			}
		}
		off = at + int64(n)
	}
}

func TestCase01Locked(t *testing.T) {
	path := formatImage(t, formatSize64)
	formatOpen(t, path)
	_, err := blockdev.Open(path, blockdev.Options{Engine: blockdev.EnginePread})
	if !errors.Is(err, blockdev.ErrBusy) || !strings.Contains(err.Error(), fmt.Sprintf("process %d", os.Getpid())) {
		t.Errorf("a second open for writing gives %v", err)
	}
}

// TestCase01ReadError puts one unreadable sector at each of the places that are looked at.
func TestCase01ReadError(t *testing.T) {
	for _, at := range []int64{0, 1024, 4096, 8180, 16384, 65536, 131072, 4 << 20, formatSize64 - 65536, formatSize64 - 512} {
		t.Run(fmt.Sprint(at), func(t *testing.T) {
			m := formatMemory(t, formatSize64)
			f := blockdev.NewFaulty(m, 1)
			f.Add(blockdev.Fault{Ops: []blockdev.Op{blockdev.OpRead}, Off: at, Len: 8})
			before := bytes.Clone(m.Bytes())
			o := FormatOptions{Backing: []blockdev.Device{f}}
			_, err := Format(t.Context(), o)
			var refusal *FormatRefusal
			if !errors.As(err, &refusal) || len(refusal.Unread) != 1 || refusal.Unread[0].Offset != at&^4095 || refusal.Unread[0].Length != 4096 {
				t.Fatalf("%v", err)
			}
			want := fmt.Sprintf("bytes %d to %d cannot be read (input/output error), so something may be there", at&^4095, at|4095)
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q is not in %q", want, err)
			}
			super := at >= 4096 && at < 8192
			if refusal.NeedsOverwrite != OverwriteAnything || refusal.NeedsDiscardUnflushed != super {
				t.Errorf("needs %v, unflushed %v", refusal.NeedsOverwrite, refusal.NeedsDiscardUnflushed)
			}
			if o.Overwrite = OverwriteBcache; !bytes.Equal(m.Bytes(), before) {
				t.Error("refused, and changed")
			}
			if _, err := Format(t.Context(), o); !errors.As(err, &refusal) {
				t.Errorf("overwriting bcache alone: %v", err)
			}
			o.Overwrite, o.DiscardUnflushed = OverwriteAnything, super
			_, err = Format(t.Context(), o)
			var failed *FormatError
			switch {
			case at < 8192: // what cannot be read back is not verified
				if !errors.As(err, &failed) || len(failed.Lost) != 1 {
					t.Errorf("formatted where nothing can be read: %v", err)
				}
			case err != nil:
				t.Error(err)
			}
		})
	}
}

// A disk that does not answer at all must not be asked for every place.
func TestCase01DeadDisk(t *testing.T) {
	m := formatMemory(t, formatSize64)
	f := blockdev.NewFaulty(m, 1)
	remove := f.Add(blockdev.Fault{})
	if _, err := Format(t.Context(), FormatOptions{Backing: []blockdev.Device{f}}); err == nil {
		t.Error("formatted")
	}
	if n := remove(); n > 12 {
		t.Errorf("%d reads", n)
	}
}

func TestCase02BlockSizes(t *testing.T) {
	file := formatOpen(t, formatImage(t, 64<<20))
	info := func(logical, physical, optimal int) blockdev.Device {
		m, err := blockdev.Memory(64<<20, blockdev.MemoryOptions{LogicalBlock: logical})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { m.Close() })
		return withInfo(m, func(i *blockdev.Info) { i.PhysicalBlock, i.OptimalIO = physical, optimal })
	}
	for _, c := range []struct {
		name    string
		devices []blockdev.Device
		block   int64
		want    uint16 // sectors, 0: refused
	}{
		{"a: file", []blockdev.Device{file}, 0, 1},
		{"b: 512e", []blockdev.Device{info(512, 4096, 0)}, 0, 1},
		{"c: 4096", []blockdev.Device{info(4096, 4096, 0)}, 0, 8},
		{"d: optimal size", []blockdev.Device{info(512, 512, 128<<10)}, 0, 1},
		{"mixed", []blockdev.Device{info(512, 4096, 0), info(4096, 4096, 0)}, 0, 8},
		{"too small", []blockdev.Device{info(4096, 4096, 0)}, 512, 0},
		{"larger than needed", []blockdev.Device{info(512, 512, 0)}, 2048, 4},
		{"larger than a page", []blockdev.Device{info(512, 512, 0)}, 8192, 0},
		{"no power of two", []blockdev.Device{info(512, 512, 0)}, 1536, 0},
		{"device with larger blocks than a page", []blockdev.Device{info(16384, 16384, 0)}, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			made, err := Format(t.Context(), FormatOptions{Backing: c.devices, Block: c.block})
			var rule *FormatRuleError
			if c.want == 0 {
				if !errors.As(err, &rule) || rule.Field != "block size" {
					t.Errorf("not refused for its block size: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range made {
				if m.Super.BlockSize != c.want {
					t.Errorf("%s has blocks of %d sectors, want %d", m.Device, m.Super.BlockSize, c.want)
				}
			}
		})
	}
}

// TestCase02LoopDevice formats a real device with blocks of 4096 bytes.
func TestCase02LoopDevice(t *testing.T) {
	path := formatImage(t, 64<<20)
	out, err := exec.Command(formatTool(t, "losetup"), "-f", "--show", "-b", "4096", path).Output()
	if err != nil {
		t.Skip("no loop device to be had:", err)
	}
	loop := strings.TrimSpace(string(out))
	t.Cleanup(func() { exec.Command("losetup", "-d", loop).Run() })
	dev, err := blockdev.Open(loop, blockdev.Options{Engine: blockdev.EnginePread})
	if err != nil {
		t.Skip(err)
	}
	defer dev.Close()
	made, err := Format(t.Context(), FormatOptions{Cache: dev, Bucket: 64 << 10})
	if err != nil {
		t.Fatal(err)
	}
	if b := made[0].Super.BlockSize; b != 8 {
		t.Errorf("blocks of %d sectors", b)
	}
}

// TestCase02FileSystemOf512Mounts makes a file system with sectors of 512 bytes and mounts it through a loop device
// that is as the export would be: the data area of a backing device that was formatted with the defaults.
func TestCase02FileSystemOf512Mounts(t *testing.T) {
	path := formatImage(t, 64<<20)
	formatRun(t, "mkfs.xfs", "-q", "--unsupported", "-s", "size=512", path)
	plain, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	backing := formatImage(t, 64<<20+8192)
	if err := putBytes(backing, 8192, plain); err != nil {
		t.Fatal(err)
	}
	dev := formatOpen(t, backing)
	made, err := Format(t.Context(), FormatOptions{Backing: []blockdev.Device{dev}})
	if err != nil {
		t.Fatal(err)
	}
	dev.Close()
	block := made[0].Shown().Backing.BlockBytes
	out, err := exec.Command(formatTool(t, "losetup"), "-f", "--show", "-o", "8192", "-b", fmt.Sprint(block), backing).Output()
	if err != nil {
		t.Skip("no loop device to be had:", err)
	}
	loop := strings.TrimSpace(string(out))
	t.Cleanup(func() { exec.Command("losetup", "-d", loop).Run() })
	where := t.TempDir()
	if err := unix.Mount(loop, where, "xfs", 0, ""); err != nil {
		if err == unix.ENODEV || err == unix.EPERM {
			t.Skip("no XFS to be mounted here:", err)
		}
		t.Fatal(err)
	}
	if err := unix.Unmount(where, 0); err != nil {
		t.Error(err)
	}
}

func TestCase05BucketGeometry(t *testing.T) {
	const mib = 1 << 20
	for _, c := range []struct {
		name   string
		size   int64 // of the device
		bucket int64
		block  int64
		rule   string // "": accepted
		remedy string
	}{
		{"smaller than the block", 64 * mib, 2048, 4096, "must not be smaller than the block size, 4KiB", ""},
		{"smaller than a page", 64 * mib, 2048, 512, "must be at least 4096 bytes", ""},
		{"no power of two", 64 * mib, 96 << 10, 0, "must be a power of two", ""},
		{"negative", 64 * mib, -65536, 0, "must be a power of two", ""},
		{
			"too few buckets", 64 * mib, 128 << 10, 0, "gives 512 buckets on 64MiB, and at least 513 are needed",
			"use a device of at least 65664KiB, or a bucket size of 64KiB",
		},
		{"just enough", 64*mib + 128<<10, 128 << 10, 0, "", ""},
		{"tiny device", 8192, 0, 0, "gives 0 buckets on 8KiB, and at least 513 are needed", "use a device of at least 262656KiB"},
		{"a page", 64 * mib, 4096, 0, "", ""},
		{"16 MiB", 513 * 16 * mib, 16 * mib, 0, "", ""},
		{"32 MiB", 513 * 32 * mib, 32 * mib, 0, "", ""},
		{"64 MiB", 513 * 64 * mib, 64 * mib, 4096, "", ""},
		{"more than there are numbers for", 513 * 64 * mib, 1 << 62, 0, "must be at most 1TiB", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := formatMemory(t, c.size)
			made, err := Format(t.Context(), FormatOptions{Cache: m, Bucket: c.bucket, Block: c.block})
			var rule *FormatRuleError
			if c.rule != "" {
				if !errors.As(err, &rule) || rule.Field != "bucket size" || !strings.Contains(rule.Rule, c.rule) || rule.Remedy != c.remedy {
					t.Errorf("got %v, want %q, %q", err, c.rule, c.remedy)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			sb := made[0].Super
			if got := int64(sb.BucketSectors()) * 512; got != c.bucket {
				t.Errorf("bucket of %d bytes, want %d", got, c.bucket)
			}
			if n := int64(sb.NBuckets()); n != c.size/c.bucket {
				t.Errorf("%d buckets", n)
			}
			large := c.bucket > 16*mib
			if (sb.Version == ondisk.VersionCacheFeature) != large || (sb.Incompat == ondisk.IncompatLargeBucket) != large {
				t.Errorf("version %d, features %#x", sb.Version, sb.Incompat)
			}
			if first := int64(sb.FirstBucket) * c.bucket; first < 24*512 || first >= 24*512+c.bucket {
				t.Errorf("first bucket %d", sb.FirstBucket)
			}
		})
	}
}

func TestCase06DataOffset(t *testing.T) {
	const size = 64 << 20
	for _, c := range []struct {
		name         string
		size, offset int64
		block        int64
		version      uint64 // accepted
		data         int64
		rule         string // refused
	}{
		{"default", size, 0, 0, 1, size - 8192, ""},
		{"16 sectors", size, 16 * 512, 0, 1, size - 8192, ""},
		{"2048 sectors", size, 2048 * 512, 0, 4, size - 1<<20, ""},
		{"17 sectors", size, 17 * 512, 0, 4, size - 17*512, ""},
		{"17 sectors of blocks of 4096", size, 17 * 512, 4096, 0, 0, "multiple of the block size, 4KiB"},
		{"15 sectors", size, 15 * 512, 0, 0, 0, "at least 16 sectors"},
		{"device size", size, size, 0, 0, 0, "leaves no room for one block of 512 bytes"},
		{"device size less one block", size, size - 4096, 4096, 4, 4096, ""},
		{"device size less half a block", size + 2048, size, 4096, 0, 0, "leaves no room"},
		{"8 KiB", 8192, 0, 0, 0, 0, "leaves no room for one block of 512 bytes on a device of 8192 bytes"},
		{"8.5 KiB", 8704, 0, 0, 1, 512, ""},
		{"rounded down to blocks", size + 2048, 0, 4096, 1, size - 8192, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := formatMemory(t, c.size)
			made, err := Format(t.Context(), FormatOptions{Backing: []blockdev.Device{m}, DataOffset: c.offset, Block: c.block})
			if c.rule != "" {
				if err == nil || !strings.Contains(err.Error(), c.rule) {
					t.Errorf("got %v, want %q", err, c.rule)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			s := made[0].Shown()
			offset := max(c.offset, 8192)
			if s.Super.Version != c.version || s.Backing.DataByte != uint64(offset) || s.Backing.DataSector != uint64(offset/512) || s.Backing.DataBytes != c.data {
				t.Errorf("version %d, %+v", s.Super.Version, s.Backing)
			}
			if want := fmt.Sprintf("dev.data.offset\t\t%d sectors, %d bytes\n", offset/512, offset); !strings.Contains(s.Text(), want) {
				t.Errorf("%q is not in\n%s", want, s.Text())
			}
		})
	}
	// At open, which judges as show does.
	for _, c := range []struct {
		size, sectors int64
		want          string
	}{
		{size, 15, "must be at least 16"},
		{size, size / 512, "leaves no room for one block"},
		{size, 2048, ""},
	} {
		sb := &ondisk.Superblock{
			Offset: 8, Version: ondisk.VersionBackingOff, Magic: ondisk.Magic, UUID: ondisk.NewUUID(), BlockSize: 1, Word184: uint64(c.sectors),
		}
		sb.SetChecksum()
		s := showSuper(sb, "disk", c.size, 512)
		if c.want == "" && s.Refused() || c.want != "" && (!s.Refused() || !strings.Contains(s.Problems[0].Message, c.want)) {
			t.Errorf("data offset %d on %d: %s, %v", c.sectors, c.size, s.Access, s.Problems)
		}
	}
}
