package ondisk

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
)

// sampleCache is a cache superblock that passes, with every field non-zero.
func sampleCache(njournal int) *Superblock {
	sb := &Superblock{
		Offset: 8, Version: VersionCache, Magic: Magic, UUID: NewUUID(), SetUUID: NewUUID(), Flags: FlagSync | FlagDiscard,
		Seq: 7, Word184: 1024, BlockSize: 1, BucketSize16: 256, NrInSet: 1, LastMount: 5, FirstBucket: 1, NJournal: uint16(njournal),
	}
	sb.SetReplacement(FIFO)
	for i := range min(njournal, MaxJournalBuckets) {
		sb.D[i] = uint64(1 + i)
	}
	sb.SetChecksum()
	return sb
}

func sampleBacking() *Superblock {
	sb := &Superblock{Offset: 8, Version: VersionBackingOff, Magic: Magic, UUID: NewUUID(), SetUUID: NewUUID(), Word184: 2048, BlockSize: 8}
	sb.SetState(StateDirty)
	sb.SetCacheMode(Writeback)
	sb.SetChecksum()
	return sb
}

var plainHost = Host{DeviceBytes: 1 << 30, LogicalBlock: 512}

func sampleGeometry() Geometry { return NewGeometry(sampleCache(8)) }

// fill sets every byte of a value's exported fields to something that is not zero.
func fillRandom(v any, r *rand.Rand) {
	var walk func(reflect.Value)
	walk = func(v reflect.Value) {
		switch v.Kind() {
		case reflect.Struct:
			for i := range v.NumField() {
				walk(v.Field(i))
			}
		case reflect.Array:
			for i := range v.Len() {
				walk(v.Index(i))
			}
		case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
			v.SetUint(r.Uint64() | 1)
		}
	}
	walk(reflect.ValueOf(v).Elem())
}

func TestSuperblockKeepsEveryByte(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var sb Superblock
	fillRandom(&sb, r)
	var b, c [SuperblockBytes]byte
	sb.Encode(b[:])
	got, err := DecodeSuperblock(b[:])
	if err != nil || *got != sb {
		t.Fatalf("round trip of all fields: %v", err)
	}
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	got, _ = DecodeSuperblock(b[:])
	got.Encode(c[:])
	if b != c {
		t.Error("random bytes do not survive decoding and encoding")
	}
	if _, err := DecodeSuperblock(b[:100]); !errors.Is(err, ErrCorrupt) {
		t.Errorf("short area: %v", err)
	}
}

// Case 03: the checksum covers as many journal buckets as are listed.
func TestSuperblockChecksumLength(t *testing.T) {
	for _, n := range []int{0, 64, 256} {
		sb := sampleCache(n)
		if a, l := sb.Check(plainHost); a != AccessWrite && n != 0 {
			t.Errorf("%d journal buckets: %v %v", n, a, l)
		} else if n == 0 && a != AccessRead { // SYNC without a journal: ours reads it only
			t.Errorf("SYNC and no journal: %v %v", a, l)
		}
		flip := func(what string, want bool, f func(*Superblock)) {
			c := *sb
			f(&c)
			if c.ChecksumOK() != want {
				t.Errorf("%d journal buckets, %s: checksum ok %v", n, what, !want)
			}
		}
		if n > 0 {
			flip("last listed entry", false, func(s *Superblock) { s.D[n-1] ^= 4 })
		}
		if n < 256 {
			flip("first entry after the list", true, func(s *Superblock) { s.D[n] ^= 4 })
		}
		flip("label", false, func(s *Superblock) { s.Label[3] ^= 1 })
		c := *sb
		c.Label[0] ^= 1
		_, l := c.Check(plainHost)
		if len(l) != 1 || l[0].Rule != 3 || !strings.Contains(l[0].Error(), "computed") {
			t.Errorf("checksum error does not give both values: %v", l)
		}
	}
	sb := sampleCache(256)
	sb.NJournal = 257
	a, l := sb.Check(plainHost)
	if a != AccessNone || len(l) != 1 || l[0].Rule != 9 {
		t.Errorf("257 journal buckets: %v %v", a, l)
	}
}

