package btree

import (
	"context"
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
	"pgregory.net/rapid"
)

// image makes a cache device of what is on the rig's disk, with all that a set has besides its tree.
func (r *rig) image() *blockdev.MemoryDevice {
	r.Helper()
	dev, err := blockdev.Memory(int64(r.buckets*r.bucketSectors)*512, blockdev.MemoryOptions{})
	if err != nil {
		r.Fatalf("%v", err)
	}
	raw := dev.Bytes()
	copy(raw, r.disk)
	at := func(sector uint64) []byte { return raw[sector*512:] }
	super := r.super
	super.SetChecksum()
	super.Encode(at(ondisk.SuperblockSector)[:ondisk.SuperblockBytes])

	prio, uuids := r.meta[0], r.meta[1] // free for all that the tree knows
	b := at(r.geo.BucketStart(prio))[:r.geo.MetaBytes()]
	clear(b)
	p := ondisk.PrioSet{Magic: r.geo.PrioMagic(), Seq: 1, NextBucket: prio, Data: b[40:]}
	for i, g := range r.saved {
		p.SetEntry(i, ondisk.PrioInitial, g)
	}
	p.Encode(b)
	b = at(r.geo.BucketStart(uuids))[:r.geo.MetaBytes()]
	clear(b)
	for i := range r.inodes {
		e := ondisk.UUIDEntry{UUID: ondisk.UUID{7, byte(i)}, Flags: ondisk.UUIDFlashOnly, Sectors: r.sectors}
		e.Encode(b[i*ondisk.UUIDEntryBytes:])
	}
	j := ondisk.JSet{
		Magic: r.geo.JSetMagic(), Version: 1, LastSeq: 1, Level: uint16(r.durableRoot.Level), Root: r.durableRoot.Key(),
		UUIDBucket: ondisk.NewChild(0, 0, r.geo.MetaSectors, ondisk.MakePtr(r.saved[uuids], r.geo.BucketStart(uuids), 0)),
	}
	j.PrioBucket[0] = prio
	for i := range int(r.super.NJournal) {
		clear(at(r.geo.BucketStart(r.super.D[i]))[:512])
	}
	put := func() {
		if j.Seq++; j.Seq > uint64(r.super.NJournal) {
			r.Fatalf("the journal is full")
		}
		j.Encode(at(r.geo.BucketStart(r.super.D[j.Seq-1])))
		j.Data = nil
	}
	for _, e := range r.journal {
		if e.seq >= r.lastSeq {
			if len(j.Data)+24 > int(r.geo.BucketBytes())-ondisk.JSetHeaderBytes {
				put()
			}
			j.Data = ondisk.AppendKey(j.Data, &e.key)
		}
	}
	put()
	return dev
}

// judge has the checker, which shares no code with the tree, read what a crash now would leave.
func (r *rig) judge() {
	r.Helper()
	dev := r.image()
	defer dev.Close()
	set, err := offline.Open(context.Background(), dev, offline.Options{Parallel: 1})
	if err != nil {
		set.Close()
		r.Fatalf("%v", err)
	}
	defer set.Close()
	if worst, found := set.Report.Worst(); found && worst > offline.Harmless {
		r.Fatalf("%v", set.Report.Findings())
	}
	cells := make([][]cell, r.inodes)
	for i := range cells {
		cells[i] = make([]cell, r.sectors)
	}
	used := map[uint64]int{}
	for i := range set.Extents {
		e := &set.Extents[i]
		if !e.Live() {
			continue
		}
		used[r.geo.Bucket(e.P.Sector())] += int(e.Size)
		for s := e.Start; s < e.End(); s++ {
			cells[e.Inode][s] = cell{ptr: e.P.Advance(s - e.Start), dirty: e.Dirty()}
		}
	}
	for i := range r.model {
		for s := range r.model[i] {
			want, got := r.model[i][s], cells[i][s]
			if got.ptr == 0 && (want.strict || !r.live(&want)) {
				continue
			}
			if got.ptr != want.ptr || got.dirty != want.dirty {
				r.Fatalf("%d:%d: the checker reads %v dirty %v, want %v %v", i, s, got.ptr, got.dirty, want.ptr, want.dirty)
			}
		}
	}
	for b, n := range used {
		if int(set.Used[b]) != n {
			r.Fatalf("bucket %d: %d sectors used, %d in extents", b, set.Used[b], n)
		}
	}
}

// TestCheckerReadsTheSame lets the offline checker judge the disk in the middle of random steps, and at their end.
func TestCheckerReadsTheSame(t *testing.T) {
	levels := 0
	rapid.Check(t, func(t *rapid.T) {
		r := newRig(t, shape{buckets: 1024, bucketSectors: 16, blockSectors: rapid.SampledFrom([]int{1, 2, 8}).Draw(t, "block"), inodes: 2, sectors: 3000})
		w := rapid.SliceOfN(rapid.IntRange(0, 8), 12, 12).Draw(t, "weights")
		r.fill(rapid.IntRange(0, 2500).Draw(t, "fill"))
		for step := range rapid.IntRange(1, 40).Draw(t, "steps") {
			r.step(t, w, false)
			if step%10 == 0 {
				r.judge()
			}
		}
		r.judge()
		r.compare()
		r.sync()
		r.lastSeq = r.seq
		r.judge()
		levels = max(levels, int(r.durableRoot.Level))
	})
	if levels == 0 {
		t.Error("no tree had two levels")
	}
}
