package nbd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// Options modify NewServer. The zero value is the default.
type Options struct {
	// MaxRequest is the longest read or write, in bytes, that is carried out; clients are told. Default 32 MiB,
	// which is also what clients assume that are told nothing; at least 64 KiB.
	MaxRequest int
	// MaxInFlight and MaxInFlightBytes limit what one connection may have unanswered, as requests (default
	// 512) and as bytes of data (default 64 MiB; a single larger request is let through). Beyond that its
	// input is left in the socket.
	MaxInFlight      int
	MaxInFlightBytes int64
	// BufferBudget limits the data of all connections together, in bytes. Default 512 MiB, at least MaxRequest.
	// It is shared fairly: a connection may hold about half of what is free. So that small requests never wait
	// for other connections, each may hold 64 KiB even when nothing is free.
	BufferBudget int64
	// QueueDepth is the depth of the queue that each connection opens on its export. Default 128.
	QueueDepth int
	// MaxConns is how many connections may be open; more are closed at once. Default 4096.
	MaxConns int
	// HandshakeTimeout bounds the time from a connection to its choice of an export. Default 30 s.
	HandshakeTimeout time.Duration
	// StallTimeout is how long a client may stop within the data of a write, or take no replies while some
	// wait to be sent, before its connection is closed; a transfer longer than that must go on at 1 MiB in
	// that time. Idle connections stay. Default 60 s.
	StallTimeout time.Duration

	Pool *blockdev.Pool // of the buffers; default: one of the server's own
	Log  *slog.Logger   // default: nothing is logged
}

func (o Options) withDefaults() Options {
	def(&o.MaxRequest, defaultMaxBlock)
	o.MaxRequest = max(o.MaxRequest, 64<<10)
	def(&o.MaxInFlight, 512)
	def(&o.MaxInFlightBytes, 64<<20)
	def(&o.BufferBudget, 512<<20)
	o.BufferBudget = max(o.BufferBudget, int64(o.MaxRequest))
	def(&o.QueueDepth, 128)
	def(&o.MaxConns, 4096)
	def(&o.HandshakeTimeout, 30*time.Second)
	def(&o.StallTimeout, 60*time.Second)
	if o.Pool == nil {
		o.Pool = blockdev.NewPool(blockdev.PoolOptions{})
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}

func def[T int | int64 | time.Duration](p *T, v T) {
	if *p <= 0 {
		*p = v
	}
}

// Errors of the server's own methods.
var (
	ErrServerClosed = errors.New("nbd: server closed")
	ErrExportExists = errors.New("nbd: an export of that name exists")
	ErrNoExport     = errors.New("nbd: no export of that name")
)

// A Server serves exports to clients. All methods may be called at the same time.
type Server struct {
	opts   Options
	log    *slog.Logger
	pool   *blockdev.Pool
	budget *budget

	mu        sync.Mutex
	exports   []*export
	listeners map[net.Listener]struct{}
	greeting  map[net.Conn]struct{} // in their handshake
	conns     map[*conn]struct{}    // in transmission
	closed    bool
	watching  bool

	done chan struct{}  // closed by Shutdown
	wg   sync.WaitGroup // accept loops, connections, the watchdog
}

// export is a served Export; immutable but for past.
type export struct {
	Export
	name   string
	status BlockStatus // nil if it does not say
	past   Stats       // of connections that have ended; guarded by Server.mu
}

// NewServer makes a server without exports and listeners. Shutdown or Close releases it.
func NewServer(o Options) *Server {
	o = o.withDefaults()
	s := &Server{
		opts: o, log: o.Log, pool: o.Pool, budget: newBudget(o.BufferBudget), done: make(chan struct{}),
		listeners: map[net.Listener]struct{}{}, greeting: map[net.Conn]struct{}{}, conns: map[*conn]struct{}{},
	}
	return s
}

// AddExport serves e under a name, which may be any bytes, at most 4096. The first export is also the default
// one, which clients get when they ask for the empty name, unless one is really named so.
func (s *Server) AddExport(name string, e Export) error {
	if len(name) > maxNameLen {
		return fmt.Errorf("nbd: export name of %d bytes is longer than %d", len(name), maxNameLen)
	}
	x := &export{Export: e, name: name}
	x.status, _ = e.(BlockStatus)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, old := range s.exports {
		if old.name == name {
			return fmt.Errorf("%w: %q", ErrExportExists, name)
		}
	}
	s.exports = append(s.exports, x)
	return nil
}

// RemoveExport ends all connections to an export in good order and waits for that, as Shutdown does.
func (s *Server) RemoveExport(ctx context.Context, name string) error {
	s.mu.Lock()
	i := slices.IndexFunc(s.exports, func(e *export) bool { return e.name == name })
	if i < 0 {
		s.mu.Unlock()
		return fmt.Errorf("%w: %q", ErrNoExport, name)
	}
	e := s.exports[i]
	s.exports = slices.Delete(s.exports, i, i+1)
	s.mu.Unlock()
	of := func(c *conn) bool { return c.export == e }
	s.stopConns(of)
	return s.waitConns(ctx, of)
}

func (s *Server) lookup(name string) *export {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.exports {
		if e.name == name {
			return e
		}
	}
	if name == "" && len(s.exports) > 0 {
		return s.exports[0]
	}
	return nil
}

func (s *Server) list() []*export {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.exports)
}