// Case 04 and the table of F 3.5, one broken rule each.
func TestSuperblockRules(t *testing.T) {
	tests := []struct {
		name    string
		backing bool
		break_  func(*Superblock)
		host    Host
		rule    int
		access  Access
		kernel  string
	}{
		{name: "offset", break_: func(s *Superblock) { s.Offset = 9 }, rule: 1, kernel: "bad offset"},
		{name: "magic", break_: func(s *Superblock) { s.Magic[5]++ }, rule: 2, kernel: "bad magic"},
		{name: "uuid", break_: func(s *Superblock) { s.UUID = UUID{} }, rule: 4, kernel: "Bad UUID"},
		{name: "block below logical", break_: func(s *Superblock) {}, host: Host{1 << 30, 4096}, rule: 5, kernel: "smaller than device"},
		{name: "version 2", break_: func(s *Superblock) { s.Version = 2 }, rule: 6, kernel: "Unsupported superblock version"},
		{name: "version 7", break_: func(s *Superblock) { s.Version = 7 }, rule: 6, kernel: "Unsupported superblock version"},
		{name: "version 0", break_: func(s *Superblock) { s.Version = 0 }, access: AccessWrite},
		{name: "version 5", break_: func(s *Superblock) { s.Version = 5 }, access: AccessWrite},
		{name: "version 1", backing: true, break_: func(s *Superblock) { s.Version = 1 }, access: AccessWrite},
		{name: "version 6", backing: true, break_: func(s *Superblock) { s.Version = 6; s.Incompat = 0x100 }, access: AccessWrite},
		{name: "data offset", backing: true, break_: func(s *Superblock) { s.Word184 = 15 }, rule: 7, kernel: "Bad data offset"},
		{name: "data offset at the end", backing: true, break_: func(s *Superblock) { s.Word184 = 1<<21 - 7 }, rule: 0},
		{name: "data offset past the end", backing: true, break_: func(s *Superblock) { s.Word184 = 1<<64 - 1 }, rule: 0},
		{name: "one block", backing: true, break_: func(s *Superblock) { s.Word184 = 1<<21 - 8 }, access: AccessWrite},
		{name: "block of a backing device", backing: true, break_: func(s *Superblock) { s.BlockSize = 3 }, rule: 0},
		{name: "compat", break_: func(s *Superblock) { s.Version = 5; s.Compat = 1 }, rule: 8, access: AccessWrite, kernel: "Unsupported compatible"},
		{name: "ro compat", break_: func(s *Superblock) { s.Version = 5; s.ROCompat = 1 }, rule: 8, access: AccessRead, kernel: "Unsupported read-only"},
		{name: "incompat", break_: func(s *Superblock) { s.Version = 5; s.Incompat = 4 }, rule: 8, kernel: "Unsupported incompatible"},
		{name: "obsolete large bucket", break_: func(s *Superblock) { s.Version = 5; s.Incompat = 1 }, rule: 0, access: AccessFlush},
		{name: "features before version 5", break_: func(s *Superblock) { s.Incompat = 4; s.Compat = 1 }, access: AccessWrite},
		{name: "too many buckets", break_: func(s *Superblock) { s.Word184 = 1 << 63 }, rule: 10, kernel: "Too many buckets"},
		{name: "127 buckets", break_: func(s *Superblock) { s.Word184 = 127 }, rule: 11, kernel: "Not enough buckets"},
		{name: "512 buckets", break_: func(s *Superblock) { s.Word184 = 512 }, rule: 22, kernel: "nbuckets is too small"},
		{name: "513 buckets", break_: func(s *Superblock) { s.Word184 = 513 }, access: AccessWrite},
		{name: "block", break_: func(s *Superblock) { s.BlockSize = 3 }, rule: 12, kernel: "Bad block size (not"},
		{name: "block 0", break_: func(s *Superblock) { s.BlockSize = 0 }, host: Host{1 << 30, 0}, rule: 12, kernel: "Bad block size (not"},
		{name: "block above page", break_: func(s *Superblock) { s.BlockSize = 16 }, rule: 13, kernel: "larger than page"},
		{name: "bucket", break_: func(s *Superblock) { s.BucketSize16 = 96 }, rule: 14, kernel: "Bad bucket size (not"},
		{name: "bucket 0", break_: func(s *Superblock) { s.BucketSize16 = 0 }, rule: 14, kernel: "Bad bucket size (not"},
		{name: "bucket below page", break_: func(s *Superblock) { s.BucketSize16 = 4 }, rule: 15, kernel: "smaller than page"},
		{name: "device too small", break_: func(s *Superblock) { s.Word184 = 1<<21/256 + 1 }, rule: 16, kernel: "device too small"},
		{name: "sizes that overflow", break_: func(s *Superblock) { s.Word184 = 1 << 62 }, rule: 16, kernel: "device too small"},
		{name: "set uuid", break_: func(s *Superblock) { s.SetUUID = UUID{} }, rule: 17, kernel: "Bad UUID"},
		{name: "device number", break_: func(s *Superblock) { s.NrThisDev = 1 }, rule: 18, kernel: "Bad cache device number"},
		{name: "nine devices", break_: func(s *Superblock) { s.NrInSet = 9 }, rule: 18, kernel: "Bad cache device number"},
		{name: "two devices", break_: func(s *Superblock) { s.NrInSet = 2 }, rule: 0, access: AccessRead},
		{name: "journal order", break_: func(s *Superblock) { s.D[3] = 9 }, rule: 19, kernel: "not sequential"},
		{name: "journal past the end", break_: func(s *Superblock) {
			s.FirstBucket = 1020
			for i := range s.D[:8] {
				s.D[i] = 1020 + uint64(i)
			}
		}, rule: 20, kernel: "Too many journal buckets"},
		{name: "first bucket", break_: func(s *Superblock) { s.FirstBucket = 0; s.NJournal = 0; s.Flags = 0 }, rule: 21, kernel: "before end of super"},
		{name: "log bucket size", break_: func(s *Superblock) { s.Version = 5; s.Incompat = 2; s.BucketSize16 = 17; s.Word184 = 600 }, host: Host{1 << 40, 512}, access: AccessWrite},
		{name: "log bucket size of 64", break_: func(s *Superblock) { s.Version = 5; s.Incompat = 2; s.BucketSize16 = 64 }, rule: 14, kernel: "Bad bucket size (not"},
		{name: "log bucket size of 63", break_: func(s *Superblock) { s.Version = 5; s.Incompat = 2; s.BucketSize16 = 63 }, rule: 0},
		{name: "short journal", break_: func(s *Superblock) { s.NJournal = 2 }, rule: 0, access: AccessRead},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			sb := sampleCache(8)
			if tt.backing {
				sb = sampleBacking()
			}
			tt.break_(sb)
			sb.SetChecksum()
			if tt.host == (Host{}) {
				tt.host = plainHost
			}
			access, limits := sb.Check(tt.host)
			if access != tt.access {
				t.Errorf("access %v, want %v: %v", access, tt.access, limits)
			}
			if tt.rule == 0 && tt.kernel == "" && tt.access == AccessWrite {
				if len(limits) > 0 {
					t.Errorf("limits: %v", limits)
				}
				return
			}
			if len(limits) == 0 || limits[0].Rule != tt.rule || !strings.Contains(limits[0].Kernel, tt.kernel) {
				t.Fatalf("limits %v, want rule %d, %q", limits, tt.rule, tt.kernel)
			}
			if !errors.Is(limits[0], ErrCorrupt) || limits[0].Field == "" || limits[0].Value == "" || limits[0].Want == "" {
				t.Errorf("not named well: %#v", limits[0])
			}
		})
	}
}

