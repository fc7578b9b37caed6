package pace

import "time"

// rescale takes ten nodes at a time, or as many as it takes to be through in half the time in which the next collection is
// due. The allocator waits as in classic: it was proposed for a kernel whose did. B 3.5 (d).
type rescale struct{}

const (
	rescaleNodes = 10
	rescaleSleep = 10 * time.Millisecond
)

func (rescale) Slice(s State) int {
	limit := s.Interval / 2
	if limit >= rescaleSleep && rescaleSleep*time.Duration(s.Nodes/rescaleNodes) > limit {
		return max(s.Nodes/int(limit/rescaleSleep), 1)
	}
	return rescaleNodes
}

func (rescale) Yield(s State) bool        { return s.Inflight > 0 }
func (rescale) Sleep(State) time.Duration { return rescaleSleep }
func (rescale) Allocates() bool           { return false }
func (rescale) Finished()                 {}
