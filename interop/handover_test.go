//go:build interop

package interop

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestHandOver gives sets in writeback mode from hand to hand. In the ring a kernel attaches a set, reads all, writes,
// and is cut off from power in the middle of its work; we go on from there, write over what it left dirty, are killed
// or stopped, and the kernel goes on. Cache and volume stay the same, and so does the history of the volume, which says
// after each step what must be there.
//
// Other sets ride along in the same boots: one that we have drained, one that the kernel drains, and those that either
// of us detaches.
func TestHandOver(t *testing.T) {
	seed := moments(t)
	for i, k := range kernels() {
		t.Run(k, func(t *testing.T) {
			r := &relay{place: newPlace(t, k), rnd: rand.New(rand.NewPCG(seed, uint64(i)))}
			r.writes = filepath.Join(r.dir, "writes")
			r.run(turns(t))
		})
	}
}

// turns returns how often the ring goes round.
func turns(t *testing.T) int {
	s := os.Getenv("UBCACHE_TURNS")
	if s == "" {
		return 2
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		t.Fatalf("UBCACHE_TURNS=%q is not a number of turns", s)
	}
	return n
}

// A relay is a kernel and we, with sets between us.
type relay struct {
	*place
	rnd    *rand.Rand
	writes string // path: all reports of fx, ours and the guest's, and what became of what
	seed   uint32 // of the last load
	boots  int
	counts int // operations that were demanded of a reader, over all
}

// A baton is a set in writeback mode that goes from hand to hand. It has one volume, backing0; in the history that has the
// baton's name.
type baton struct {
	*diskSet
	r     *relay
	size  int64    // of the volume, in bytes
	dev   string   // the guest's name of the backing device, in the boot that is being prepared
	known *content // what the next one must read; nil: whatever the history allows
}

// baton formats one.
func (r *relay) baton(name string, cache, backing int64, bucket string) *baton {
	r.t.Helper()
	b := &baton{diskSet: &diskSet{name: name, dir: filepath.Join(r.dir, name)}, r: r, size: backing - 16*sector}
	if err := os.Mkdir(b.dir, 0o755); err != nil {
		r.t.Fatal(err)
	}
	in := &place{t: r.t, dir: b.dir}
	b.cache, b.backings = in.image("cache", cache), []string{in.image("backing0", backing)}
	must(r.t, program(r.t, "ubcache"), "format", "--bucket", bucket, "--block", "512", "--writeback", "--cache", b.cache, "--backing", b.backings[0])
	return b
}

const sector = 512

func (r *relay) run(turns int) {
	ring := r.baton("ring", 24*mib, 48*mib, "8k")
	drained, detached := r.baton("drained", 20*mib, 24*mib, "16k"), r.baton("detached", 20*mib, 24*mib, "16k")
	drains, detaches := r.baton("drains", 20*mib, 24*mib, "16k"), r.baton("detaches", 20*mib, 24*mib, "16k")
	alone := drained.drainedHere()
	detached.detachedHere()
	drains.leftDirty()
	detaches.leftDirty()
	for turn := range turns {
		v := r.visit()
		if turn == 0 {
			v.seesDrained(drained)
			v.seesAlone(alone)
			v.seesDetached(detached)
			v.attaches(drains, "dirty")
			v.attaches(detaches, "dirty")
			v.drain(drains)
			v.detach(detaches)
		}
		if turn == 1 {
			v.attaches(drains, "")
			v.attaches(detaches, "dirty")
		}
		v.attaches(ring, "")
		v.load(ring, turn)
		v.cut()
		if turn == 0 {
			drains.drainedThere()
			detaches.detachedThere()
		}
		ring.ourTurn(turn)
	}
	v := r.visit()
	v.attaches(ring, "")
	v.end()
	ring.examine()
	r.t.Logf("%d turns, %d boots; %d operations were demanded", turns, r.boots, r.counts)
}

// note says in the history what became of all that was written to the volume.
func (b *baton) note(fate string) { b.r.append(fmt.Sprintf("fx %s %s\n", fate, b.name)) }

