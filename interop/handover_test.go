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
			t.Parallel()
			r := &relay{place: newPlace(t, k), rnd: rand.New(rand.NewPCG(seed, uint64(i)))}
			r.writes = filepath.Join(r.dir, "writes")
			r.append("")
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
	size  int64  // of the volume, in bytes
	dev   string // the guest's name of the backing device, in the boot that is being prepared
	known string // path: what somebody has read since the last write; empty: nobody has
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
	small := func(name string) *baton { return r.baton(name, 20*mib, 24*mib, "16k") }
	ring := r.baton("ring", 24*mib, 48*mib, "8k")
	drained, detached := small("drained"), small("detached")                     // by us
	drains, cutOff, detaches := small("drains"), small("cut"), small("detaches") // by the kernel
	alone := drained.drainedHere()
	detached.detachedHere()
	for _, b := range []*baton{ring, drains, cutOff, detaches} {
		b.leftDirty()
	}
	for turn := range turns {
		v := r.visit()
		if turn == 0 {
			v.seesDrained(drained)
			v.seesAlone(alone)
			v.seesDetached(detached)
			v.drains(drains)
			v.over("drains")
			v.drains(cutOff)
			v.detaches(detaches)
		}
		if turn == 1 {
			v.attaches(drains, "clean")
			v.attaches(cutOff, "clean")
			v.attaches(detaches, "dirty")
		}
		v.losing = openVolatile(r.t, ring.cache)
		v.attaches(ring, "dirty")
		v.load(ring, turn)
		v.cut()
		if turn == 0 {
			drains.drainedThere(false)
			cutOff.drainedThere(true)
			detaches.detachedThere()
		}
		ring.ourTurn(turn)
	}
	v := r.visit()
	v.attaches(ring, "")
	v.end()
	ring.examine()
	r.t.Logf("%d turns, %d boots; over all readers %d operations counted", turns, r.boots, r.counts)
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

// judge holds what dev has against the history: all that was flushed, and what was acknowledged where that is no less; and
// nothing has changed since somebody read it, unless it was written.
func (b *baton) judge(dev, who string) {
	t := b.r.t
	t.Helper()
	history := filepath.Join(b.r.dir, "history")
	if err := os.WriteFile(history, []byte(must(t, fx(t), "history", b.r.writes)), 0o644); err != nil {
		t.Fatal(err)
	}
	args := []string{"check", dev, history, b.name, "acknowledged"}
	if b.known != "" {
		args = append(args, b.known)
	}
	said, status := run(t, fx(t), args...)
	if status != 0 {
		t.Fatalf("%s: %s:\n%s", b.name, who, tail(said, 12))
	}
	n := number(demanded.FindStringSubmatch(said)[1])
	t.Logf("%s: %s: %d operations count; %s", b.name, who, n, tail(said, 1))
	b.r.counts += n
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
	b.learn(out)
	if t.Failed() {
		t.FailNow()
	}
}

// learn takes a file for what the next one must read.
func (b *baton) learn(file string) {
	b.r.t.Helper()
	b.known = filepath.Join(b.dir, "known")
	if err := os.Rename(file, b.known); err != nil {
		b.r.t.Fatal(err)
	}
}

// start serves the set, and demands of the server what the images have at rest.
func (b *baton) start() *server {
	b.r.t.Helper()
	b.examine()
	return b.again()
}

// again serves the set and demands that all is there that must be, once more when it was read: then much of it has gone
// from the cache, or come there.
func (b *baton) again() *server {
	b.r.t.Helper()
	s := b.serve(b.r.t)
	b.judge(s.uri("backing0"), "our server")
	b.judge(s.uri("backing0"), "our server")
	b.set("sequential_cutoff", "0")
	return s
}

func (b *baton) set(attr, value string) { b.ask("set", "backing0", attr, value) }

func (b *baton) get(object, attr string) string { return strings.TrimSpace(b.ask("get", object, attr)) }

