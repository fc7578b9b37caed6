//go:build interop

package interop

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// An exhibit is a set that our server has left, and what a kernel must find in it.
type exhibit struct {
	*diskSet
	want    map[string]content // by volume
	history map[string]string  // by volume: the file that fx check takes; none where others have written too
	copy    bool               // as a kill left it: every kernel gets the same, and may not change it
	spoiled bool               // what a kernel made of it was wrong
	says    string             // in lines that a kernel has about it besides
}

// TestServed hands to real kernels what our server wrote to, stopped in order or killed. What was stopped in order goes
// from hand to hand: each kernel reads and writes, and so do we before the next one.
func TestServed(t *testing.T) {
	p := newPlace(t, "")
	exhibits := onHost(t, p, useFixture)
	exhibits = append(exhibits, killed(t, p)...)
	for i, k := range kernels() {
		t.Run(k, func(t *testing.T) {
			exhibits = slices.DeleteFunc(exhibits, func(e *exhibit) bool { return e.spoiled })
			if len(exhibits) == 0 {
				t.Fatal("nothing to hand to a kernel")
			}
			in := &place{t: t, kernel: k, dir: p.dir, share: p.share}
			s := &show{errand: in.newErrand("out-" + k), exhibits: exhibits, number: i}
			s.run()
			for _, e := range exhibits {
				t.Run(e.name, func(t *testing.T) {
					t.Parallel()
					e.spoiled = true
					s.judge(t, e)
					e.spoiled = t.Failed()
				})
			}
		})
	}
}

// A show is one boot of a kernel, which attaches each set in turn, copies out what it reads, and writes to those that
// it may write to.
type show struct {
	*errand
	exhibits      []*exhibit
	number        int // of the kernel
	first, second map[*exhibit][]copied
}

func (s *show) run() {
	s.t.Helper()
	s.first, s.second = map[*exhibit][]copied{}, map[*exhibit][]copied{}
	for _, e := range s.exhibits {
		s.add(e)
	}
	s.errand.run(boot{throwOff: true, limit: 10 * time.Minute})
}

// add writes down what there is to do with a set.
func (s *show) add(e *exhibit) {
	s.t.Helper()
	options := ",unmap"
	if !e.copy {
		options += ",keep"
	}
	cache := s.plug(e.cache, options)
	var names []string // as jobs name volumes
	var waits []string
	s.job("begin")
	s.job("register %s", cache)
	for _, b := range e.backings {
		d := s.plug(b, options)
		s.job("register %s", d)
		names = append(names, d)
		if e.attaches(s.t, b) {
			waits = append(waits, "attached "+d)
		} else {
			waits = append(waits, "alone "+d)
		}
	}
	for _, w := range waits {
		s.job("%s", w)
	}
	for _, f := range e.flash {
		names = append(names, cache+"/"+f)
	}
	copyOut := func(to map[*exhibit][]copied) {
		for i, v := range e.volumes() {
			to[e] = append(to[e], s.copyOut(names[i], v, e.want[v].Size))
		}
	}
	copyOut(s.first)
	if !e.copy {
		for i, v := range e.volumes() {
			seed, length := 1000*(s.number+1)+i, e.want[v].Size&^(64*kib-1)
			s.job("over %s seed=%d,ops=60,min=4k,max=64k,align=4k,len=%d,threads=2,flush=30", names[i], seed, length)
		}
		copyOut(s.second)
	}
	s.job("end %s", e.name)
}

var processors = make(chan struct{}, runtime.NumCPU())

// judge compares what a kernel read with what it had to, then what we read with what it wrote, and writes a little to
// what is there for the next kernel.
func (s *show) judge(t *testing.T, e *exhibit) {
	processors <- struct{}{}
	defer func() { <-processors }()
	p := &place{t: t, kernel: s.kernel, dir: e.dir, share: s.share}
	for _, line := range strange(p.shared(e.name + ".log")) {
		if len(e.refused) > 0 && strings.Contains(line, "block size less than set's block size") {
			continue
		}
		if e.says != "" && strings.Contains(line, e.says) {
			continue
		}
		t.Errorf("the kernel says: %s", line)
	}
	t.Logf("kernel %s: %s", s.kernel, replayed.FindString(p.shared(e.name+".log")))
	for _, c := range s.first[e] {
		p.sameAs(e, c, s.out)
	}
	if e.copy || t.Failed() {
		return
	}
	now := map[string]content{}
	for _, c := range s.second[e] {
		now[c.volume] = c.hash(t, s.out)
		if now[c.volume].SHA256 == e.want[c.volume].SHA256 {
			t.Errorf("%s: the kernel's writes made no difference", c.volume)
		}
	}
	e.atRest(t, now)
	v := e.serve(t)
	v.shows(now)
	for _, name := range e.served() {
		v.writeAtRandom(name)
		now[name] = v.read(name)
	}
	v.stop()
	e.atRest(t, now)
	e.want, e.history = now, nil
}

