package blockdev_test

import (
	"bytes"
	"errors"
	"log/slog"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/blockdev/devtest"
)

// mounted makes a file system on a loop device with sectors of that size, and returns where it is mounted.
func mounted(t *testing.T, sectorSize string) string {
	t.Helper()
	dev := loopDevice(t, makeFile(t, diskDir(t), 32<<20), "--sector-size", sectorSize)
	dir := t.TempDir()
	for _, c := range [][]string{{"mkfs.ext4", "-q", dev}, {"mount", dev, dir}} {
		if _, err := exec.LookPath(c[0]); err != nil {
			missingTool(t, c[0])
		}
		if out, err := exec.Command(c[0], c[1:]...).CombinedOutput(); err != nil {
			t.Skipf("needs a file system of its own: %v: %v: %s", c, err, out)
		}
	}
	t.Cleanup(func() {
		for try := 1; ; try++ { // the kernel may keep a file for a moment until it has forgotten the ring
			out, err := exec.Command("umount", dir).CombinedOutput()
			if err == nil {
				return
			}
			if try == 50 {
				t.Errorf("umount: %v: %s", err, out)
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
	})
	return dir
}

// On a disk with sectors of 4096 bytes, direct transfers of 512 are impossible: a file there has blocks of 512
// nevertheless, through the page cache, or blocks of 4096 if the caller can do with those.
func TestDirectTransfersThatNeedLargerBlocks(t *testing.T) {
	dir := mounted(t, "4096")
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	d := mustOpen(t, makeFile(t, dir, 1<<20), blockdev.Options{Logger: logger})
	if i := d.Info(); i.Direct || i.LogicalBlock != 512 {
		t.Errorf("%+v", i)
	}
	if !strings.Contains(log.String(), "page cache") {
		t.Errorf("no notice: %q", &log)
	}
	d.Close()
	log.Reset()
	d = mustOpen(t, makeFile(t, dir, 1<<20), blockdev.Options{Logger: logger, LogicalBlock: 4096})
	if i := d.Info(); !i.Direct || i.LogicalBlock != 4096 {
		t.Errorf("%+v", i)
	}
	if log.Len() != 0 {
		t.Errorf("a notice: %q", &log)
	}
	d.Close()
	devtest.Run(t, func(t *testing.T) blockdev.Device {
		return mustOpen(t, makeFile(t, dir, 5<<20), blockdev.Options{})
	})
}

func TestAFullFileSystem(t *testing.T) {
	dir := mounted(t, "512")
	for _, engine := range []string{blockdev.EngineUring, blockdev.EnginePread} {
		d := mustOpen(t, makeFile(t, dir, 64<<20), blockdev.Options{Engine: engine})
		io := mustIO(t, d, 4)
		err := io.WriteAt(bytes.Repeat([]byte("x"), 64<<20), 0, 0)
		if !errors.Is(err, unix.ENOSPC) {
			t.Errorf("%s: %v, want ENOSPC", engine, err)
		}
		if err := io.Discard(0, 64<<20); err != nil {
			t.Errorf("%s: %v", engine, err)
		}
		t.Cleanup(func() { d.Close() })
	}
}

func TestReadOnlyBlockDevice(t *testing.T) {
	dev := loopDevice(t, makeFile(t, diskDir(t), 4<<20), "--read-only")
	if d, err := blockdev.Open(dev, blockdev.Options{}); err == nil {
		d.Close()
		t.Error("opened for writing")
	} else {
		t.Log(err)
	}
	d := mustOpen(t, dev, blockdev.Options{ReadOnly: true})
	io := mustIO(t, d, 1)
	if err := errors.Join(io.ReadAt(make([]byte, 100), 10), io.Flush()); err != nil {
		t.Error(err)
	}
	t.Cleanup(func() { d.Close() })
}