// Serve accepts connections from l, which it closes in the end, until Shutdown; then it returns ErrServerClosed.
func (s *Server) Serve(l net.Listener) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		l.Close()
		return ErrServerClosed
	}
	s.listeners[l] = struct{}{}
	s.wg.Add(1)
	if !s.watching {
		s.watching = true
		s.wg.Go(s.watch)
	}
	s.mu.Unlock()
	defer s.wg.Done()
	defer func() {
		l.Close()
		s.mu.Lock()
		delete(s.listeners, l)
		s.mu.Unlock()
	}()

	var delay time.Duration
	for {
		nc, err := l.Accept()
		if err != nil {
			select {
			case <-s.done:
				return ErrServerClosed
			default:
			}
			if errors.Is(err, net.ErrClosed) {
				return err
			}
			// Out of descriptors, or the client went away while it waited: both pass.
			delay = min(max(2*delay, 5*time.Millisecond), time.Second)
			s.log.Error("accept failed", "addr", l.Addr().String(), "err", err)
			select {
			case <-time.After(delay):
			case <-s.done:
			}
			continue
		}
		delay = 0
		s.start(nc)
	}
}

// start gives a new connection its goroutine, or closes it.
func (s *Server) start(nc net.Conn) {
	s.mu.Lock()
	if s.closed || len(s.greeting)+len(s.conns) >= s.opts.MaxConns {
		full := !s.closed
		s.mu.Unlock()
		nc.Close()
		if full {
			s.log.Warn("too many connections", "remote", remote(nc), "limit", s.opts.MaxConns)
		}
		return
	}
	s.greeting[nc] = struct{}{}
	s.wg.Go(func() { s.serveConn(nc) })
	s.mu.Unlock()
}

// serveConn is the life of a connection.
func (s *Server) serveConn(nc net.Conn) {
	c, err := s.greet(nc)
	s.mu.Lock()
	delete(s.greeting, nc)
	if err == nil {
		s.conns[c] = struct{}{}
		if s.closed || !slices.Contains(s.exports, c.export) {
			c.stop() // was chosen just before it went away
		}
	}
	s.mu.Unlock()
	if err != nil {
		nc.Close()
		if !disconnected(err) && !errors.Is(err, errAborted) {
			s.log.Warn("handshake failed", "remote", remote(nc), "err", err)
		}
		return
	}
	s.log.Info("client connected", "export", c.export.name, "remote", remote(nc))
	err = c.run()
	s.mu.Lock()
	delete(s.conns, c)
	st := c.stats.load()
	c.export.past.add(&st)
	s.mu.Unlock()
	total := st.Total()
	level := slog.LevelInfo
	if err != nil && !disconnected(err) && !errors.Is(err, errDisconnect) {
		level = slog.LevelWarn
	} else if errors.Is(err, errDisconnect) {
		err = nil
	}
	s.log.Log(context.Background(), level, "client gone", "export", c.export.name, "remote", remote(nc),
		"requests", total.Requests, "bytes", total.Bytes, "err", err)
}

