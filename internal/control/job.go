package control

import (
	"context"
	"net/url"
	"time"
)

// Kinds of jobs.
const (
	Flush  = "flush"  // the data that is dirty is written back
	Detach = "detach" // so is all, and the volume is served without the cache then
)

// States of a job. It runs once, and then stays in one of the others.
const (
	Running   = "running"
	Done      = "done"
	Failed    = "failed"
	Cancelled = "cancelled"
)

// A Job is work on a volume that may take long. It goes on in the daemon whether anybody waits for it or not; a volume
// has one at a time, and keeps the last one.
type Job struct {
	Kind         string    `json:"kind"`
	State        string    `json:"state"`
	Started      time.Time `json:"started"`
	Ended        time.Time `json:"ended,omitzero"`
	DirtyAtStart Number    `json:"dirty_bytes_at_start,omitzero"` // of the volume
	DirtyBytes   Number    `json:"dirty_bytes,omitzero"`          // now, or when it ended; with what was written meanwhile
	Error        string    `json:"error,omitempty"`               // why it failed
	Ranges       []Range   `json:"ranges,omitempty"`              // of the volume, that could not be written back; some of them where there are many
}

// A Range is a part of a volume, in bytes.
type Range struct {
	Offset int64 `json:"offset"`
	Length int64 `json:"length"`
}

// StartJob starts a job of a kind, or finds the one that runs. It returns the job as it is now.
func (c *Client) StartJob(ctx context.Context, volume, kind string) (*Job, error) {
	return c.job(ctx, "POST", volume, kind)
}

// Job returns the last job of a volume.
func (c *Client) Job(ctx context.Context, volume string) (*Job, error) {
	return c.job(ctx, "GET", volume, "job")
}

// CancelJob ends the job of a volume that runs, if one does, and returns the last one.
func (c *Client) CancelJob(ctx context.Context, volume string) (*Job, error) {
	return c.job(ctx, "POST", volume, "cancel")
}

func (c *Client) job(ctx context.Context, method, volume, what string) (*Job, error) {
	j := new(Job)
	if err := c.do(ctx, method, "/v1/volumes/"+url.PathEscape(volume)+"/"+what, nil, nil, j); err != nil {
		return nil, err
	}
	return j, nil
}

// startJob is the call that starts jobs of a kind.
func startJob(kind string) func(s *Server, r *request) (any, error) {
	return func(s *Server, r *request) (any, error) {
		if err := r.empty(); err != nil {
			return nil, err
		}
		return s.backend.StartJob(r.Context(), r.name, kind)
	}
}

func (s *Server) cancelJob(r *request) (any, error) {
	if err := r.empty(); err != nil {
		return nil, err
	}
	return s.backend.CancelJob(r.Context(), r.name)
}