// attaches tells whether a kernel will attach a backing device to its set: it names one, and its blocks are not smaller
// than those of the set.
func (s *diskSet) attaches(t *testing.T, backing string) bool {
	t.Helper()
	b, c := must(t, program(t, "ubcache"), "show", backing), must(t, program(t, "ubcache"), "show", s.cache)
	return !none.MatchString(b) && number(blocks.FindStringSubmatch(b)[1]) >= number(blocks.FindStringSubmatch(c)[1])
}

var (
	none   = regexp.MustCompile(`(?m)^cset\.uuid\s+[0-]+$`)
	blocks = regexp.MustCompile(`(?m)^dev\.block\s+(\d+) bytes$`)
)

func number(s string) int {
	n, _ := strconv.Atoi(s)
	return n
}

// part copies it to a file of its own.
func (c copied) part(t *testing.T, out, path string) string {
	t.Helper()
	must(t, "dd", "if="+out, "of="+path, "bs=1M", "iflag=skip_bytes,count_bytes", fmt.Sprint("skip=", c.off), fmt.Sprint("count=", c.size),
		"conv=sparse", "status=none")
	return path
}

func (c copied) hash(t *testing.T, out string) content {
	t.Helper()
	return parseContent(t, must(t, fx(t), "hash", out, fmt.Sprint(c.off), fmt.Sprint(c.size)))
}

// sameAs compares what the kernel read of a volume with what it must be.
func (p *place) sameAs(e *exhibit, c copied, out string) {
	p.t.Helper()
	got, want := c.hash(p.t, out), e.want[c.volume]
	if got.SHA256 != want.SHA256 {
		p.t.Errorf("%s: kernel %s reads sha256 %s, we %s; %s", c.volume, p.kernel, got.SHA256, want.SHA256, differs(got, want))
	} else {
		p.t.Logf("%s: kernel %s and we agree on %d bytes, sha256 %s", c.volume, p.kernel, got.Size, got.SHA256)
	}
	if e.history[c.volume] == "" {
		return
	}
	part := c.part(p.t, out, filepath.Join(p.dir, c.volume+"-"+p.kernel))
	said, status := run(p.t, fx(p.t), "check", part, e.history[c.volume], c.volume)
	if status != 0 {
		p.t.Errorf("%s: what kernel %s reads is not what was flushed:\n%s", c.volume, p.kernel, tail(said, 12))
		return
	}
	p.t.Logf("%s: kernel %s: %s", c.volume, p.kernel, tail(said, 1))
	os.Remove(part)
}

// usual is what kernels say when all is well. That one invalidates what a cache holds, or that a device has no place in a
// set, is not among it.
var usual = regexp.MustCompile(`bcache: (` +
	`bcache_device_free\(\) bcache\d+ stopped` +
	`|bch_cached_dev_attach\(\) Caching \w+ as bcache\d+ on set [-0-9a-f]+` +
	`|bch_journal_replay\(\) journal replay done, \d+ keys in \d+ entries, seq \d+` +
	`|cache_set_free\(\) Cache set [-0-9a-f]+ unregistered` +
	`|register_(bdev|cache)\(\) registered (backing|cache) device \w+` +
	`)$|block nbd\d: shutting down sockets$`)

var replayed = regexp.MustCompile(`journal replay done, \d+ keys in \d+ entries`)

// slow is what kernels say of a machine that has other things to do.
var slow = regexp.MustCompile(`\] (hrtimer: interrupt took|clocksource: |perf: interrupt took|rcu: |sched: |workqueue: .* hogged CPU)`)

// strange returns the lines of a kernel's log that speak of trouble: all of bcache that is not usual, and all others
// that are warnings or worse.
func strange(log string) (lines []string) {
	for line := range strings.Lines(log) {
		line = strings.TrimSpace(line)
		level := 6
		fmt.Sscanf(line, "<%d>", &level)
		if (level&7 <= 4 || strings.Contains(line, "bcache: ")) && !usual.MatchString(line) && !slow.MatchString(line) {
			lines = append(lines, line)
		}
	}
	return lines
}
