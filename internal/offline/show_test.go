package offline

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/fixture"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// showHead returns the superblock of an image in the tree of fixtures, without unpacking the rest.
func showHead(t *testing.T, file string) *ondisk.Superblock {
	t.Helper()
	f, err := os.Open(filepath.Join(fixture.Dir(), file))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := zstd.NewReader(f, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(64<<20))
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	hole := 0 // at the start: see the map beside an image that has one
	if m, err := os.ReadFile(filepath.Join(fixture.Dir(), strings.TrimSuffix(file, ".zst")+".map")); err == nil {
		fmt.Sscan(string(m), &hole)
	}
	var b [8192]byte
	if _, err := io.ReadFull(z, b[hole:]); err != nil {
		t.Fatal(err)
	}
	sb, err := ondisk.DecodeSuperblock(b[4096:])
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

// sameAsStored holds SuperShow against what the tool printed into one file: its errors, which are not buffered,
// come first there.
func sameAsStored(t *testing.T, sb *ondisk.Superblock, stored []byte) {
	t.Helper()
	text, failure, _ := SuperShow(sb, false)
	if failure != "" {
		text = failure + "\n" + text
	}
	if text != string(stored) {
		t.Errorf("got\n%s\nbcache-super-show prints\n%s", text, stored)
	}
}

func TestSuperShowOfFixtures(t *testing.T) {
	all, err := fixture.All()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		for _, d := range f.Devices {
			t.Run(f.Name+"/"+d.Role, func(t *testing.T) {
				stored, err := f.SuperShow(d.Role)
				if err != nil {
					t.Fatal(err)
				}
				sb := showHead(t, filepath.Join(f.Name, d.File))
				sameAsStored(t, sb, stored)
				if s := showSuper(sb, d.Role, d.Size, 512); s.Access != ondisk.AccessWrite.String() || len(s.Problems) > 0 {
					t.Errorf("%s, %v", s.Access, s.Problems)
				}
			})
		}
	}
}

// deliberate are the images of the folder formats on which we and the kernels differ, and what we say.
var deliberate = map[string]ondisk.Access{
	"cache-obsolete-large-bucket": ondisk.AccessFlush, // a kernel takes it, with all volumes read-only
}

// TestFormatsVerdicts holds our verdict on every image against that of each kernel, and the rule that we name first
// against what it logged.
func TestFormatsVerdicts(t *testing.T) {
	all, err := fixture.Formats()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		t.Run(f.Name, func(t *testing.T) {
			stored, err := f.SuperShowText()
			if err != nil {
				t.Fatal(err)
			}
			sb := showHead(t, filepath.Join("formats", f.File))
			sameAsStored(t, sb, stored)
			access, limits := sb.Check(ondisk.Host{DeviceBytes: f.Size, LogicalBlock: 512})
			if want, ok := deliberate[f.Name]; ok {
				if access != want {
					t.Errorf("%v, want %v", access, want)
				}
				access = ondisk.AccessWrite
			}
			if len(f.Kernels) == 0 {
				t.Fatal("no kernel has looked at it")
			}
			for k, v := range f.Kernels {
				if (access == ondisk.AccessWrite) != (v.Verdict == "accepted") {
					t.Errorf("kernel %s has %s it, ours gives %v: %v", k, v.Verdict, access, limits)
				}
				if v.Verdict == "refused" && !strings.Contains(strings.Join(v.Log, "\n"), limits[0].Kernel) {
					t.Errorf("kernel %s says %q, ours expects %q", k, v.Log, limits[0].Kernel)
				}
			}
		})
	}
}

