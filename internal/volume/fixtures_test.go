package volume

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"strings"
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/fixture"
	"github.com/ubcache/ubcache/internal/offline"
)

// hashDevice reads a device whole.
func hashDevice(t *testing.T, dev blockdev.Device) string {
	t.Helper()
	io, err := blockdev.NewIO(dev, 8)
	if err != nil {
		t.Fatal(err)
	}
	defer io.Close()
	h := sha256.New()
	buf := make([]byte, 1<<20)
	for off, size := int64(0), dev.Info().Size; off < size; {
		b := buf[:min(int64(len(buf)), size-off)]
		if err := io.ReadAt(b, off); err != nil {
			t.Fatal(err)
		}
		h.Write(b)
		off += int64(len(b))
	}
	return hex.EncodeToString(h.Sum(nil))
}

// TestFixtures opens what kernels left, reads each volume whole, twice, the second time with what the first has put
// into the cache, and stops; then the set is sound and says the same.
func TestFixtures(t *testing.T) {
	list, err := fixture.All()
	if err != nil {
		t.Fatal(err)
	}
	for i, f := range list {
		if !f.HasCache() || testing.Short() && i%5 != 0 {
			continue
		}
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			open := func(role string) blockdev.Device {
				path, err := f.Extract(role, dir)
				if err != nil {
					t.Fatal(err)
				}
				dev, err := blockdev.Open(path, blockdev.Options{})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { dev.Close() })
				return dev
			}
			cache := open("cache")
			backings := map[string]blockdev.Device{}
			for _, r := range f.Backings() {
				backings[r] = open(r)
			}
			for _, when := range []string{"first start", "second start"} {
				set, err := cacheset.Open(context.Background(), cache, cacheset.Options{})
				if err != nil {
					t.Fatal(err)
				}
				for name, want := range f.Volumes {
					var v *Volume
					if dev, ok := backings[name]; ok {
						v, err = Open(set, dev)
					} else {
						v, err = OpenFlash(set, strings.TrimPrefix(name, "flash:"))
					}
					if f.Name == "two-backing" && name == "backing1" {
						// Its blocks are smaller than the set's: kernels do not attach it either.
						if !errors.Is(err, ErrBlockSize) {
							t.Errorf("opening backing1: %v", err)
						}
						continue
					}
					if err != nil {
						t.Fatal(err)
					}
					for range 2 {
						if got := hashDevice(t, v); got != want.SHA256 {
							t.Errorf("%s: %s reads as %s, want %s", when, name, got, want.SHA256)
						}
					}
					if err := v.Close(); err != nil {
						t.Error(err)
					}
				}
				if err := set.Close(context.Background()); err != nil {
					t.Error(err)
				}
			}
			var all []blockdev.Device
			for _, r := range f.Backings() {
				all = append(all, backings[r])
			}
			s, _, err := offline.Check(context.Background(), cache, all, offline.CheckOptions{})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			for _, g := range s.Report.Findings() {
				if g.Severity > offline.Harmless {
					t.Error(g.String())
				}
			}
		})
	}
}
