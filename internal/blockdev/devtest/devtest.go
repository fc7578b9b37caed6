// Package devtest is the suite that every blockdev.Device passes, real or wrapped.
package devtest

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// MinSize is the least size in bytes of a device to test.
const MinSize = 4 << 20

// Run tests the devices that open returns. It is called once per test, for a device of MinSize or more whose
// content does not matter; the suite closes it.
func Run(t *testing.T, open func(t *testing.T) blockdev.Device) {
	for _, c := range []struct {
		name string
		fn   func(t *testing.T, d *device)
	}{
		{"Info", testInfo},
		{"WhatIsWrittenIsRead", testReadBack},
		{"BatchesLargerThanDepth", testBatches},
		{"BadRequestsAreRefused", testRefused},
		{"EmptyRequests", testEmpty},
		{"WriteZeroes", testZeroes},
		{"Discard", testDiscard},
		{"FlushAndFUA", testFlush},
		{"SubmitFromComplete", testResubmit},
		{"ManySubmitters", testConcurrent},
		{"CloseWaits", testClose},
		{"RandomAgainstModel", testModel},
		{"IO", testIO},
		{"SteadyStateAllocatesNothing", testAllocs},
	} {
		t.Run(c.name, func(t *testing.T) {
			dev := open(t)
			d := &device{Device: dev, t: t, info: dev.Info(), pool: blockdev.NewPool(blockdev.PoolOptions{MaxFree: 16 << 20})}
			if d.info.Size < MinSize {
				t.Fatalf("the device has %d bytes, the suite needs %d", d.info.Size, MinSize)
			}
			defer func() { // also when the test ends early
				if err := dev.Close(); err != nil && !d.closed {
					t.Errorf("close: %v", err)
				}
				if n := d.pool.Stats().InUse; n != 0 && !t.Failed() {
					t.Errorf("%d buffers leaked", n)
				}
				d.pool.Trim(0)
			}()
			c.fn(t, d)
		})
	}
}

func testInfo(t *testing.T, d *device) {
	i := d.info
	if b := i.LogicalBlock; b < 512 || b&(b-1) != 0 {
		t.Errorf("LogicalBlock %d", b)
	}
	if i.Size%int64(i.LogicalBlock) != 0 {
		t.Errorf("Size %d is no multiple of LogicalBlock %d", i.Size, i.LogicalBlock)
	}
	if i.PhysicalBlock < i.LogicalBlock || i.MaxTransfer < i.LogicalBlock {
		t.Errorf("PhysicalBlock %d, MaxTransfer %d, LogicalBlock %d", i.PhysicalBlock, i.MaxTransfer, i.LogicalBlock)
	}
	if a := i.BufferAlign; a < 1 || a&(a-1) != 0 || a > 4096 {
		t.Errorf("BufferAlign %d", a)
	}
	if i.Name == "" || i.Engine == "" {
		t.Errorf("no name or engine: %+v", i)
	}
	if d.Info() != i {
		t.Error("Info changes")
	}
}

func testReadBack(t *testing.T, d *device) {
	b := d.queue(4)
	defer b.close()
	for round, n := range []int64{d.block(1), d.roundUp(4096), d.roundUp(3 * 4096), d.roundUp(65536), d.roundUp(1<<20 + 512)} {
		for _, off := range []int64{0, d.block(1), d.block(7), d.roundUp(1 << 20), d.info.Size - n} {
			d.write(b, off, n, uint64(round), 0)
			if got := d.read(b, off, n); !bytes.Equal(got, filled(n, off, uint64(round))) {
				t.Fatalf("%d bytes at %d differ from what was written", n, off)
			}
		}
	}
}

func testBatches(t *testing.T, d *device) {
	for _, depth := range []int{1, 3, 32} {
		b := d.queue(depth)
		var writes, reads []*blockdev.Request
		var bufs []*blockdev.Buffer
		n := d.roundUp(4096)
		for i := range 300 {
			off := int64(i*7%300) * n
			w, r := d.pool.Get(int(n)), d.pool.Get(int(n))
			bufs = append(bufs, w, r)
			fill(w.Data, off, uint64(depth))
			writes = append(writes, &blockdev.Request{Op: blockdev.OpWrite, Off: off, Buf: w.Data})
			reads = append(reads, &blockdev.Request{Op: blockdev.OpRead, Off: off, Buf: r.Data})
		}
		b.must(writes...)
		b.must(reads...)
		for i := range reads {
			if !bytes.Equal(reads[i].Buf, writes[i].Buf) {
				t.Fatalf("depth %d: request %d at %d read something else", depth, i, reads[i].Off)
			}
		}
		b.close()
		for _, buf := range bufs {
			buf.Release()
		}
	}
}

