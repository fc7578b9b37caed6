//go:build interop

package interop

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// A visit is one boot of the kernel.
type visit struct {
	*errand
	r      *relay
	said   string        // what it printed
	losing *volatileDisk // the cache that will lose what was not flushed; nil: none
	fine   []string      // more lines that its log may have
	after  []func()      // what there is to look at when it is over
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
	switch {
	case b.cache == "":
	case v.losing != nil && v.losing.image == b.cache:
		v.disks = append(v.disks, v.losing.uri+",cache=writeback")
		v.job("register %s", devName(len(v.disks)-1))
	default:
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
		b.judge(c.part(v.t, v.out, filepath.Join(b.dir, "part")), "kernel "+v.kernel)
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
		if !strings.Contains(values["cache_mode"], "[writeback]") {
			v.t.Fatalf("%s %s: the mode is not writeback", b.name, as)
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
	v.reads(b, "alone", "inconsistent", "stale")
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

// quiet demands that the kernel has said nothing but what is usual. Before it replays the journal it may find keys in the
// leaves whose buckets have other data by now: the keys that are there instead are in the journal.
func (v *visit) quiet(log string) {
	v.t.Helper()
	before := log[:strings.LastIndex(log, "bcache: bch_journal_replay() journal replay done")+1]
	for _, line := range strange(log) {
		replaced := strings.Contains(line, "bcache: bch_extent_bad() stale dirty pointer") && strings.Contains(before, line)
		if !replaced && !slices.ContainsFunc(v.fine, func(s string) bool { return strings.HasSuffix(line, s) }) {
			v.t.Errorf("kernel %s says: %s", v.kernel, line)
		}
	}
}

// drains has the kernel attach what we have left dirty, and write all back.
func (v *visit) drains(b *baton) {
	v.attaches(b, "dirty")
	v.job("set %s writeback_delay 0", b.dev)
	v.job("set %s writeback_percent 0", b.dev)
	v.job("clean %s", b.dev)
	v.says(b, "drained", "clean", "clean")
}

// detaches has the kernel attach what we have left dirty, and detach it, which writes all back first.
func (v *visit) detaches(b *baton) {
	v.attaches(b, "dirty")
	v.job("detach %s", b.dev)
	v.fine = append(v.fine, "bcache: cached_dev_detach_finish() Caching disabled for "+b.dev)
	v.says(b, "detached", "no cache", "none")
}

// passes are moments at which the power goes: when the kernel has passed a tracepoint so often.
var passes = []struct {
	event         string
	least, spread int
}{
	{"bcache_write", 200, 600},
	{"bcache_writeback", 20, 100},
	{"bcache_btree_node_split", 1, 4},
	{"bcache_journal_write", 3, 10},
	{"bcache_btree_write", 5, 20},
}

// load has the kernel write until the power goes. While it writes back, its backing device must lose nothing, for the kernel
// does not flush it before it takes data for clean (B 5.2).
func (v *visit) load(b *baton, turn int) {
	c, writeback := passes[turn%len(passes)], turn%2
	if c.event == "bcache_writeback" {
		writeback = 1
	}
	v.job("set %s writeback_delay 0", b.dev)
	v.job("set %s writeback_percent 10", b.dev)
	v.job("set %s writeback_running %d", b.dev, writeback)
	v.job("load %s %s %s", b.dev, b.name, b.spec(500, ",flush=100"))
	v.says(b, "loaded", "dirty", "dirty")
	v.job("set %s cache/journal_delay_ms 1000", b.dev) // so that much is not flushed
	v.job("cut %s %d", c.event, c.least+v.r.rnd.IntN(c.spread))
	v.job("load %s %s %s", b.dev, b.name, b.spec(3000, ",flush=400"))
	v.job("off")
	v.after = append(v.after, func() {
		v.t.Logf("the power went at: %s", strings.TrimSpace(v.said[strings.LastIndex(v.said, "CUT "):]))
		v.losing.lose(v.t, v.r.rnd)
		v.r.append(v.said)
		b.note("cut")
		b.known = ""
	})
}

const visitLimit = 5 * time.Minute

// cut boots until the power goes.
func (v *visit) cut() {
	v.t.Helper()
	v.said = v.run(boot{cutAt: "CUT ", limit: visitLimit})
	console, err := os.ReadFile(filepath.Join(v.dir, "jobs.console"))
	if err != nil {
		v.t.Fatal(err)
	}
	said := string(console[:bytes.LastIndexByte(console, '\n')+1]) // the last line may be torn
	if !strings.Contains(said, "bcache: register_bdev() registered backing device") || strings.Contains(said, "Call Trace:") {
		v.t.Errorf("kernel %s says nothing of bcache, or too much:\n%s", v.kernel, tail(said, 40))
	}
	v.quiet(said)
	v.look()
}

// end boots, and has the kernel stop in order.
func (v *visit) end() {
	v.t.Helper()
	v.over("last")
	v.run(boot{limit: visitLimit})
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