func (r *relay) append(reports string) {
	r.t.Helper()
	f, err := os.OpenFile(r.writes, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		r.t.Fatal(err)
	}
	_, err = f.WriteString(reports)
	if err := errors.Join(err, f.Close()); err != nil {
		r.t.Fatal(err)
	}
}

var demanded = regexp.MustCompile(`(?m)^(\d+) operations count$`)

// judge holds what dev has against the history: all that was flushed, and all that was acknowledged unless a cut came
// after it.
func (b *baton) judge(dev, who string) {
	t := b.r.t
	t.Helper()
	history := filepath.Join(b.r.dir, "history")
	if err := os.WriteFile(history, []byte(must(t, fx(t), "history", b.r.writes)), 0o644); err != nil {
		t.Fatal(err)
	}
	said, status := run(t, fx(t), "check", dev, history, b.name, "acknowledged")
	if status != 0 {
		t.Fatalf("%s: %s:\n%s", b.name, who, tail(said, 12))
	}
	n := number(demanded.FindStringSubmatch(said)[1])
	t.Logf("%s: %s: %d operations count; %s", b.name, who, n, tail(said, 1))
	b.r.counts += n
}

// same demands that a reader has read what the one before it did.
func (b *baton) same(got content, who string) {
	b.r.t.Helper()
	if b.known != nil && got.SHA256 != b.known.SHA256 {
		b.r.t.Fatalf("%s: %s: sha256 %s, want %s; %s", b.name, who, got.SHA256, b.known.SHA256, differs(got, *b.known))
	}
	b.known = &got
}

// examine looks at the images at rest: nothing is wrong with them, and what our offline reader makes of them is what the
// history demands. Whoever comes next must read the same.
func (b *baton) examine() {
	t := b.r.t
	t.Helper()
	b.r.check(b.checkFlags()...)
	out := filepath.Join(b.dir, "cat")
	if _, _, err := catTo(t, out, b.catFlags("backing0")...); err != nil {
		t.Fatalf("%s: ubcache cat: %v", b.name, err)
	}
	b.judge(out, "at rest")
	b.same(parseContent(t, must(t, fx(t), "hash", out)), "at rest")
	os.Remove(out)
	if t.Failed() {
		t.FailNow()
	}
}

// start serves the set, and demands of the server what the images have at rest.
func (b *baton) start() *server {
	b.r.t.Helper()
	b.examine()
	return b.again()
}

// again serves the set and demands that all is there that must be.
func (b *baton) again() *server {
	b.r.t.Helper()
	s := b.serve(b.r.t)
	b.judge(s.uri("backing0"), "our server")
	b.same(s.read("backing0"), "our server")
	b.set(s, "sequential_cutoff", "0")
	return s
}

func (b *baton) set(s *server, attr, value string) {
	b.r.t.Helper()
	must(b.r.t, program(b.r.t, "ubcache"), "set", "--socket", filepath.Join(b.dir, "control.sock"), "backing0", attr, value)
}

func (b *baton) get(s *server, attr string) string {
	b.r.t.Helper()
	return strings.TrimSpace(must(b.r.t, program(b.r.t, "ubcache"), "get", "--socket", filepath.Join(b.dir, "control.sock"), "backing0", attr))
}

// state returns the state in the superblock of the backing device.
func (b *baton) state() string {
	b.r.t.Helper()
	m := cacheState.FindStringSubmatch(must(b.r.t, program(b.r.t, "ubcache"), "show", b.backings[0]))
	if m == nil {
		b.r.t.Fatalf("%s: ubcache show tells no state", b.name)
	}
	return m[1]
}

var cacheState = regexp.MustCompile(`(?m)^dev\.data\.cache_state\s+\d+ \[(\w+)\]$`)

// spec makes a load of its own: some in the first twelve MiB only, over what is there already.
func (b *baton) spec(ops int, more string) string {
	b.r.seed++
	length := b.size &^ (64*kib - 1)
	if b.r.seed%2 == 0 {
		length = 12 * mib
	}
	return fmt.Sprintf("seed=%d,ops=%d,min=512,max=16k,align=512,len=%d,threads=4%s", b.r.seed, ops, length, more)
}

