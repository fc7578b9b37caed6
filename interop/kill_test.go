//go:build interop

package interop

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/fixture"
)

// A victim is a set whose server is killed again and again.
type victim struct {
	*diskSet
	kills int
	block int64                        // of the writes
	seed  uint32                       // of the next load
	past  map[string][]json.RawMessage // what was written before, by volume
}

// killed serves sets, loads them over several connections, and kills the server, twenty times in all for each round.
// What was acknowledged must be there at the next start, and stay as it is. It returns the sets, stopped in order at
// last, and copies of the images as some kills left them, without what the server keeps in its runtime directory: what
// was flushed must be there for a kernel.
func killed(t *testing.T, p *place) (exhibits []*exhibit) {
	seed, n := moments(t), rounds(t)
	t.Run("killed", func(t *testing.T) {
		var mu sync.Mutex
		start := func(name string, i int, make func(p *place) *victim) {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				p := &place{t: t, kernel: "none", dir: p.dir, share: p.share}
				processors <- struct{}{}
				defer func() { <-processors }()
				e := make(p).kill(p, rand.New(rand.NewPCG(seed, uint64(i))))
				mu.Lock()
				defer mu.Unlock()
				exhibits = append(exhibits, e...)
			})
		}
		start("fresh", 0, func(p *place) *victim { return p.freshVictim(13 * n) })
		start("dirty", 1, func(p *place) *victim { return p.dirtyVictim("wb-crash-6.1", 512, 4*n) })
		start("dirty-4k", 2, func(p *place) *victim { return p.dirtyVictim("moving-gc", 4*kib, 3*n) })
	})
	slices.SortFunc(exhibits, func(a, b *exhibit) int { return strings.Compare(a.name, b.name) })
	return exhibits
}

// moments returns the seed for what is left to chance: UBCACHE_SEED, else one of its own.
func moments(t *testing.T) uint64 {
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("UBCACHE_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatalf("UBCACHE_SEED: %v", err)
		}
		seed = n
	}
	t.Logf("moments by UBCACHE_SEED=%d", seed)
	return seed
}

// freshVictim formats a set with a volume in writethrough and one in writearound. The cache is smaller than what is
// written, so buckets are used again.
func (p *place) freshVictim(kills int) *victim {
	p.t.Helper()
	s := &diskSet{name: "killed-fresh", dir: filepath.Join(p.dir, "killed-fresh")}
	if err := os.Mkdir(s.dir, 0o755); err != nil {
		p.t.Fatal(err)
	}
	in := &place{t: p.t, dir: s.dir}
	s.cache = in.image("cache", 24*mib)
	s.backings = []string{in.image("backing0", 32*mib), in.image("backing1", 32*mib)}
	must(p.t, program(p.t, "ubcache"), "format", "--bucket", "8k", "--block", "512", "--cache", s.cache, "--backing", s.backings[0], "--backing", s.backings[1])
	must(p.t, fx(p.t), "super", s.backings[1], "flags=2") // writearound, which no option of format asks for
	return &victim{diskSet: s, kills: kills, block: 512, past: map[string][]json.RawMessage{}}
}

// dirtyVictim takes a fixture that holds dirty data.
func (p *place) dirtyVictim(name string, block int64, kills int) *victim {
	p.t.Helper()
	f, err := fixture.Get(name)
	if err != nil {
		p.t.Fatal(err)
	}
	named := *f
	named.Name = "killed-" + name
	v := &victim{diskSet: p.unpack(&named), kills: kills, block: block, past: map[string][]json.RawMessage{}}
	b, err := os.ReadFile(filepath.Join(fixture.Dir(), name, "manifest.json"))
	if err != nil {
		p.t.Fatal(err)
	}
	var manifest struct {
		History []json.RawMessage `json:"history"`
	}
	if err := json.Unmarshal(b, &manifest); err != nil {
		p.t.Fatal(err)
	}
	for _, phase := range manifest.History {
		var of struct{ Volume string }
		if err := json.Unmarshal(phase, &of); err != nil {
			p.t.Fatal(err)
		}
		v.past[of.Volume] = append(v.past[of.Volume], phase)
	}
	return v
}

// kill does that to one set.
func (v *victim) kill(p *place, rnd *rand.Rand) (copies []*exhibit) {
	t := p.t
	for k := range v.kills {
		if k%5 == 4 { // at the start, in the middle of what it does before it serves
			s := v.launch(t)
			time.Sleep(time.Duration(rnd.IntN(60)) * time.Millisecond)
			s.kill()
			t.Logf("kill %d: at the start", k)
		} else {
			s := v.serve(t)
			before := v.lookAt(s)
			if k%4 == 1 { // and once it was read it stays so
				s.kill()
				s = v.serve(t)
				for name, c := range v.lookAt(s) {
					if c.SHA256 != before[name].SHA256 {
						t.Errorf("kill %d: %s: the content changed from one start to the next; %s", k, name, differs(c, before[name]))
					}
				}
			}
			after := time.Duration(20+rnd.IntN(700)) * time.Millisecond
			v.load(s, after, s.kill)
			t.Logf("kill %d: after %v of load", k, after)
		}
		if k%4 == 2 && len(copies) < 2*rounds(t) {
			copies = append(copies, v.leave(p, k))
		}
		if t.Failed() {
			t.FailNow()
		}
	}
	s := v.serve(t)
	v.lookAt(s)
	v.load(s, 300*time.Millisecond, s.stop) // in order, and under load
	s = v.serve(t)
	e := &exhibit{diskSet: v.diskSet, want: v.lookAt(s), history: map[string]string{}}
	s.stop()
	v.atRest(t, e.want)
	for _, name := range v.served() {
		e.history[name] = v.history(t, v.dir, name)
	}
	return append(copies, e)
}

