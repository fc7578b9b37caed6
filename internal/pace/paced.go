package pace

import "time"

// paced is what Linux 7.2 has: ten nodes with requests about, else one of 128, and it always lets go. It sleeps less if
// somebody waits for a bucket. B 3.5 (e).
type paced struct{}

const (
	pacedNodes  = 10
	pacedParts  = 128
	pacedSleep  = 100 * time.Millisecond
	pacedWaited = 10 * time.Millisecond
)

func (paced) Slice(s State) int {
	if s.Inflight > 0 {
		return pacedNodes
	}
	return max(pacedNodes, s.Nodes/pacedParts)
}

func (paced) Yield(State) bool { return true }

func (paced) Sleep(s State) time.Duration {
	if s.Waiters > 0 {
		return pacedWaited
	}
	return pacedSleep
}

func (paced) Allocates() bool { return true }
func (paced) Finished()       {}
