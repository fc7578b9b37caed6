package blockdev

import (
	"math/rand/v2"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/rt"
)

// A Fault says which requests go wrong, and how. The zero value makes each request fail with EIO.
type Fault struct {
	Ops      []Op      // which operations; empty: all
	Purposes []Purpose // which purposes; empty: all
	Off, Len int64     // requests that touch this range, in bytes; Len 0: all. A flush touches everything
	Prob     float64   // how probable it is for each of those, 0 to 1; 0: certain
	Skip     int       // so many of those pass first
	Count    int       // after so many it is over; 0: never

	Err  error         // what the request fails with, wrapped in an IOError; default EIO, or none if Hang is set
	Hang time.Duration // how long nothing happens to it first
}

// Faulty makes requests fail, or hang for a while, by rules that may change at any time. What fails does not
// reach the device below.
type Faulty struct {
	layer
	mu    rt.Mutex
	rng   *rand.Rand
	rules []*faultRule
}

type faultRule struct {
	Fault
	met, struck int
}

// NewFaulty wraps dev, at first without faults. What happens by probability follows from seed.
func NewFaulty(dev Device, seed uint64) *Faulty {
	f := &Faulty{layer: newLayer(dev), rng: rand.New(rand.NewPCG(seed, 0))}
	f.mu.Init(f.rt)
	return f
}

// Add adds a rule. Of several that apply to a request, the one added first does. The result takes the rule
// away again, and returns how often it struck.
func (f *Faulty) Add(fault Fault) (remove func() int) {
	if fault.Err == nil && fault.Hang == 0 {
		fault.Err = unix.EIO
	}
	rule := &faultRule{Fault: fault}
	f.mu.Lock()
	f.rules = append(f.rules, rule)
	f.mu.Unlock()
	return func() int {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.rules = slices.DeleteFunc(f.rules, func(r *faultRule) bool { return r == rule })
		return rule.struck
	}
}

// Clear takes all rules away.
func (f *Faulty) Clear() {
	f.mu.Lock()
	f.rules = nil
	f.mu.Unlock()
}

// strike returns the fault that befalls r, or nil. f.mu is held.
func (f *Faulty) strike(r *Request) *Fault {
	for _, rule := range f.rules {
		if !rule.applies(r) || rule.Count > 0 && rule.struck >= rule.Count {
			continue
		}
		if rule.met++; rule.met <= rule.Skip {
			continue
		}
		if rule.Prob > 0 && f.rng.Float64() >= rule.Prob {
			continue
		}
		rule.struck++
		return &rule.Fault
	}
	return nil
}

func (f *Fault) applies(r *Request) bool {
	if len(f.Ops) > 0 && !slices.Contains(f.Ops, r.Op) || len(f.Purposes) > 0 && !slices.Contains(f.Purposes, r.Purpose) {
		return false
	}
	return f.Len == 0 || r.Op == OpFlush || r.Off < f.Off+f.Len && f.Off < r.Off+r.Length()
}

// NewQueue makes a queue on which the faults strike.
func (f *Faulty) NewQueue(depth int, complete func(done []*Request)) (Queue, error) {
	q := &faultyQueue{f: f}
	q.init(&f.layer, complete)
	below, err := f.Device.NewQueue(depth, func(done []*Request) { q.finish(done...) })
	if err != nil {
		return nil, err
	}
	q.below = below
	return q, nil
}

type faultyQueue struct {
	layerQueue
	f *Faulty
}

func (q *faultyQueue) Submit(reqs []*Request) {
	if !q.begin(len(reqs)) {
		q.refuse(reqs, ErrClosed)
		return
	}
	info := q.f.Info()
	var pass, failed []*Request
	type held struct {
		r *Request
		f *Fault
	}
	var hang []held
	q.f.mu.Lock()
	for _, r := range reqs {
		switch f := q.f.strike(r); {
		case f == nil:
			pass = append(pass, r)
		case f.Hang > 0:
			hang = append(hang, held{r, f})
		default:
			r.Err = ioError(info.Name, r, f.Err)
			failed = append(failed, r)
		}
	}
	q.f.mu.Unlock()
	for _, h := range hang {
		q.f.rt.AfterFunc(h.f.Hang, func() {
			if h.f.Err != nil {
				h.r.Err = ioError(info.Name, h.r, h.f.Err)
				q.finish(h.r)
				return
			}
			q.below.Submit([]*Request{h.r})
		})
	}
	if len(pass) > 0 {
		q.below.Submit(pass)
	}
	if len(failed) > 0 {
		q.finish(failed...)
	}
}
