package blockdev_test

import (
	"bufio"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
)

var (
	writing = blockdev.Options{Engine: blockdev.EngineInline}
	reading = blockdev.Options{Engine: blockdev.EngineInline, ReadOnly: true}
	looking = blockdev.Options{Engine: blockdev.EngineInline, ReadOnly: true, NoLock: true}
)

// expectBusy tries to open path and wants to be told that someone has it, with all of the words.
func expectBusy(t *testing.T, path string, o blockdev.Options, words ...string) {
	t.Helper()
	d, err := blockdev.Open(path, o)
	if err == nil {
		d.Close()
		t.Errorf("opened (reading only: %v) though it is in use", o.ReadOnly)
		return
	}
	var busy *blockdev.BusyError
	if !errors.Is(err, blockdev.ErrBusy) || !errors.As(err, &busy) {
		t.Errorf("%v, want ErrBusy", err)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q does not mention %q", err, w)
		}
	}
}

func expectFree(t *testing.T, path string, o blockdev.Options) {
	t.Helper()
	d, err := blockdev.Open(path, o)
	if err != nil {
		t.Errorf("open (reading only: %v): %v", o.ReadOnly, err)
		return
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

func self() string { return filepath.Base(os.Args[0])[:8] }

// testExclusion goes through who may open beside whom, by path and by other.
func testExclusion(t *testing.T, path, other string) {
	w := mustOpen(t, path, writing)
	for _, p := range []string{path, other} {
		expectBusy(t, p, writing, p, self())
		expectBusy(t, p, reading, p, self())
		expectFree(t, p, looking)
	}
	q, err := w.NewQueue(1, func([]*blockdev.Request) {})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	expectBusy(t, other, writing) // the queue keeps it
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
	expectFree(t, other, writing)

	r := mustOpen(t, path, reading)
	expectFree(t, path, reading)
	expectFree(t, other, reading)
	expectBusy(t, path, writing, self())
	expectBusy(t, other, writing, self())
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	expectFree(t, path, writing)
}

func TestFileIsExclusive(t *testing.T) {
	dir := t.TempDir()
	path := makeFile(t, dir, 1<<20)
	link, hard := filepath.Join(dir, "link"), filepath.Join(dir, "hard")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(path, hard); err != nil {
		t.Fatal(err)
	}
	t.Run("symlink", func(t *testing.T) { testExclusion(t, path, link) })
	t.Run("hard link", func(t *testing.T) { testExclusion(t, hard, path) })
}

func TestBlockDeviceIsExclusive(t *testing.T) {
	dev := loopDevice(t, makeFile(t, diskDir(t), 4<<20))
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(dev, link); err != nil {
		t.Fatal(err)
	}
	testExclusion(t, dev, link)
}

// helper starts a program that holds a lock, gives it input, and waits for the line that it prints then.
func helper(t *testing.T, input, ready, name string, args ...string) {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		missingTool(t, name)
	}
	cmd := exec.Command(name, args...)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close() // which ends the program
		_ = cmd.Wait()
	})
	if _, err := io.WriteString(stdin, input); err != nil {
		t.Fatal(err)
	}
	for s := bufio.NewScanner(stdout); s.Scan(); {
		if strings.Contains(s.Text(), ready) {
			return
		}
	}
	t.Fatalf("%s ended", name)
}

func TestFlockOfOthersIsHonoured(t *testing.T) {
	for _, c := range []struct {
		how      string
		readable bool
	}{{"--exclusive", false}, {"--shared", true}} {
		t.Run(c.how, func(t *testing.T) {
			path := makeFile(t, t.TempDir(), 1<<20)
			helper(t, "", "locked", "flock", c.how, path, "sh", "-c", "echo locked; cat")
			expectBusy(t, path, writing, "process", "flock")
			if c.readable {
				expectFree(t, path, reading)
			} else {
				expectBusy(t, path, reading, "process", "flock")
			}
			expectFree(t, path, looking)
		})
	}
}

func TestOurFlockIsSeenByOthers(t *testing.T) {
	if _, err := exec.LookPath("flock"); err != nil {
		missingTool(t, "flock")
	}
	try := func(how, path string) bool {
		return exec.Command("flock", "--nonblock", how, path, "true").Run() == nil
	}
	path := makeFile(t, t.TempDir(), 1<<20)
	d := mustOpen(t, path, writing)
	if try("--shared", path) || try("--exclusive", path) {
		t.Error("flock got a lock on a file open for writing")
	}
	d.Close()
	d = mustOpen(t, path, reading)
	if !try("--shared", path) || try("--exclusive", path) {
		t.Error("a file open for reading: flock must get a shared lock, and only that")
	}
	d.Close()
	if !try("--exclusive", path) {
		t.Error("the lock stays after Close")
	}
}

