package pace

import "time"

// classic is what Linux had from 4.19 to 6.9. It lets go for requests alone, so that a set without any is collected in one
// hold, and at most a hundred times. B 3.5 (a).
type classic struct{}

const (
	classicNodes = 100
	classicSleep = 100 * time.Millisecond
)

func (classic) Slice(s State) int         { return max(classicNodes, s.Nodes/100) }
func (classic) Yield(s State) bool        { return s.Inflight > 0 }
func (classic) Sleep(State) time.Duration { return classicSleep }
func (classic) Allocates() bool           { return false }
func (classic) Finished()                 {}
