package offline

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/fixture"
)

// lab is an unpacked fixture with its devices opened for reading.
type lab struct {
	*fixture.Fixture
	paths    map[string]string // by role
	digests  map[string]string
	cache    blockdev.Device
	backings []blockdev.Device // in the order of Fixture.Backings
}

// images is where fixtures are unpacked, once for all tests of the package: nothing here writes to them.
var images struct {
	dir  string
	once sync.Map // of fixture names, *sync.Once
}

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "ubcache-offline")
	if err != nil {
		panic(err)
	}
	images.dir = dir
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

func openLab(t testing.TB, f *fixture.Fixture) *lab {
	t.Helper()
	l := &lab{Fixture: f, paths: map[string]string{}, digests: map[string]string{}}
	dir := filepath.Join(images.dir, f.Name)
	once, _ := images.once.LoadOrStore(f.Name, new(sync.Once))
	once.(*sync.Once).Do(func() {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Devices {
			if _, err := f.Extract(d.Role, dir); err != nil {
				t.Fatal(err)
			}
		}
	})
	open := func(role string) blockdev.Device {
		path := filepath.Join(dir, role+".img")
		l.paths[role], l.digests[role] = path, digest(t, path)
		dev, err := blockdev.Open(path, blockdev.Options{ReadOnly: true})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { dev.Close() })
		return dev
	}
	l.cache = open("cache")
	for _, r := range f.Backings() {
		l.backings = append(l.backings, open(r))
	}
	return l
}

// digest hashes what a file holds, and where, holes left out.
func digest(t testing.TB, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	for at := int64(0); ; {
		from, err := f.Seek(at, unix.SEEK_DATA)
		if err != nil {
			return hex.EncodeToString(h.Sum(nil))
		}
		if at, err = f.Seek(from, unix.SEEK_HOLE); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(h, from, at)
		if _, err := io.Copy(h, io.NewSectionReader(f, from, at-from)); err != nil {
			t.Fatal(err)
		}
	}
}

// unchanged fails the test where an image no longer is what it was.
func (l *lab) unchanged(t *testing.T) {
	t.Helper()
	for role, path := range l.paths {
		if digest(t, path) != l.digests[role] {
			t.Errorf("%s: image changed", role)
		}
	}
}

func eachFixture(t *testing.T, fn func(t *testing.T, f *fixture.Fixture)) {
	all, err := fixture.All()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		if testing.Short() && f.Name != "btree-deep" && f.Name != "wb-crash-6.1" && f.Name != "flash-only" {
			continue
		}
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			fn(t, f)
		})
	}
}

// hashVolume reads the whole volume through a queue.
func hashVolume(t testing.TB, v *Volume) string {
	t.Helper()
	h := sha256.New()
	bad, err := Copy(context.Background(), h, v, CopyOptions{})
	if err != nil || len(bad) > 0 {
		t.Fatalf("%v, unreadable %v", err, bad)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// TestFixtures reads every set that a kernel left: each volume has the content that the kernel itself showed,
// a check finds nothing above harmless, and no image changes.
func TestFixtures(t *testing.T) {
	eachFixture(t, func(t *testing.T, f *fixture.Fixture) {
		l := openLab(t, f)
		s, found, err := Check(context.Background(), l.cache, l.backings, CheckOptions{Data: true})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		sameKeys(t, s, f)
		for _, x := range s.Report.Findings() {
			if x.Severity > Harmless {
				t.Errorf("%v", &x)
			} else {
				t.Log(&x)
			}
		}
		if len(found) != len(l.backings) {
			t.Fatalf("%d of %d backing devices accepted", len(found), len(l.backings))
		}
		read := 0
		for name, want := range f.Volumes {
			var v *Volume
			if i := index(f.Backings(), name); i >= 0 {
				v, err = OpenVolume(s, found[i])
			} else {
				v, err = OpenFlash(s, name)
			}
			if err != nil {
				t.Fatal(err)
			}
			if v.Info().Size != want.Size {
				t.Errorf("%s: size %d, manifest says %d", name, v.Info().Size, want.Size)
			}
			if got := hashVolume(t, v); got != want.SHA256 {
				t.Errorf("%s: sha256 %s, manifest says %s", name, got, want.SHA256)
			}
			read++
		}
		if read == 0 {
			t.Error("no volume")
		}
		l.unchanged(t)
	})
}

func index(list []string, s string) int {
	for i := range list {
		if list[i] == s {
			return i
		}
	}
	return -1
}

// sameKeys holds the live extents after our replay against those that the kernel printed after its own. When the
// kernel printed them its allocator had begun to reuse clean buckets: it may have none of the keys of such a bucket.
func sameKeys(t *testing.T, s *Set, f *fixture.Fixture) {
	t.Helper()
	text, err := f.Keys()
	if err != nil {
		t.Fatal(err)
	}
	theirs := make(map[uint64]bool) // buckets that the kernel has keys of
	for line := range strings.Lines(string(text)) {
		if k, ok := parseKey(line); ok {
			theirs[s.Geo.Bucket(uint64(k.sector))] = true
		}
	}
	if s.Stats.Extents > 0 && len(theirs) == 0 {
		t.Fatal("no key read from the kernel's list")
	}
	var got bytes.Buffer
	reused := 0
	for i := range s.Extents {
		e := &s.Extents[i]
		b := s.Geo.Bucket(e.P.Sector())
		switch {
		case !e.Live():
		case !e.Dirty() && s.Role[b] == RoleClean && !theirs[b]:
			reused++
		default:
			fmt.Fprintln(&got, e.Key())
		}
	}
	if reused > 0 {
		t.Logf("%d clean extents lie in buckets that the kernel had reused already", reused)
	}
	if f.Name != "wt-wrap" && reused > 0 {
		t.Errorf("the kernel has nothing of %d clean extents, and its cache was not full", reused)
	}
	a, b := joinKeys(got.String()), joinKeys(string(text))
	if a != b {
		t.Errorf("ours %d lines, the kernel's %d; first difference: %s", strings.Count(a, "\n"), strings.Count(b, "\n"), firstDifference(a, b))
	}
}

type textKey struct {
	inode, start, n, dev, sector, gen int
	dirty                             bool
}

func parseKey(line string) (k textKey, ok bool) {
	_, err := fmt.Sscanf(line, "%d:%d len %d -> [%d:%d gen %d]", &k.inode, &k.start, &k.n, &k.dev, &k.sector, &k.gen)
	k.dirty = strings.Contains(line, "] dirty")
	return k, err == nil
}

// joinKeys brings keys to one form: neighbours that continue each other joined.
func joinKeys(text string) string {
	var out strings.Builder
	var last textKey
	for line := range strings.Lines(text) {
		k, ok := parseKey(line)
		if !ok {
			continue
		}
		next := last
		next.start, next.sector, next.n = last.start+last.n, last.sector+last.n, k.n
		if last.n > 0 && k == next {
			last.n += k.n
			continue
		}
		if last.n > 0 {
			fmt.Fprintln(&out, last)
		}
		last = k
	}
	fmt.Fprintln(&out, last)
	return out.String()
}

func firstDifference(a, b string) string {
	la, lb := strings.Split(a, "\n"), strings.Split(b, "\n")
	for i := range min(len(la), len(lb)) {
		if la[i] != lb[i] {
			return fmt.Sprintf("line %d: ours %q, the kernel's %q", i, la[i], lb[i])
		}
	}
	return "one is a part of the other"
}
