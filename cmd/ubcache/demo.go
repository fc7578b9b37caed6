package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/ubcache/ubcache/internal/nbd"
	"github.com/ubcache/ubcache/internal/offline"
)

// demoOptions are the options of demo. The hidden ones are for tests.
type demoOptions struct {
	keep    bool
	seconds float64 // of the cached load; the bare one takes a quarter
	size    int64   // of the volume in bytes; the cache is half as large
}

// newDemoCommand makes "ubcache demo".
func newDemoCommand(env *environment) *cobra.Command {
	o := demoOptions{seconds: 20, size: 512 << 20}
	cmd := &cobra.Command{
		Use:       "demo [rescue] [--keep]",
		Short:     "Show what a cache gains, or rescue a set that a power cut left",
		ValidArgs: []string{"rescue\trescue a cache set that a power cut left"},
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 && args[0] == "rescue" {
				args = args[1:]
			}
			return wantArgs(0, 0, "")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			work := demoCache
			if len(args) > 0 {
				work = demoRescue
			}
			return demoFolder(cmd.Context(), env, &o, work)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&o.keep, "keep", false, "keep the folder with the files")
	f.Float64Var(&o.seconds, "seconds", o.seconds, "how long the cached load takes")
	f.Var(&sizeValue{to: &o.size, least: 160 << 20}, "size", "`SIZE` of the volume")
	for _, hidden := range []string{"seconds", "size"} {
		_ = f.MarkHidden(hidden)
	}
	return describe(cmd, help{
		long: `
Without an argument: make two files in the temporary folder, one a disk of 512 MiB that is made slow, the other a cache
of 256 MiB. Format them, serve them over NBD, and load first the disk alone and then the cached volume with the same
random reads and writes. Every read is checked against what was written. Then print what the cache gains, stop, check
the set, and check every block once more at rest. It takes about half a minute.

With "rescue": unpack two disk images that a real kernel left when its power was cut in the middle of writing, show and
check them, serve the volume over NBD without a write to either, read it with the built-in client, and compare every
byte with what the kernel itself showed after its own recovery. It takes less than half a minute.

Neither needs root or a kernel module. Both need up to 800 MB in the temporary folder ($TMPDIR, default /tmp), and
remove what they put there, also when they are interrupted.`,
		example: "ubcache demo\nubcache demo rescue",
		exit:    map[int]string{exitFailed: "interrupted, or something did not come out as it must"},
	})
}

// demoFolder does the work in a new temporary folder, and removes that at the end if it is not to be kept. It also
// ends the work when the window is closed, or when nobody reads the output any more: no reason to leave files behind.
// Nor is impatience: a second signal ends the process, and takes the folder away before.
func demoFolder(ctx context.Context, env *environment, o *demoOptions, work func(ctx context.Context, env *environment, o *demoOptions, dir string) error) (err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	signal.Ignore(unix.SIGPIPE) // writing gives an error instead
	defer signal.Reset(unix.SIGPIPE)
	env = &environment{name: env.name, stdin: env.stdin, stdout: &demoOutput{env.stdout, cancel}, stderr: env.stderr}
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer signal.Stop(signals)

	dir, err := os.MkdirTemp("", "ubcache-demo-")
	if err != nil {
		return err
	}
	defer func() {
		if o.keep {
			fmt.Fprintf(env.stdout, "The files are in %s.\n", dir)
		} else if rerr := os.RemoveAll(dir); err == nil {
			err = rerr
		}
	}()
	done := make(chan struct{})
	defer close(done)
	go func() {
		for n := 0; ; n++ {
			select {
			case s := <-signals:
				if n == 0 {
					cancel(fmt.Errorf("signal: %v", s))
					continue
				}
				if !o.keep {
					os.RemoveAll(dir)
				}
				os.Exit(exitFailed)
			case <-done:
				return
			}
		}
	}()
	err = work(ctx, env, o, dir)
	if cause := context.Cause(ctx); cause != nil && (errors.Is(err, ctx.Err()) || errors.Is(err, cause)) {
		err = fmt.Errorf("interrupted: %w", cause)
	}
	return err
}

// A demoOutput ends the demo when it cannot be written to.
type demoOutput struct {
	io.Writer
	cancel context.CancelCauseFunc
}

func (o *demoOutput) Write(p []byte) (int, error) {
	n, err := o.Writer.Write(p)
	if err != nil {
		o.cancel(fmt.Errorf("standard output: %w", err))
	}
	return n, err
}

// How the two files are formatted, in bytes.
const (
	demoBucket     = 128 << 10
	demoDataOffset = 8 << 10 // where the data of the disk begins
)

