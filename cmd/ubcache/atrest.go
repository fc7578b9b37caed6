package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/offline"
)

// opened are the devices that a command at rest has open, for reading only.
type opened struct {
	cache    blockdev.Device // nil: none named
	backings []blockdev.Device
}

// openDevices opens what the flags name.
func openDevices(env *environment, d *deviceFlags) (o opened, err error) {
	defer func() {
		if err != nil {
			o.Close()
		}
	}()
	open := func(path string) (blockdev.Device, error) {
		return blockdev.Open(path, blockdev.Options{ReadOnly: true, Logger: newLogger(env.stderr)})
	}
	if d.Cache != "" {
		if o.cache, err = open(d.Cache); err != nil {
			return o, err
		}
	}
	for _, path := range d.Backing {
		dev, err := open(path)
		if err != nil {
			return o, err
		}
		o.backings = append(o.backings, dev)
	}
	return o, nil
}

func (o *opened) Close() {
	for _, dev := range append(o.backings, o.cache) {
		if dev != nil {
			dev.Close()
		}
	}
}

// newLogger logs for people: one line each, without time.
func newLogger(w io.Writer) *slog.Logger {
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey && len(groups) == 0 {
			return slog.Attr{}
		}
		return a
	}}))
}

// atRestError gives an error of package offline the exit status that goes with it.
func atRestError(err error) error {
	var refused *offline.RefusedError
	if errors.As(err, &refused) {
		return refusedError(err)
	}
	return err
}

// listRanges prints ranges of a volume, offset and length in bytes.
func listRanges(w io.Writer, ranges [][2]int64) (total int64) {
	for _, r := range ranges {
		fmt.Fprintf(w, "  offset %d length %d\n", r[0], r[1])
		total += r[1]
	}
	return total
}

// openVolume opens the volume that the flags name: the one backing device, or the flash-only volume. What is wrong
// with the set beyond the harmless is printed to standard error. Call release in any case.
func openVolume(ctx context.Context, env *environment, o *opened, d *deviceFlags) (v *offline.Volume, release func(), err error) {
	release = func() {}
	var set *offline.Set
	if o.cache != nil {
		set, err = offline.Open(ctx, o.cache, offline.Options{})
		release = func() { set.Close() }
		if err != nil {
			return nil, release, err
		}
		for _, f := range set.Report.Findings() {
			if f.Severity > offline.Harmless {
				fmt.Fprintf(env.stderr, "%s: %s\n", env.name, f.String())
			}
		}
	}
	if d.Flash != "" {
		v, err = offline.OpenFlash(set, d.Flash)
		return v, release, err
	}
	b, err := offline.OpenBacking(set, o.backings[0])
	if err != nil {
		return nil, release, err
	}
	if set == nil {
		v, err = offline.OpenAlone(b)
	} else {
		v, err = offline.OpenVolume(set, b)
	}
	return v, release, err
}

func hashFile(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, f)
	return hex.EncodeToString(h.Sum(nil)), err
}

// indentText puts three spaces before each line that is not empty.
func indentText(s string) string {
	var out strings.Builder
	for line := range strings.Lines(s) {
		if line != "\n" {
			out.WriteString("   ")
		}
		out.WriteString(line)
	}
	return out.String()
}
