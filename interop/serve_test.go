//go:build interop

package interop

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/nbd"
)

// A diskSet is a cache set whose images lie in a folder of their own, and the names of its volumes.
type diskSet struct {
	name     string
	dir      string
	cache    string   // path; empty: none
	backings []string // paths; the volumes on them are called backing0, backing1
	flash    []string // flash-only volumes
	refused  []string // volumes that are not served, since their set cannot take them
}

// volumes returns the names of all of them.
func (s *diskSet) volumes() []string {
	var names []string
	for i := range s.backings {
		names = append(names, backingName(i))
	}
	return append(names, s.flash...)
}

// served returns the names of those that a server of ours serves.
func (s *diskSet) served() []string {
	return slices.DeleteFunc(s.volumes(), func(name string) bool { return slices.Contains(s.refused, name) })
}

func backingName(i int) string { return fmt.Sprintf("backing%d", i) }

// catFlags are those that "ubcache cat" takes for a volume.
func (s *diskSet) catFlags(volume string) []string {
	for i, b := range s.backings {
		if backingName(i) == volume {
			return []string{"--cache", s.cache, "--backing", b}
		}
	}
	return []string{"--cache", s.cache, "--flash", volume}
}

// checkFlags are those that "ubcache check" takes.
func (s *diskSet) checkFlags() []string {
	args := []string{"--cache", s.cache}
	for _, b := range s.backings {
		args = append(args, "--backing", b)
	}
	return args
}

func (s *diskSet) images() []string { return append([]string{s.cache}, s.backings...) }

// A server is a running "ubcache serve".
type server struct {
	t      *testing.T
	set    *diskSet
	cmd    *exec.Cmd
	socket string
	log    string // path of what it prints
	ready  chan struct{}
	ended  chan struct{}
	err    error // of Wait, once ended
}

const (
	startLimit = 2 * time.Minute // a busy machine, a journal to replay
	stopLimit  = time.Minute
)

// serveFlags are the command line for it.
func (s *diskSet) serveFlags() []string {
	all := []string{
		"serve", "--cache", s.cache, "--nbd", "unix:" + filepath.Join(s.dir, "nbd.sock"),
		"--runtime-dir", filepath.Join(s.dir, "run"), "--socket", filepath.Join(s.dir, "control.sock"),
	}
	for i, b := range s.backings {
		if name := backingName(i); !slices.Contains(s.refused, name) {
			all = append(all, "--volume", name+"="+b)
		}
	}
	for _, f := range s.flash {
		all = append(all, "--flash", f)
	}
	return all
}

// launch starts a server and does not wait. What it keeps for the next one is in the folder run of the set.
func (s *diskSet) launch(t *testing.T, args ...string) *server {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(s.dir, "run"), 0o700); err != nil {
		t.Fatal(err)
	}
	v := &server{t: t, set: s, socket: filepath.Join(s.dir, "nbd.sock"), log: filepath.Join(s.dir, "serve.log")}
	v.ready, v.ended = make(chan struct{}), make(chan struct{})
	log, err := os.OpenFile(v.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	v.cmd = exec.Command(program(t, "ubcache"), append(s.serveFlags(), args...)...)
	v.cmd.Stderr = log
	out, err := v.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(log, "# %s\n", strings.Join(v.cmd.Args, " "))
	if err := v.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			fmt.Fprintln(log, lines.Text())
			if lines.Text() == "ready" {
				close(v.ready)
			}
		}
		v.err = v.cmd.Wait()
		log.Close()
		close(v.ended)
	}()
	t.Cleanup(func() {
		v.cmd.Process.Kill()
		<-v.ended
	})
	return v
}

// serve starts a server and waits until it is ready.
func (s *diskSet) serve(t *testing.T, args ...string) *server {
	t.Helper()
	v := s.launch(t, args...)
	select {
	case <-v.ready:
	case <-v.ended:
		t.Fatalf("%s: ubcache serve ended before it was ready: %v\n%s", s.name, v.err, v.said(20))
	case <-time.After(startLimit):
		t.Fatalf("%s: ubcache serve was not ready in %v\n%s", s.name, startLimit, v.said(20))
	}
	return v
}

// said returns the end of what the server has printed.
func (v *server) said(lines int) string {
	b, err := os.ReadFile(v.log)
	if err != nil {
		return err.Error()
	}
	return tail(string(b), lines)
}

// stop ends the server in order and demands status 0, and no error in its log.
func (v *server) stop() {
	v.t.Helper()
	v.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-v.ended:
	case <-time.After(stopLimit):
		v.cmd.Process.Signal(syscall.SIGQUIT) // for the stacks of its goroutines
		<-v.ended
		v.t.Fatalf("ubcache serve did not stop in %v; its log is %s:\n%s", stopLimit, v.log, v.said(60))
	}
	if v.err != nil {
		v.t.Fatalf("ubcache serve stopped with %v:\n%s", v.err, v.said(30))
	}
	for line := range strings.Lines(v.said(10000)) {
		if strings.Contains(line, "level=ERROR") {
			v.t.Errorf("ubcache serve logged an error: %s", line)
		}
	}
}

// kill ends the server by SIGKILL.
func (v *server) kill() {
	v.t.Helper()
	v.cmd.Process.Kill()
	<-v.ended
	var exit *exec.ExitError
	if !errors.As(v.err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		v.t.Fatalf("ubcache serve had ended before it was killed: %v\n%s", v.err, v.said(40))
	}
	v.released()
}

// released waits until nobody has the images open any more: the kernel takes the rings of a dead process apart in the
// background, and they hold its files, locks included.
func (v *server) released() {
	v.t.Helper()
	begin := time.Now()
	for _, image := range v.set.images() {
		f, err := os.Open(image)
		if err != nil {
			v.t.Fatal(err)
		}
		for syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
			if time.Since(begin) > stopLimit {
				v.t.Fatalf("%s is still in use %v after the death of its server", image, stopLimit)
			}
			time.Sleep(time.Millisecond)
		}
		f.Close()
	}
	if took := time.Since(begin); took > 10*time.Millisecond {
		v.t.Logf("the images were free %v after the kill", took)
	}
}

// uri names a volume.
func (v *server) uri(volume string) string {
	return nbd.Address{Network: "unix", Addr: v.socket, Export: volume}.String()
}

// read hashes a volume with our client.
func (v *server) read(volume string) content {
	v.t.Helper()
	return parseContent(v.t, must(v.t, fx(v.t), "hash", v.uri(volume)))
}

// copyOut hashes a volume with libnbd's client.
func (v *server) copyOut(volume string) string {
	v.t.Helper()
	sum := sha256.New()
	var diag strings.Builder
	cmd := exec.CommandContext(context.Background(), "nbdcopy", v.uri(volume), "-")
	cmd.Stdout, cmd.Stderr = sum, &diag
	if err := cmd.Run(); err != nil {
		v.t.Fatalf("nbdcopy %s: %v\n%s\n%s", volume, err, diag.String(), v.said(20))
	}
	return hex.EncodeToString(sum.Sum(nil))
}

// open connects to a volume with our client.
func (v *server) open(volume string) (*nbd.Client, *blockdev.IO) {
	v.t.Helper()
	c, err := nbd.DialURI(context.Background(), v.uri(volume), nbd.DialOptions{})
	if err != nil {
		v.t.Fatal(err)
	}
	o, err := blockdev.NewIO(c, 1)
	if err != nil {
		v.t.Fatal(err)
	}
	return c, o
}