func testRefused(t *testing.T, d *device) {
	b := d.queue(4)
	defer b.close()
	n := d.roundUp(4096)
	d.write(b, 0, 2*n, 1, 0)
	d.write(b, d.info.Size-n, n, 1, 0)
	buf := d.pool.Get(int(2 * n))
	defer buf.Release()
	type request = blockdev.Request
	cases := []struct {
		name string
		req  request
		want error
	}{
		{"negative offset", request{Op: blockdev.OpRead, Off: -n, Buf: buf.Data[:n]}, blockdev.ErrOutOfRange},
		{"at the end", request{Op: blockdev.OpWrite, Off: d.info.Size, Buf: buf.Data[:n]}, blockdev.ErrOutOfRange},
		{"across the end", request{Op: blockdev.OpWrite, Off: d.info.Size - n, Buf: buf.Data[:2*n]}, blockdev.ErrOutOfRange},
		{"near 2^63", request{Op: blockdev.OpRead, Off: math.MaxInt64 &^ (n - 1), Buf: buf.Data[:n]}, blockdev.ErrOutOfRange},
		{"length near 2^63", request{Op: blockdev.OpWriteZeroes, Off: n, Len: math.MaxInt64 &^ (n - 1)}, blockdev.ErrOutOfRange},
		{"both near 2^63", request{Op: blockdev.OpWriteZeroes, Off: math.MaxInt64 &^ (n - 1), Len: math.MaxInt64 &^ (n - 1)}, blockdev.ErrOutOfRange},
		{"negative length", request{Op: blockdev.OpWriteZeroes, Off: n, Len: -n}, blockdev.ErrOutOfRange},
		{"unaligned offset", request{Op: blockdev.OpWrite, Off: 1, Buf: buf.Data[:n]}, blockdev.ErrUnaligned},
		{"offset aligned to half a block", request{Op: blockdev.OpRead, Off: d.block(1) / 2, Buf: buf.Data[:n]}, blockdev.ErrUnaligned},
		{"unaligned length", request{Op: blockdev.OpWrite, Off: 0, Buf: buf.Data[:n-1]}, blockdev.ErrUnaligned},
		{"unaligned zeroes", request{Op: blockdev.OpWriteZeroes, Off: 0, Len: d.block(1) + 1}, blockdev.ErrUnaligned},
		{"unknown operation", request{Op: blockdev.NumOps, Buf: buf.Data[:n]}, blockdev.ErrNotSupported},
	}
	if d.info.BufferAlign > 1 {
		cases = append(cases, struct {
			name string
			req  request
			want error
		}{"unaligned memory", request{Op: blockdev.OpWrite, Off: 0, Buf: buf.Data[1 : n+1]}, blockdev.ErrUnaligned})
	}
	// All in one batch, with good ones between.
	var all []*request
	for i := range cases {
		good := &request{Op: blockdev.OpFlush}
		all = append(all, &cases[i].req, good)
	}
	b.do(all...)
	for i, r := range all {
		if i%2 == 1 {
			if r.Err != nil {
				t.Errorf("flush after %q: %v", cases[i/2].name, r.Err)
			}
		} else if c := cases[i/2]; !errors.Is(r.Err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, r.Err, c.want)
		}
	}
	if !bytes.Equal(d.read(b, 0, 2*n), filled(2*n, 0, 1)) {
		t.Error("refused requests changed the start")
	}
	if !bytes.Equal(d.read(b, d.info.Size-n, n), filled(n, d.info.Size-n, 1)) {
		t.Error("refused requests changed the end")
	}
}

func testEmpty(t *testing.T, d *device) {
	b := d.queue(2)
	defer b.close()
	b.q.Submit(nil)
	b.must(
		&blockdev.Request{Op: blockdev.OpRead, Off: 0},
		&blockdev.Request{Op: blockdev.OpWrite, Off: d.info.Size},
		&blockdev.Request{Op: blockdev.OpWriteZeroes, Off: d.block(1)},
	)
}