func TestLargeBucketDecoding(t *testing.T) {
	sb := sampleCache(8)
	sb.Version, sb.BucketSize16, sb.BucketSizeHi = 5, 17, 2
	for incompat, want := range map[uint64]uint64{0: 17, 1: 17 + 2<<16, 2: 131072, 3: 131072} {
		sb.Incompat = incompat
		if got := sb.BucketSectors(); got != want {
			t.Errorf("incompat %d: %d sectors, want %d", incompat, got, want)
		}
	}
}

// The table of F 1.3.
func TestGeometry(t *testing.T) {
	for _, tt := range []struct {
		bucket, meta, node, uuids, ppb int
	}{
		{64 << 10, 64 << 10, 64 << 10, 512, 21832},
		{128 << 10, 128 << 10, 128 << 10, 1024, 43677},
		{256 << 10, 256 << 10, 256 << 10, 2048, 87368},
		{512 << 10, 512 << 10, 256 << 10, 4096, 174749},
		{1 << 20, 1 << 20, 256 << 10, 8192, 349512},
		{2 << 20, 2 << 20, 512 << 10, 16384, 699037},
		{4 << 20, 4 << 20, 1 << 20, 32768, 1398088},
		{8 << 20, 4 << 20, 1 << 20, 32768, 1398088},
	} {
		sb := sampleCache(8)
		sb.BucketSize16 = uint16(tt.bucket / SectorSize)
		g := NewGeometry(sb)
		if g.MetaBytes() != tt.meta || int(g.NodeSectors)*SectorSize != tt.node || int(g.NrUUIDs) != tt.uuids || int(g.PrioPerBucket) != tt.ppb {
			t.Errorf("bucket %d: meta %d node %d uuids %d ppb %d", tt.bucket, g.MetaBytes(), g.NodeSectors*SectorSize, g.NrUUIDs, g.PrioPerBucket)
		}
		if s := g.BucketStart(5) + 3; g.Bucket(s) != 5 || g.Remainder(s) != 3 {
			t.Errorf("bucket %d: sector %d", tt.bucket, s)
		}
	}
	if g := sampleGeometry(); g.SetMagic^g.JSetMagic() != 0x245235C1A3625032 || g.SetMagic^g.PrioMagic() != 0x6750E15F87337F91 || g.SetMagic^g.BSetMagic() != 0x90135C78B99E07F5 {
		t.Error("magic numbers")
	}
	for n, want := range map[uint64]int{128: 2, 513: 4, 1024: 8, 1 << 20: 256} {
		if got := JournalBuckets(n); got != want {
			t.Errorf("%d buckets: journal of %d, want %d", n, got, want)
		}
	}
}

