//go:build interop

package interop

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A cut is one kind of moment at which the power goes.
type cut struct {
	name   string
	mark   string   // the line at which it goes
	format []string // of the set
	cache  int64
	slow   string // options of the backing disk
}

var cuts = []cut{
	{name: "write", mark: "fx MARK", format: []string{"--bucket", "128k", "--block", "512"}, cache: 72 * mib},
	{name: "split", mark: "CUT ", format: []string{"--bucket", "8k", "--block", "512"}, cache: 48 * mib},
	{name: "flush", mark: "CUT ", format: []string{"--bucket", "64k", "--block", "4k"}, cache: 96 * mib, slow: ",wiops=300"},
}

// TestPowerCuts lets a real kernel write to sets that we formatted, and cuts its power. What we then read of the
// images must be what the same kernel reads after its own replay, on copies, and nothing that had been flushed may
// be missing from either.
func TestPowerCuts(t *testing.T) {
	for _, k := range kernels() {
		t.Run(k, func(t *testing.T) {
			t.Parallel()
			for round := range rounds(t) {
				powerCuts(t, k, round)
			}
		})
	}
}

func powerCuts(t *testing.T, kernel string, round int) {
	p := newPlace(t, kernel)
	type pair struct{ cache, backing string }
	var pairs []pair
	var disks, names []string
	for _, c := range cuts {
		name := fmt.Sprintf("%s-%d", c.name, round)
		d := pair{p.image(name+"-cache", c.cache), p.image(name+"-backing", 32*mib)}
		must(t, program(t, "ubcache"), append(append([]string{"format"}, c.format...),
			"--writeback", "--cache", d.cache, "--backing", d.backing)...)
		out := p.boot(boot{
			disks: []string{d.cache + ",cache=unsafe", d.backing + ",cache=unsafe" + c.slow},
			cutAt: c.mark, limit: 240 * time.Second, script: "cut", args: []string{c.name, fmt.Sprint(round + 1)},
		})
		log := filepath.Join(p.dir, name+".log")
		if err := os.WriteFile(log, []byte(out), 0o644); err != nil {
			t.Fatal(err)
		}
		p.put(name+".history", []byte(must(t, fx(t), "history", log)))
		pairs, names = append(pairs, d), append(names, name)
		disks = append(disks, d.cache+",cache=unsafe", d.backing+",cache=unsafe")
	}
	p.boot(boot{disks: disks, throwOff: true, limit: 240 * time.Second, script: "replay", args: names})

	for i, name := range names {
		t.Run(name, func(t *testing.T) {
			p := &place{t: t, kernel: kernel, dir: p.dir, share: p.share}
			check := tail(p.shared(name+".check"), 1)
			t.Logf("the kernel reads %s", check)
			if !strings.HasSuffix(check, ", 0 wrong") {
				t.Errorf("the kernel itself lost something:\n%s", p.shared(name+".check"))
			}
			before := []string{digest(t, pairs[i].cache), digest(t, pairs[i].backing)}
			ours := p.cat(name+".cat", parseContent(t, p.shared(name+".hash")), "--cache", pairs[i].cache, "--backing", pairs[i].backing)
			if ours != "" {
				if out, status := run(t, fx(t), "check", ours, filepath.Join(p.share, name+".history"), "volume"); status != 0 {
					t.Errorf("what we read is not what was written:\n%s", tail(out, 20))
				}
			}
			p.check("--cache", pairs[i].cache, "--backing", pairs[i].backing)
			if before[0] != digest(t, pairs[i].cache) || before[1] != digest(t, pairs[i].backing) {
				t.Error("cat or check changed an image")
			}
		})
	}
}

func digest(t *testing.T, path string) string {
	t.Helper()
	return parseContent(t, must(t, fx(t), "hash", path)).SHA256
}