func testZeroes(t *testing.T, d *device) {
	b := d.queue(2)
	defer b.close()
	size := d.roundUp(256 << 10)
	for round, flags := range []blockdev.Flags{0, blockdev.NoUnmap, blockdev.FUA, blockdev.FastZero, blockdev.FastZero | blockdev.NoUnmap} {
		for _, span := range [][2]int64{{0, d.block(1)}, {d.block(3), d.block(5)}, {d.block(1), size - d.block(2)}, {0, size}} {
			d.write(b, 0, size, uint64(round), 0)
			want := filled(size, 0, uint64(round))
			r := &blockdev.Request{Op: blockdev.OpWriteZeroes, Off: span[0], Len: span[1], Flags: flags}
			b.do(r)
			switch {
			case r.Err == nil:
				clear(want[span[0] : span[0]+span[1]])
			case !errors.Is(r.Err, blockdev.ErrNotSupported) || flags&blockdev.FastZero == 0:
				t.Fatalf("flags %q, %d bytes at %d: %v", flags, span[1], span[0], r.Err)
			}
			if !bytes.Equal(d.read(b, 0, size), want) {
				t.Fatalf("flags %q, %d bytes at %d, %v: content is wrong", flags, span[1], span[0], r.Err)
			}
		}
	}
}

func testDiscard(t *testing.T, d *device) {
	b := d.queue(2)
	defer b.close()
	size := d.roundUp(256 << 10)
	for round, span := range [][2]int64{{0, d.block(1)}, {d.block(3), d.block(9)}, {d.block(1), size - d.block(2)}, {0, size}} {
		d.write(b, 0, size, uint64(round), 0)
		want := filled(size, 0, uint64(round))
		r := &blockdev.Request{Op: blockdev.OpDiscard, Off: span[0], Len: span[1]}
		b.do(r)
		if !d.info.CanDiscard {
			if !errors.Is(r.Err, blockdev.ErrNotSupported) {
				t.Fatalf("discard: %v, want ErrNotSupported", r.Err)
			}
			continue
		}
		if r.Err != nil {
			t.Fatalf("discard %d bytes at %d: %v", span[1], span[0], r.Err)
		}
		got := d.read(b, 0, size)
		if d.info.DiscardZeroes && bytes.ContainsFunc(got[span[0]:span[0]+span[1]], func(c rune) bool { return c != 0 }) {
			t.Fatalf("discard %d bytes at %d: not zero", span[1], span[0])
		}
		copy(want[span[0]:span[0]+span[1]], got[span[0]:])
		if !bytes.Equal(got, want) {
			t.Fatalf("discard %d bytes at %d: changed what lies beside", span[1], span[0])
		}
	}
}

func testFlush(t *testing.T, d *device) {
	b := d.queue(4)
	defer b.close()
	n := d.roundUp(4096)
	b.must(&blockdev.Request{Op: blockdev.OpFlush})
	d.write(b, n, n, 1, blockdev.FUA)
	d.write(b, 2*n, n, 1, 0)
	b.must(&blockdev.Request{Op: blockdev.OpFlush}, &blockdev.Request{Op: blockdev.OpFlush})
	b.must(&blockdev.Request{Op: blockdev.OpWriteZeroes, Off: 3 * n, Len: n, Flags: blockdev.FUA})
	for off := n; off < 3*n; off += n {
		if !bytes.Equal(d.read(b, off, n), filled(n, off, 1)) {
			t.Fatalf("content at %d is wrong", off)
		}
	}
}

