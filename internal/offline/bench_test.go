package offline

import (
	"context"
	"os"
	"testing"
	"unsafe"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/fixture"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// BenchmarkOpen reads a set of several hundred nodes from memory: what is left is checksums, merging and replay.
func BenchmarkOpen(b *testing.B) {
	f, err := fixture.Get("btree-deep")
	if err != nil {
		b.Fatal(err)
	}
	l := openLab(b, f)
	img, err := os.ReadFile(l.paths["cache"])
	if err != nil {
		b.Fatal(err)
	}
	dev, err := blockdev.Memory(int64(len(img)), blockdev.MemoryOptions{})
	if err != nil {
		b.Fatal(err)
	}
	defer dev.Close()
	bio, err := blockdev.NewIO(dev, 4)
	if err != nil {
		b.Fatal(err)
	}
	if err := bio.WriteAt(img, 0, 0); err != nil {
		b.Fatal(err)
	}
	bio.Close()
	var read, keys, extents int64
	b.ReportAllocs()
	for b.Loop() {
		read = 0
		s, err := Open(context.Background(), dev, Options{EachNode: func(ref NodeRef, _ *ondisk.Node) {
			read += int64(ref.Key.Size()) * ondisk.SectorSize
		}})
		if err != nil {
			b.Fatal(err)
		}
		keys, extents = s.Stats.Keys, s.Stats.Extents
		s.Close()
	}
	perOp := b.Elapsed().Seconds() / float64(b.N)
	b.ReportMetric(float64(read)/perOp/1e6, "MB/s-nodes")
	b.ReportMetric(float64(keys)/perOp, "keys/s")
	b.ReportMetric(float64(unsafe.Sizeof(Extent{})), "B/extent")
	b.ReportMetric(float64(extents), "extents")
}

// TestMemoryPerItem holds what docs/ARCHITECTURE.md says of memory.
func TestMemoryPerItem(t *testing.T) {
	if n := unsafe.Sizeof(Extent{}); n != 24 {
		t.Errorf("an extent takes %d bytes", n)
	}
	var s Set
	perBucket := unsafe.Sizeof(s.Gen[0]) + unsafe.Sizeof(s.DiskGen[0]) + unsafe.Sizeof(s.Prio[0]) + unsafe.Sizeof(s.OldestGen[0]) + unsafe.Sizeof(s.Role[0]) + unsafe.Sizeof(s.Used[0])
	if perBucket != 10 {
		t.Errorf("a bucket takes %d bytes", perBucket)
	}
}
