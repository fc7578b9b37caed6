//go:build interop

package interop

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/ubcache/ubcache/internal/fixture"
)

// unpack puts a fixture's images into a folder of the place.
func (p *place) unpack(f *fixture.Fixture) *diskSet {
	p.t.Helper()
	s := &diskSet{name: f.Name, dir: filepath.Join(p.dir, f.Name)}
	if err := os.Mkdir(s.dir, 0o755); err != nil {
		p.t.Fatal(err)
	}
	for _, d := range f.Devices {
		path, err := f.Extract(d.Role, s.dir)
		if err != nil {
			p.t.Fatal(err)
		}
		if d.Role == "cache" {
			s.cache = path
		} else {
			s.backings = append(s.backings, path)
		}
	}
	for name := range f.Volumes {
		if !strings.HasPrefix(name, "backing") {
			s.flash = append(s.flash, name)
		}
	}
	slices.Sort(s.flash)
	return s
}

// onHost runs fn for each fixture on a copy of its images, as many at a time as there are processors.
func onHost(t *testing.T, p *place, fn func(t *testing.T, f *fixture.Fixture, s *diskSet) *exhibit) (done []*exhibit) {
	all, err := fixture.All()
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	t.Run("fixtures", func(t *testing.T) {
		for _, f := range all {
			t.Run(f.Name, func(t *testing.T) {
				t.Parallel()
				processors <- struct{}{}
				defer func() { <-processors }()
				p := &place{t: t, dir: p.dir, share: p.share}
				e := fn(t, f, p.unpack(f))
				mu.Lock()
				defer mu.Unlock()
				done = append(done, e)
			})
		}
	})
	slices.SortFunc(done, func(a, b *exhibit) int { return strings.Compare(a.name, b.name) })
	return done
}

// useFixture reads what a kernel left through a server of ours, writes to it, and stops in order. What it returns is
// what the kernel must read then.
func useFixture(t *testing.T, f *fixture.Fixture, s *diskSet) *exhibit {
	e := &exhibit{diskSet: s, want: map[string]content{}}
	if f.Name == "two-backing" { // that one was written to uncached, for its blocks are smaller than the set's
		s.refuse(t, "backing1")
		e.want["backing1"] = recorded(t, f, "backing1")
	}
	v := s.serve(t)
	for _, name := range s.served() {
		want := f.Volumes[name]
		before := v.read(name)
		if before.SHA256 != want.SHA256 || before.Size != want.Size {
			t.Errorf("%s: %d bytes, sha256 %s; the kernel reads %d bytes, %s; %s", name, before.Size, before.SHA256, want.Size, want.SHA256,
				differs(before, recorded(t, f, name)))
		}
		if sum := v.copyOut(name); sum != want.SHA256 {
			t.Errorf("%s: nbdcopy reads sha256 %s, the kernel %s", name, sum, want.SHA256)
		}
		if before.SHA256 != want.SHA256 {
			t.FailNow() // before anything is written
		}
		touched := v.writeAtRandom(name)
		after := v.read(name)
		for i := range after.Chunks {
			in := slices.ContainsFunc(touched, func(w window) bool { return w.off < int64(i+1)*after.Chunk && w.off+w.size > int64(i)*after.Chunk })
			if !in && after.Chunks[i] != before.Chunks[i] {
				t.Errorf("%s: chunk %d has changed, and nobody wrote there", name, i)
			}
		}
		if after.SHA256 == before.SHA256 {
			t.Errorf("%s: no change after writing", name)
		}
		e.want[name] = after
	}
	v.stop()
	s.atRest(t, e.want)
	v = s.serve(t) // once more: what the first stop left opens
	v.shows(e.want)
	v.stop()
	s.atRest(t, e.want)
	return e
}

