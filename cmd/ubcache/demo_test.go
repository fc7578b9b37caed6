package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
)

func TestDemoContent(t *testing.T) {
	c := newDemoContent(1, 8)
	block := func(run uint64, number int, version uint32) []byte {
		p := make([]byte, demoBlock)
		newDemoContent(run, 8).fill(p, number, version)
		return p
	}
	c.sent[3].Store(2) // version 1 stands, 2 is under way
	c.stands[3].Store(1)
	part := block(1, 3, 1)
	copy(part[5*demoSector:], block(1, 3, 2)[5*demoSector:6*demoSector])
	flipped := block(1, 3, 1)
	flipped[3*demoSector+100] ^= 1
	moved := block(1, 3, 1)
	copy(moved[:demoSector], moved[demoSector:2*demoSector])
	for _, x := range []struct {
		name, want string
		p          []byte
	}{
		{"older", "block 3, from byte 8: want version 1 to 2, got sector 0 of block 3, version 0", block(1, 3, 0)},
		{"as it stands", "", block(1, 3, 1)},
		{"half written", "", part},
		{"half written within a sector", "", append(block(1, 3, 2)[:1000], block(1, 3, 1)[1000:]...)},
		{"invented", "got sector 0 of block 3, version 3", block(1, 3, 3)},
		{"another block", "from byte 0: want version 1 to 2, got sector 0 of block 4, version 1", block(1, 4, 1)},
		{"another sector", "got sector 1 of block 3, version 1", moved},
		{"another run", "from byte 16: want version 1 to 2, got content that nobody wrote", block(2, 3, 1)},
		{"a flipped bit", "from byte 1632:", flipped},
		{"half older", "from byte 2056:", append(block(1, 3, 1)[:2048], block(1, 3, 0)[2048:]...)},
		{"zeroes", "from byte 0:", make([]byte, demoBlock)},
		{"under way", "", block(1, 3, 2)},
		{"older than what a read has returned", "want version 2, got", block(1, 3, 1)},
	} {
		err := c.endRead(x.p, 3, c.beginRead(3), make([]byte, demoBlock))
		if x.want == "" && err != nil || x.want != "" && (err == nil || !strings.Contains(err.Error(), x.want)) {
			t.Errorf("%s: %v, want %q", x.name, err, x.want)
		}
	}
}

// A device that answers reads of one block with what another one holds.
type strayDevice struct {
	blockdev.Device
	of, instead int64
}

func (d *strayDevice) NewQueue(depth int, complete func([]*blockdev.Request)) (blockdev.Queue, error) {
	q, err := d.Device.NewQueue(depth, complete)
	return strayQueue{q, d}, err
}

type strayQueue struct {
	blockdev.Queue
	d *strayDevice
}

func (q strayQueue) Submit(reqs []*blockdev.Request) {
	for _, r := range reqs {
		if r.Op == blockdev.OpRead && r.Off == q.d.of {
			r.Off = q.d.instead
		}
	}
	q.Queue.Submit(reqs)
}

