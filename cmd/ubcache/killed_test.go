package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/nbd"
)

const (
	killedBlock = 4096
	killedSpan  = 512 // blocks that are written to
)

// startServe starts "ubcache serve" as users do, and waits until it is ready.
func startServe(t *testing.T, stderr *bytes.Buffer, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("ubcache", append([]string{"serve"}, args...)...)
	cmd.Stderr = stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			cmd.Process.Kill()
			cmd.Wait()
		}
	})
	for scan := bufio.NewScanner(out); scan.Scan(); {
		if scan.Text() == "ready" {
			return cmd
		}
	}
	cmd.Wait()
	t.Fatalf("not ready: %s", stderr)
	return nil
}

// idle runs a command at rest until the devices are free: the kernel takes the dead process's rings apart first.
func idle(t *testing.T, args ...string) (code int, out, errs string) {
	t.Helper()
	for range 600 {
		if code, out, errs = command(append([]string{"ubcache"}, args...)...); !strings.Contains(errs, "in use") {
			return code, out, errs
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatalf("%v: %s", args, errs)
	return code, out, errs
}

// A daemon is killed under load, with acknowledged writes that only its file in the runtime folder has. What the commands
// at rest give of the volume then is what the next start serves, and has all that was acknowledged.
func TestAtRestAfterAKill(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	cache, backing, runtime, sock := sparse(t, "c.img", 64<<20), sparse(t, "b.img", 32<<20), in("run"), in("s")
	if code, _, errs := command("ubcache", "format", "--cache", cache, "--backing", backing, "--bucket", "64k", "--writeback"); code != exitDone {
		t.Fatal(errs)
	}
	t.Setenv("UBCACHE_SOCKET", in("control"))
	serve := []string{"--cache", cache, "--volume", "a=" + backing, "--nbd", "unix:" + sock, "--runtime-dir", runtime}
	var log bytes.Buffer
	cmd := startServe(t, &log, serve...)
	for _, set := range [][]string{{"set", "journal_delay_ms", "30000"}, {"a", "sequential_cutoff", "0"}} {
		if code, _, errs := command(append([]string{"ubcache", "set"}, set...)...); code != exitDone {
			t.Fatal(errs)
		}
	}

	// Each worker has blocks of its own, and writes its next number to one after the other; acked is what it was told is
	// there.
	const workers = 4
	var acked [killedSpan]uint64
	var running sync.WaitGroup
	var enough sync.WaitGroup
	enough.Add(workers)
	for w := range workers {
		running.Go(func() {
			reached := sync.OnceFunc(enough.Done)
			defer reached()
			c, err := nbd.Dial(context.Background(), "unix", sock, "a", nbd.DialOptions{})
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			io, err := blockdev.NewIO(c, 1)
			if err != nil {
				t.Error(err)
				return
			}
			defer io.Close()
			for n := uint64(1); ; n++ {
				block := int(n*uint64(workers)+uint64(w)) % killedSpan
				b := make([]byte, killedBlock)
				for at := 0; at < len(b); at += 8 {
					binary.LittleEndian.PutUint64(b[at:], n)
				}
				if io.WriteAt(b, int64(block)*killedBlock, 0) != nil {
					return // it is dead
				}
				acked[block] = n
				if n == 300 {
					reached()
				}
			}
		})
	}
	enough.Wait()
	cmd.Process.Kill()
	cmd.Wait()
	running.Wait()

	// At rest.
	code, rest, errs := idle(t, "cat", "--cache", cache, "--backing", backing, "--runtime-dir", runtime)
	if code != exitDone || !strings.Contains(errs, " entries of the process that died, from "+runtime+"/") {
		t.Fatalf("cat: status %d, %s", code, errs)
	}
	for block, n := range acked {
		b := rest[block*killedBlock:][:killedBlock]
		first := binary.LittleEndian.Uint64([]byte(b))
		if first < n || b != strings.Repeat(b[:8], killedBlock/8) {
			t.Fatalf("block %d begins with %d, %d was acknowledged", block, first, n)
		}
	}
	if err := os.Mkdir(in("empty"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, without, errs := idle(t, "cat", "--cache", cache, "--backing", backing, "--runtime-dir", in("empty")); without == rest || errs != "" {
		t.Errorf("without the runtime folder cat gives the same, or says %q", errs)
	}
	if code, out, errs := idle(t, "check", "--cache", cache, "--backing", backing, "--runtime-dir", runtime); code != exitDone || !strings.Contains(errs, "of the process that died") {
		t.Errorf("check: status %d, %s%s", code, out, errs)
	}
	if code, out, errs := idle(t, "check", "--cache", cache, "--runtime-dir", runtime, "--json"); code != exitDone || strings.Contains(out, `"mapped_entries": 0`) ||
		strings.Contains(out, "; 0 bytes of it are dirty") || !strings.Contains(out, " bytes of it are dirty") {
		t.Errorf("check --json: status %d, %s%s", code, out, errs)
	}
	if code, out, errs := idle(t, "dump", "--cache", cache, "--runtime-dir", runtime, "--what", "journal"); code != exitDone || !strings.Contains(out, ": mapped, in "+runtime) {
		t.Errorf("dump: status %d, %s", code, errs)
	}
	read := func(args ...string) string {
		var log bytes.Buffer
		cmd := startServe(t, &log, args...)
		b := make([]byte, len(rest))
		c, err := nbd.Dial(context.Background(), "unix", sock, "a", nbd.DialOptions{})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		io, err := blockdev.NewIO(c, 1)
		if err == nil {
			err = io.ReadAt(b, 0)
			io.Close()
		}
		c.Close()
		cmd.Process.Signal(os.Interrupt)
		if werr := cmd.Wait(); err != nil || werr != nil {
			t.Fatal(err, werr, log.String())
		}
		if strings.Contains(log.String(), "level=WARN") || strings.Contains(log.String(), "level=ERROR") {
			t.Error(log.String())
		}
		if !strings.Contains(strings.Join(args, " "), "--read-only") && !(strings.Contains(log.String(), `"mapped entries"=`) && !strings.Contains(log.String(), `"mapped entries"=0`) &&
			strings.Contains(log.String(), `msg="the set is closed" "dirty bytes"=`)) {
			t.Errorf("the start does not tell what it has recovered, or the stop what is dirty: %s", log.String())
		}
		return string(b)
	}
	if got := read(append([]string{"--read-only"}, serve...)...); got != rest {
		t.Error("serve --read-only gives something else than cat")
	}
	if got := read(serve...); got != rest {
		t.Error("what the next start serves is not what cat gave")
	}
	// The file is used up.
	if code, again, errs := idle(t, "cat", "--cache", cache, "--backing", backing, "--runtime-dir", runtime); code != exitDone || errs != "" || again != rest {
		t.Errorf("after a stop: status %d, %s", code, errs)
	}
	path, _ := filepath.Glob(filepath.Join(runtime, "*.journal"))
	if len(path) != 1 {
		t.Fatal(path)
	}
	if err := os.Truncate(path[0], 100); err != nil {
		t.Fatal(err)
	}
	code, _, errs = idle(t, "cat", "--cache", cache, "--backing", backing, "--runtime-dir", runtime)
	if code != exitDone || !strings.Contains(errs, "warning: "+path[0]) {
		t.Errorf("a damaged file: status %d, %s", code, errs)
	}
	if code, _, errs := command("ubcache", "cat", "--cache", cache, "--backing", backing, "--runtime-dir", in("none")); code != exitUsage || !strings.Contains(errs, "--runtime-dir") {
		t.Errorf("no such folder: status %d, %s", code, errs)
	}
}