const overNBD = ",conns=2,flush=150,fua=13,zero=17"

// write does a load through the server.
func (b *baton) write(s *server, ops int) {
	b.r.t.Helper()
	out, status := run(b.r.t, fx(b.r.t), "write", s.uri("backing0"), b.name, b.spec(ops, overNBD))
	if status != 0 {
		b.r.t.Fatalf("%s: fx write: status %d\n%s\n%s", b.name, status, tail(out, 5), s.said(20))
	}
	b.r.append(out)
	b.known = nil
}

// under ends the server in the middle of a load.
func (b *baton) under(s *server, end func()) {
	t := b.r.t
	t.Helper()
	w := exec.Command(fx(t), "write", s.uri("backing0"), b.name, b.spec(10000000, overNBD))
	out, err := w.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	w.Stderr = &said
	if err := w.Start(); err != nil {
		t.Fatal(err)
	}
	reports := bufio.NewReader(out)
	begin, err := reports.ReadString('\n') // it is connected
	if err != nil {
		t.Fatalf("%s: fx write: %v, %v", b.name, err, w.Wait())
	}
	time.Sleep(time.Duration(20+b.r.rnd.IntN(500)) * time.Millisecond)
	end()
	rest, err := io.ReadAll(reports)
	if err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := w.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 3 {
		t.Fatalf("%s: fx ended with %v, not by the loss of its connection:\n%s", b.name, err, said.String())
	}
	b.r.append(begin + string(rest))
	b.known = nil
}

// stop ends the server in order, when it has shown once more what is there.
func (b *baton) stop(s *server) {
	b.r.t.Helper()
	b.judge(s.uri("backing0"), "our server")
	b.same(s.read("backing0"), "our server")
	s.stop()
	b.note("stop")
}

// ourTurn goes on where the power went, and leaves the set to the kernel: stopped, or killed, or both.
func (b *baton) ourTurn(turn int) {
	t := b.r.t
	t.Helper()
	s := b.start()
	running := strconv.Itoa(1 - turn%2) // of the kernel it was the other way round
	b.set(s, "writeback_running", running)
	b.write(s, 500)
	switch turn % 3 {
	case 0: // killed and stopped, both under load
		b.under(s, s.kill)
		b.note("kill")
		s = b.again()
		b.set(s, "writeback_running", running)
		b.write(s, 200)
		b.dirty(s)
		b.under(s, s.stop)
		b.note("stop")
	case 1: // the kernel knows nothing of what was acknowledged and not flushed
		b.dirty(s)
		b.under(s, s.kill)
		b.note("cut")
	case 2:
		b.dirty(s)
		b.stop(s)
	}
	b.examine()
}

// dirty demands that some data is.
func (b *baton) dirty(s *server) {
	b.r.t.Helper()
	mode, dirty, state := b.get(s, "cache_mode"), b.get(s, "dirty_data"), b.get(s, "state")
	if !strings.Contains(mode, "[writeback]") || dirty == "0.0k" || state != "dirty" {
		b.r.t.Fatalf("%s: mode %s, dirty_data %s, state %s", b.name, mode, dirty, state)
	}
	b.r.t.Logf("%s: our server leaves %s dirty", b.name, dirty)
}

// leftDirty writes to a set that nobody has used yet, and stops.
func (b *baton) leftDirty() {
	b.r.t.Helper()
	s := b.start()
	b.set(s, "writeback_running", "0")
	b.write(s, 600)
	b.dirty(s)
	b.stop(s)
	b.rests("dirty")
	b.examine()
}

// rests demands that state of the superblock.
func (b *baton) rests(state string) {
	b.r.t.Helper()
	if got := b.state(); got != state {
		b.r.t.Fatalf("%s: the superblock says %s, want %s", b.name, got, state)
	}
}

// plain demands that the backing device by itself has all the data.
func (b *baton) plain() {
	b.r.t.Helper()
	b.same(copied{off: 16 * sector, size: b.size}.hash(b.r.t, b.backings[0]), "the backing device by itself")
}

