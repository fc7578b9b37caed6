package main

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/spf13/cobra"

	"github.com/ubcache/ubcache"
	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/daemon"
	"github.com/ubcache/ubcache/internal/nbd"
)

// serveFlags are what a command line of "ubcache serve" says.
type serveFlags struct {
	devices            deviceFlags
	flash, listen      []string
	readOnly           bool
	socket, runtimeDir string
	nodeCache          int64
	engine             string
}

// newServeCommand makes "ubcache serve".
func newServeCommand(env *environment) *cobra.Command {
	o := &serveFlags{}
	cmd := &cobra.Command{
		Use:   "serve --cache DEV [--volume NAME=DEV]... [--flash NAME]... --nbd ADDRESS... [--read-only]",
		Short: "Serve the volumes of a cache set over NBD",
		Args:  wantArgs(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.check(); err != nil {
				return err
			}
			if o.readOnly {
				c := o.readOnlyConfig(env)
				var err error
				if c.RuntimeDirs, err = runtimeDirs(o.runtimeDir); err != nil {
					return err
				}
				return atRestError(daemon.ReadOnly(cmd.Context(), c))
			}
			return o.serveError(daemon.Serve(cmd.Context(), o.config(env)))
		},
	}
	o.devices.add(cmd, roleCache, roleVolume)
	f := cmd.Flags()
	f.StringArrayVar(&o.flash, "flash", nil, "serve flash-only volume `NAME`, its label or slot number; may be repeated")
	f.StringArrayVar(&o.listen, "nbd", nil, "listen on `ADDRESS`, unix:PATH or tcp:HOST:PORT; may be repeated")
	f.BoolVar(&o.readOnly, "read-only", false, "serve devices at rest without a write to any")
	f.Var(&onceValue{to: &o.socket}, "socket", "make the control socket at `PATH`; default: $UBCACHE_SOCKET, else control.sock\n"+
		"in /run/ubcache or $XDG_RUNTIME_DIR/ubcache")
	f.Var(&onceValue{to: &o.runtimeDir}, "runtime-dir", "keep what outlives the process in `FOLDER`, best on a tmpfs; default:\n"+
		"/run/ubcache, else $XDG_RUNTIME_DIR/ubcache")
	f.Var(&sizeValue{to: &o.nodeCache, least: 1 << 20}, "node-cache", "keep at most `SIZE` of the index in memory (default 256M)")
	f.StringVar(&o.engine, "engine", "", "I/O `ENGINE`: uring or pread; default: uring where the system has it")
	return describe(cmd, help{
		long: `
Run a cache set, and serve each volume as the NBD export NAME; the first is also the default export. A set that was
only formatted is initialised, a backing device that was only formatted is attached, and a set that was not stopped
in good order is recovered first.

Once all is served it prints "ready", and a line for each address and volume. SIGTERM or SIGINT stop it: requests in
flight are answered, for up to ten seconds, and the index is written out, for up to a minute; all together it takes
less than 90 seconds. Nothing that was acknowledged is lost if the process is killed instead; the next start then
takes longer. For that it needs a folder that outlives the process (--runtime-dir), the same one at the
next start. Without one it says so, and each write is acknowledged only when the journal has it.

A flash-only volume is served only where --flash names it, after a restart too. A backing device of the set that is not
given is left out; if it has dirty data in the cache, a warning says so, and "ubcache status".

"ubcache status", "get", "set", "flush", "detach" and "flash" reach it through the control socket, which only its owner
can use. Without any volume it serves the flash-only volumes that "ubcache flash create" makes then.

With --read-only nothing is written to any device; they are locked against whoever would write. What clients read is
backing device and cache together, with the journal replayed, as the kernel would show it, and with what a daemon that
was killed has left in its runtime folder. Where the index of the cache is damaged, the parts that nobody knows the
content of are listed at the start, and reading them is an error, as is reading what a device cannot read; all the rest
is served. The cache device may be left out for backing devices that are not attached to any (state none or stale).
There is no control socket then.`,
		example: `ubcache serve --cache /dev/nvme0n1p4 --volume data=/dev/sdb --nbd unix:/run/data.sock
ubcache serve --read-only --cache /dev/nvme0n1p4 --volume data=/dev/sdb --nbd unix:/run/data.sock
nbdcopy nbd+unix:///data?socket=/run/data.sock data.img`,
		exit: map[int]string{exitRefused: "refused: what could be served might be old data"},
	})
}

