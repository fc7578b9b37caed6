package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/ubcache/ubcache/internal/daemon"
	"github.com/ubcache/ubcache/internal/fixture"
	"github.com/ubcache/ubcache/internal/nbd"
	"github.com/ubcache/ubcache/internal/offline"
)

// demoRescue rescues a cache set that a kernel's power cut left.
func demoRescue(ctx context.Context, env *environment, _ *demoOptions, dir string) error {
	say := func(format string, args ...any) { fmt.Fprintf(env.stdout, format+"\n", args...) }
	begin := time.Now()
	f, err := fixture.Demo()
	if err != nil {
		return err
	}
	say("1. A cache set as a power cut left it")
	say("   Linux %s was writing through a bcache in writeback mode when its power was cut.", f.Kernel)
	paths := map[string]string{}
	for _, d := range f.Devices {
		if paths[d.Role], err = f.Extract(d.Role, dir); err != nil {
			return err
		}
		say("   %-9s %s, %d MiB", d.Role, paths[d.Role], d.Size>>20)
	}

	say("\n2. What the superblocks say (ubcache show)")
	for _, d := range f.Devices {
		s, err := showDevice(paths[d.Role])
		if err != nil {
			return err
		}
		fmt.Fprintln(env.stdout, indentText(s.Text()))
	}

	say("\n3. Is it sound? (ubcache check: reads everything, changes nothing)")
	devices := deviceFlags{Cache: paths["cache"], Backing: []string{paths["backing0"]}}
	dirty, err := demoCheck(ctx, env, &devices)
	if err != nil {
		return err
	}
	say("   %d MiB of it are dirty: they exist in the cache alone. The backing disk by itself would be wrong.", dirty>>20)

	say("\n4. Serve it over NBD, read only, and read it whole")
	got, size, took, err := demoServe(ctx, say, paths, dir)
	if err != nil {
		return err
	}
	want := f.Volumes["backing0"].SHA256
	say("   read %d MiB in %.1f s", size>>20, took.Seconds())
	say("   sha256 here       %s", got)
	say("   sha256 the kernel %s", want)
	if got != want {
		return errors.New("the content is not what the kernel shows")
	}

	say("\n5. Nothing was written")
	for _, d := range f.Devices {
		sum, err := hashFile(paths[d.Role])
		if err != nil {
			return err
		}
		if sum != d.SHA256 {
			return fmt.Errorf("%s: the image has changed", d.Role)
		}
		say("   %-9s sha256 unchanged", d.Role)
	}
	say("\nAll bytes as the kernel has them, dirty data from the cache and the rest from the disk: done in %.1f s.", time.Since(begin).Seconds())
	return nil
}

// demoCheck checks the set, prints what is found, and returns the dirty bytes.
func demoCheck(ctx context.Context, env *environment, d *deviceFlags) (dirty int64, err error) {
	open, err := openDevices(env, d)
	if err != nil {
		return 0, err
	}
	defer open.Close()
	set, _, err := offline.Check(ctx, open.cache, open.backings, offline.CheckOptions{})
	defer func() { set.Close() }() // it is there after an error too
	if err != nil {
		return 0, err
	}
	for _, f := range set.Report.Findings() {
		fmt.Fprintf(env.stdout, "   %s\n", f.String())
	}
	s := &set.Stats
	fmt.Fprintf(env.stdout, "   %d tree nodes, %d extents, %d keys replayed from the journal\n", s.Nodes, s.Extents, s.ReplayedKeys)
	if worst, found := set.Report.Worst(); found && worst > offline.Harmless {
		return 0, fmt.Errorf("the check found something: %v", worst)
	}
	return s.DirtyBytes, nil
}

// demoServe serves the volume and reads it through the socket.
func demoServe(ctx context.Context, say func(string, ...any), paths map[string]string, dir string) (sum string, size int64, took time.Duration, err error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	ready := make(chan daemon.Served, 1)
	ended := make(chan error, 1)
	sock := filepath.Join(dir, "demo.sock")
	go func() {
		ended <- daemon.ReadOnly(ctx, daemon.ReadOnlyConfig{
			Cache: paths["cache"], Volumes: []daemon.Named{{Name: "demo", Device: paths["backing0"]}}, Listen: []string{"unix:" + sock},
			Log: slog.New(slog.DiscardHandler), Ready: func(s daemon.Served) { ready <- s },
		})
	}()
	select {
	case err := <-ended:
		return "", 0, 0, err
	case s := <-ready:
		say("   %s", addressURI(s.Addrs[0], s.Volumes[0].Name))
	}
	begin := time.Now()
	client, err := nbd.Dial(ctx, "unix", sock, "demo", nbd.DialOptions{})
	if err != nil {
		return "", 0, 0, err
	}
	h := sha256.New()
	bad, err := offline.Copy(ctx, h, client, offline.CopyOptions{})
	size = client.Info().Size
	took = time.Since(begin)
	if cerr := client.Close(); err == nil {
		err = cerr
	}
	if err == nil && len(bad) > 0 {
		err = fmt.Errorf("could not be read: %v", bad)
	}
	stop()
	if serr := <-ended; err == nil {
		err = serr
	}
	return hex.EncodeToString(h.Sum(nil)), size, took, err
}