// drainedHere writes, has it all written back, and stops. It returns a copy of the backing device, without the cache.
func (b *baton) drainedHere() *baton {
	t := b.r.t
	t.Helper()
	s := b.start()
	b.set(s, "writeback_running", "0")
	b.write(s, 600)
	b.dirty(s)
	b.set(s, "writeback_running", "1")
	must(t, program(t, "ubcache"), "flush", "--socket", filepath.Join(b.dir, "control.sock"), "backing0", "--wait")
	if dirty, state := b.get(s, "dirty_data"), b.get(s, "state"); dirty != "0.0k" || state != "clean" {
		t.Fatalf("%s: dirty_data %s, state %s after a flush", b.name, dirty, state)
	}
	b.stop(s)
	b.rests("clean")
	b.plain()
	b.examine()
	alone := &baton{diskSet: &diskSet{name: b.name, dir: filepath.Join(b.r.dir, "alone")}, r: b.r, size: b.size, known: b.known}
	if err := os.Mkdir(alone.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	alone.backings = []string{filepath.Join(alone.dir, "backing0.img")}
	must(t, "cp", "--sparse=always", b.backings[0], alone.backings[0])
	return alone
}

// detachedHere writes, detaches, writes on without a cache, and stops.
func (b *baton) detachedHere() {
	t := b.r.t
	t.Helper()
	s := b.start()
	b.set(s, "writeback_running", "0")
	b.write(s, 600)
	b.dirty(s)
	must(t, program(t, "ubcache"), "detach", "--socket", filepath.Join(b.dir, "control.sock"), "backing0", "--wait")
	b.write(s, 200)
	b.stop(s)
	b.rests("none")
	b.plain()
}

// drainedThere goes on with a set that the kernel has drained.
func (b *baton) drainedThere() {
	t := b.r.t
	t.Helper()
	b.rests("clean")
	b.plain()
	s := b.start()
	if dirty, state := b.get(s, "dirty_data"), b.get(s, "state"); dirty != "0.0k" || state != "clean" {
		t.Fatalf("%s: dirty_data %s, state %s, though the kernel has drained it", b.name, dirty, state)
	}
	b.stop(s)
	b.examine()
}

// detachedThere attaches anew what the kernel has detached, and leaves it dirty.
func (b *baton) detachedThere() {
	b.r.t.Helper()
	b.rests("none")
	b.plain()
	b.leftDirty()
}

// A visit is one boot of the kernel.
type visit struct {
	*errand
	r     *relay
	after []func() // what there is to look at when it is over
}

func (r *relay) visit() *visit {
	r.t.Helper()
	r.boots++
	v := &visit{errand: r.newErrand(fmt.Sprintf("out-%d", r.boots)), r: r}
	v.job("begin")
	return v
}

// devices plugs the set and registers it.
func (v *visit) devices(b *baton) (backing string) {
	if b.cache != "" {
		v.job("register %s", v.plug(b.cache, ",unmap"))
	}
	backing = v.plug(b.backings[0], ",unmap")
	v.job("register %s", backing)
	b.dev = backing
	return backing
}

// attaches has the kernel attach the set and read all. state is what it must say then; "": no matter.
func (v *visit) attaches(b *baton, state string) {
	v.job("attached %s", v.devices(b))
	v.reads(b, "attached", state, state)
}

// reads has the kernel read all; it says state, and the superblock has that which is stored.
func (v *visit) reads(b *baton, as, state, stored string) {
	v.says(b, as, state, stored)
	c := v.copyOut(b.dev, b.name, b.size)
	v.after = append(v.after, func() {
		part := c.part(v.t, v.out, filepath.Join(v.dir, "part"))
		b.judge(part, "kernel "+v.kernel)
		b.same(c.hash(v.t, v.out), "kernel "+v.kernel)
		os.Remove(part)
	})
}

// says has the kernel tell the state; what is clean, or without a cache, has nothing dirty.
func (v *visit) says(b *baton, as, state, stored string) {
	file := fmt.Sprintf("%s-%s-%d", b.name, as, v.r.boots)
	v.job("values %s %s state dirty_data cache_mode", b.dev, file)
	v.after = append(v.after, func() {
		values := map[string]string{}
		for line := range strings.Lines(v.shared(file + ".values")) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
			values[name] = value
		}
		v.t.Logf("%s %s: kernel %s: %v", b.name, as, v.kernel, values)
		if state != "" && (values["state"] != state || values["stored"] != stored || state != "dirty" && values["dirty_data"] != "0.0k") {
			v.t.Fatalf("%s %s: want state %s, and %s in the superblock", b.name, as, state, stored)
		}
	})
}

