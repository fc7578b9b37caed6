package ondisk

import (
	"bytes"
	"errors"
	"testing"
)

func FuzzSuperblock(f *testing.F) {
	var b [SuperblockBytes]byte
	for _, sb := range []*Superblock{sampleCache(0), sampleCache(8), sampleCache(256), sampleBacking()} {
		sb.Encode(b[:])
		f.Add(bytes.Clone(b[:]))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		sb, err := DecodeSuperblock(in)
		if err != nil {
			if !errors.Is(err, ErrCorrupt) {
				t.Error(err)
			}
			return
		}
		var out [SuperblockBytes]byte
		if sb.Encode(out[:]); !bytes.Equal(out[:], in[:SuperblockBytes]) {
			t.Error("bytes lost")
		}
		if access, limits := sb.Check(plainHost); access == AccessNone && len(limits) == 0 {
			t.Error("refused without a reason")
		}
		sb.SetChecksum()
		if access, _ := sb.Check(plainHost); access > AccessNone && sb.IsCache() {
			if g := NewGeometry(sb); g.MetaBytes() <= 0 || g.NPrio == 0 || g.NrUUIDs == 0 {
				t.Errorf("accepted, but %+v", g)
			}
		}
	})
}

func FuzzKey(f *testing.F) {
	for _, k := range sampleKeys(2, 0) {
		f.Add(AppendKey(nil, &k))
	}
	g := sampleGeometry()
	f.Fuzz(func(t *testing.T, in []byte) {
		k, n, err := DecodeKey(in)
		if err != nil {
			return
		}
		if out := AppendKey(nil, &k); !bytes.Equal(out, in[:n]) {
			t.Error("bytes lost")
		}
		_, _, _ = k.String(), g.NodeFault(&k), k.IsCheck()
		if g.LeafFault(&k) == FaultNone && k.Start() >= k.End() {
			t.Errorf("good, but %v", k)
		}
	})
}

func FuzzNode(f *testing.F) {
	g := sampleGeometry()
	b, ref := node(&g, sampleKeys(40, 0), sampleKeys(3, 4000), sampleKeys(3, 5000))
	f.Add(b[:4096])
	f.Add(b)
	f.Fuzz(func(t *testing.T, in []byte) {
		n := DecodeNode(in, &g, &ref)
		if n.Err != nil && !errors.Is(n.Err, ErrCorrupt) {
			t.Error(n.Err)
		}
		for i := range n.Sets {
			s := &n.Sets[i]
			var words int
			if err := s.EachKey(func(k *Key) bool { words += k.Words(); return true }); err == nil && words != int(s.Keys) {
				t.Errorf("%d words of %d", words, s.Keys)
			}
		}
		// The same bytes with right checksums reach the code behind them.
		if len(in) >= 512 {
			c := bytes.Clone(in)
			copy(c[8:], b[8:16])
			c[24], c[25], c[26], c[27] = 1, 0, 0, 0
			c[30], c[31] = 0, 0
			if end := BSetHeaderBytes + 8*(int(c[28])+int(c[29])<<8); end <= len(c) {
				EncodeBSet(c, g.BSetMagic(), n.Seq, ref.P[0], bytes.Clone(c[BSetHeaderBytes:end]))
				n = DecodeNode(c, &g, &ref)
				for i := range n.Sets {
					_ = n.Sets[i].EachKey(func(k *Key) bool { return k.Words() > 0 })
				}
			}
		}
	})
}

func FuzzJournalBucket(f *testing.F) {
	g := sampleGeometry()
	b := make([]byte, 8192)
	j := JSet{Magic: g.JSetMagic(), Seq: 9, Version: 1, LastSeq: 4, UUIDBucket: MaxKey, Root: MaxKey}
	for _, k := range sampleKeys(5, 0) {
		j.Data = AppendKey(j.Data, &k)
	}
	j.Encode(b)
	j.Seq++
	j.Encode(b[512:])
	f.Add(b)
	f.Fuzz(func(t *testing.T, in []byte) {
		last := -1
		check := func(at int, j JSet) {
			if at <= last || at%g.BlockBytes() != 0 {
				t.Errorf("entry at %d after %d", at, last)
			}
			last = at
			var words int
			if err := j.EachKey(func(k *Key) bool { words += k.Words(); return true }); err == nil && words != int(j.Keys) {
				t.Errorf("%d words of %d", words, j.Keys)
			}
		}
		stop, err := ScanJournalBucket(in, &g, check)
		if err == nil && stop < len(in) {
			t.Errorf("stopped at %d of %d without a reason", stop, len(in))
		}
		// Again with the magic and the checksum set right.
		if len(in) < JSetHeaderBytes {
			return
		}
		c := bytes.Clone(in)
		copy(c[8:16], b[8:16])
		c[30], c[31] = 0, 0
		if end := JSetHeaderBytes + 8*(int(c[28])+int(c[29])<<8); end <= len(c) && end <= MaxJSetBytes {
			sum := Checksum(c[8:end])
			for i := range 8 {
				c[i] = byte(sum >> (8 * i))
			}
			last = -1
			_, _ = ScanJournalBucket(c, &g, check)
		}
	})
}

func FuzzPrioSet(f *testing.F) {
	g := sampleGeometry()
	p := PrioSet{Magic: g.PrioMagic(), Data: make([]byte, g.MetaBytes()-prioHeaderBytes)}
	b := make([]byte, g.MetaBytes())
	p.Encode(b)
	f.Add(b[:4096])
	f.Fuzz(func(t *testing.T, in []byte) {
		c := make([]byte, g.MetaBytes())
		copy(c, in)
		if _, err := DecodePrioSet(in, &g); err == nil && len(in) != len(c) {
			t.Error("wrong length accepted")
		}
		p := PrioSet{Magic: g.PrioMagic(), Data: c[prioHeaderBytes:]}
		p.Encode(c)
		if _, err := DecodePrioSet(c, &g); err != nil {
			t.Error(err)
		}
	})
}

func FuzzUUIDEntry(f *testing.F) {
	f.Add(make([]byte, 256), 1, false)
	f.Fuzz(func(t *testing.T, in []byte, i int, old bool) {
		e, err := DecodeUUIDEntry(in, i, old)
		if err != nil {
			return
		}
		_, _, _ = e.LabelString(), e.FlashOnly(), e.Retired()
		if !old {
			var out [UUIDEntryBytes]byte
			if e.Encode(out[:]); !bytes.Equal(out[:], in[i*UUIDEntryBytes:(i+1)*UUIDEntryBytes]) {
				t.Error("bytes lost")
			}
		}
	})
}
