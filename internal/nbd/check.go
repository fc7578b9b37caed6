package nbd

import "github.com/ubcache/ubcache/internal/blockdev"

// A verdict says what to do with a request.
type verdict uint8

const (
	refuse      verdict = iota // answer with an error; a write's payload is thrown away
	acknowledge                // answer with success, nothing to do
	submit                     // give it to the export
	queryStatus                // ask the export's BlockStatus
)

// check decides on a request from its header alone. It is the only place where requests are judged.
func (g *geometry) check(h header, structured, contexts bool) (verdict, uint32) {
	var allowed uint16 = cmdFlagFUA // valid on every command, without effect on most
	write := true
	switch h.cmd {
	case cmdRead:
		write = false
		if structured {
			allowed |= cmdFlagDF
		}
	case cmdWrite:
	case cmdTrim:
		if !g.CanTrim && !g.ReadOnly {
			return refuse, errnoInval
		}
	case cmdWriteZeroes:
		allowed |= cmdFlagNoHole | cmdFlagFastZero
		if !g.CanZero && !g.ReadOnly {
			return refuse, errnoInval
		}
	case cmdFlush:
		write = false
	case cmdCache:
		write = false
	case cmdBlockStatus:
		write = false
		allowed |= cmdFlagReqOne
		if !contexts {
			return refuse, errnoInval
		}
	default:
		return refuse, errnoInval
	}
	if h.flags&^allowed != 0 {
		return refuse, errnoInval
	}
	if write && g.ReadOnly {
		return refuse, errnoPerm
	}
	if h.cmd == cmdFlush {
		if h.offset != 0 || h.length != 0 {
			return refuse, errnoInval
		}
		if g.ReadOnly {
			return acknowledge, errnoOK
		}
		return submit, errnoOK
	}

	// No sum of offset and length is formed: it could overflow.
	if h.offset > g.size || uint64(h.length) > g.size-h.offset {
		if write {
			return refuse, errnoNoSpace
		}
		return refuse, errnoInval
	}
	if (h.offset|uint64(h.length))&uint64(g.min-1) != 0 {
		return refuse, errnoInval
	}
	if h.length > g.max {
		switch {
		case h.cmd == cmdRead && h.flags&cmdFlagDF != 0:
			return refuse, errnoOverflow
		case h.cmd == cmdRead || h.cmd == cmdWrite:
			return refuse, errnoInval
		}
	}
	switch {
	case h.cmd == cmdBlockStatus:
		if h.length == 0 {
			return refuse, errnoInval // no extent could be given
		}
		return queryStatus, errnoOK
	case h.cmd == cmdCache || h.length == 0:
		return acknowledge, errnoOK
	}
	return submit, errnoOK
}

// fill makes the device request for a header that check let through; the buffer is set elsewhere.
func (h header) fill(q *blockdev.Request) {
	q.Off = int64(h.offset)
	q.Len = int64(h.length)
	q.Flags = 0
	switch h.cmd {
	case cmdRead:
		q.Op = blockdev.OpRead
		return
	case cmdWrite:
		q.Op = blockdev.OpWrite
	case cmdFlush:
		q.Op = blockdev.OpFlush
		return
	case cmdTrim:
		q.Op = blockdev.OpDiscard
	case cmdWriteZeroes:
		q.Op = blockdev.OpWriteZeroes
		if h.flags&cmdFlagNoHole != 0 {
			q.Flags |= blockdev.NoUnmap
		}
		if h.flags&cmdFlagFastZero != 0 {
			q.Flags |= blockdev.FastZero
		}
	}
	if h.flags&cmdFlagFUA != 0 {
		q.Flags |= blockdev.FUA
	}
}