func TestQemuAndWeExcludeEachOther(t *testing.T) {
	if _, err := exec.LookPath("qemu-io"); err != nil {
		missingTool(t, "qemu-io")
	}
	qemuOpens := func(path string, args ...string) bool {
		out, err := exec.Command("qemu-io", append(args, "-f", "raw", "-c", "length", path)...).CombinedOutput()
		if err != nil && !strings.Contains(string(out), "lock") {
			t.Errorf("qemu-io: %v: %s", err, out)
		}
		return err == nil
	}
	path := makeFile(t, diskDir(t), 1<<20)

	d := mustOpen(t, path, writing)
	if qemuOpens(path) || qemuOpens(path, "-r") {
		t.Error("qemu opens what we write")
	}
	d.Close()
	d = mustOpen(t, path, reading)
	if qemuOpens(path) {
		t.Error("qemu opens for writing what we read")
	}
	if !qemuOpens(path, "-r") {
		t.Error("qemu cannot read what we read")
	}
	d.Close()
	if !qemuOpens(path) {
		t.Error("qemu cannot open what nobody has open")
	}

	t.Run("qemu-io writes", func(t *testing.T) {
		qemuIO(t, path)
		expectBusy(t, path, writing, "qemu-io")
		expectBusy(t, path, reading, "qemu-io")
		expectFree(t, path, looking)
	})
	t.Run("qemu-io reads", func(t *testing.T) {
		qemuIO(t, path, "-r")
		expectBusy(t, path, writing, "qemu-io")
		expectFree(t, path, reading)
	})
}

// qemuIO starts a qemu-io that has path open until the test ends: it reads its commands from a pipe.
func qemuIO(t *testing.T, path string, args ...string) {
	t.Helper()
	helper(t, "length\n", "1 MiB", "qemu-io", append(args, "-f", "raw", path)...)
}

func TestBusyNamesWhatIsBuiltOnIt(t *testing.T) {
	dev := loopDevice(t, makeFile(t, diskDir(t), 4<<20))
	if _, err := exec.LookPath("dmsetup"); err != nil {
		missingTool(t, "dmsetup")
	}
	cmd := exec.Command("dmsetup", "create", "--noudevrules", "--noudevsync", "blockdev-test", "--table", "0 1024 linear "+dev+" 0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Skipf("needs device mapper: %v: %s", err, out)
	}
	defer func() {
		if out, err := exec.Command("dmsetup", "remove", "--noudevrules", "--noudevsync", "blockdev-test").CombinedOutput(); err != nil {
			t.Errorf("dmsetup remove: %v: %s", err, out)
		}
	}()
	expectBusy(t, dev, writing, "dm-", "blockdev-test")
	expectBusy(t, dev, reading, "dm-", "blockdev-test")
	expectFree(t, dev, looking)
}

func TestBusyNamesTheMount(t *testing.T) {
	dev := loopDevice(t, makeFile(t, diskDir(t), 16<<20))
	if _, err := exec.LookPath("mkfs.ext4"); err != nil {
		missingTool(t, "mkfs.ext4")
	}
	if out, err := exec.Command("mkfs.ext4", "-q", dev).CombinedOutput(); err != nil {
		t.Fatalf("mkfs: %v: %s", err, out)
	}
	dir := filepath.Join(t.TempDir(), "mount point")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mount", dev, dir).CombinedOutput(); err != nil {
		t.Skipf("needs to mount: %v: %s", err, out)
	}
	defer func() {
		if out, err := exec.Command("umount", dir).CombinedOutput(); err != nil {
			t.Errorf("umount: %v: %s", err, out)
		}
	}()
	expectBusy(t, dev, writing, "mounted at "+dir)
	expectBusy(t, dev, reading, "mounted at "+dir)
}

