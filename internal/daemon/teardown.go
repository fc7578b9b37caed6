package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/ubcache/ubcache/internal/nbd"
)

// A teardown undoes steps, the last first.
type teardown struct {
	log   *slog.Logger
	steps []func() error
}

func (t *teardown) add(f func() error) { t.steps = append(t.steps, f) }

// run undoes all steps whatever fails. It returns the first error, beginning with err, and logs the others.
func (t *teardown) run(err error) error {
	for len(t.steps) > 0 {
		last := len(t.steps) - 1
		step := t.steps[last]
		t.steps = t.steps[:last]
		if serr := step(); err == nil {
			err = serr
		} else if serr != nil {
			t.log.Warn("while ending", "err", serr)
		}
	}
	return err
}

// drain ends a server: what it has received is answered, as long as that takes no longer than limit.
func drain(server *nbd.Server, limit time.Duration, log *slog.Logger) error {
	var stuck []string
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	for _, c := range server.Connections() {
		stuck = append(stuck, fmt.Sprintf("%s on export %q, %d requests unanswered", c.Remote, c.Export, c.InFlight))
	}
	err := server.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		log.Warn("connections were cut off: they did not take their replies in time", "limit", limit, "open at the signal", stuck)
		return nil
	}
	return err
}

// closeSet ends a set. Past the limit the rest of the index is left to the next start; past the grace the set is
// stuck, and left to the end of the process.
func closeSet(set cacheSet, limit, grace time.Duration, log *slog.Logger) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	closed := make(chan error, 1)
	go func() { closed <- set.Close(ctx) }()
	late := time.NewTimer(limit + grace)
	defer late.Stop()
	select {
	case err := <-closed:
		if ctx.Err() != nil {
			log.Warn("the set was not written out in time: the next start takes longer", "limit", limit)
		}
		return err
	case <-late.C:
		return fmt.Errorf("the set does not close: given up after %v", limit+grace)
	}
}

// listen serves addrs in the background. What it hands to undo closes the listeners: the server does that too, but
// where it has not begun to serve, after it has ended.
func listen(ctx context.Context, server *nbd.Server, addrs []string, undo func(func() error)) (list []net.Addr, err error) {
	for _, addr := range addrs {
		l, err := nbd.Listen(ctx, addr)
		if err != nil {
			return nil, err
		}
		undo(func() error {
			l.Close()
			return nil
		})
		go server.Serve(l)
		list = append(list, l.Addr())
	}
	return list, nil
}
