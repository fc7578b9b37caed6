package blockdev

import (
	"container/heap"
	"fmt"
	"time"

	"github.com/ubcache/ubcache/internal/rt"
)

// LatencyPreset returns a model of a kind of disk: "nvme", "ssd" (SATA), "hdd" or "network" (a cloud volume of
// 125 MB/s).
func LatencyPreset(name string) (Latency, error) {
	switch name {
	case "nvme":
		return Latency{
			Read: 80 * time.Microsecond, Write: 20 * time.Microsecond, Flush: 150 * time.Microsecond,
			Jitter: 0.2, PerMiB: 330 * time.Microsecond, Parallel: 64,
		}, nil
	case "ssd":
		return Latency{
			Read: 150 * time.Microsecond, Write: 60 * time.Microsecond, Flush: 2 * time.Millisecond,
			Jitter: 0.3, PerMiB: 2 * time.Millisecond, Parallel: 16,
		}, nil
	case "hdd":
		return Latency{
			Read: 9 * time.Millisecond, Write: 9 * time.Millisecond, Flush: 12 * time.Millisecond,
			Sequential: 100 * time.Microsecond, Jitter: 0.5, PerMiB: 6 * time.Millisecond, Parallel: 1,
		}, nil
	case "network":
		return Latency{
			Read: 700 * time.Microsecond, Write: 900 * time.Microsecond, Flush: time.Millisecond,
			Jitter: 0.4, PerMiB: 8 * time.Millisecond, Parallel: 32,
		}, nil
	}
	return Latency{}, fmt.Errorf("blockdev: no latency model %q: want nvme, ssd, hdd or network", name)
}

// Delaying makes a device as slow as a Latency says, by the clock of its runtime. A request waits for one of
// Parallel servers, takes its time there, and then reaches the device below: what it reads, and the order of
// overlapping requests, is decided at the end of its time. The depth of a queue has no effect.
type Delaying struct {
	layer

	mu       rt.Mutex
	latency  Latency
	servers  []time.Duration // when each is free
	wire     time.Duration   // when whoever moves data last is done
	ends     time.Duration   // when all that was begun is done
	shut     time.Duration   // until when an exclusive discard keeps all else waiting
	last     int64           // where the last request ended
	waiting  delayHeap
	sequence uint64
	armed    *rt.Timer // goes off at armedAt; nil: nothing waits
	armedAt  time.Duration
}

type delayed struct {
	due      time.Duration
	sequence uint64 // among those due at the same time, the first submitted goes first
	r        *Request
	q        *delayQueue
}

// NewDelaying wraps dev.
func NewDelaying(dev Device, l Latency) *Delaying {
	d := &Delaying{layer: newLayer(dev), last: -1}
	d.mu.Init(d.rt)
	d.SetLatency(l)
	return d
}

// SetLatency changes the model for requests submitted from now on.
func (d *Delaying) SetLatency(l Latency) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.latency = l
	d.servers = make([]time.Duration, max(l.Parallel, 0))
}

// NewQueue makes a queue whose requests take their time.
func (d *Delaying) NewQueue(depth int, complete func(done []*Request)) (Queue, error) {
	q := &delayQueue{d: d}
	q.init(&d.layer, complete)
	below, err := d.Device.NewQueue(depth, func(done []*Request) { q.finish(done...) })
	if err != nil {
		return nil, err
	}
	q.below = below
	return q, nil
}

type delayQueue struct {
	layerQueue
	d *Delaying
}

func (q *delayQueue) Submit(reqs []*Request) {
	if !q.begin(len(reqs)) {
		q.refuse(reqs, ErrClosed)
		return
	}
	d := q.d
	now := d.rt.Now()
	var pass []*Request
	d.mu.Lock()
	for _, r := range reqs {
		due := d.schedule(now, r)
		if due <= now {
			pass = append(pass, r)
			continue
		}
		d.sequence++
		heap.Push(&d.waiting, delayed{due: due, sequence: d.sequence, r: r, q: q})
	}
	d.arm(now)
	d.mu.Unlock()
	if len(pass) > 0 {
		q.below.Submit(pass)
	}
}

// schedule returns when r reaches the device below. d.mu is held.
func (d *Delaying) schedule(now time.Duration, r *Request) time.Duration {
	l := &d.latency
	exclusive := r.Op == OpDiscard && l.Exclusive
	base, drawn := l.base(r, d.last), false
	if r.Op == OpWrite && l.Writes != nil {
		base, drawn = l.Writes.At(d.rt.Float64()), true
	}
	moved := int64(0)
	if r.Op != OpFlush {
		d.last = r.Off + r.Length()
	}
	if r.Op == OpRead || r.Op == OpWrite {
		moved = r.Length()
	}
	move := time.Duration(float64(l.PerMiB) * float64(moved) / (1 << 20))
	if l.Jitter > 0 && !drawn {
		f := 1 + l.Jitter*(2*d.rt.Float64()-1)
		base = time.Duration(float64(base) * f)
	}
	start, server := now, -1
	if len(d.servers) > 0 {
		server = 0
		for i, free := range d.servers {
			if free < d.servers[server] {
				server = i
			}
		}
		start = max(now, d.servers[server])
	}
	start = max(start, d.shut)
	if exclusive {
		start = max(start, d.ends)
	}
	end := start + base
	if move > 0 {
		end = max(end, d.wire) + move
		d.wire = end
	}
	if server >= 0 {
		d.servers[server] = end
	}
	if exclusive {
		d.shut = end
	}
	d.ends = max(d.ends, end)
	return end
}

// base is the time of r without moving its data; last is where the request before ended.
func (l *Latency) base(r *Request, last int64) time.Duration {
	switch {
	case r.Op == OpFlush:
		return l.Flush
	case r.Op == OpDiscard && l.Discard > 0:
		return l.Discard
	case l.Sequential > 0 && r.Off == last:
		return l.Sequential
	case r.Op == OpRead:
		return l.Read
	default:
		return l.Write
	}
}

// arm sees to it that fire is called when the first request is due. d.mu is held.
func (d *Delaying) arm(now time.Duration) {
	if len(d.waiting) == 0 {
		return
	}
	first := d.waiting[0].due
	if d.armed != nil {
		if d.armedAt <= first {
			return
		}
		d.armed.Stop() // if it fires nevertheless, fire finds nothing due
	}
	d.armedAt = first
	d.armed = d.rt.AfterFunc(max(first-now, 0), d.fire)
}

// fire passes on what is due.
func (d *Delaying) fire() {
	now := d.rt.Now()
	var due []delayed
	d.mu.Lock()
	for len(d.waiting) > 0 && d.waiting[0].due <= now {
		due = append(due, heap.Pop(&d.waiting).(delayed))
	}
	if d.armed != nil && d.armedAt <= now {
		d.armed = nil
	}
	d.arm(now)
	d.mu.Unlock()
	for len(due) > 0 { // one batch per run of the same queue
		q := due[0].q
		var batch []*Request
		for len(due) > 0 && due[0].q == q {
			batch = append(batch, due[0].r)
			due = due[1:]
		}
		q.below.Submit(batch)
	}
}

type delayHeap []delayed

func (h delayHeap) Len() int { return len(h) }
func (h delayHeap) Less(i, j int) bool {
	return h[i].due < h[j].due || h[i].due == h[j].due && h[i].sequence < h[j].sequence
}
func (h delayHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *delayHeap) Push(x any)   { *h = append(*h, x.(delayed)) }
func (h *delayHeap) Pop() any {
	old := *h
	x := old[len(old)-1]
	old[len(old)-1] = delayed{}
	*h = old[:len(old)-1]
	return x
}