// The file behind a loop device is in use by it, under whatever name it is opened.
func TestFileBehindLoopIsBusy(t *testing.T) {
	dir := diskDir(t)
	path, hard, link := makeFile(t, dir, 1<<20), filepath.Join(dir, "hard"), filepath.Join(dir, "link")
	if err := os.Link(path, hard); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	names := []string{path, hard, link}
	t.Run("writable", func(t *testing.T) {
		dev := loopDevice(t, path)
		for _, name := range names {
			expectBusy(t, name, writing, name, dev)
			expectBusy(t, name, reading, name, dev)
			expectFree(t, name, looking)
		}
		expectFree(t, dev, writing)
		expectFree(t, dev, reading)
		expectFree(t, makeFile(t, t.TempDir(), 1<<20), writing)
	})
	t.Run("read-only", func(t *testing.T) {
		dev := loopDevice(t, path, "--read-only")
		for _, name := range names {
			expectBusy(t, name, writing, name, dev)
			expectFree(t, name, reading)
			expectFree(t, name, looking)
		}
		expectFree(t, dev, reading)
	})
	t.Run("renamed", func(t *testing.T) {
		dev := loopDevice(t, path)
		if err := os.Rename(path, path+".new"); err != nil {
			t.Fatal(err)
		}
		defer os.Rename(path+".new", path)
		expectBusy(t, path+".new", writing, dev)
	})
	t.Run("on a device", func(t *testing.T) {
		below := loopDevice(t, path)
		dev := loopDevice(t, below)
		expectBusy(t, below, writing, below, dev)
		expectFree(t, dev, writing)
	})
	expectFree(t, path, writing)
	expectFree(t, path, reading)
}

func TestBusyNamesTheMountOfTheLoop(t *testing.T) {
	path := makeFile(t, diskDir(t), 16<<20)
	dev := loopDevice(t, path)
	if _, err := exec.LookPath("mkfs.ext4"); err != nil {
		missingTool(t, "mkfs.ext4")
	}
	if out, err := exec.Command("mkfs.ext4", "-q", dev).CombinedOutput(); err != nil {
		t.Fatalf("mkfs: %v: %s", err, out)
	}
	dir := t.TempDir()
	if out, err := exec.Command("mount", dev, dir).CombinedOutput(); err != nil {
		t.Skipf("needs to mount: %v: %s", err, out)
	}
	defer func() {
		if out, err := exec.Command("umount", dir).CombinedOutput(); err != nil {
			t.Errorf("umount: %v: %s", err, out)
		}
	}()
	expectBusy(t, path, writing, dev+" (mounted at "+dir+")")
	expectBusy(t, path, reading, dev+" (mounted at "+dir+")")
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	if _, err := blockdev.Open(filepath.Join(dir, "missing"), writing); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
	for _, p := range []string{dir, "/dev/null"} {
		if _, err := blockdev.Open(p, writing); err == nil || !strings.Contains(err.Error(), "neither") {
			t.Errorf("%s: %v", p, err)
		}
	}
	path := makeFile(t, dir, 1<<20)
	for name, o := range map[string]blockdev.Options{
		"unknown engine":  {Engine: "steam"},
		"NoLock to write": {NoLock: true},
		"block of 1000":   {LogicalBlock: 1000},
		"block of 256":    {LogicalBlock: 256},
	} {
		if d, err := blockdev.Open(path, o); err == nil {
			d.Close()
			t.Errorf("%s: opened", name)
		}
	}
	expectFree(t, path, writing) // and nothing is left locked
}

// Whoever opens a device right after it was closed gets it, whatever the engine left behind in the kernel.
func TestReopenAtOnce(t *testing.T) {
	t.Run("block", func(t *testing.T) { reopen(t, loopDevice(t, makeFile(t, diskDir(t), 1<<20))) })
	t.Run("file", func(t *testing.T) { reopen(t, makeFile(t, diskDir(t), 1<<20)) })
}

func reopen(t *testing.T, path string) {
	for range 30 {
		d := mustOpen(t, path, blockdev.Options{})
		io, err := blockdev.NewIO(d, 8)
		if err != nil {
			t.Fatal(err)
		}
		if err := io.WriteAt(make([]byte, 65536), 0, 0); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(io.Close(), d.Close()); err != nil {
			t.Fatal(err)
		}
	}
}

// missingTool skips a test for want of a program, or fails it where programs must be there.
func missingTool(t *testing.T, name string) {
	t.Helper()
	if os.Getenv("UBCACHE_REQUIRE_TOOLS") == "1" {
		t.Fatalf("UBCACHE_REQUIRE_TOOLS is 1, and there is no %s", name)
	}
	t.Skip("needs ", name)
}