func TestKeyFields(t *testing.T) {
	k := NewExtent(3, 100, 8, MakePtr(7, 0x123456, 0), true)
	if k.Inode() != 3 || k.End() != 100 || k.Start() != 92 || k.Size() != 8 || !k.Dirty() || k.Ptrs() != 1 || k.Words() != 3 {
		t.Errorf("fields of %v", k)
	}
	if p := k.P[0]; p.Gen() != 7 || p.Sector() != 0x123456 || p.Dev() != 0 || !p.Available() {
		t.Errorf("pointer of %v", k)
	}
	// The words of F 19.2 and 19.3.
	if k := NewExtent(0, 0x6c49, 10, 0x19dca01, true); k.High != 0x9000001000a00000 || k.Start() != 27711 || k.P[0].Sector() != 105930 {
		t.Errorf("example key: %#x %v", k.High, k)
	}
	if k := NewChild(MaxInode, MaxOffset, 256, MakePtr(1, 0xc00, 0)); k.High != 0x90000000100fffff || k.ComparePos(&MaxKey) != 0 {
		t.Errorf("example root: %#x", k.High)
	}
	if k := NewInvalidation(1, 16, 8); k.High != 0x8000000000800001 || k.String() != "1:8 len 8 -> []" {
		t.Errorf("invalidation: %#x %v", k.High, k)
	}
	if c := NewExtent(0, 16, 8, MakePtr(1, 2, CheckDev), false); !c.IsCheck() || c.String() != "0:8 len 8 -> [check dev]" {
		t.Errorf("check key: %v", c)
	}
	if s := k.String(); s != "3:92 len 8 -> [0:1193046 gen 7] dirty" {
		t.Error(s)
	}
}

func TestKeyCut(t *testing.T) {
	k := NewExtent(1, 100, 20, MakePtr(1, 1000, 0), true)
	k.CutFront(85)
	if k.Start() != 85 || k.End() != 100 || k.P[0].Sector() != 1005 || !k.Dirty() {
		t.Errorf("front: %v", k)
	}
	k.CutBack(90)
	if k.Start() != 85 || k.End() != 90 || k.P[0].Sector() != 1005 {
		t.Errorf("back: %v", k)
	}
	k.CutFront(95)
	if k.Size() != 0 || k.End() != 95 || k.P[0].Sector() != 1010 {
		t.Errorf("past the end: %v", k)
	}
	k = NewExtent(1, 100, 20, MakePtr(9, 1<<43-1, 3), false)
	k.CutFront(82)
	if k.P[0].Sector() != 1 || k.P[0].Gen() != 9 || k.P[0].Dev() != 3 {
		t.Errorf("pointer wraps: %v", k)
	}
	k = NewInvalidation(1, 100, 20)
	k.CutBack(80)
	if k.Size() != 0 || k.End() != 80 {
		t.Errorf("back to the start: %v", k)
	}
}

