package blockdev

import (
	"strings"

	"github.com/ubcache/ubcache/internal/rt"
)

// A TraceLog collects the lines of one or more Tracing devices in the order of what happened.
type TraceLog struct {
	mu    rt.Mutex
	lines strings.Builder
}

// NewTraceLog makes an empty log; r is the runtime of the devices (nil: the real one).
func NewTraceLog(r *rt.Runtime) *TraceLog {
	l := new(TraceLog)
	l.mu.Init(r)
	return l
}

// Take returns the lines since the last Take, each ended by a newline.
func (l *TraceLog) Take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.lines.String()
	l.lines.Reset()
	return s
}

// TraceOptions modify NewTracing.
type TraceOptions struct {
	Label string                // put before each line, with a space: tells devices of one log apart
	Done  bool                  // also a line when a request completes: "done write 4096+512 journal", then any error
	Only  func(r *Request) bool // which requests to trace; default: all. It must not keep r
}

// Tracing writes a line for each request submitted, in Request's text form:
//
//	cache write 8192+4096 data
//	cache write 4096+512 journal fua
//	backing flush writeback
type Tracing struct {
	layer
	log *TraceLog
	o   TraceOptions
}

// NewTracing wraps dev. Lines go to log.
func NewTracing(dev Device, log *TraceLog, o TraceOptions) *Tracing {
	if o.Label != "" {
		o.Label += " "
	}
	return &Tracing{layer: newLayer(dev), log: log, o: o}
}

func (t *Tracing) trace(what string, reqs []*Request, results bool) {
	t.log.mu.Lock()
	defer t.log.mu.Unlock()
	for _, r := range reqs {
		if t.o.Only != nil && !t.o.Only(r) {
			continue
		}
		t.log.lines.WriteString(t.o.Label + what + r.String())
		if results && r.Err != nil {
			t.log.lines.WriteString(": " + r.Err.Error())
		}
		t.log.lines.WriteByte('\n')
	}
}

// NewQueue makes a queue of the device below whose requests are traced.
func (t *Tracing) NewQueue(depth int, complete func(done []*Request)) (Queue, error) {
	done := complete
	if t.o.Done {
		done = func(reqs []*Request) {
			t.trace("done ", reqs, true)
			complete(reqs)
		}
	}
	q, err := t.Device.NewQueue(depth, done)
	if err != nil {
		return nil, err
	}
	return &traceQueue{Queue: q, t: t}, nil
}

type traceQueue struct {
	Queue
	t *Tracing
}

func (q *traceQueue) Submit(reqs []*Request) {
	q.t.trace("", reqs, false)
	q.Queue.Submit(reqs)
}
