package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/nbd"
	"github.com/ubcache/ubcache/internal/offline"
)

// A Named is a backing device and the name that its volume is served under.
type Named struct{ Name, Device string }

// A ReadOnlyConfig says what ReadOnly serves. The order is that of the exports: volumes, then flash-only ones.
type ReadOnlyConfig struct {
	Cache   string  // path; empty: none, and volumes must not need one
	Volumes []Named // backing devices
	Flash   []string
	Listen  []string // addresses as nbd.Listen takes them
	Engine  string   // of blockdev.Options

	RuntimeDirs []string // of offline.Options

	Log *slog.Logger

	// Ready, if set, hears once that all is served, and where.
	Ready func(Served)

	open func(path string, o blockdev.Options) (blockdev.Device, error) // for tests; default: blockdev.Open
}

// Served is what ReadOnly or Serve serves.
type Served struct {
	Addrs   []net.Addr
	Volumes []ServedVolume
	Socket  string // of the control socket; empty: none
}

// A ServedVolume is one export.
type ServedVolume struct {
	Name       string
	Size       int64      // bytes
	Unreadable [][2]int64 // of ReadOnly: offset and length in bytes, what the damaged index does not tell
}

// shutdownLimit is how long requests in flight may take after the end was asked for.
const shutdownLimit = 10 * time.Second

// ReadOnly serves a set at rest until ctx ends, and reads only. It returns nil after an end in good order. What
// clients tried to read in vain meanwhile is logged when it happens first, and listed at the end.
func ReadOnly(ctx context.Context, c ReadOnlyConfig) (err error) {
	var closers []func() error
	defer func() {
		for i := len(closers) - 1; i >= 0; i-- {
			if cerr := closers[i](); err == nil {
				err = cerr
			}
		}
	}()
	if c.open == nil {
		c.open = blockdev.Open
	}
	open := func(path string) (blockdev.Device, error) {
		dev, err := c.open(path, blockdev.Options{ReadOnly: true, Engine: c.Engine, Logger: c.Log})
		if err == nil {
			closers = append(closers, dev.Close)
		}
		return dev, err
	}

	var set *offline.Set
	if c.Cache != "" {
		dev, err := open(c.Cache)
		if err != nil {
			return err
		}
		set, err = offline.Open(ctx, dev, offline.Options{RuntimeDirs: c.RuntimeDirs})
		closers = append(closers, set.Close)
		if err != nil {
			return err
		}
		if m := &set.Mapped; len(m.Entries) > 0 {
			c.Log.Info("entries of the process that died are taken in", "entries", len(m.Entries), "keys", m.Keys(), "file", m.Path)
		}
		for _, err := range set.Mapped.Unused {
			c.Log.Warn("the entries of the process that died cannot be used: writes that were acknowledged last may be missing", "err", err)
		}
		for _, f := range set.Report.Findings() {
			if f.Severity > offline.Harmless {
				c.Log.Warn("the set has a flaw", "finding", f.String())
			}
		}
	}
	failures := newFailureLog(c.Log)
	closers = append(closers, failures.Close)
	server := nbd.NewServer(nbd.Options{Log: c.Log})
	var served Served
	var volumes []*offline.Volume
	add := func(name string, v *offline.Volume) error {
		if err := server.AddExport(name, &export{v}); err != nil {
			return fmt.Errorf("export %q: %w", name, err)
		}
		v.OnFailure(func(off, length int64, err error) { failures.add(name, off, length, err) })
		volumes = append(volumes, v)
		served.Volumes = append(served.Volumes, ServedVolume{name, v.Info().Size, v.Unreadable()})
		return nil
	}
	for _, n := range c.Volumes {
		dev, err := open(n.Device)
		if err != nil {
			return err
		}
		b, err := offline.OpenBacking(set, dev)
		if err != nil {
			return err
		}
		var v *offline.Volume
		if set != nil {
			v, err = offline.OpenVolume(set, b)
		} else {
			v, err = offline.OpenAlone(b)
		}
		if err == nil {
			err = add(n.Name, v)
		}
		if err != nil {
			return err
		}
	}
	for _, name := range c.Flash {
		if set == nil {
			return errors.New("a flash-only volume lies on a cache device, and none was given")
		}
		v, err := offline.OpenFlash(set, name)
		if err == nil {
			err = add(name, v)
		}
		if err != nil {
			return err
		}
	}
	stop := sync.OnceValue(func() error { return drain(server, shutdownLimit, c.Log) })
	closers = append(closers, stop)
	served.Addrs, err = listen(ctx, server, c.Listen, func(f func() error) { closers = append(closers, f) })
	if err != nil {
		return err
	}
	if c.Ready != nil {
		c.Ready(served)
	}
	<-ctx.Done()
	err = stop()
	for i, v := range volumes {
		for _, r := range v.Failed() {
			c.Log.Warn("was asked for and could not be read", "volume", served.Volumes[i].Name, "offset", r[0], "length", r[1])
		}
	}
	return err
}