// Each completion submits the next request of its chain.
func testResubmit(t *testing.T, d *device) {
	const chains, length = 5, 200
	n := d.roundUp(512)
	type chain struct {
		req  blockdev.Request
		left int
	}
	var q blockdev.Queue
	var wg sync.WaitGroup
	wg.Add(chains)
	q, err := d.NewQueue(2, func(done []*blockdev.Request) {
		for _, r := range done {
			c := r.Owner.(*chain)
			if r.Err != nil {
				t.Errorf("%v: %v", r.Op, r.Err)
			}
			if c.left--; c.left == 0 {
				wg.Done()
				continue
			}
			if r.Op == blockdev.OpWrite {
				r.Op = blockdev.OpRead
			} else {
				r.Op = blockdev.OpWrite
			}
			q.Submit([]*blockdev.Request{r})
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range chains {
		buf := d.pool.Get(int(n))
		defer buf.Release()
		fill(buf.Data, 0, uint64(i))
		c := &chain{left: length}
		c.req = blockdev.Request{Op: blockdev.OpWrite, Off: int64(i) * n, Buf: buf.Data, Owner: c}
		q.Submit([]*blockdev.Request{&c.req})
	}
	wg.Wait()
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
}

// Several queues, several goroutines on each, each with a part of the device of its own.
func testConcurrent(t *testing.T, d *device) {
	const queues, perQueue, rounds = 2, 4, 40
	n := d.roundUp(4096)
	var wg sync.WaitGroup
	for qi := range queues {
		io, err := blockdev.NewIO(d.Device, 3)
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := io.Close(); err != nil {
				t.Error(err)
			}
		}()
		for gi := range perQueue {
			wg.Go(func() {
				base := int64(qi*perQueue+gi) * 8 * n
				buf := d.pool.Get(int(n))
				defer buf.Release()
				for round := range rounds {
					off := base + int64(round%8)*n
					fill(buf.Data, off, uint64(round))
					if err := io.WriteAt(buf.Data, off, 0); err != nil {
						t.Error(err)
						return
					}
					if round%10 == 0 {
						if err := io.Flush(); err != nil {
							t.Error(err)
						}
					}
					clear(buf.Data)
					if err := io.ReadAt(buf.Data, off); err != nil {
						t.Error(err)
						return
					}
					if !bytes.Equal(buf.Data, filled(n, off, uint64(round))) {
						t.Errorf("round %d at %d: content is wrong", round, off)
						return
					}
				}
			})
		}
	}
	wg.Wait()
}

func testClose(t *testing.T, d *device) {
	n := d.roundUp(4096)
	var bufs []*blockdev.Buffer
	for range 10 {
		var completed atomic.Int64
		q, err := d.NewQueue(4, func(done []*blockdev.Request) { completed.Add(int64(len(done))) })
		if err != nil {
			t.Fatal(err)
		}
		var reqs []*blockdev.Request
		for i := range 50 {
			buf := d.pool.Get(int(n))
			bufs = append(bufs, buf)
			reqs = append(reqs, &blockdev.Request{Op: blockdev.OpWrite, Off: int64(i) * n, Buf: buf.Data})
		}
		reqs = append(reqs, &blockdev.Request{Op: blockdev.OpFlush})
		q.Submit(reqs)
		if err := q.Close(); err != nil {
			t.Fatal(err)
		}
		if got := completed.Load(); got != 51 {
			t.Fatalf("Close returned when %d of 51 requests had completed", got)
		}
		late := &blockdev.Request{Op: blockdev.OpFlush}
		q.Submit([]*blockdev.Request{late})
		if completed.Load() != 52 || !errors.Is(late.Err, blockdev.ErrClosed) {
			t.Fatalf("after Close: %v, want ErrClosed", late.Err)
		}
		if err := q.Close(); !errors.Is(err, blockdev.ErrClosed) {
			t.Fatalf("second Close: %v, want ErrClosed", err)
		}
	}
	for _, buf := range bufs {
		buf.Release()
	}
	// A queue outlives its device's Close.
	b := d.queue(1)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	d.closed = true
	if _, err := d.NewQueue(1, func([]*blockdev.Request) {}); !errors.Is(err, blockdev.ErrClosed) {
		t.Fatalf("NewQueue on a closed device: %v, want ErrClosed", err)
	}
	d.read(b, 0, n)
	b.close()
}

func testModel(t *testing.T, d *device) {
	seed := rand.Uint64()
	defer func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	}()
	rng := rand.New(rand.NewPCG(seed, 0))
	b := d.queue(1 + rng.IntN(16))
	defer b.close()
	size := d.roundUp(256 << 10)
	d.write(b, 0, size, seed, 0)
	model := filled(size, 0, seed)
	blocks := int(size / d.block(1))
	for step := range 300 {
		first := rng.IntN(blocks)
		off := d.block(first)
		n := d.block(min(1+rng.IntN(1<<rng.IntN(9)), blocks-first))
		what := fmt.Sprintf("step %d, %d bytes at %d", step, n, off)
		var flags blockdev.Flags
		if rng.IntN(4) == 0 {
			flags |= blockdev.FUA
		}
		if rng.IntN(2) == 0 {
			flags |= blockdev.NoUnmap
		}
		switch rng.IntN(8) {
		case 0:
			b.must(&blockdev.Request{Op: blockdev.OpFlush})
		case 1:
			b.must(&blockdev.Request{Op: blockdev.OpWriteZeroes, Off: off, Len: n, Flags: flags})
			clear(model[off : off+n])
		case 2:
			if d.info.CanDiscard {
				b.must(&blockdev.Request{Op: blockdev.OpDiscard, Off: off, Len: n, Flags: flags})
				copy(model[off:off+n], d.read(b, off, n)) // whatever it is now
			}
		case 3, 4, 5:
			d.write(b, off, n, uint64(step), flags&blockdev.FUA)
			fill(model[off:off+n], off, uint64(step))
		default:
			if !bytes.Equal(d.read(b, off, n), model[off:off+n]) {
				t.Fatalf("%s: content is wrong", what)
			}
		}
	}
	if !bytes.Equal(d.read(b, 0, size), model) {
		t.Fatal("content is wrong at the end")
	}
}

func testIO(t *testing.T, d *device) {
	io, err := blockdev.NewIO(d.Device, 2)
	if err != nil {
		t.Fatal(err)
	}
	super := io.WithPurpose(blockdev.ForSuperblock)
	size := d.roundUp(3<<20 + 5*512)
	if size > d.info.Size {
		size = d.info.Size
	}
	want := filled(size, 0, 9)
	odd := make([]byte, size+1)[1:] // unaligned memory
	copy(odd, want)
	if err := super.WriteAt(odd, 0, blockdev.FUA); err != nil {
		t.Fatal(err)
	}
	for _, span := range [][2]int64{{0, size}, {1, 10}, {511, 2}, {4095, 4098}, {513, 2 << 20}, {size - 3, 3}, {77, size - 77}, {5, 0}} {
		for shift := range 2 {
			got := make([]byte, span[1]+1)[shift:][:span[1]]
			if err := io.ReadAt(got, span[0]); err != nil {
				t.Fatalf("%d bytes at %d: %v", span[1], span[0], err)
			}
			if !bytes.Equal(got, want[span[0]:span[0]+span[1]]) {
				t.Fatalf("%d bytes at %d: content is wrong", span[1], span[0])
			}
		}
	}
	if err := io.Flush(); err != nil {
		t.Error(err)
	}
	if err := io.WriteZeroes(d.block(1), d.block(2), 0); err != nil {
		t.Error(err)
	}
	clear(want[d.block(1):d.block(3)])
	for _, c := range []struct {
		name string
		err  error
		want error
	}{
		{"write at an odd offset", io.WriteAt(odd[:d.block(1)], 1, 0), blockdev.ErrUnaligned},
		{"write of an odd length", io.WriteAt(odd[:d.block(1)-1], 0, 0), blockdev.ErrUnaligned},
		{"write across the end", io.WriteAt(odd, d.info.Size-d.block(1), 0), blockdev.ErrOutOfRange},
		{"read across the end", io.ReadAt(odd[:2], d.info.Size-1), blockdev.ErrOutOfRange},
		{"read near 2^63", io.ReadAt(odd[:2], math.MaxInt64-1), blockdev.ErrOutOfRange},
		{"read at -1", io.ReadAt(odd[:2], -1), blockdev.ErrOutOfRange},
	} {
		var e *blockdev.IOError
		if !errors.Is(c.err, c.want) || !errors.As(c.err, &e) {
			t.Errorf("%s: %v, want an IOError with %v", c.name, c.err, c.want)
		}
	}
	got := make([]byte, d.block(4))
	if err := io.ReadAt(got, 0); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want[:len(got)]) {
		t.Error("content is wrong after refused requests")
	}
	if err := io.Close(); err != nil {
		t.Fatal(err)
	}
	if err := super.Flush(); !errors.Is(err, blockdev.ErrClosed) {
		t.Errorf("flush after Close: %v, want ErrClosed", err)
	}
}

