package nbd

import (
	"fmt"
	"sync/atomic"
)

// Op names a kind of request in Stats.
type Op uint8

// The kinds of request that are counted. OpOther are commands that this server does not know.
const (
	OpRead Op = iota
	OpWrite
	OpFlush
	OpTrim
	OpCache
	OpWriteZeroes
	OpBlockStatus
	OpOther
	NumOps
)

var opNames = [NumOps]string{"read", "write", "flush", "trim", "cache", "write_zeroes", "block_status", "other"}

// String returns the name used in metrics.
func (o Op) String() string {
	if o < NumOps {
		return opNames[o]
	}
	return fmt.Sprintf("op(%d)", uint8(o))
}

// opOf returns the kind of a command.
func opOf(cmd uint16) Op {
	switch cmd {
	case cmdRead:
		return OpRead
	case cmdWrite:
		return OpWrite
	case cmdFlush:
		return OpFlush
	case cmdTrim:
		return OpTrim
	case cmdCache:
		return OpCache
	case cmdWriteZeroes:
		return OpWriteZeroes
	case cmdBlockStatus:
		return OpBlockStatus
	}
	return OpOther
}

// OpStats counts requests of one kind.
type OpStats struct {
	Requests uint64 // answered, also with an error
	Errors   uint64 // answered with an error
	Bytes    uint64 // covered by those answered without an error
}

// Stats counts the requests of a connection, or of an export.
type Stats [NumOps]OpStats

// Total adds up all kinds.
func (s *Stats) Total() OpStats {
	var t OpStats
	for i := range s {
		t.add(s[i])
	}
	return t
}

func (o *OpStats) add(p OpStats) {
	o.Requests += p.Requests
	o.Errors += p.Errors
	o.Bytes += p.Bytes
}

func (s *Stats) add(p *Stats) {
	for i := range s {
		s[i].add(p[i])
	}
}

// counters are Stats that one goroutine at a time adds to, in batches, while others read.
type counters [NumOps]struct{ requests, errors, bytes atomic.Uint64 }

func (c *counters) add(s *Stats) {
	for i := range s {
		if s[i].Requests == 0 {
			continue
		}
		c[i].requests.Add(s[i].Requests)
		if s[i].Bytes != 0 {
			c[i].bytes.Add(s[i].Bytes)
		}
		if s[i].Errors != 0 {
			c[i].errors.Add(s[i].Errors)
		}
	}
}

func (c *counters) load() (s Stats) {
	for i := range c {
		s[i] = OpStats{c[i].requests.Load(), c[i].errors.Load(), c[i].bytes.Load()}
	}
	return s
}
