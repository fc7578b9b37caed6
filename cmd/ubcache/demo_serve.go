package main

import (
	"context"
	"net"
	"path/filepath"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/daemon"
	"github.com/ubcache/ubcache/internal/nbd"
)

// The disk of the demo is a file that answers late.
const (
	demoDelay  = 4 * time.Millisecond
	demoJitter = 0.3
)

// demoSlow makes dev slow, and returns how many reads it has seen.
func demoSlow(dev blockdev.Device) (slow blockdev.Device, reads func() int64) {
	counting := blockdev.NewCounting(dev)
	slow = blockdev.NewDelaying(counting, blockdev.Latency{Read: demoDelay, Write: demoDelay, Flush: demoDelay, Jitter: demoJitter})
	return slow, func() int64 { return counting.Total(blockdev.OpRead).Ops }
}

// A demoServer is an export for the load, served within the process.
type demoServer struct {
	addr      net.Addr
	export    string
	base      int64        // where the volume begins in the export, in bytes
	diskReads func() int64 // of the slow disk below
	stop      func() error
}

// demoBare serves the slow disk alone.
func demoBare(ctx context.Context, disk, dir string) (*demoServer, error) {
	dev, err := blockdev.Open(disk, blockdev.Options{})
	if err != nil {
		return nil, err
	}
	slow, reads := demoSlow(dev)
	server := nbd.NewServer(nbd.Options{})
	stop := func() error {
		err := server.Close()
		if cerr := slow.Close(); err == nil {
			err = cerr
		}
		return err
	}
	s := &demoServer{export: "bare", base: demoDataOffset, diskReads: reads, stop: stop}
	if err = server.AddExport(s.export, nbd.DeviceExport(slow, "the slow disk of the demo", false)); err == nil {
		s.addr, err = server.ListenAndServe(ctx, "unix:"+filepath.Join(dir, "bare.sock"))
	}
	if err != nil {
		stop()
		return nil, err
	}
	return s, nil
}

// demoCached serves the cached volume, with the same slow disk below, as "ubcache serve" does. The end of ctx stops
// it only while it starts: after that, whoever loads it is to end first.
func demoCached(ctx context.Context, disk, cache, dir string) (*demoServer, error) {
	s := &demoServer{export: "demo"}
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ready, ended := make(chan daemon.Served, 1), make(chan error, 1)
	s.stop = func() error {
		cancel()
		return <-ended
	}
	go func() {
		ended <- daemon.Serve(running, daemon.Config{
			Cache: cache, Volumes: []daemon.Named{{Name: s.export, Device: disk}}, Listen: []string{"unix:" + filepath.Join(dir, "cached.sock")},
			Socket: filepath.Join(dir, "control.sock"), RuntimeDir: dir,
			Wrap: func(role, _ string, dev blockdev.Device) blockdev.Device {
				if role == "backing" {
					dev, s.diskReads = demoSlow(dev)
				}
				return dev
			},
			Ready: func(s daemon.Served) { ready <- s },
		})
	}()
	select {
	case served := <-ready:
		s.addr = served.Addrs[0]
		return s, nil
	case err := <-ended:
		cancel()
		return nil, err
	case <-ctx.Done():
		if err := s.stop(); err != nil {
			return nil, err
		}
		return nil, context.Cause(ctx)
	}
}
