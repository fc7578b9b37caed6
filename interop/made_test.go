//go:build interop

package interop

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/sim/made"
)

// TestMade hands to real kernels what power cuts have left of sets in states that do not come soon: buckets that were used
// again and again within one journal window (J3), and an index that maintenance has
// coalesced and lowered, or was about to. They must find all in order, and read what we read, which is what was written.
func TestMade(t *testing.T) {
	p := newPlace(t, "")
	var exhibits []*exhibit
	for _, held := range []bool{true, false} {
		left, err := made.Reused(7, held)
		list := p.exhibits(left, err)
		for _, e := range list {
			e.says = "bch_extent_bad() stale dirty pointer" // a key in the journal whose bucket was used again; a newer one follows
		}
		exhibits = append(exhibits, list...)
	}
	left, err := made.Lowered(7, 6)
	exhibits = append(exhibits, p.exhibits(left, err)...)
	for i, k := range kernels() {
		t.Run(k, func(t *testing.T) {
			in := &place{t: t, kernel: k, dir: p.dir, share: p.share}
			s := &show{errand: in.newErrand("out-" + k), exhibits: exhibits, number: i}
			s.run()
			for _, e := range exhibits {
				t.Run(e.name, func(t *testing.T) { s.judge(t, e) })
			}
		})
	}
}

// exhibits puts what is left into files, and looks at it first.
func (p *place) exhibits(left []*made.Left, err error) (list []*exhibit) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
	for _, l := range left {
		e := &exhibit{diskSet: &diskSet{name: l.Name, dir: filepath.Join(p.dir, l.Name)}, want: map[string]content{}, copy: true}
		if err := os.Mkdir(e.dir, 0o755); err != nil {
			p.t.Fatal(err)
		}
		file := func(name string, m *blockdev.MemoryDevice) string {
			path := filepath.Join(e.dir, name+".img")
			if err := os.WriteFile(path, m.Bytes(), 0o644); err != nil {
				p.t.Fatal(err)
			}
			return path
		}
		e.cache = file("cache", l.Cache)
		if l.Backing != nil {
			e.backings = []string{file("backing0", l.Backing)}
		} else {
			e.flash = []string{l.Flash}
		}
		in := &place{t: p.t, dir: e.dir}
		in.check(e.checkFlags()...)
		for _, v := range e.volumes() {
			path := filepath.Join(e.dir, v)
			if _, _, err := catTo(p.t, path, e.catFlags(v)...); err != nil {
				p.t.Fatal(err)
			}
			got, err := os.ReadFile(path)
			if err != nil {
				p.t.Fatal(err)
			}
			if err := l.Verify(got); err != nil {
				p.t.Error(err)
			}
			e.want[v] = parseContent(p.t, must(p.t, fx(p.t), "hash", path))
		}
		l.Close()
		list = append(list, e)
	}
	return list
}