func TestKeyRoundTrip(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for ptrs := range MaxKeyPtrs + 1 {
		k := Key{High: r.Uint64()&^(7<<60) | uint64(ptrs)<<60, Low: r.Uint64()}
		for i := range ptrs {
			k.P[i] = Ptr(r.Uint64())
		}
		b := AppendKey(nil, &k)
		got, n, err := DecodeKey(b)
		if err != nil || n != len(b) || n != 8*k.Words() || got != k {
			t.Errorf("%d pointers: %v %d %v", ptrs, got, n, err)
		}
		if _, _, err := DecodeKey(b[:len(b)-8]); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%d pointers, cut off: %v", ptrs, err)
		}
	}
	if _, _, err := DecodeKey(bytes.Repeat([]byte{0xff}, 80)); !errors.Is(err, ErrCorrupt) {
		t.Errorf("7 pointers: %v", err)
	}
}

func TestKeyFaults(t *testing.T) {
	g := sampleGeometry() // 1024 buckets of 256 sectors, 1024 slots
	leaf := map[Fault]Key{
		FaultNone:    NewExtent(1, 300, 8, MakePtr(1, 2*256, 0), false),
		FaultEmpty:   NewExtent(1, 300, 0, MakePtr(1, 2*256, 0), false),
		FaultTooBig:  NewExtent(1, 7, 8, MakePtr(1, 2*256, 0), false),
		FaultCrosses: NewExtent(1, 300, 8, MakePtr(1, 3*256-7, 0), false),
		FaultOutside: NewExtent(1, 300, 8, MakePtr(1, 1024*256, 0), false),
		FaultInode:   NewExtent(1024, 300, 8, MakePtr(1, 2*256, 0), false),
	}
	for want, k := range leaf {
		if got := g.LeafFault(&k); got != want {
			t.Errorf("%v: %v, want %v", k, got, want)
		}
	}
	low := NewExtent(1, 300, 8, MakePtr(1, 0, 0), false)
	if got := g.LeafFault(&low); got != FaultOutside {
		t.Errorf("below the first bucket: %v", got)
	}
	check := NewExtent(1, 300, 8, MakePtr(1, 1<<42, CheckDev), false)
	if got := g.LeafFault(&check); got != FaultNone {
		t.Errorf("check key: %v", got)
	}
	inv, dirty := NewInvalidation(1, 8, 8), NewExtent(1, 8, 8, MakePtr(1, 512, 0), true)
	if g.NodeFault(&inv) != FaultNoPtr || g.NodeFault(&dirty) != FaultDirtyNode {
		t.Error("node faults")
	}
	sb := sampleCache(8)
	sb.BucketSize16 = 16384
	large := NewGeometry(sb)
	if k := NewChild(0, 0, 8193, MakePtr(1, 2*16384, 0)); large.NodeFault(&k) != FaultBigNode {
		t.Error("a node of more than 4 MiB")
	}
}

func TestGenerations(t *testing.T) {
	for _, tt := range []struct{ a, b, want uint8 }{{5, 5, 0}, {6, 5, 1}, {5, 6, 0}, {2, 250, 8}, {128, 0, 128}, {129, 0, 0}} {
		if got := GenAfter(tt.a, tt.b); got != tt.want {
			t.Errorf("GenAfter(%d, %d) = %d, want %d", tt.a, tt.b, got, tt.want)
		}
	}
}

func TestUUIDText(t *testing.T) {
	u := NewUUID()
	if got, err := ParseUUID(strings.ToUpper(u.String())); err != nil || got != u {
		t.Errorf("%v %v", got, err)
	}
	for _, s := range []string{"", "f342fd19-8beb-45c1-95ce-b50196c65e3", "f342fd19-8beb-45c1-95ce_b50196c65e3f", "g342fd19-8beb-45c1-95ce-b50196c65e3f"} {
		if _, err := ParseUUID(s); err == nil {
			t.Errorf("%q accepted", s)
		}
	}
}

