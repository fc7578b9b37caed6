package lab

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"strconv"
	"time"

	"github.com/ubcache/ubcache/internal/rt"
)

// A LatLog is a latency log in the format of fio, a line for each request or, with Average, for each direction and interval:
//
//	time in ms since the window began, latency in ns, direction (0 read, 1 write), block size, offset
//
// With Average it is fio's log_avg_msec: the first completion after an interval is over ends it, and is part of it; the line has the
// time of that completion, the mean latency, and 0 for block size and offset, as fio has it. With Max (log_max_value) the line
// has the greatest latency instead of the mean.
//
// Lines are written by a goroutine of the log's own, so that no request waits for the file.
type LatLog struct {
	w       io.WriteCloser
	average time.Duration
	max     bool

	window [2]logWindow // of reads and writes; the load's

	rt      *rt.Runtime
	mu      rt.Mutex
	changed rt.Cond
	chunk   []logLine // the load's
	full    [][]logLine
	spare   [][]logLine
	closed  bool
	err     error
	writer  rt.WaitGroup
}

type logWindow struct {
	begin, last time.Duration
	sum         time.Duration
	max         time.Duration
	n           int64
}

type logLine struct {
	at, latency time.Duration
	off         int64
	block       int32
	write       bool
}

// LogOptions are those of a LatLog.
type LogOptions struct {
	Average time.Duration // whole milliseconds; 0: a line for each request
	Max     bool          // needs Average
}

const logChunk = 16 << 10 // lines

// NewLatLog makes a log that goes to w, and closes w in the end.
func NewLatLog(r *rt.Runtime, w io.WriteCloser, o LogOptions) (*LatLog, error) {
	if o.Average < 0 || o.Average%time.Millisecond != 0 {
		return nil, fmt.Errorf("an interval of %v: want whole milliseconds", o.Average)
	}
	if o.Max && o.Average == 0 {
		return nil, fmt.Errorf("the greatest latency of an interval needs an interval")
	}
	l := &LatLog{w: w, average: o.Average, max: o.Max, rt: r}
	l.mu.Init(r)
	l.changed.Init(&l.mu)
	l.writer.Init(r)
	l.writer.Go("latency log", l.write)
	return l, nil
}

// Add adds a request that completed at after the beginning of the window. Calls must not overlap.
func (l *LatLog) Add(at, latency time.Duration, read bool, block int, off int64) {
	if l.average == 0 {
		l.add(logLine{at, latency, off, int32(block), !read})
		return
	}
	w := &l.window[direction(!read)]
	w.sum += latency
	w.n++
	w.max = max(w.max, latency)
	at = at.Truncate(time.Millisecond) // fio's clock for this
	w.last = at
	if at-w.begin < l.average {
		return
	}
	l.endWindow(w, !read)
}

// endWindow adds the line of an interval, and begins the next.
func (l *LatLog) endWindow(w *logWindow, write bool) {
	line := logLine{at: w.last, latency: w.max, write: write}
	if !l.max {
		line.latency = time.Duration(math.Round(float64(w.sum) / float64(w.n)))
	}
	*w = logWindow{begin: w.last.Truncate(l.average)}
	l.add(line)
}

func direction(write bool) int {
	if write {
		return 1
	}
	return 0
}

func (l *LatLog) add(line logLine) {
	l.chunk = append(l.chunk, line)
	if len(l.chunk) < logChunk {
		return
	}
	l.mu.Lock()
	l.full = append(l.full, l.chunk)
	l.chunk = nil
	if n := len(l.spare); n > 0 {
		l.chunk, l.spare = l.spare[n-1], l.spare[:n-1]
	}
	l.mu.Unlock()
	l.changed.Signal()
	if l.chunk == nil {
		l.chunk = make([]logLine, 0, logChunk)
	}
}

// write is the goroutine that writes.
func (l *LatLog) write() {
	b := bufio.NewWriterSize(l.w, 1<<20)
	var err error
	l.mu.Lock()
	for {
		for len(l.full) == 0 && !l.closed {
			l.changed.Wait()
		}
		if len(l.full) == 0 {
			break
		}
		chunk := l.full[0]
		l.full = l.full[1:]
		l.mu.Unlock()
		if err == nil {
			err = writeLines(b, chunk)
		}
		l.mu.Lock()
		l.spare = append(l.spare, chunk[:0])
	}
	l.mu.Unlock()
	if err == nil {
		err = b.Flush()
	}
	if cerr := l.w.Close(); err == nil {
		err = cerr
	}
	l.mu.Lock()
	l.err = err
	l.mu.Unlock()
}

func writeLines(b *bufio.Writer, list []logLine) error {
	var line []byte
	for _, x := range list {
		line = strconv.AppendInt(line[:0], x.at.Milliseconds(), 10)
		for _, n := range []int64{int64(x.latency), int64(direction(x.write)), int64(x.block), x.off} {
			line = append(line, ", "...)
			line = strconv.AppendInt(line, n, 10)
		}
		if _, err := b.Write(append(line, '\n')); err != nil {
			return err
		}
	}
	return nil
}

// Close writes what is left, an interval that is not over included, and closes the file. The error is the first of all
// writes.
func (l *LatLog) Close() error {
	for i := range l.window {
		if w := &l.window[i]; w.n > 0 {
			l.endWindow(w, i == direction(true))
		}
	}
	l.mu.Lock()
	if len(l.chunk) > 0 {
		l.full = append(l.full, l.chunk)
		l.chunk = nil
	}
	l.closed = true
	l.mu.Unlock()
	l.changed.Signal()
	l.writer.Wait()
	return l.err
}
