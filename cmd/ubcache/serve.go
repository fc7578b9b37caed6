package main

import (
	"fmt"
	"net"

	"github.com/spf13/cobra"

	"github.com/ubcache/ubcache/internal/daemon"
	"github.com/ubcache/ubcache/internal/nbd"
)

// newServeCommand makes "ubcache serve".
func newServeCommand(env *environment) *cobra.Command {
	var devices deviceFlags
	var flash, listen []string
	var readOnly bool
	var engine string
	cmd := &cobra.Command{
		Use:   "serve --read-only [--cache DEV] [--volume NAME=DEV]... [--flash NAME]... --nbd ADDRESS...",
		Short: "Serve the volumes of a cache set over NBD",
		Args:  wantArgs(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case !readOnly:
				return usageErrorf("this version serves sets at rest, for reading: give --read-only")
			case len(listen) == 0:
				return usageErrorf("where? Give --nbd unix:PATH or --nbd tcp:HOST:PORT")
			case len(devices.Volumes)+len(flash) == 0:
				return usageErrorf("what? Give --volume NAME=DEV or --flash NAME")
			case devices.Cache == "" && len(flash) > 0:
				return usageErrorf("a flash-only volume lies on a cache device: give --cache DEV too")
			}
			for _, addr := range listen {
				if err := nbd.CheckAddress(addr); err != nil {
					return usageErrorf("--nbd: %w", err)
				}
			}
			c := daemon.ReadOnlyConfig{Cache: devices.Cache, Flash: flash, Listen: listen, Engine: engine, Log: newLogger(env.stderr)}
			for _, v := range devices.Volumes {
				c.Volumes = append(c.Volumes, daemon.Named{Name: v.Name, Device: v.Device})
			}
			c.Ready = func(s daemon.Served) { printServed(env, s) }
			return atRestError(daemon.ReadOnly(cmd.Context(), c))
		},
	}
	devices.add(cmd, roleCache, roleVolume)
	f := cmd.Flags()
	f.StringArrayVar(&flash, "flash", nil, "serve flash-only volume `NAME`, its label or slot number; may be repeated")
	f.StringArrayVar(&listen, "nbd", nil, "listen on `ADDRESS`, unix:PATH or tcp:HOST:PORT; may be repeated")
	f.BoolVar(&readOnly, "read-only", false, "serve devices at rest without a write to any")
	f.StringVar(&engine, "engine", "", "I/O `ENGINE`: uring or pread; default: uring where the system has it")
	return describe(cmd, help{
		long: `
Serve each volume as the NBD export NAME; the first is also the default export. What clients read is backing device
and cache together, with the journal replayed, as the kernel would show it. Nothing is written to any device; they
are locked against whoever would write.

Once all is served it prints "ready", and a line for each address and volume. SIGTERM or SIGINT stop it: requests in
flight are answered first, for up to ten seconds.

Where the index of the cache is damaged, the parts that nobody knows the content of are listed at the start, and
reading them is an error, as is reading what a device cannot read; all the rest is served. The cache device may be
left out for backing devices that are not attached to any (state none or stale).`,
		example: `ubcache serve --read-only --cache /dev/nvme0n1p4 --volume data=/dev/sdb --nbd unix:/run/data.sock
nbdcopy nbd+unix:///data?socket=/run/data.sock data.img`,
		exit: map[int]string{exitRefused: "refused: what could be served might be old data"},
	})
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
	}
	fmt.Fprintln(env.stdout, "ready")
}

// addressURI names an export the way in which clients want it.
func addressURI(a net.Addr, export string) string {
	return nbd.Address{Network: a.Network(), Addr: a.String(), Export: export}.String()
}
