package blockdev_test

import (
	"bytes"
	"os/exec"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
)

// While requests of one device hang in the kernel, where no signal reaches the thread that waits for them, those
// of another complete. (With io_uring they would not if a thread that has submitted some of them were the one that
// hangs.) A frozen file system is where they hang.
func TestHangingRequestsDoNotHoldUpOtherDevices(t *testing.T) {
	dir := mounted(t, "512")
	frozen := mustOpen(t, makeFile(t, dir, 4<<20), blockdev.Options{Engine: blockdev.EngineUring})
	defer frozen.Close()
	other := mustOpen(t, makeFile(t, diskDir(t), 4<<20), blockdev.Options{Engine: blockdev.EngineUring})
	defer other.Close()
	hanging, err := blockdev.NewIO(frozen, 16)
	if err != nil {
		t.Fatal(err)
	}
	io := mustIO(t, other, 1)
	buf := make([]byte, 4096)
	for off := int64(0); off < 4<<20; off += 4096 {
		if err := io.WriteAt(buf, off, 0); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.Command("fsfreeze", "--freeze", dir).CombinedOutput(); err != nil {
		t.Skipf("needs fsfreeze: %v: %s", err, out)
	}
	thawed := false
	thaw := func() {
		if out, err := exec.Command("fsfreeze", "--unfreeze", dir).CombinedOutput(); err != nil && !thawed {
			t.Errorf("fsfreeze: %v: %s", err, out)
		}
		thawed = true
	}
	defer func() { // or umount would hang
		if !thawed {
			thaw()
		}
	}()
	const freeze = 600 * time.Millisecond
	done := make(chan error, 16)
	start := time.Now()
	begun := 0
	var longest time.Duration
	for i := int64(0); time.Since(start) < freeze; i++ {
		if begun < cap(done) && time.Since(start) > time.Duration(begun)*10*time.Millisecond {
			off := int64(begun) * 8192
			ops := []func() error{
				func() error { return hanging.WriteZeroes(off, 4096, 0) },
				func() error { return hanging.WriteAt(bytes.Clone(buf), off, 0) },
				func() error { return hanging.WriteZeroes(off, 4096, blockdev.NoUnmap|blockdev.FUA) },
				func() error { return hanging.Discard(off, 4096) },
			}
			op := ops[begun%len(ops)]
			go func() { done <- op() }()
			begun++
		}
		before := time.Now()
		if err := io.ReadAt(buf, i%1000*4096); err != nil {
			t.Fatal(err)
		}
		longest = max(longest, time.Since(before))
	}
	select {
	case err := <-done:
		t.Logf("one completed though the file system is frozen: %v", err)
		done <- err
	default:
	}
	thaw()
	for range begun {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	t.Logf("the longest read took %v, the freeze %v", longest, freeze)
	if longest > freeze/2 {
		t.Errorf("a read took %v while another device hung", longest)
	}
	if err := hanging.Close(); err != nil {
		t.Error(err)
	}
}
