package main

import (
	"context"
	"errors"
	"strings"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/nbd"
)

func isURI(dev string) bool { return strings.HasPrefix(dev, "nbd") && strings.Contains(dev, "://") }

// An export is one over NBD. Its threads are spread over the connections.
type export struct {
	size    int64
	client  *nbd.Client
	threads []*blockdev.IO
}

func openExport(uri string, conns, threads int64) *export {
	c, err := nbd.DialURI(context.Background(), uri, nbd.DialOptions{Connections: int(conns)})
	must(err)
	e := &export{size: c.Info().Size, client: c}
	for range threads {
		o, err := blockdev.NewIO(c, 1)
		must(err)
		e.threads = append(e.threads, o)
	}
	return e
}

func (e *export) write(thread int64, b []byte, off int64, forced, zeroes bool) error {
	var flags blockdev.Flags
	if forced {
		flags = blockdev.FUA
	}
	if zeroes {
		return e.threads[thread].WriteZeroes(off, int64(len(b)), flags)
	}
	return e.threads[thread].WriteAt(b, off, flags)
}

// flush goes over one connection, and must cover what the others have had acknowledged.
func (e *export) flush() error { return e.threads[0].Flush() }

func (e *export) close() error {
	var errs []error
	for _, o := range e.threads {
		errs = append(errs, o.Close())
	}
	return errors.Join(append(errs, e.client.Close())...)
}

func (e *export) alive() bool { return e.threads[0].ReadAt(make([]byte, sector), 0) == nil }