// randomSuper makes a superblock of which most fields are plausible and some are anything.
func randomSuper(rng *rand.Rand) *ondisk.Superblock {
	pick := func(v ...uint64) uint64 { return v[rng.IntN(len(v))] }
	sb := &ondisk.Superblock{
		Offset: 8, Version: pick(0, 0, 1, 3, 4, 1, 2, 5, 6, 7, 1<<63), Magic: ondisk.Magic,
		UUID: ondisk.NewUUID(), SetUUID: ondisk.NewUUID(), Flags: pick(0, 1, 2, 3, rng.Uint64()), Seq: rng.Uint64(),
		Word184: pick(0, 1, 8, 16, 1024, rng.Uint64()), BlockSize: uint16(pick(0, 1, 8, rng.Uint64())),
		BucketSize16: uint16(pick(0, 128, 1024, 32768, rng.Uint64())), NrInSet: uint16(pick(1, rng.Uint64())),
		NrThisDev: uint16(pick(0, 1, rng.Uint64())), LastMount: rng.Uint32(), FirstBucket: uint16(pick(0, 1, 3, rng.Uint64())),
		NJournal: uint16(pick(0, 1, 8, 255, 256)),
	}
	for i := range sb.D {
		sb.D[i] = rng.Uint64()
	}
	for i := range rng.IntN(len(sb.Label) + 1) {
		sb.Label[i] = byte(rng.IntN(256))
	}
	switch rng.IntN(16) {
	case 0:
		sb.Offset = rng.Uint64()
	case 1:
		sb.Magic[rng.IntN(16)] ^= 1
	}
	if sb.SetChecksum(); rng.IntN(8) == 0 {
		sb.Csum = rng.Uint64()
	}
	return sb
}

// TestSuperShowAsTheTool compares both streams, and whether it ends in failure, on superblocks of all kinds.
func TestSuperShowAsTheTool(t *testing.T) {
	tool := formatTool(t, "bcache-super-show")
	rng := rand.New(rand.NewPCG(1, 2))
	path := filepath.Join(t.TempDir(), "super")
	n := 300
	if testing.Short() {
		n = 60
	}
	for i := range n {
		sb := randomSuper(rng)
		var b [8192]byte
		sb.Encode(b[4096:])
		if err := os.WriteFile(path, b[:], 0o600); err != nil {
			t.Fatal(err)
		}
		keepGoing := i%2 == 0
		args := []string{path}
		if keepGoing {
			args = append(args, "-f")
		}
		cmd := exec.Command(tool, args...)
		var out, errs bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errs
		err := cmd.Run()
		text, failure, status := SuperShow(sb, keepGoing)
		if text != out.String() || strings.TrimSuffix(errs.String(), "\n") != failure || cmd.ProcessState.ExitCode() != status {
			t.Fatalf("superblock %d (-f: %v): got\n%s%q\nthe tool prints (%v)\n%s%q", i, keepGoing, text, failure, err, out.String(), errs.String())
		}
	}
}

// validSuper makes a cache superblock as a kernel writes it, with n journal buckets.
func validSuper(n uint16) *ondisk.Superblock {
	sb := &ondisk.Superblock{
		Offset: 8, Version: ondisk.VersionCache, Magic: ondisk.Magic, UUID: ondisk.NewUUID(), SetUUID: ondisk.NewUUID(),
		Flags: ondisk.FlagSync, Seq: 1, Word184: 1024, BlockSize: 1, BucketSize16: 128, NrInSet: 1, FirstBucket: 1, NJournal: n,
	}
	if n == 0 {
		sb.Flags = 0
	}
	for i := range min(int(n), len(sb.D)) {
		sb.D[i] = uint64(1 + i)
	}
	sb.SetChecksum()
	return sb
}

