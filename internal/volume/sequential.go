package volume

import "time"

const (
	streams      = 128             // that are followed
	streamExpiry = 5 * time.Second // without a request, a stream is over
)

// A sequencer finds sequential streams among the requests of one queue. The kernel follows each task's; there are no
// tasks here, so a connection stands for one. Source: B 1.3.
type sequencer struct {
	recent [streams]stream
	io     uint64 // bytes of the current stream
	avg    uint64
}

type stream struct {
	next   uint64 // sector
	bytes  uint64
	expiry time.Duration
}

// sectors notes a request and returns how long its stream is.
func (q *sequencer) sectors(start, n uint64, now time.Duration) uint64 {
	var r *stream
	oldest := &q.recent[0]
	for i := range q.recent {
		s := &q.recent[i]
		if s.next == start && now < s.expiry {
			r = s
			break
		}
		if s.expiry < oldest.expiry {
			oldest = s
		}
	}
	if r == nil {
		r = oldest
		q.avg = (q.avg*7 + q.io) / 8
		q.io = 0
		r.bytes = 0
	}
	r.bytes += n * 512
	r.next, r.expiry = start+n, now+streamExpiry
	q.io = r.bytes
	return max(q.io, q.avg) / 512
}
