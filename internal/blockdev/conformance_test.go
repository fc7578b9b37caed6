package blockdev_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/blockdev/devtest"
)

// diskDir returns a new directory on a file system that takes O_DIRECT, if one of the usual places has it.
func diskDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "blockdev")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// makeFile makes a sparse file.
func makeFile(t testing.TB, dir string, size int64) string {
	t.Helper()
	f, err := os.CreateTemp(dir, "disk")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return f.Name()
}

func mustOpen(t testing.TB, path string, o blockdev.Options) blockdev.Device {
	t.Helper()
	d, err := blockdev.Open(path, o)
	if err != nil {
		if o.Engine == blockdev.EngineUring && strings.Contains(err.Error(), "not available") {
			t.Skip("needs io_uring: ", err)
		}
		t.Fatal(err)
	}
	return d
}

func TestConformance(t *testing.T) {
	for _, engine := range []string{blockdev.EngineUring, blockdev.EnginePread, blockdev.EngineInline} {
		t.Run("file/"+engine, func(t *testing.T) {
			devtest.Run(t, func(t *testing.T) blockdev.Device {
				return mustOpen(t, makeFile(t, diskDir(t), 6<<20), blockdev.Options{Engine: engine})
			})
		})
	}
	t.Run("file/4096", func(t *testing.T) {
		devtest.Run(t, func(t *testing.T) blockdev.Device {
			return mustOpen(t, makeFile(t, diskDir(t), 6<<20+512), blockdev.Options{LogicalBlock: 4096})
		})
	})
	t.Run("file/buffered", func(t *testing.T) {
		devtest.Run(t, func(t *testing.T) blockdev.Device {
			return mustOpen(t, makeFile(t, diskDir(t), 6<<20), blockdev.Options{Buffered: true})
		})
	})
	t.Run("file/tmpfs", func(t *testing.T) {
		if _, err := os.Stat("/dev/shm"); err != nil {
			t.Skip("needs /dev/shm")
		}
		devtest.Run(t, func(t *testing.T) blockdev.Device {
			dir, err := os.MkdirTemp("/dev/shm", "blockdev")
			if err != nil {
				t.Skip("needs a writable /dev/shm: ", err)
			}
			t.Cleanup(func() { os.RemoveAll(dir) })
			return mustOpen(t, makeFile(t, dir, 6<<20), blockdev.Options{})
		})
	})
	t.Run("memory", func(t *testing.T) {
		devtest.Run(t, func(t *testing.T) blockdev.Device { return mustMemory(t, 5<<20, blockdev.MemoryOptions{}) })
	})
	t.Run("memory/4096", func(t *testing.T) {
		devtest.Run(t, func(t *testing.T) blockdev.Device {
			return mustMemory(t, 5<<20, blockdev.MemoryOptions{LogicalBlock: 4096, BufferAlign: 1, NoDiscard: true})
		})
	})
	wrappers := map[string]func(t *testing.T, d blockdev.Device) blockdev.Device{
		"crashable": func(t *testing.T, d blockdev.Device) blockdev.Device {
			c, err := blockdev.NewCrashable(d, blockdev.CrashableOptions{})
			if err != nil {
				t.Fatal(err)
			}
			return c
		},
		"faulty":   func(_ *testing.T, d blockdev.Device) blockdev.Device { return blockdev.NewFaulty(d, 1) },
		"counting": func(_ *testing.T, d blockdev.Device) blockdev.Device { return blockdev.NewCounting(d) },
		"delaying": func(_ *testing.T, d blockdev.Device) blockdev.Device {
			return blockdev.NewDelaying(d, blockdev.Latency{Read: time.Microsecond, Flush: 50 * time.Microsecond, PerMiB: 10 * time.Microsecond, Jitter: 0.5, Parallel: 3})
		},
		"tracing": func(_ *testing.T, d blockdev.Device) blockdev.Device {
			return blockdev.NewTracing(d, blockdev.NewTraceLog(nil), blockdev.TraceOptions{Done: true})
		},
	}
	for name, wrap := range wrappers {
		t.Run(name+"/memory", func(t *testing.T) {
			devtest.Run(t, func(t *testing.T) blockdev.Device { return wrap(t, mustMemory(t, 5<<20, blockdev.MemoryOptions{})) })
		})
		if testing.Short() || name != "crashable" && name != "delaying" {
			continue
		}
		t.Run(name+"/file", func(t *testing.T) {
			devtest.Run(t, func(t *testing.T) blockdev.Device {
				return wrap(t, mustOpen(t, makeFile(t, diskDir(t), 6<<20), blockdev.Options{}))
			})
		})
	}
	t.Run("all wrappers/memory", func(t *testing.T) {
		devtest.Run(t, func(t *testing.T) blockdev.Device {
			var d blockdev.Device = mustMemory(t, 5<<20, blockdev.MemoryOptions{})
			for _, name := range []string{"crashable", "faulty", "delaying", "tracing", "counting"} {
				d = wrappers[name](t, d)
			}
			return d
		})
	})
	for _, engine := range []string{blockdev.EngineUring, blockdev.EnginePread} {
		for _, sector := range []string{"512", "4096"} {
			if testing.Short() && sector == "4096" {
				continue
			}
			t.Run("loop/"+engine+"/"+sector, func(t *testing.T) {
				devtest.Run(t, func(t *testing.T) blockdev.Device {
					dev := loopDevice(t, makeFile(t, diskDir(t), 6<<20), "--sector-size", sector)
					return mustOpen(t, dev, blockdev.Options{Engine: engine})
				})
			})
		}
	}
}

func mustMemory(t testing.TB, size int64, o blockdev.MemoryOptions) *blockdev.MemoryDevice {
	t.Helper()
	d, err := blockdev.Memory(size, o)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// loopDevice makes a block device of a file, or skips.
func loopDevice(t testing.TB, file string, args ...string) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root for a loop device")
	}
	if _, err := exec.LookPath("losetup"); err != nil {
		if os.Getenv("UBCACHE_REQUIRE_TOOLS") == "1" {
			t.Fatal("losetup is not installed, and UBCACHE_REQUIRE_TOOLS=1")
		}
		t.Skip("needs losetup")
	}
	out, err := exec.Command("losetup", append(args, "--find", "--show", file)...).CombinedOutput()
	if err != nil {
		t.Skipf("needs loop devices: losetup: %v: %s", err, out)
	}
	dev := strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "--detach", dev).CombinedOutput(); err != nil {
			t.Errorf("losetup --detach %s: %v: %s", dev, err, out)
		}
	})
	if filepath.Dir(dev) != "/dev" {
		t.Fatalf("losetup answered %q", out)
	}
	return dev
}