// show puts a superblock on a disk and shows it.
func showOn(t *testing.T, sb *ondisk.Superblock) *Shown {
	t.Helper()
	m := formatMemory(t, 64<<20)
	sb.Encode(m.Bytes()[ondisk.SuperblockOffset:])
	s, err := Show(m)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// toolAgrees asks bcache-super-show, which computes the checksum as a kernel does, whether it is right.
func toolAgrees(t *testing.T, sb *ondisk.Superblock) bool {
	t.Helper()
	var b [8192]byte
	sb.Encode(b[4096:])
	path := filepath.Join(t.TempDir(), "super")
	if err := os.WriteFile(path, b[:], 0o600); err != nil {
		t.Fatal(err)
	}
	out, _ := exec.Command(formatTool(t, "bcache-super-show"), "-f", path).Output()
	return strings.Contains(string(out), "[match]\nsb.version")
}

func TestCase03ChecksumLength(t *testing.T) {
	for _, n := range []uint16{0, 64, 256} {
		sb := validSuper(n)
		if s := showOn(t, sb); s.Refused() || !s.Super.CsumOK {
			t.Errorf("%d journal buckets: %v", n, s.Problems)
		}
		if !toolAgrees(t, sb) {
			t.Errorf("%d journal buckets: bcache-super-show computes another checksum", n)
		}
	}
	s := showOn(t, validSuper(257))
	if !s.Refused() || len(s.Problems) != 1 || s.Problems[0].Rule != 9 || s.Problems[0].Field != "njournal_buckets" {
		t.Errorf("257 journal buckets: %v", s.Problems)
	}

	flip := func(n uint16, change func(*ondisk.Superblock)) *Shown {
		sb := validSuper(n)
		change(sb)
		return showOn(t, sb)
	}
	for _, n := range []uint16{64, 255} {
		for what, s := range map[string]*Shown{
			"last listed": flip(n, func(sb *ondisk.Superblock) { sb.D[n-1] ^= 1 << 40 }),
			"label":       flip(n, func(sb *ondisk.Superblock) { sb.Label[31] ^= 1 }),
		} {
			if !s.Refused() || len(s.Problems) != 1 || s.Problems[0].Rule != 3 {
				t.Errorf("%d, %s: %v", n, what, s.Problems)
				continue
			}
			for _, v := range []string{s.Super.Csum, s.Super.CsumExpected} {
				if !strings.Contains(s.Problems[0].Message, v) {
					t.Errorf("%d, %s: %s is not in %q", n, what, v, s.Problems[0].Message)
				}
			}
		}
		if s := flip(n, func(sb *ondisk.Superblock) { sb.D[n] ^= 1 }); s.Refused() {
			t.Errorf("%d, first after the list: %v", n, s.Problems)
		}
	}

	// Rewritten with a longer list.
	sb := validSuper(64)
	for sb.NJournal < 256 {
		sb.D[sb.NJournal] = uint64(sb.FirstBucket) + uint64(sb.NJournal)
		sb.NJournal++
	}
	if sb.ChecksumOK() {
		t.Error("the old checksum is still right")
	}
	sb.SetChecksum()
	if s := showOn(t, sb); s.Refused() {
		t.Error(s.Problems)
	}
	if !toolAgrees(t, sb) {
		t.Error("bcache-super-show computes another checksum")
	}
}

func TestCase04VersionsAndFeatures(t *testing.T) {
	cache := func(version, compat, incompat, ro uint64) *ondisk.Superblock {
		sb := validSuper(8)
		sb.Version, sb.Compat, sb.Incompat, sb.ROCompat = version, compat, incompat, ro
		if incompat&ondisk.IncompatLargeBucket != 0 {
			sb.BucketSize16 = 7
		}
		sb.SetChecksum()
		return sb
	}
	backing := func(version uint64) *ondisk.Superblock {
		sb := &ondisk.Superblock{Offset: 8, Version: version, Magic: ondisk.Magic, UUID: ondisk.NewUUID(), BlockSize: 1}
		if version != 1 {
			sb.Word184 = 2048
		}
		if version == 6 {
			sb.Incompat = 0x100 // not read
		}
		sb.SetChecksum()
		return sb
	}
	for _, c := range []struct {
		name   string
		sb     *ondisk.Superblock
		access ondisk.Access
		says   string
	}{
		{"cache 0", cache(0, 0, 0, 0), ondisk.AccessWrite, ""},
		{"cache 3", cache(3, 0, 0, 0), ondisk.AccessWrite, ""},
		{"cache 3 does not read features", cache(3, 7, 0x100, 7), ondisk.AccessWrite, ""},
		{"cache 5", cache(5, 0, 0, 0), ondisk.AccessWrite, ""},
		{"backing 1", backing(1), ondisk.AccessWrite, ""},
		{"backing 4", backing(4), ondisk.AccessWrite, ""},
		{"backing 6", backing(6), ondisk.AccessWrite, ""},
		{"version 2", cache(2, 0, 0, 0), ondisk.AccessNone, "version is 2"},
		{"version 7", cache(7, 0, 0, 0), ondisk.AccessNone, "version is 7"},
		{"unknown incompatible bit", cache(5, 0, 0x100, 0), ondisk.AccessNone, "feature_incompat is 0x100"},
		{"unknown read-only-compatible bit", cache(5, 0, 0, 4), ondisk.AccessRead, "feature_ro_compat is 0x4"},
		{"unknown compatible bit", cache(5, 8, 0, 0), ondisk.AccessWrite, "feature_compat is 0x8"},
		{"obsolete large bucket", cache(5, 0, 1, 0), ondisk.AccessFlush, "obsolete large-bucket layout"},
		{"large bucket", cache(5, 0, 2, 0), ondisk.AccessWrite, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := showOn(t, c.sb)
			if s.Access != c.access.String() {
				t.Errorf("%s, want %v: %v", s.Access, c.access, s.Problems)
			}
			var said []string
			for _, p := range s.Problems {
				said = append(said, p.Message)
			}
			if !strings.Contains(strings.Join(said, "\n"), c.says) || (c.says == "") != (len(said) == 0) {
				t.Errorf("says %q, want %q", said, c.says)
			}
			// The raw values are there, whatever the verdict.
			if s.Super.Version != c.sb.Version || s.Super.Incompat != fmt.Sprintf("%#x", c.sb.Incompat) || s.Super.BucketSize != c.sb.BucketSize16 {
				t.Errorf("shows %+v", s.Super)
			}
			text := s.Text()
			if c.sb.Version > 4 || c.sb.Version == 2 {
				for _, want := range []string{
					fmt.Sprintf("raw.feature_incompat\t%#x\n", c.sb.Incompat), fmt.Sprintf("raw.feature_compat\t%#x\n", c.sb.Compat),
					fmt.Sprintf("raw.bucket_size\t\t%d\n", c.sb.BucketSize16), fmt.Sprintf("raw.set_uuid\t\t%v\n", c.sb.SetUUID),
				} {
					if !strings.Contains(text, want) {
						t.Errorf("%q is not in\n%s", want, text)
					}
				}
			}
			// And a rewrite keeps every bit that we do not know.
			var before, after [ondisk.SuperblockBytes]byte
			c.sb.Encode(before[:])
			again, err := ondisk.DecodeSuperblock(before[:])
			if err != nil {
				t.Fatal(err)
			}
			again.Encode(after[:])
			if before != after {
				t.Error("decoding and encoding changed something")
			}
		})
	}
	// The logarithm.
	sb := cache(5, 0, 2, 0)
	sb.BucketSize16, sb.Word184 = 17, 1024
	sb.SetChecksum()
	s := showSuper(sb, "disk", 1024*131072*512, 512)
	if s.Refused() || s.Cache.BucketBytes != 131072*512 || s.Cache.CacheBytes != 1023*131072*512 || s.Cache.MetadataBytes != 4<<20 || s.Cache.UUIDSlots != 32768 {
		t.Errorf("%+v, %v", s.Cache, s.Problems)
	}
}