// greet does the handshake.
func (s *Server) greet(nc net.Conn) (c *conn, err error) {
	setSocketOptions(nc, s.opts.StallTimeout)
	nc.SetDeadline(time.Now().Add(s.opts.HandshakeTimeout))
	h := &handshake{srv: s, rw: nc}
	h.open = func(h *handshake) error {
		c = newConn(s, nc, h)
		q, err := h.export.NewQueue(s.opts.QueueDepth, c.complete)
		if err == nil {
			c.queue = q
		}
		return err
	}
	if err := h.run(); err != nil {
		if c != nil && c.queue != nil {
			c.queue.Close()
		}
		return nil, err
	}
	nc.SetDeadline(time.Time{})
	return c, nil
}

// watch closes connections whose clients have stalled.
func (s *Server) watch() {
	tick := time.NewTicker(max(s.opts.StallTimeout/8, 10*time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-s.done:
			return // waitConns goes on with it
		case now := <-tick.C:
			s.checkStalled(now)
		}
	}
}

func (s *Server) checkStalled(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		if err := c.watchLocked(now); err != nil && !c.dead.Load() {
			s.log.Warn("connection given up", "export", c.export.name, "remote", remote(c.nc), "err", err)
			go c.giveUp()
		}
	}
}

// Shutdown closes the listeners and ends all connections in good order: requests that have been received are
// carried out and answered, as long as their clients take the answers. When ctx ends first, the remaining connections are closed without that and ctx's
// error is returned; a request that a device does not give back may then still be in flight.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.done)
		for l := range s.listeners {
			l.Close()
		}
		for nc := range s.greeting {
			nc.Close()
		}
	}
	s.mu.Unlock()
	all := func(*conn) bool { return true }
	s.stopConns(all)
	if err := s.waitConns(ctx, all); err != nil {
		return err
	}
	s.wg.Wait()
	return nil
}

// Close is Shutdown without patience: connections are closed at once. It waits for requests in flight.
func (s *Server) Close() error {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	err := s.Shutdown(ctx)
	if errors.Is(err, context.Canceled) {
		s.wg.Wait()
		return nil
	}
	return err
}

func (s *Server) stopConns(of func(*conn) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		if of(c) {
			c.stop()
		}
	}
}

// waitConns waits until no such connection is left. When ctx ends before, it closes them and returns ctx's error.
func (s *Server) waitConns(ctx context.Context, of func(*conn) bool) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		s.mu.Lock()
		var left []*conn
		for c := range s.conns {
			if of(c) {
				left = append(left, c)
			}
		}
		s.mu.Unlock()
		if len(left) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			for _, c := range left {
				c.giveUp()
			}
			return ctx.Err()
		case now := <-tick.C:
			s.checkStalled(now)
		}
	}
}

// ConnStats describes a connection.
type ConnStats struct {
	Remote     string
	Export     string
	Started    time.Time
	Structured bool
	InFlight   int // requests received and not answered
	Stats      Stats
}

// Connections lists the connections that are in transmission, oldest first.
func (s *Server) Connections() []ConnStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]ConnStats, 0, len(s.conns))
	for c := range s.conns {
		c.out.mu.Lock()
		inflight := c.out.inflight
		c.out.mu.Unlock()
		list = append(list, ConnStats{remote(c.nc), c.export.name, c.started, c.structured, inflight, c.stats.load()})
	}
	slices.SortFunc(list, func(a, b ConnStats) int { return a.Started.Compare(b.Started) })
	return list
}

// ExportStats counts all requests to the named export since it was added.
func (s *Server) ExportStats(name string) (Stats, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.IndexFunc(s.exports, func(e *export) bool { return e.name == name })
	if i < 0 {
		return Stats{}, fmt.Errorf("%w: %q", ErrNoExport, name)
	}
	total := s.exports[i].past
	for c := range s.conns {
		if c.export == s.exports[i] {
			st := c.stats.load()
			total.add(&st)
		}
	}
	return total, nil
}

func remote(nc net.Conn) string {
	if a := nc.RemoteAddr(); a != nil && a.String() != "" && a.String() != "@" {
		return a.String()
	}
	return "unix"
}
