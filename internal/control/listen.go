package control

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// maxPath is what fits into the address of a Unix socket.
const maxPath = len(syscall.RawSockaddrUnix{}.Path) - 1

// checkPath refuses what the system would cut off, or take for something else.
func checkPath(path string) error {
	switch {
	case path == "":
		return errors.New("the path of the control socket is empty")
	case len(path) > maxPath:
		return fmt.Errorf("control socket %s: the path has %d bytes, at most %d are possible", path, len(path), maxPath)
	case strings.HasPrefix(path, "@"):
		return fmt.Errorf("control socket %s: an abstract socket has no mode, anybody could use it: name a file (./%s)", path, path)
	case strings.Contains(path, "\x00"):
		return fmt.Errorf("control socket %q: a path has no zero byte", path)
	}
	return nil
}

// Listen makes the socket, with mode 0600. One that a dead daemon has left is replaced; where somebody answers, the
// error matches ErrInUse and says who. Anything that is no socket is left alone. On Close the socket is removed,
// unless another has taken its place.
func Listen(path string) (net.Listener, error) {
	if err := checkPath(path); err != nil {
		return nil, err
	}
	// Two that find the same dead socket must not remove each other's new one: one at a time.
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	defer dir.Close()
	err = syscall.EINTR
	for err == syscall.EINTR {
		err = syscall.Flock(int(dir.Fd()), syscall.LOCK_EX)
	}
	if err != nil {
		return nil, fmt.Errorf("control socket: lock %s: %w", dir.Name(), err)
	}
	l, err := listen(path)
	if errors.Is(err, syscall.EADDRINUSE) {
		if err := removeDead(path); err != nil {
			return nil, err
		}
		l, err = listen(path)
	}
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	id, err := os.Lstat(path)
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("control socket: %w", err)
	}
	return &listener{UnixListener: l, path: path, id: id}, nil
}

func listen(path string) (*net.UnixListener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		// On Linux the file that bind makes takes its mode from the socket: no moment in which it is wider.
		var err error
		if cerr := raw.Control(func(fd uintptr) { err = syscall.Fchmod(int(fd), 0o600) }); cerr != nil {
			return cerr
		}
		return err
	}}
	l, err := lc.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, err
	}
	ul := l.(*net.UnixListener)
	ul.SetUnlinkOnClose(false)
	return ul, nil
}

// removeDead removes the socket at path if nobody listens on it.
func removeDead(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("control socket: %w", err)
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("control socket: %s exists and is not a socket", path)
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		c.Close()
		return fmt.Errorf("control socket %s: %w: %s", path, ErrInUse, whoAnswers(path))
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("control socket %s: cannot tell whether it is in use: %w", path, err)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("control socket: %w", err)
	}
	return nil
}

// whoAnswers describes the daemon at path.
func whoAnswers(path string) string {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	c := newClient(path)
	defer c.Close()
	s, err := c.Status(ctx)
	if err != nil {
		return "a program that does not tell its status"
	}
	return fmt.Sprintf("process %d, which serves set %s", s.PID, s.Set.UUID)
}

// A listener lets a bounded number of connections in, and removes its socket on Close if it is still its own.
type listener struct {
	*net.UnixListener
	path string
	id   os.FileInfo
}

func (l *listener) Close() error {
	err := l.UnixListener.Close()
	if err == nil {
		if now, serr := os.Lstat(l.path); serr == nil && os.SameFile(now, l.id) {
			os.Remove(l.path)
		}
	}
	return err
}