// check finds what makes no sense.
func (o *serveFlags) check() error {
	d := &o.devices
	switch {
	case len(o.listen) == 0:
		return usageErrorf("where? Give --nbd unix:PATH or --nbd tcp:HOST:PORT")
	case len(d.Volumes)+len(o.flash) == 0 && o.readOnly:
		return usageErrorf("what? Give --volume NAME=DEV or --flash NAME")
	case d.Cache == "" && len(o.flash) > 0:
		return usageErrorf("a flash-only volume lies on a cache device: give --cache DEV too")
	case d.Cache == "" && !o.readOnly:
		return usageErrorf("through which cache? Give --cache DEV; only --read-only can do without")
	case o.readOnly && (o.socket != "" || o.nodeCache != 0):
		return usageErrorf("--socket and --node-cache are of no use with --read-only")
	case o.engine != "" && o.engine != blockdev.EngineUring && o.engine != blockdev.EnginePread:
		return usageErrorf("--engine %q: want %s or %s", o.engine, blockdev.EngineUring, blockdev.EnginePread)
	}
	for _, addr := range o.listen {
		if err := nbd.CheckAddress(addr); err != nil {
			return usageErrorf("--nbd: %w", err)
		}
	}
	if !o.readOnly {
		var names []string
		for _, v := range d.Volumes {
			names = append(names, v.Name)
		}
		if err := daemon.CheckNames(append(names, o.flash...)); err != nil {
			return usageErrorf("%w", err)
		}
	}
	return noneTwice(d.paths())
}

func (o *serveFlags) volumes() (list []daemon.Named) {
	for _, v := range o.devices.Volumes {
		list = append(list, daemon.Named{Name: v.Name, Device: v.Device})
	}
	return list
}

func (o *serveFlags) readOnlyConfig(env *environment) daemon.ReadOnlyConfig {
	return daemon.ReadOnlyConfig{
		Cache: o.devices.Cache, Volumes: o.volumes(), Flash: o.flash, Listen: o.listen, Engine: o.engine, Log: newLogger(env.stderr),
		Ready: func(s daemon.Served) { printServed(env, s) },
	}
}

func (o *serveFlags) config(env *environment) daemon.Config {
	return daemon.Config{
		Cache: o.devices.Cache, Volumes: o.volumes(), Flash: o.flash, Listen: o.listen, Engine: o.engine, Log: newLogger(env.stderr),
		Socket: o.socket, RuntimeDir: o.runtimeDir, NodeCache: o.nodeCache, Version: buildVersion(),
		Ready: func(s daemon.Served) { printServed(env, s) },
	}
}

// serveError gives an error of a running set the exit status that goes with it.
func (o *serveFlags) serveError(err error) error {
	switch {
	case errors.Is(err, ubcache.ErrNoVolume):
		return fmt.Errorf("%w; \"ubcache flash create NAME SIZE --cache %s\" makes one, \"ubcache flash list --cache %[2]s\" lists those that there are", err,
			o.devices.Cache)
	case errors.Is(err, ubcache.ErrOtherSet):
		return refusedErrorf("%w; name the cache device of that set; no option overrides this", err)
	case errors.Is(err, ubcache.ErrUnflushed):
		return refusedErrorf("%w; name the cache device that does; no option overrides this", err)
	case errors.Is(err, context.Canceled):
		return errors.New("interrupted before it served anything")
	}
	return err
}

func printServed(env *environment, s daemon.Served) {
	for _, v := range s.Volumes {
		fmt.Fprintf(env.stdout, "volume %s: %d bytes\n", v.Name, v.Size)
		if len(v.Unreadable) > 0 {
			fmt.Fprintf(env.stdout, "volume %s: unreadable, the index of the cache is damaged there:\n", v.Name)
			listRanges(env.stdout, v.Unreadable)
		}
	}
	for _, a := range s.Addrs {
		for _, v := range s.Volumes {
			fmt.Fprintln(env.stdout, addressURI(a, v.Name))
		}
		if len(s.Volumes) == 0 {
			fmt.Fprintln(env.stdout, addressURI(a, ""))
		}
	}
	if s.Socket != "" {
		fmt.Fprintf(env.stdout, "control socket: %s\n", s.Socket)
	}
	fmt.Fprintln(env.stdout, "ready")
}

// addressURI names an export the way in which clients want it.
func addressURI(a net.Addr, export string) string {
	return nbd.Address{Network: a.Network(), Addr: a.String(), Export: export}.String()
}
