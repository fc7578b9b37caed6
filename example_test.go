package ubcache_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/ubcache/ubcache"
)

// An SSD and a disk, here two files, become one volume.
func Example() {
	dir, err := os.MkdirTemp("", "ubcache-example-")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	ssd, disk := filepath.Join(dir, "ssd"), filepath.Join(dir, "disk")
	for path, size := range map[string]int64{ssd: 64 << 20, disk: 256 << 20} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			log.Fatal(err)
		}
		if err := os.Truncate(path, size); err != nil {
			log.Fatal(err)
		}
	}

	ctx := context.Background()
	if _, err := ubcache.Format(ctx, ubcache.FormatOptions{Cache: ssd, Backing: []string{disk}, BucketSize: 64 << 10}); err != nil {
		log.Fatal(err)
	}
	set, err := ubcache.Open(ctx, ubcache.Options{Cache: ssd})
	if err != nil {
		log.Fatal(err)
	}
	v, err := set.OpenVolume(ctx, ubcache.VolumeOptions{Name: "data", Backing: disk})
	if err != nil {
		log.Fatal(err)
	}
	block := make([]byte, v.BlockSize())
	copy(block, "hello")
	if err := v.WriteAt(ctx, block, 4096, 0); err != nil {
		log.Fatal(err)
	}
	if err := v.Flush(ctx); err != nil { // from here on it survives a power cut
		log.Fatal(err)
	}
	clear(block)
	if err := v.ReadAt(ctx, block, 4096); err != nil {
		log.Fatal(err)
	}
	s := v.Stats()
	fmt.Printf("%s, %d MiB, mode %s: read %q, %d hit, %d misses\n", v.Name(), v.Size()>>20, s.Mode, block[:5], s.Hits, s.Misses)
	if err := set.Close(ctx); err != nil {
		log.Fatal(err)
	}
	// Output: data, 255 MiB, mode writethrough: read "hello", 1 hit, 0 misses
}