// demoCache shows what a cache gains.
func demoCache(ctx context.Context, env *environment, o *demoOptions, dir string) error {
	say := func(format string, args ...any) { fmt.Fprintf(env.stdout, format+"\n", args...) }
	begin := time.Now()
	disk, cache := filepath.Join(dir, "disk.img"), filepath.Join(dir, "cache.img")
	content := newDemoContent(rand.Uint64(), int(o.size/demoBlock))

	say("1. A slow disk and a small cache")
	say("   disk   %s, %d MiB. It is slowed down on purpose: every request to it", disk, o.size>>20)
	say("          waits %d ms, give or take %.0f %%, as for a disk far away. All else is real.", demoDelay.Milliseconds(), 100*demoJitter)
	say("   cache  %s, %d MiB, as fast as the file system is", cache, o.size>>21)
	if err := demoFormat(ctx, o, disk, cache); err != nil {
		return err
	}
	if err := demoFill(ctx, content, disk); err != nil {
		return err
	}
	say("   formatted as one set, and each of the %d blocks of the disk filled with its number and version", content.blocks())

	long := time.Duration(o.seconds * float64(time.Second))
	short := long / 4
	say("\n2. The disk alone, over NBD, for %v", short)
	say("   %d requests of 4 KiB at a time, %.0f %% of them writes, over %d connections; some blocks are asked for", demoConns*demoDepth, 100*demoWrites, demoConns)
	say("   often and most seldom (Zipf, s=%g). Every read is checked. A line a second: p50/p99 of the latencies.", demoZipfS)
	bare, err := demoBare(ctx, disk, dir)
	if err != nil {
		return err
	}
	alone, _, err := demoRun(ctx, env, content, bare, short, false)
	if err != nil {
		return err
	}

	say("\n3. The same load with the cache before the disk, for %v; the cache begins empty", long)
	cached, err := demoCached(ctx, disk, cache, dir)
	if err != nil {
		return err
	}
	all, warm, err := demoRun(ctx, env, content, cached, long, true)
	if err != nil {
		return err
	}

	say("\n4. What it comes to")
	demoTable(env.stdout, []demoColumn{
		{"disk alone", false, alone}, {"cached", true, all}, {fmt.Sprintf("its last %v", warm.took.Round(100*time.Millisecond)), true, warm},
	})
	say("\n%s", indentText(demoVerdict(alone, all, warm)))

	say("\n5. Stopped. Is the set sound? (ubcache check, and every block read once more, at rest)")
	if err := demoAtRest(ctx, env, content, disk, cache); err != nil {
		return err
	}
	requests := int64(0)
	for _, f := range []*demoFigures{alone, all} {
		requests += f.reads.TotalCount() + f.writes.TotalCount()
	}
	say("\n%d requests, and every read returned what had been written: done in %.1f s.", requests, time.Since(begin).Seconds())
	return nil
}

// demoFormat makes the two files and formats them.
func demoFormat(ctx context.Context, o *demoOptions, disk, cache string) error {
	for path, size := range map[string]int64{disk: demoDataOffset + o.size, cache: o.size / 2} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			return err
		}
		if err := os.Truncate(path, size); err != nil {
			return err
		}
	}
	_, err := formatDevices(ctx, cache, []string{disk}, offline.FormatOptions{Bucket: demoBucket, DataOffset: demoDataOffset})
	return err
}

// demoFill writes version 0 of every block.
func demoFill(ctx context.Context, c *demoContent, disk string) (err error) {
	f, err := os.OpenFile(disk, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := f.Close(); err == nil {
			err = cerr
		}
	}()
	const chunk = 16 << 20 // synced one by one: that can be interrupted, and the loads do not have to wait for it
	buf := make([]byte, chunk)
	for block := 0; block < c.blocks(); {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		n := min(chunk/demoBlock, c.blocks()-block)
		for i := range n {
			c.fill(buf[i*demoBlock:], block+i, 0)
		}
		if _, err := f.WriteAt(buf[:n*demoBlock], demoDataOffset+int64(block)*demoBlock); err != nil {
			return err
		}
		if err := f.Sync(); err != nil {
			return err
		}
		block += n
	}
	return nil
}

// demoRun loads a server and stops it. It returns the figures of the whole time, and of its last quarter.
func demoRun(ctx context.Context, env *environment, content *demoContent, s *demoServer, d time.Duration, cached bool) (all, end *demoFigures, err error) {
	defer func() {
		if serr := s.stop(); err == nil {
			err = serr
		}
	}()
	client, err := nbd.Dial(ctx, s.addr.Network(), s.addr.String(), s.export, nbd.DialOptions{Connections: demoConns})
	if err != nil {
		return nil, nil, err
	}
	defer client.Close()
	// After an interruption requests end by themselves. If not, that must not keep the files here.
	ended := context.AfterFunc(ctx, func() {
		time.Sleep(interruptGrace)
		client.Disconnect()
	})
	defer ended()
	live := newDemoLive(env.stdout)
	all, end = newDemoFigures(), newDemoFigures()
	load := demoLoad{content: content, dev: client, base: s.base, diskReads: s.diskReads}
	interval := min(time.Second, d/4)
	err = load.run(ctx, d, interval, func(now time.Duration, f *demoFigures) {
		live.set(demoLine(now, f, cached))
		all.add(f)
		if now > d*3/4+interval/2 {
			end.add(f)
		}
	})
	live.end()
	return all, end, err
}

// demoAtRest checks the set and every block of the volume.
func demoAtRest(ctx context.Context, env *environment, content *demoContent, disk, cache string) error {
	devices := deviceFlags{Cache: cache, Backing: []string{disk}}
	if _, err := demoCheck(ctx, env, &devices); err != nil {
		return err
	}
	open, err := openDevices(env, &devices)
	if err != nil {
		return err
	}
	defer open.Close()
	v, release, err := openVolume(ctx, env, &open, &devices)
	defer release()
	if err != nil {
		return err
	}
	r := demoReader{c: content}
	bad, err := offline.Copy(ctx, &r, v, offline.CopyOptions{})
	if err == nil && len(bad) > 0 {
		err = fmt.Errorf("could not be read: %v", bad)
	}
	if err == nil {
		err = r.end()
	}
	if err != nil {
		return err
	}
	fmt.Fprintf(env.stdout, "   all %d blocks hold the version written last\n", content.blocks())
	return nil
}