// testAllocs holds the devices that say so to the promise that a request in steady state allocates nothing.
func testAllocs(t *testing.T, d *device) {
	if !allocationFree(d.Device) {
		t.Skip("this device makes no such promise")
	}
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	n := d.roundUp(4096)
	var wg sync.WaitGroup
	q, err := d.NewQueue(8, func(done []*blockdev.Request) { wg.Add(-len(done)) })
	if err != nil {
		t.Fatal(err)
	}
	var reqs []*blockdev.Request
	for i := range 16 {
		buf := d.pool.Get(int(n))
		defer buf.Release()
		reqs = append(reqs, &blockdev.Request{Op: blockdev.Op(i % 2), Off: int64(i) * n, Buf: buf.Data})
	}
	perBatch := testing.AllocsPerRun(200, func() {
		wg.Add(len(reqs))
		q.Submit(reqs)
		wg.Wait()
	})
	if perBatch >= 1 {
		t.Errorf("%.2f allocations for %d requests", perBatch, len(reqs))
	}
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
}

// allocationFree reports whether the device promises to allocate nothing per request.
func allocationFree(d blockdev.Device) bool {
	switch d.Info().Engine {
	case "memory", blockdev.EngineUring, blockdev.EnginePread, blockdev.EngineInline:
		_, wrapped := d.(interface{ Unwrap() blockdev.Device })
		return !wrapped
	}
	return false
}