func node(g *Geometry, sets ...[]Key) ([]byte, Key) {
	ref := NewChild(MaxInode, MaxOffset, g.NodeSectors, MakePtr(3, 20*256, 0))
	b := make([]byte, int(g.NodeSectors)*SectorSize)
	at := 0
	for _, keys := range sets {
		var w []byte
		for i := range keys {
			w = AppendKey(w, &keys[i])
		}
		n := EncodeBSet(b[at:], g.BSetMagic(), 0xfeed, ref.P[0], w)
		at += (n + g.BlockBytes() - 1) / g.BlockBytes() * g.BlockBytes()
	}
	return b, ref
}

func sampleKeys(n int, at uint64) (keys []Key) {
	for i := range n {
		keys = append(keys, NewExtent(1, at+uint64(i+1)*8, 8, MakePtr(1, 30*256+uint64(i)*8%256, 0), i%2 == 0))
	}
	return keys
}

func TestNodeRoundTrip(t *testing.T) {
	g := sampleGeometry()
	a, b := sampleKeys(50, 0), sampleKeys(3, 4000)
	buf, ref := node(&g, a, b)
	n := DecodeNode(buf, &g, &ref)
	if n.Err != nil || len(n.Sets) != 2 || n.Seq != 0xfeed || n.Used != 4 || n.Sets[1].Block != 3 {
		t.Fatalf("%+v", n)
	}
	var got []Key
	for i := range n.Sets {
		if err := n.Sets[i].EachKey(func(k *Key) bool { got = append(got, *k); return true }); err != nil {
			t.Fatal(err)
		}
	}
	if !reflect.DeepEqual(got, append(a, b...)) {
		t.Error("keys differ")
	}
	empty, ref := node(&g, nil)
	if n := DecodeNode(empty, &g, &ref); n.Err != nil || len(n.Sets) != 1 {
		t.Errorf("an empty first set: %+v", n)
	}
}

func TestNodeDamage(t *testing.T) {
	g := sampleGeometry()
	fresh := func() ([]byte, Key) { return node(&g, sampleKeys(50, 0), sampleKeys(3, 4000), sampleKeys(3, 5000)) }
	for _, tt := range []struct {
		name   string
		damage func(b []byte)
		kernel string
		sets   int
		torn   bool
	}{
		{"no seq", func(b []byte) { clear(b[16:24]) }, "bad btree header", 0, false},
		{"seq of the first", func(b []byte) { b[16]++ }, "bad checksum", 0, false},
		{"version", func(b []byte) { b[3*512+24] = 2 }, "unsupported bset version", 1, false},
		{"keys", func(b []byte) { b[3*512+31] = 0xff }, "bad btree header", 1, false},
		{"magic", func(b []byte) { b[3*512+8]++ }, "bad magic", 1, false},
		{"csum", func(b []byte) { b[3*512+50]++ }, "bad checksum", 1, false},
		{"last csum", func(b []byte) { b[4*512+50]++ }, "bad checksum", 2, true},
		{"empty set", func(b []byte) { EncodeBSet(b[4*512:], g.BSetMagic(), 0xfeed, MakePtr(3, 20*256, 0), nil) }, "empty set", 2, true},
		{"hole", func(b []byte) { b[3*512+16]++ }, "corrupted btree", 1, false},
		{"seq of the last", func(b []byte) { b[4*512+16]++ }, "right with the node's own", 2, false},
	} {
		b, ref := fresh()
		tt.damage(b)
		n := DecodeNode(b, &g, &ref)
		if n.Err == nil || !strings.Contains(n.Err.Error(), tt.kernel) || !errors.Is(n.Err, ErrCorrupt) || len(n.Sets) != tt.sets || n.Torn != tt.torn {
			t.Errorf("%s: sets %d torn %v: %v", tt.name, len(n.Sets), n.Torn, n.Err)
		}
	}
	for _, short := range [][]byte{nil, make([]byte, 100)} {
		if n := DecodeNode(short, &g, &MaxKey); n.Err == nil {
			t.Errorf("a node of %d bytes", len(short))
		}
	}
}

