// Command nbdmem serves memory or a file over NBD, for measurements of internal/nbd alone.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"runtime/pprof"
	"syscall"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/nbd"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "nbdmem:", err)
		os.Exit(1)
	}
}

func run() error {
	var (
		size     = flag.Int64("size", 1<<30, "bytes of memory to serve")
		socket   = flag.String("socket", "", "Unix socket to listen on")
		listen   = flag.String("listen", "", "address to listen on: unix:PATH or tcp:HOST:PORT")
		file     = flag.String("file", "", "serve this file or device instead of memory")
		direct   = flag.Bool("direct", true, "open the file with O_DIRECT")
		readOnly = flag.Bool("read-only", false, "serve for reading only")
		engine   = flag.String("engine", "", "how to do the file's I/O, as blockdev names it")
		verbose  = flag.Bool("v", false, "log connections")
		profile  = flag.String("cpuprofile", "", "write a CPU profile here")
	)
	flag.Parse()
	// Nearly nothing is allocated once the connections stand, so the heap is tiny and its growth by half is a
	// few hundred KiB: let it grow more before it is collected.
	debug.SetGCPercent(400)

	dev, err := open(*file, *size, *direct, *readOnly, *engine)
	if err != nil {
		return err
	}
	defer dev.Close()
	var o nbd.Options
	if *verbose {
		o.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	srv := nbd.NewServer(o)
	if err := srv.AddExport("", nbd.DeviceExport(dev, "benchmark", *readOnly)); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if *socket != "" {
		*listen = "unix:" + *socket
	}
	addr, err := srv.ListenAndServe(ctx, *listen)
	if err != nil {
		return err
	}
	if *profile != "" {
		f, err := os.Create(*profile)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	fmt.Println("ready", addr, dev.Info().Engine)
	<-ctx.Done()
	end, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return srv.Shutdown(end)
}

func open(file string, size int64, direct, readOnly bool, engine string) (blockdev.Device, error) {
	if file == "" {
		return blockdev.Memory(size, blockdev.MemoryOptions{ReadOnly: readOnly})
	}
	return blockdev.Open(file, blockdev.Options{Buffered: !direct, ReadOnly: readOnly, Engine: engine})
}