// lookAt demands that every acknowledged write is there, and returns what is.
func (v *victim) lookAt(s *server) map[string]content {
	s.t.Helper()
	now := map[string]content{}
	for _, name := range v.served() {
		if said, status := run(s.t, fx(s.t), "check", s.uri(name), v.history(s.t, v.dir, name), name, "acknowledged"); status != 0 {
			s.t.Fatalf("%s: not every acknowledged write is there:\n%s\n%s", name, tail(said, 12), s.said(20))
		}
		now[name] = s.read(name)
	}
	return now
}

// history writes what fx check takes for a volume to a file, and returns its path.
func (v *victim) history(t *testing.T, dir, volume string) string {
	t.Helper()
	all := slices.Clone(v.past[volume])
	if log := v.writes(volume); exists(log) {
		var own []json.RawMessage
		if err := json.Unmarshal([]byte(must(t, fx(t), "history", log)), &own); err != nil {
			t.Fatal(err)
		}
		all = append(all, own...)
	}
	b, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, volume+".history")
	if all == nil {
		b = []byte("[]")
	}
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// writes is the file for what fx reports of its writes to a volume.
func (v *victim) writes(volume string) string { return filepath.Join(v.dir, volume+".writes") }

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// load writes to all volumes at a time, and reads them, until it ends the server after that long.
func (v *victim) load(s *server, after time.Duration, end func()) {
	s.t.Helper()
	var writers, readers []*exec.Cmd
	for i, name := range v.served() {
		log, err := os.OpenFile(v.writes(name), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
		if err != nil {
			s.t.Fatal(err)
		}
		defer log.Close()
		v.seed++
		size, err := strconv.ParseInt(tail(must(s.t, "nbdinfo", "--size", s.uri(name)), 1), 10, 64)
		if err != nil {
			s.t.Fatal(err)
		}
		// Every other load stays within a few MiB, so that it writes over itself again and again.
		length := size &^ (64*kib - 1)
		if v.seed/2%2 == 1 {
			length = min(length, 3*mib)
		}
		spec := fmt.Sprintf("seed=%d,ops=10000000,min=%d,max=16k,align=%d,len=%d,threads=6,conns=3,flush=%d,fua=13,zero=17", 50000+v.seed, v.block, v.block, length, 60+40*i)
		w := exec.Command(fx(s.t), "write", s.uri(name), name, spec)
		w.Stdout, w.Stderr = log, log
		r := exec.Command(fx(s.t), "hash", s.uri(name)) // fills the cache; what it reads is of no interest
		for _, c := range []*exec.Cmd{w, r} {
			if err := c.Start(); err != nil {
				s.t.Fatal(err)
			}
		}
		writers, readers = append(writers, w), append(readers, r)
		v.begun(s, name, spec)
	}
	time.Sleep(after)
	end()
	for _, r := range readers {
		r.Wait()
	}
	for i, w := range writers {
		var exit *exec.ExitError
		if err := w.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 3 {
			b, _ := os.ReadFile(v.writes(v.served()[i]))
			s.t.Errorf("%v ended with %v, not by the loss of its connection:\n%s", w.Args, err, tail(string(b), 5))
		}
	}
}

// begun waits until a writer is connected, and says so.
func (v *victim) begun(s *server, name, spec string) {
	s.t.Helper()
	for begin := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		said, err := os.ReadFile(v.writes(name))
		if err != nil {
			s.t.Fatal(err)
		}
		if strings.Contains(string(said), "fx begin "+name+" "+spec+"\n") {
			return
		}
		if time.Since(begin) > stopLimit {
			s.t.Fatalf("%s: fx does not begin:\n%s", name, tail(string(said), 5))
		}
	}
}

// leave copies the images as a kill left them. We must find what was flushed there too, and nothing wrong.
func (v *victim) leave(p *place, k int) *exhibit {
	t := p.t
	t.Helper()
	c := &diskSet{name: fmt.Sprintf("%s-%d", v.name, k), dir: fmt.Sprintf("%s-%d", v.dir, k)}
	if err := os.Mkdir(c.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	copied := func(image string) string {
		to := filepath.Join(c.dir, filepath.Base(image))
		must(t, "cp", "--sparse=always", image, to)
		return to
	}
	c.cache = copied(v.cache)
	for _, b := range v.backings {
		c.backings = append(c.backings, copied(b))
	}
	e := &exhibit{diskSet: c, want: map[string]content{}, history: map[string]string{}, copy: true}
	in := &place{t: t, kernel: "none", dir: c.dir}
	in.check(c.checkFlags()...)
	for _, name := range c.volumes() {
		e.history[name] = v.history(t, c.dir, name)
		out := filepath.Join(c.dir, name+".cat")
		if _, _, err := catTo(t, out, c.catFlags(name)...); err != nil {
			t.Fatalf("kill %d: ubcache cat of %s: %v", k, name, err)
		}
		if said, status := run(t, fx(t), "check", out, e.history[name], name); status != 0 {
			t.Errorf("kill %d: %s: without the runtime directory, not every flushed write is there:\n%s", k, name, tail(said, 12))
		}
		e.want[name] = parseContent(t, must(t, fx(t), "hash", out))
		os.Remove(out)
	}
	return e
}
