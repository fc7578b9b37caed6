package nbd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// CheckAddress says whether Listen could understand addr: unix:PATH, unix:@NAME for an abstract socket, or
// tcp:HOST:PORT with a port up to 65535, where 0 means any that is free. HOST must be given, if only as a wildcard like 0.0.0.0 or [::]: there
// is no access control but the address. The error says what is wanted.
func CheckAddress(addr string) error {
	_, _, err := parseAddress(addr)
	return err
}

// sunPathSize is the size of a Unix socket's address. A path needs a final zero byte in it; a name has a zero byte
// where it is written with an @.
const sunPathSize = len(unix.RawSockaddrUnix{}.Path)

// parseAddress splits an address into the network and what net calls an address there.
func parseAddress(addr string) (network, rest string, err error) {
	network, rest, _ = strings.Cut(addr, ":")
	fail := func(format string, args ...any) (string, string, error) {
		return "", "", fmt.Errorf("nbd: address %q: "+format, append([]any{addr}, args...)...)
	}
	switch network {
	case "unix":
		limit := sunPathSize - 1
		if strings.HasPrefix(rest, "@") {
			limit = sunPathSize
		}
		switch {
		case rest == "" || rest == "@":
			return fail("want unix:PATH: the path is missing")
		case strings.Contains(rest, "\x00"):
			return fail("want unix:PATH: a zero byte cannot be part of a path")
		case len(rest) > limit:
			return fail("want unix:PATH with at most %d bytes in the path, not %d", limit, len(rest))
		}
		return network, rest, nil
	case "tcp":
		host, port, err := net.SplitHostPort(rest)
		if err != nil {
			return fail("want tcp:HOST:PORT, an IPv6 address in brackets")
		}
		if host == "" {
			return fail("want tcp:HOST:PORT: the host is missing; 127.0.0.1 is this one only, 0.0.0.0 or [::] any")
		}
		if _, err := strconv.ParseUint(port, 10, 16); err != nil {
			return fail("want tcp:HOST:PORT with a port up to 65535, not %q", port)
		}
		return network, rest, nil
	}
	return fail("want unix:PATH or tcp:HOST:PORT")
}

// Listen opens a listener for Serve. addr is what CheckAddress takes.
//
// A Unix socket gets mode 0600. A socket that a dead process has left is replaced; one that a live process
// listens on, and anything that is no socket, is left alone and makes Listen fail. On Close the socket is removed,
// unless someone else's has taken its place.
func Listen(ctx context.Context, addr string) (net.Listener, error) {
	network, rest, err := parseAddress(addr)
	if err != nil {
		return nil, err
	}
	if network == "unix" {
		return listenUnix(ctx, rest, 0o600)
	}
	lc := net.ListenConfig{KeepAliveConfig: keepAlive}
	return lc.Listen(ctx, network, rest)
}

// ListenAndServe listens on addr and serves it in the background until Shutdown. It returns the address, whose port
// is the real one if 0 was asked for.
func (s *Server) ListenAndServe(ctx context.Context, addr string) (net.Addr, error) {
	l, err := Listen(ctx, addr)
	if err != nil {
		return nil, err
	}
	go s.Serve(l)
	return l.Addr(), nil
}

// keepAlive finds out within about 45 s that an idle client's host is gone.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 5 * time.Second, Count: 3}

// setSocketOptions makes the kernel give up on TCP peers that do not acknowledge what is sent to them.
func setSocketOptions(nc net.Conn, timeout time.Duration) {
	tc, ok := nc.(*net.TCPConn)
	if !ok {
		return
	}
	if raw, err := tc.SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) {
			unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(timeout.Milliseconds()))
		})
	}
}

// unixListener removes its socket on Close, if it is still its own.
type unixListener struct {
	*net.UnixListener
	path string
	id   os.FileInfo // nil: abstract
}

func listenUnix(ctx context.Context, path string, mode uint32) (net.Listener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		// On Linux the file that bind makes takes its mode from the socket: no moment in which it is wider.
		var err error
		if cerr := raw.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), mode) }); cerr != nil {
			return cerr
		}
		return err
	}}
	if strings.HasPrefix(path, "@") {
		return lc.Listen(ctx, "unix", path)
	}

	// Two programs that find the same stale socket must not remove each other's new one: one at a time.
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("nbd: listen: %w", err)
	}
	defer dir.Close()
	err = unix.EINTR
	for err == unix.EINTR {
		err = unix.Flock(int(dir.Fd()), unix.LOCK_EX)
	}
	if err != nil {
		return nil, fmt.Errorf("nbd: listen: lock %s: %w", dir.Name(), err)
	}
	l, err := lc.Listen(ctx, "unix", path)
	if errors.Is(err, syscall.EADDRINUSE) {
		if err := removeStale(path); err != nil {
			return nil, err
		}
		l, err = lc.Listen(ctx, "unix", path)
	}
	if err != nil {
		return nil, fmt.Errorf("nbd: %w", err)
	}
	ul := l.(*net.UnixListener)
	ul.SetUnlinkOnClose(false)
	id, err := os.Lstat(path)
	if err != nil {
		ul.Close()
		return nil, fmt.Errorf("nbd: listen: %w", err)
	}
	return &unixListener{ul, path, id}, nil
}

// removeStale removes the socket at path if nobody listens on it.
func removeStale(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("nbd: listen: %w", err)
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("nbd: listen: %s exists and is not a socket", path)
	}
	c, err := net.Dial("unix", path)
	if err == nil {
		c.Close()
		return fmt.Errorf("nbd: listen: %s: %w: another program listens there", path, syscall.EADDRINUSE)
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("nbd: listen: %s: cannot tell whether it is in use: %w", path, err)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("nbd: listen: %w", err)
	}
	return nil
}

func (l *unixListener) Close() error {
	err := l.UnixListener.Close()
	if err == nil {
		if now, serr := os.Lstat(l.path); serr == nil && os.SameFile(now, l.id) {
			os.Remove(l.path)
		}
	}
	return err
}