// refuse demands that a server refuses to start with a volume, and changes nothing; from then on it is left out.
func (s *diskSet) refuse(t *testing.T, volume string) {
	t.Helper()
	digests := func() (all []string) {
		for _, i := range s.images() {
			all = append(all, digest(t, i))
		}
		return all
	}
	before := digests()
	out, status := run(t, program(t, "ubcache"), s.serveFlags()...)
	if status == 0 || !strings.Contains(out, "block size") {
		t.Errorf("ubcache serve with %s, whose blocks are smaller than the set's: status %d, want another than 0, and the reason:\n%s", volume, status, tail(out, 10))
	}
	if !slices.Equal(before, digests()) {
		t.Errorf("ubcache serve refused %s, and has changed an image", volume)
	}
	s.refused = append(s.refused, volume)
}

// shows demands that a server shows that content.
func (v *server) shows(want map[string]content) {
	v.t.Helper()
	for _, name := range v.set.served() {
		if got := v.read(name); got.SHA256 != want[name].SHA256 {
			v.t.Errorf("%s: we read sha256 %s after a restart, want %s; %s", name, got.SHA256, want[name].SHA256, differs(got, want[name]))
		}
	}
}

// atRest demands that the set is sound, and holds that content.
func (s *diskSet) atRest(t *testing.T, want map[string]content) {
	t.Helper()
	p := &place{t: t, kernel: "none", dir: s.dir}
	p.check(s.checkFlags()...)
	for name, c := range want {
		if path := p.cat(name+".cat", c, s.catFlags(name)...); path != "" && !t.Failed() {
			os.Remove(path)
		}
	}
}

// A window is a range of bytes of a volume.
type window struct{ off, size int64 }

// writeAtRandom writes to three windows of a volume, at its start, middle and end, some hundred KiB in several block
// sizes, over what is there, and verifies it; then it trims and zeroes a little. It returns the windows.
func (v *server) writeAtRandom(volume string) []window {
	v.t.Helper()
	c, o := v.open(volume)
	info := c.Info()
	size, block := info.Size, int64(info.LogicalBlock)
	wide := int64(mib)
	if size < 8*wide {
		wide = 64 * kib
	}
	w := []window{{0, wide}, {size / 2 &^ (wide - 1), wide}, {(size - wide) &^ (wide - 1), wide}}
	jobs := [][]string{
		{"--bs=" + strconv.FormatInt(block, 10), "--io_size=" + strconv.FormatInt(min(128*block, wide), 10)},
		{"--bssplit=4k/60:16k/30:64k/10", "--io_size=" + strconv.FormatInt(min(256*kib, wide), 10)},
		{"--bs=64k", "--io_size=" + strconv.FormatInt(min(256*kib, wide), 10)},
	}
	args := []string{
		"--ioengine=nbd", "--uri=" + v.uri(volume), "--rw=randwrite", "--iodepth=8", "--fsync=16", "--randseed=" + strconv.Itoa(len(volume)),
		"--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--verify_state_save=0", "--output-format=terse",
	}
	for i, j := range jobs {
		args = append(args, fmt.Sprintf("--name=%s-%d", volume, i), "--offset="+strconv.FormatInt(w[i].off, 10), "--size="+strconv.FormatInt(w[i].size, 10))
		args = append(args, j...)
	}
	if out, status := run(v.t, "fio", args...); status != 0 {
		v.t.Errorf("fio on %s: status %d\n%s\n%s", volume, status, tail(out, 20), v.said(20))
	}
	if info.CanDiscard {
		if err := o.Discard(w[1].off+wide/4, wide/8); err != nil {
			v.t.Errorf("trim of %s: %v", volume, err)
		}
	}
	if err := o.WriteZeroes(w[2].off+wide/2, wide/8, 0); err != nil {
		v.t.Errorf("zeroes to %s: %v", volume, err)
	}
	if err := o.Close(); err != nil {
		v.t.Error(err)
	}
	if err := c.Close(); err != nil {
		v.t.Error(err)
	}
	return w
}

// recorded returns what a fixture's manifest says of a volume, chunk by chunk.
func recorded(t *testing.T, f *fixture.Fixture, volume string) content {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(fixture.Dir(), f.Name, volume+".content.json"))
	if err != nil {
		t.Fatal(err)
	}
	var c content
	if err := json.Unmarshal(b, &c); err != nil {
		t.Fatal(err)
	}
	return c
}
