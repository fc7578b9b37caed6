package offline

import (
	"bytes"
	"context"
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/fixture"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// TestFixtureStructures decodes every structure that a kernel wrote in every fixture, encodes it again, and
// wants the same bytes.
func TestFixtureStructures(t *testing.T) {
	eachFixture(t, func(t *testing.T, f *fixture.Fixture) {
		l := openLab(t, f)
		bio, err := blockdev.NewIO(l.cache, 4)
		if err != nil {
			t.Fatal(err)
		}
		defer bio.Close()
		read := func(sector uint64, n int) []byte {
			b := make([]byte, n)
			if err := bio.ReadAt(b, int64(sector)*ondisk.SectorSize); err != nil {
				t.Fatal(err)
			}
			return b
		}
		same := func(what string, sector uint64, got, want []byte) {
			if !bytes.Equal(got, want) {
				i := 0
				for got[i] == want[i] {
					i++
				}
				t.Errorf("%s at sector %d: byte %d is %#x after decoding and encoding, %#x on disk", what, sector, i, got[i], want[i])
			}
		}
		var sets, keys int
		s, err := Open(context.Background(), l.cache, Options{EachNode: func(ref NodeRef, n *ondisk.Node) {
			for i := range n.Sets {
				set := &n.Sets[i]
				var words []byte
				if err := set.EachKey(func(k *ondisk.Key) bool {
					words = ondisk.AppendKey(words, k)
					keys++
					return true
				}); err != nil {
					t.Error(err)
				}
				got := make([]byte, set.Bytes())
				ondisk.EncodeBSet(got, set.Magic, set.Seq, ref.Key.P[0], words)
				want := append(got[:ondisk.BSetHeaderBytes:ondisk.BSetHeaderBytes], set.Data...)
				same("bset", ref.Sector(), got, want)
				sets++
				if got := ondisk.NodeChecksum(uint64(ref.Key.P[0]), got[8:]); got != set.Csum {
					t.Errorf("bset in node at sector %d: csum %016x after decoding and encoding, %016x on disk", ref.Sector(), got, set.Csum)
				}
			}
		}})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()

		area := read(ondisk.SuperblockSector, ondisk.SuperblockBytes)
		again := make([]byte, len(area))
		s.Super.Encode(again)
		same("superblock", ondisk.SuperblockSector, again, area)
		for i, dev := range l.backings {
			b, err := OpenBacking(s, dev)
			if err != nil {
				t.Fatal(err)
			}
			b.Super.SetChecksum()
			b.Super.Encode(again)
			io, err := blockdev.NewIO(dev, 1)
			if err != nil {
				t.Fatal(err)
			}
			defer io.Close()
			if err := io.ReadAt(area, ondisk.SuperblockOffset); err != nil {
				t.Fatal(err)
			}
			same(l.Backings()[i]+" superblock", ondisk.SuperblockSector, again, area)
		}
		for _, e := range s.Entries {
			want := read(e.Sector, e.Bytes)
			j, err := ondisk.DecodeJSet(want, &s.Geo)
			if err != nil {
				t.Fatal(err)
			}
			got := make([]byte, e.Bytes)
			j.Encode(got)
			same("jset", e.Sector, got, want)
		}
		prios := 0
		for b, role := range s.Role {
			if role != RolePrio {
				continue
			}
			at := s.Geo.BucketStart(uint64(b))
			want := read(at, s.Geo.MetaBytes())
			p, err := ondisk.DecodePrioSet(want, &s.Geo)
			if err != nil {
				t.Fatal(err)
			}
			got := make([]byte, len(want))
			p.Encode(got)
			same("prio set", at, got, want)
			prios++
		}
		at := s.Newest.UUIDBucket.P[0].Sector()
		want := read(at, s.Geo.MetaBytes())
		got := make([]byte, len(want))
		for i := range s.Slots {
			s.Slots[i].Encode(got[i*ondisk.UUIDEntryBytes:])
		}
		same("uuid array", at, got, want)
		t.Logf("%d journal entries, %d bsets with %d keys, %d prio sets, %d slots", len(s.Entries), sets, keys, prios, len(s.Slots))
	})
}