// seesDrained has the kernel look at a set with nothing dirty.
func (v *visit) seesDrained(b *baton) {
	v.attaches(b, "clean")
	v.over("drained")
}

// seesAlone has the kernel run a backing device that is clean, without its cache.
func (v *visit) seesAlone(b *baton) {
	dev := v.devices(b)
	v.job("set %s running 1", dev)
	v.job("alone %s", dev)
	v.reads(b, "alone", "no cache", "stale")
	v.over("alone")
}

// seesDetached has the kernel find a device without a set, though the set is there.
func (v *visit) seesDetached(b *baton) {
	v.job("alone %s", v.devices(b))
	v.reads(b, "detached", "no cache", "none")
	v.over("detached")
}

// over ends what was begun, and begins anew.
func (v *visit) over(name string) {
	v.job("end %s", name)
	v.job("begin")
	v.after = append(v.after, func() { v.quiet(v.shared(name + ".log")) })
}

// quiet demands that the kernel has said nothing but what is usual.
func (v *visit) quiet(log string) {
	v.t.Helper()
	for _, line := range strange(log) {
		v.t.Errorf("kernel %s says: %s", v.kernel, line)
	}
}

// drain has the kernel write all back.
func (v *visit) drain(b *baton) {
	v.job("set %s writeback_delay 0", b.dev)
	v.job("set %s writeback_percent 0", b.dev)
	v.job("clean %s", b.dev)
	v.says(b, "drained", "clean", "clean")
}

// detach has the kernel detach the device, which writes all back first.
func (v *visit) detach(b *baton) {
	v.job("detach %s", b.dev)
	v.says(b, "detached", "no cache", "none")
}

// moments at which the power goes: when the kernel has passed a tracepoint so often.
var passes = []struct {
	event   string
	least   int
	spread  int
	running int // writeback
}{
	{"bcache_journal_write", 3, 10, 0},
	{"bcache_writeback", 20, 100, 1},
	{"bcache_btree_node_split", 1, 4, 0},
	{"bcache_btree_write", 5, 20, 1},
}

// load has the kernel write until the power goes.
func (v *visit) load(b *baton, turn int) {
	c := passes[turn%len(passes)]
	v.job("set %s writeback_delay 0", b.dev)
	v.job("set %s writeback_percent 10", b.dev)
	v.job("set %s writeback_running %d", b.dev, c.running)
	v.job("load %s %s %s", b.dev, b.name, b.spec(500, ",flush=100"))
	v.says(b, "loaded", "dirty", "dirty")
	v.job("cut %s %d", c.event, c.least+v.r.rnd.IntN(c.spread))
	v.job("load %s %s %s", b.dev, b.name, b.spec(3000, ",flush=150"))
	v.job("off")
	v.after = append(v.after, func() {
		b.note("cut")
		b.known = nil
	})
}

const visitLimit = 5 * time.Minute

// cut boots until the power goes.
func (v *visit) cut() {
	v.t.Helper()
	out := v.run(boot{cutAt: "CUT ", limit: visitLimit})
	console, err := os.ReadFile(filepath.Join(v.dir, "jobs.console"))
	if err != nil {
		v.t.Fatal(err)
	}
	v.quiet(string(console[:bytes.LastIndexByte(console, '\n')+1])) // the last line may be torn
	v.r.append(out)
	v.look()
}

// end boots, and has the kernel stop in order.
func (v *visit) end() {
	v.t.Helper()
	v.over("last")
	v.r.append(v.run(boot{limit: visitLimit}))
	v.look()
}

func (v *visit) look() {
	v.t.Helper()
	for _, fn := range v.after {
		fn()
	}
	os.Remove(v.out)
	if v.t.Failed() {
		v.t.FailNow()
	}
}