func TestJSetRoundTrip(t *testing.T) {
	g := sampleGeometry()
	r := rand.New(rand.NewPCG(5, 6))
	j := JSet{
		Magic: g.JSetMagic(), Seq: 9, Version: 1, LastSeq: 4, Level: 2, UUIDBucket: NewChild(0, 0, g.MetaSectors, MakePtr(1, 50*256, 0)),
		Root: NewChild(MaxInode, MaxOffset, g.NodeSectors, MakePtr(1, 12*256, 0)),
	}
	for i := range j.PrioBucket {
		j.PrioBucket[i] = r.Uint64()
	}
	for _, k := range sampleKeys(5, 0) {
		j.Data = AppendKey(j.Data, &k)
	}
	b := make([]byte, 4096)
	n := j.Encode(b)
	got, err := DecodeJSet(b, &g)
	if err != nil || !reflect.DeepEqual(got, j) || n != got.Bytes() {
		t.Fatalf("%v\n%+v\n%+v", err, got, j)
	}
	for _, tt := range []struct {
		at   int
		want error
	}{{8, ErrNoJSet}, {28, ErrBadJSet}, {31, ErrBadJSet}, {0, ErrBadJSet}, {n - 1, ErrBadJSet}, {170, ErrBadJSet}} {
		c := bytes.Clone(b)
		c[tt.at] ^= 0x80
		if _, err := DecodeJSet(c, &g); !errors.Is(err, tt.want) {
			t.Errorf("byte %d: %v", tt.at, err)
		}
	}
	j.LastSeq = 10
	j.Encode(b)
	if _, err := DecodeJSet(b, &g); !errors.Is(err, ErrCorrupt) {
		t.Errorf("last_seq after seq: %v", err)
	}
	j.LastSeq, j.Data = 4, make([]byte, MaxJSetBytes)
	big := make([]byte, 64<<10)
	j.Encode(big)
	if _, err := DecodeJSet(big, &g); !errors.Is(err, ErrBadJSet) {
		t.Errorf("above 8 pages: %v", err)
	}
}

func TestPrioSetRoundTrip(t *testing.T) {
	g := sampleGeometry()
	r := rand.New(rand.NewPCG(7, 8))
	p := PrioSet{Magic: g.PrioMagic(), Seq: 3, Version: 1, Pad: 2, NextBucket: 77, Data: make([]byte, g.MetaBytes()-prioHeaderBytes)}
	for i := range p.Len() {
		p.SetEntry(i, uint16(r.Uint32()), uint8(r.Uint32()))
	}
	b := make([]byte, g.MetaBytes())
	p.Encode(b)
	got, err := DecodePrioSet(b, &g)
	if err != nil || !reflect.DeepEqual(got, p) || p.Len() != int(g.PrioPerBucket) {
		t.Fatal(err)
	}
	for _, at := range []int{0, 8, 33, 40, len(b) - 1} {
		c := bytes.Clone(b)
		c[at] ^= 1
		if _, err := DecodePrioSet(c, &g); !errors.Is(err, ErrCorrupt) {
			t.Errorf("byte %d: %v", at, err)
		}
	}
	if _, err := DecodePrioSet(b[:512], &g); !errors.Is(err, ErrCorrupt) {
		t.Error(err)
	}
}

func TestUUIDEntryRoundTrip(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	var e UUIDEntry
	fillRandom(&e, r)
	b := make([]byte, 4*UUIDEntryBytes)
	e.Encode(b[2*UUIDEntryBytes:])
	if got, err := DecodeUUIDEntry(b, 2, false); err != nil || got != e {
		t.Fatal(err)
	}
	old := make([]byte, 128)
	e.Encode(old)
	got, err := DecodeUUIDEntry(append(make([]byte, 64), old[:64]...), 1, true)
	e.Flags, e.Sectors, e.Pad = 0, 0, [56]byte{}
	if err != nil || got != e {
		t.Errorf("old form: %v", err)
	}
	for _, i := range []int{-1, 4} {
		if _, err := DecodeUUIDEntry(b, i, false); !errors.Is(err, ErrCorrupt) {
			t.Errorf("slot %d: %v", i, err)
		}
	}
	if !(&UUIDEntry{UUID: RetiredUUID}).Retired() || (&UUIDEntry{UUID: RetiredUUID, Flags: 1}).FlashOnly() || !(&UUIDEntry{UUID: UUID{1}, Flags: 1}).FlashOnly() {
		t.Error("kinds of slots")
	}
	l := UUIDEntry{Label: [32]byte{'a', 'b', '\n', 'x'}}
	if l.LabelString() != "ab" {
		t.Errorf("label %q", l.LabelString())
	}
}
