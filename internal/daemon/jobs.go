package daemon

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/ubcache/ubcache"
	"github.com/ubcache/ubcache/internal/control"
)

// jobs are the long works on volumes: they begin with a request, and end by themselves, by another request, or with
// the daemon. Of each volume the last one is kept.
type jobs struct {
	log *slog.Logger

	mu      sync.Mutex // not held while a volume is asked
	last    map[string]*job
	stopped bool
	running sync.WaitGroup
}

// A job is one of them. What follows ended is set before that is closed, and not changed then.
type job struct {
	kind    string
	volume  volume
	started time.Time
	dirty   int64 // bytes at the start
	cancel  context.CancelFunc
	ended   chan struct{}

	state string
	end   time.Time
	left  int64 // dirty bytes at the end
	err   error
}

// start starts a job, or finds one of that kind that runs.
func (s *jobs) start(name, kind string, v volume) (*job, error) {
	dirty := v.Stats().DirtyBytes
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return nil, control.Stopping()
	}
	if j := s.last[name]; j != nil && !j.over() {
		if j.kind != kind {
			return nil, control.Busy(name, j.kind)
		}
		return j, nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	j := &job{kind: kind, volume: v, started: time.Now(), dirty: dirty, cancel: cancel, ended: make(chan struct{})}
	if s.last == nil {
		s.last = map[string]*job{}
	}
	s.last[name] = j
	s.running.Go(func() {
		defer cancel()
		s.log.Info("job begins", "volume", name, "job", kind, "dirty", dirty)
		work := v.WriteBack
		if kind == control.Detach {
			work = v.Detach
		}
		j.finish(work(ctx))
		level := slog.LevelInfo
		if j.state == control.Failed {
			level = slog.LevelWarn
		}
		s.log.Log(ctx, level, "job ends", "volume", name, "job", kind, "state", j.state, "dirty", j.left, "err", j.err)
	})
	return j, nil
}

// finish says how a job has ended.
func (j *job) finish(err error) {
	j.state, j.end, j.left, j.err = control.Done, time.Now(), j.volume.Stats().DirtyBytes, err
	switch {
	case errors.Is(err, context.Canceled):
		j.state, j.err = control.Cancelled, nil
	case err != nil:
		j.state = control.Failed
	}
	close(j.ended)
}

// over reports whether a job has ended.
func (j *job) over() bool {
	select {
	case <-j.ended:
		return true
	default:
		return false
	}
}

// find returns the last job of a volume.
func (s *jobs) find(name string) (*job, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if j := s.last[name]; j != nil {
		return j, nil
	}
	return nil, control.NoJob(name)
}

// forget drops the last job of a volume that is no more.
func (s *jobs) forget(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.last, name)
}

// stop cancels all, and lets none begin any more.
func (s *jobs) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = true
	for _, j := range s.last {
		j.cancel()
	}
}

// wait waits until all have ended, but no longer than the limit.
func (s *jobs) wait(limit time.Duration) {
	ended := make(chan struct{})
	go func() {
		s.running.Wait()
		close(ended)
	}()
	late := time.NewTimer(limit)
	defer late.Stop()
	select {
	case <-ended:
	case <-late.C:
		s.log.Warn("a job does not end", "limit", limit)
	}
}

// status is a job as the control socket tells it.
func (j *job) status() *control.Job {
	s := &control.Job{Kind: j.kind, State: control.Running, Started: j.started, DirtyAtStart: control.Num(j.dirty)}
	if !j.over() {
		s.DirtyBytes = control.Num(j.volume.Stats().DirtyBytes)
		return s
	}
	s.State, s.Ended, s.DirtyBytes = j.state, j.end, control.Num(j.left)
	if j.err == nil {
		return s
	}
	s.Error = j.err.Error()
	if left := (*ubcache.WriteBackError)(nil); errors.As(j.err, &left) {
		s.Error, s.Ranges = left.Err.Error(), jobRanges(left.Ranges)
	}
	return s
}

// jobRanges puts ranges in order, and together where they touch.
func jobRanges(ranges []ubcache.Range) (list []control.Range) {
	ranges = slices.Clone(ranges)
	slices.SortFunc(ranges, func(a, b ubcache.Range) int { return cmp.Compare(a.Off, b.Off) })
	for _, r := range ranges {
		if n := len(list); n > 0 && r.Off <= list[n-1].Offset+list[n-1].Length {
			list[n-1].Length = max(list[n-1].Length, r.Off+r.Len-list[n-1].Offset)
			continue
		}
		list = append(list, control.Range{Offset: r.Off, Length: r.Len})
	}
	return list
}

// StartJob implements control.Backend.
func (b *backend) StartJob(_ context.Context, name, kind string) (*control.Job, error) {
	if _, err := b.running(true); err != nil {
		return nil, err
	}
	v, err := b.find(name)
	if err != nil {
		return nil, err
	}
	switch s := v.Stats(); {
	case s.Flash:
		return nil, control.FlashOnly(name)
	case !s.Attached && kind == control.Detach:
		return nil, control.Detached(name)
	}
	j, err := b.jobs.start(name, kind, v)
	if err != nil {
		return nil, err
	}
	return j.status(), nil
}

// Job implements control.Backend.
func (b *backend) Job(_ context.Context, name string) (*control.Job, error) {
	j, err := b.job(name)
	if err != nil {
		return nil, err
	}
	return j.status(), nil
}

// CancelJob implements control.Backend.
func (b *backend) CancelJob(ctx context.Context, name string) (*control.Job, error) {
	j, err := b.job(name)
	if err != nil {
		return nil, err
	}
	j.cancel()
	select {
	case <-j.ended:
		return j.status(), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// job returns the last one of a volume.
func (b *backend) job(name string) (*job, error) {
	if _, err := b.running(false); err != nil {
		return nil, err
	}
	if _, err := b.find(name); err != nil {
		return nil, err
	}
	return b.jobs.find(name)
}
