package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

// A progress tells people how far long work is: a bar on a terminal, elsewhere a line every ten seconds.
type progress struct {
	w     io.Writer
	what  string
	bytes bool
	bar   *progressbar.ProgressBar
	last  time.Time
	stage string
	fd    int // of the terminal
}

// barRoom is what the bar and its figures take of a line, in columns.
const barRoom = 66

const progressEvery = 10 * time.Second

// newProgress makes one on env's standard error. With bytes the numbers are amounts of data.
func newProgress(env *environment, what string, bytes bool) *progress {
	p := &progress{w: env.stderr, what: what, bytes: bytes, last: time.Now()}
	if f, ok := env.stderr.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		o := []progressbar.Option{
			progressbar.OptionSetWriter(f), progressbar.OptionSetDescription(what), progressbar.OptionThrottle(100 * time.Millisecond),
			progressbar.OptionClearOnFinish(), progressbar.OptionSetWidth(30), progressbar.OptionShowCount(),
		}
		if bytes {
			o = append(o, progressbar.OptionShowBytes(true))
		}
		p.bar, p.fd = progressbar.NewOptions64(1, o...), int(f.Fd())
	}
	return p
}

// set says how much is done, of how much.
func (p *progress) set(done, of int64) {
	if p.bar != nil {
		p.bar.ChangeMax64(max(of, 1))
		_ = p.bar.Set64(done)
		return
	}
	if now := time.Now(); now.Sub(p.last) >= progressEvery {
		p.last = now
		if p.bytes {
			fmt.Fprintf(p.w, "%s: %d of %d MiB\n", p.what, done>>20, of>>20)
		} else {
			fmt.Fprintf(p.w, "%s: %d of %d\n", p.what, done, of)
		}
	}
}

// say says how far work of several stages is, in its own words; share is of all of it, from 0 to 1. Elsewhere than on a terminal
// each stage has at least one line.
func (p *progress) say(line, stage string, share float64) {
	if p.bar != nil {
		if columns, _, err := term.GetSize(p.fd); err == nil { // a line that is broken is not overwritten
			r := []rune(line)
			line = string(r[:min(len(r), max(columns-barRoom, 0))])
		}
		p.bar.Describe(line)
		p.set(int64(100*share), 100)
		return
	}
	if now := time.Now(); now.Sub(p.last) >= progressEvery || stage != p.stage {
		p.last, p.stage = now, stage
		fmt.Fprintf(p.w, "%s: %s; %.0f %% of all\n", p.what, line, 100*share)
	}
}

// left says how much of the work is left, where it may grow while it is done.
func (p *progress) left(n, of int64) {
	if p.bar != nil {
		p.set(of-n, of)
		return
	}
	if now := time.Now(); now.Sub(p.last) >= progressEvery {
		p.last = now
		fmt.Fprintf(p.w, "%s: %d bytes left\n", p.what, n)
	}
}

// end takes the bar away.
func (p *progress) end() {
	if p.bar != nil {
		_ = p.bar.Clear()
	}
}