// A failureLog logs what volumes could not read, without making them wait for the log.
type failureLog struct {
	log     *slog.Logger
	lines   chan failure
	stopped chan struct{}
	ended   chan struct{}
}

type failure struct {
	volume      string
	off, length int64
	err         error
}

func newFailureLog(log *slog.Logger) *failureLog {
	l := &failureLog{log: log, lines: make(chan failure, 256), stopped: make(chan struct{}), ended: make(chan struct{})}
	go l.run()
	return l
}

// add drops the line where the log does not keep up; all is listed at the end.
func (l *failureLog) add(volume string, off, length int64, err error) {
	select {
	case l.lines <- failure{volume, off, length, err}:
	default:
	}
}

func (l *failureLog) run() {
	defer close(l.ended)
	for {
		select {
		case f := <-l.lines:
			l.log.Error("could not be read", "volume", f.volume, "offset", f.off, "length", f.length, "err", f.err)
		case <-l.stopped:
			return
		}
	}
}

func (l *failureLog) Close() error {
	close(l.stopped)
	<-l.ended
	return nil
}

// An export is a volume as the NBD server wants it.
type export struct{ v *offline.Volume }

func (e *export) Info() nbd.ExportInfo {
	i := e.v.Info()
	return nbd.ExportInfo{
		Size: i.Size, MinBlock: i.LogicalBlock, PreferredBlock: max(i.PhysicalBlock, i.OptimalIO), ReadOnly: true, Rotational: i.Rotational,
		MultiConn: true, Description: "bcache volume at rest, read only",
	}
}

func (e *export) NewQueue(depth int, complete func([]*blockdev.Request)) (blockdev.Queue, error) {
	return e.v.NewQueue(depth, complete)
}

// MetaContexts and AppendExtents tell clients what is a hole in a flash-only volume, and what is cached.
func (e *export) MetaContexts() []string { return []string{nbd.ContextAllocation, nbd.ContextState} }

func (e *export) AppendExtents(dst []nbd.Extent, context string, off, length int64, most int) ([]nbd.Extent, error) {
	n := len(dst)
	e.v.EachPiece(off, length, func(kind offline.Kind, _, length int64) bool {
		var flags uint32
		if context == nbd.ContextAllocation {
			if kind == offline.FromNowhere {
				flags = nbd.StateHole | nbd.StateZero
			}
		} else {
			switch kind {
			case offline.FromCache:
				flags = nbd.StateClean
			case offline.FromCacheDirty:
				flags = nbd.StateDirty
			}
		}
		if len(dst) > n && dst[len(dst)-1].Flags == flags {
			dst[len(dst)-1].Length += length
			return true
		}
		if len(dst)-n == most {
			return false
		}
		dst = append(dst, nbd.Extent{Length: length, Flags: flags})
		return true
	})
	return dst, nil
}