func TestDemoLoad(t *testing.T) {
	const blocks, base = 1000, 8192
	c := newDemoContent(7, blocks)
	mem, err := blockdev.Memory(base+blocks*demoBlock, blockdev.MemoryOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	for i := range blocks {
		c.fill(mem.Bytes()[base+i*demoBlock:], i, 0)
	}
	counting := blockdev.NewCounting(mem)
	l := demoLoad{content: c, dev: counting, base: base, diskReads: func() int64 { return counting.Total(blockdev.OpRead).Ops }}
	sum := newDemoFigures()
	ticks := 0
	err = l.run(t.Context(), 200*time.Millisecond, 50*time.Millisecond, func(_ time.Duration, f *demoFigures) {
		ticks++
		sum.add(f)
	})
	if err != nil {
		t.Fatal(err)
	}
	reads, writes := sum.reads.TotalCount(), sum.writes.TotalCount()
	if reads != counting.Total(blockdev.OpRead).Ops || writes != counting.Total(blockdev.OpWrite).Ops {
		t.Errorf("%d reads and %d writes recorded, the device had %d and %d", reads, writes, counting.Total(blockdev.OpRead).Ops, counting.Total(blockdev.OpWrite).Ops)
	}
	if share := float64(writes) / float64(reads+writes); reads+writes > 2000 && (share < 0.15 || share > 0.25) {
		t.Errorf("%d reads, %d writes", reads, writes)
	}
	if ticks < 1 || sum.took < 200*time.Millisecond || sum.hits() != 0 {
		t.Errorf("%d ticks, %v, hits %v", ticks, sum.took, sum.hits())
	}
	r := demoReader{c: c}
	if _, err := r.Write(mem.Bytes()[base:]); err != nil || r.end() != nil {
		t.Errorf("at the end: %v, %v", err, r.end())
	}

	// What is wrong ends it.
	l.dev = &strayDevice{mem, base + int64(newDemoWorker(&l, nil, 0).draw())*demoBlock, base}
	err = l.run(t.Context(), time.Minute, time.Second, func(time.Duration, *demoFigures) {})
	if err == nil || !strings.Contains(err.Error(), "not what was written: block") {
		t.Errorf("a stray read: %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("enough")
	time.AfterFunc(20*time.Millisecond, func() { cancel(enough) })
	l.dev = mem
	if err := l.run(ctx, time.Minute, time.Second, func(time.Duration, *demoFigures) {}); err != enough {
		t.Errorf("interrupted: %v", err)
	}
}

// figures makes some: so many reads and writes in a second, all of which took that long, and reads of the disk.
func figures(reads, writes int64, read, write time.Duration, diskReads int64) *demoFigures {
	f := newDemoFigures()
	f.took, f.diskReads = time.Second, diskReads
	_ = f.reads.RecordValues(int64(read), reads)
	_ = f.writes.RecordValues(int64(write), writes)
	return f
}

func TestDemoReport(t *testing.T) {
	bare := figures(3200, 800, 4*time.Millisecond, 4*time.Millisecond, 3200)
	warm := figures(12000, 3000, 50*time.Microsecond, 4*time.Millisecond, 1200)
	var out bytes.Buffer
	demoTable(&out, []demoColumn{{"disk alone", false, bare}, {"cached", true, warm}})
	for _, want := range []string{
		`(?m)^ +disk alone +cached$`, `(?m)^ +IOPS +4000 +15000$`, `(?m)^ +reads, p50 +4\.00 ms +0\.050 ms$`,
		`(?m)^ +writes, maximum +4\.00 ms +4\.00 ms$`, `(?m)^ +hit ratio +- +90\.0 %$`,
	} {
		if !regexp.MustCompile(want).MatchString(out.String()) {
			t.Errorf("no %s in\n%s", want, &out)
		}
	}
	for _, c := range []struct {
		warm *demoFigures
		want string
	}{
		{warm, "Of 100 reads, 90 did not wait"},
		{warm, "at most 0.050 ms, instead of 4.00 ms"},
		{warm, "Writes took as long as before"},
		{warm, "At the end, 3.8 times as many requests"},
		{figures(12000, 3000, 50*time.Microsecond, 100*time.Microsecond, 0), "Half of the writes took at most 0.10 ms, instead of 4.00 ms"},
		{figures(120, 30, 50*time.Millisecond, 80*time.Millisecond, 0), "Writes took 80 ms instead of 4.00 ms"},
		{figures(120, 30, 50*time.Millisecond, 80*time.Millisecond, 0), "No gain at the end, 0.04 times"},
	} {
		if got := demoVerdict(bare, c.warm, c.warm); !strings.Contains(got, c.want) {
			t.Errorf("no %q in %q", c.want, got)
		}
	}
	none := newDemoFigures()
	none.took = time.Second
	if line := demoLine(time.Second, none, true); !strings.Contains(line, "0 IOPS  hits  0.0 %  reads -/-  writes -/-") {
		t.Errorf("without requests: %q", line)
	}
}

// A demo that is interrupted, at any time, leaves nothing.
func TestDemoInterrupted(t *testing.T) {
	for _, after := range []time.Duration{0, 50 * time.Millisecond, 400 * time.Millisecond, 1200 * time.Millisecond} {
		t.Setenv("TMPDIR", t.TempDir())
		ctx, cancel := context.WithTimeoutCause(t.Context(), after, errors.New("enough"))
		env := &environment{name: "ubcache", stdout: io.Discard, stderr: io.Discard}
		err := demoFolder(ctx, env, &demoOptions{seconds: 60, size: 160 << 20}, demoCache)
		cancel()
		if err == nil || !strings.Contains(err.Error(), "interrupted: enough") {
			t.Errorf("after %v: %v", after, err)
		}
		if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "*")); len(left) > 0 {
			t.Errorf("after %v it left %v", after, left)
		}
	}
}