// ask runs a command that goes to the running server.
func (b *baton) ask(args ...string) string {
	b.r.t.Helper()
	return must(b.r.t, program(b.r.t, "ubcache"), append(args, "--socket", filepath.Join(b.dir, "control.sock"))...)
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

// spec makes a load of its own: every other one stays in the first twelve MiB, over what is there already.
func (b *baton) spec(ops int, more string) string {
	length := b.size &^ (64*kib - 1)
	if b.r.seed%2 == 0 {
		length = 12 * mib
	}
	return b.within(length, ops, more)
}

func (b *baton) within(length int64, ops int, more string) string {
	b.r.seed++
	return fmt.Sprintf("seed=%d,ops=%d,min=512,max=16k,align=512,len=%d,threads=4%s", b.r.seed, ops, length, more)
}

const (
	overNBD = ",conns=2,flush=150,fua=13,zero=17"
	endless = 10000000 // operations
)

// write does a load through the server.
func (b *baton) write(s *server, ops int) {
	b.r.t.Helper()
	out, status := run(b.r.t, fx(b.r.t), "write", s.uri("backing0"), b.name, b.spec(ops, overNBD))
	if status != 0 {
		b.r.t.Fatalf("%s: fx write: status %d\n%s\n%s", b.name, status, tail(out, 5), s.said(20))
	}
	b.r.append(out)
	b.known = ""
}

// killed kills the server under a load that is not flushed, and stays where all is dirty soon. So hardly anything forces the
// journal out, and most of what is acknowledged is nowhere but in the server's memory, and its folder.
func (b *baton) killed(s *server, fate string) {
	b.r.t.Helper()
	b.ask("set", "set", "journal_delay_ms", "30000")
	b.under(s, b.within(mib, endless, ",conns=2,zero=17"), s.kill)
	b.note(fate)
}

// under ends the server in the middle of a load.
func (b *baton) under(s *server, spec string, end func()) {
	t := b.r.t
	t.Helper()
	w := exec.Command(fx(t), "write", s.uri("backing0"), b.name, spec)
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
	b.known = ""
}

// stop ends the server in order, when it has shown once more what is there.
func (b *baton) stop(s *server) {
	b.r.t.Helper()
	b.judge(s.uri("backing0"), "our server")
	out := filepath.Join(b.dir, "served")
	must(b.r.t, "nbdcopy", s.uri("backing0"), out)
	b.learn(out)
	s.stop()
	b.note("stop")
}

// ourTurn goes on where the power went, and leaves the set to the kernel: stopped, or killed, or both.
func (b *baton) ourTurn(turn int) {
	t := b.r.t
	t.Helper()
	s := b.start()
	b.writeback(turn%2 == 0) // with the kernel it was the other way round
	b.write(s, 500)
	switch turn % 3 {
	case 0: // killed and stopped, both under load
		b.killed(s, "kill")
		s = b.again()
		b.writeback(true)
		b.write(s, 200)
		b.dirty()
		b.under(s, b.spec(endless, overNBD), s.stop)
		b.note("stop")
	case 1: // the kernel knows nothing of what was acknowledged and not flushed
		b.dirty()
		b.killed(s, "forget")
	case 2:
		b.dirty()
		b.stop(s)
	}
	b.examine()
}

// writeback has our server write back, two MiB a second to begin with, or nothing.
func (b *baton) writeback(running bool) {
	b.r.t.Helper()
	if !running {
		b.set("writeback_running", "0")
		return
	}
	b.set("writeback_delay", "0")
	b.set("writeback_rate", "4096")
	for begin := time.Now(); b.get("set", "writeback_keys_done") == "0"; time.Sleep(10 * time.Millisecond) {
		if time.Since(begin) > stopLimit {
			b.r.t.Fatalf("%s: nothing is written back", b.name)
		}
	}
}

// dirty demands that some data is.
func (b *baton) dirty() {
	b.r.t.Helper()
	mode, dirty, state := b.get("backing0", "cache_mode"), b.get("backing0", "dirty_data"), b.get("backing0", "state")
	if !strings.Contains(mode, "[writeback]") || dirty == "0.0k" || state != "dirty" {
		b.r.t.Fatalf("%s: mode %s, dirty_data %s, state %s", b.name, mode, dirty, state)
	}
	b.r.t.Logf("%s: our server leaves %s dirty", b.name, dirty)
}

// leftDirty writes to a set that nobody has used yet, and stops.
func (b *baton) leftDirty() {
	b.r.t.Helper()
	s := b.start()
	b.writeback(false)
	b.write(s, 600)
	b.dirty()
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
	b.judge(copied{off: 16 * sector, size: b.size}.part(b.r.t, b.backings[0], filepath.Join(b.dir, "plain")), "the backing device by itself")
}

// drainedHere writes, has it all written back, and stops. It returns a copy of the backing device, without the cache.
func (b *baton) drainedHere() *baton {
	t := b.r.t
	t.Helper()
	s := b.start()
	b.writeback(false)
	b.write(s, 600)
	b.dirty()
	b.set("writeback_running", "1")
	b.flush()
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
	b.writeback(false)
	b.write(s, 600)
	b.dirty()
	b.ask("detach", "backing0", "--wait")
	b.write(s, 200)
	b.stop(s)
	b.rests("detached")
	b.plain()
}

// drainedThere goes on with a set that the kernel has drained, and stopped in order unless the power was cut. Then keys may
// be dirty that no longer were, for the kernel does not journal that they are clean: these count, whatever the superblock
// says (F 10), until they are written back once more.
func (b *baton) drainedThere(cut bool) {
	t := b.r.t
	t.Helper()
	b.rests("clean")
	b.plain()
	s := b.start()
	dirty, state := b.get("backing0", "dirty_data"), b.get("backing0", "state")
	t.Logf("%s: our server finds %s dirty, state %s", b.name, dirty, state)
	if dirty == "0.0k" != (state == "clean") || !cut && state != "clean" {
		t.Fatalf("%s: dirty_data %s, state %s, though the kernel has drained it", b.name, dirty, state)
	}
	b.flush()
	b.stop(s)
	b.rests("clean")
	b.plain()
	b.examine()
}

// flush has our server write all back.
func (b *baton) flush() {
	t := b.r.t
	t.Helper()
	b.ask("flush", "backing0", "--wait")
	if dirty, state := b.get("backing0", "dirty_data"), b.get("backing0", "state"); dirty != "0.0k" || state != "clean" {
		t.Fatalf("%s: dirty_data %s, state %s after a flush", b.name, dirty, state)
	}
}

// detachedThere attaches anew what the kernel has detached, and leaves it dirty.
func (b *baton) detachedThere() {
	b.r.t.Helper()
	b.rests("detached")
	b.plain()
	b.leftDirty()
}