// TestShownIsWholeAsJSON holds that every field is there by name, also where it is zero, and nothing where there is
// no superblock.
func TestShownIsWholeAsJSON(t *testing.T) {
	decode := func(s *Shown) map[string]any {
		b, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		var m map[string]any
		if err := json.Unmarshal(b, &m); err != nil {
			t.Fatal(err)
		}
		return m
	}
	sb := validSuper(4)
	sb.Label[0] = 0xff // no UTF-8
	sb.SetChecksum()
	m := decode(showOn(t, sb))
	if n := len(m["superblock"].(map[string]any)); n != 24 {
		t.Errorf("%d fields in %v", n, m["superblock"])
	}
	if label := m["superblock"].(map[string]any)["label"]; label != "\ufffd" {
		t.Errorf("label %q", label)
	}
	m = decode(showOn(t, &ondisk.Superblock{}))
	if m["superblock"] != nil || m["role"] != "none" || m["access"] != "none" {
		t.Errorf("no superblock gives %v", m)
	}
}

func TestShowTooShort(t *testing.T) {
	m, err := blockdev.Memory(4096, blockdev.MemoryOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if _, err := Show(m); err == nil || !strings.Contains(err.Error(), "4096 bytes") {
		t.Error(err)
	}
}

func FuzzShow(f *testing.F) {
	for i := range 4 {
		var b [ondisk.SuperblockBytes]byte
		validSuper(uint16(i * 64)).Encode(b[:])
		f.Add(b[:260], int64(64<<20))
	}
	f.Fuzz(func(_ *testing.T, b []byte, size int64) {
		full := make([]byte, ondisk.SuperblockBytes)
		copy(full, b)
		sb, _ := ondisk.DecodeSuperblock(full)
		showSuper(sb, "disk", size, 512).Text()
		if sb.SetChecksum(); size > 0 {
			sb.Offset, sb.Magic = 8, ondisk.Magic
			sb.SetChecksum()
			showSuper(sb, "disk", size, 512).Text()
		}
	})
}
