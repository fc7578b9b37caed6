package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/ubcache/ubcache/internal/rt"
)

// Weights say how often each kind of request comes, in proportion.
type Weights struct {
	Read, Write, FUA, Flush, Discard, Zeroes int
}

// defaultWeights are multiplied by seed, so that some runs never flush and others hardly do anything else.
var defaultWeights = Weights{Read: 30, Write: 40, FUA: 8, Flush: 8, Discard: 5, Zeroes: 4}

// A Workload is a load on some volumes that follows from its seed.
type Workload struct {
	Seed     uint64        // of the requests; a Loop sets it
	Requests int           // default 150
	Clients  int           // goroutines that send them, one request at a time each; default 4
	Blocks   int           // most requests are of 1 to so many blocks; default 8
	Large    int           // a few are of up to so many; default 16 * Blocks
	Think    time.Duration // a client waits for up to so long between two requests; default 300 µs, negative: never
	Weights  Weights       // zero: drawn by seed

	// Between, if set, is called before request n, 0 and on, is sent, by the goroutine that sends it.
	Between func(ctx context.Context, n int) error
	// Tolerate, if set, says which errors of requests are no failure: the request has then perhaps happened.
	Tolerate func(err error) bool
}

// requestKind is what a request does, in the order of Weights.
type requestKind int

const (
	reqRead requestKind = iota
	reqWrite
	reqFUA
	reqFlush
	reqDiscard
	reqZeroes
)

func (k requestKind) String() string {
	return [...]string{"read", "write", "FUA write", "flush", "discard", "write zeroes"}[k]
}

type request struct {
	kind     requestKind
	volume   int
	first, n int64 // blocks
	fua      bool  // of a write of zeroes
}

func (r request) String() string {
	return fmt.Sprintf("%v, volume %d, blocks %d-%d", r.kind, r.volume, r.first, r.first+r.n-1)
}

// A terrain is where requests to one volume go.
type terrain struct {
	blocks  int64
	hot     [3][2]int64 // first and length: small ranges that are hit again and again
	streams [3]int64    // where each sequential run goes on
}

func newTerrain(rng *rand.Rand, blocks int64) *terrain {
	t := &terrain{blocks: blocks}
	for i := range t.hot {
		n := min(blocks, 2+rng.Int64N(24))
		t.hot[i] = [2]int64{rng.Int64N(blocks - n + 1), n}
	}
	for i := range t.streams {
		t.streams[i] = rng.Int64N(blocks)
	}
	return t
}

// place chooses the range of a request.
func (t *terrain) place(rng *rand.Rand, w *Workload) (first, n int64) {
	n = 1 + min(rng.Int64N(int64(w.Blocks)), rng.Int64N(int64(w.Blocks)))
	switch rng.IntN(30) {
	case 0:
		n = 1 + rng.Int64N(int64(w.Large))
	case 1, 2:
		n = int64(w.Blocks)
	}
	n = min(n, t.blocks)
	switch k := rng.IntN(10); {
	case k < 5:
		h := t.hot[rng.IntN(len(t.hot))]
		first = h[0] + rng.Int64N(h[1])
		if rng.IntN(4) == 0 {
			first = h[0] // the same again
		}
	case k < 7:
		s := &t.streams[rng.IntN(len(t.streams))]
		if *s+n > t.blocks {
			*s = 0
		}
		first = *s
		*s += n
	default:
		first = rng.Int64N(t.blocks)
	}
	return min(first, t.blocks-n), n
}

func (w *Workload) fill() {
	set := func(p *int, value int) {
		if *p == 0 {
			*p = value
		}
	}
	set(&w.Requests, 150)
	set(&w.Clients, 4)
	set(&w.Blocks, 8)
	set(&w.Large, 16*w.Blocks)
	if w.Think == 0 {
		w.Think = 300 * time.Microsecond
	}
}

// plan makes the requests.
func (w *Workload) plan(volumes []*volume) []request {
	rng := rand.New(rand.NewPCG(w.Seed, 0x776f726b))
	g := w.Weights
	if g == (Weights{}) {
		g = defaultWeights
		for _, p := range []*int{&g.Read, &g.FUA, &g.Flush, &g.Discard, &g.Zeroes} {
			*p *= []int{0, 1, 1, 1, 3}[rng.IntN(5)]
		}
	}
	weights := [...]int{g.Read, g.Write, g.FUA, g.Flush, g.Discard, g.Zeroes}
	total := 0
	for _, n := range weights {
		total += n
	}
	var ground []*terrain
	for _, v := range volumes {
		ground = append(ground, newTerrain(rng, int64(len(v.blocks))))
	}
	list := make([]request, w.Requests)
	for i := range list {
		r := &list[i]
		for at := rng.IntN(total); at >= weights[r.kind]; r.kind++ {
			at -= weights[r.kind]
		}
		r.volume = rng.IntN(len(volumes))
		r.first, r.n = ground[r.volume].place(rng, w)
		r.fua = r.kind == reqFUA || r.kind == reqZeroes && rng.IntN(4) == 0
	}
	return list
}

// Run sends the requests to targets, which are in the order of the history's volumes, and returns when all have been
// answered. It ends early at the first failure, which it returns: an error of a request, or a *Violation. What
// happens after h was frozen is no failure.
func (w Workload) Run(ctx context.Context, r *rt.Runtime, h *History, targets []Target) error {
	w.fill()
	var clients []*Client
	for i, t := range targets {
		clients = append(clients, h.Client(i, t))
	}
	list := w.plan(h.volumes)
	var (
		mu     rt.Mutex
		next   int
		failed error
		g      rt.WaitGroup
	)
	mu.Init(r)
	g.Init(r)
	take := func() int {
		mu.Lock()
		defer mu.Unlock()
		if next == len(list) || failed != nil || h.Frozen() {
			return -1
		}
		next++
		return next - 1
	}
	fail := func(err error) {
		if h.Frozen() {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		if failed == nil {
			failed = err
		}
	}
	for n := range w.Clients {
		g.Go(fmt.Sprintf("client %d", n), func() {
			for {
				i := take()
				if i < 0 {
					return
				}
				if w.Think > 0 && r.Uint64N(2) == 0 {
					r.Sleep(time.Duration(r.Uint64N(uint64(w.Think))))
				}
				if w.Between != nil {
					if err := w.Between(ctx, i); err != nil {
						fail(fmt.Errorf("before request %d: %w", i, err))
						return
					}
				}
				if err := list[i].send(ctx, clients); err != nil && (w.Tolerate == nil || isViolation(err) || !w.Tolerate(err)) {
					fail(fmt.Errorf("request %d (%v): %w", i, list[i], err))
					return
				}
			}
		})
	}
	g.Wait()
	return failed
}

func (r *request) send(ctx context.Context, clients []*Client) error {
	c := clients[r.volume]
	off, n := r.first*c.block, r.n*c.block
	switch r.kind {
	case reqRead:
		return c.Read(ctx, off, n)
	case reqWrite, reqFUA:
		return c.Write(ctx, off, n, r.fua)
	case reqFlush:
		return c.Flush(ctx)
	case reqDiscard:
		return c.Discard(ctx, off, n)
	default:
		return c.WriteZeroes(ctx, off, n, r.fua)
	}
}
