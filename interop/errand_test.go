//go:build interop

package interop

import (
	"fmt"
	"os"
	"strings"
)

// An errand is one boot that does what is in a table; see guest/jobs.
type errand struct {
	*place
	disks       []string
	table       strings.Builder
	out, outDev string // a disk for content
	end         int64  // of that, in bytes
}

// A copied volume is one whose content the guest has put on a disk of its own.
type copied struct {
	volume    string
	off, size int64 // in out
}

// newErrand plugs a disk for content, in a new image of that name.
func (p *place) newErrand(out string) *errand {
	p.t.Helper()
	e := &errand{place: p, out: p.image(out, 0)}
	e.outDev = e.plug(e.out, ",keep")
	return e
}

// plug adds a disk, and returns the guest's name for it.
func (e *errand) plug(image, options string) string {
	e.disks = append(e.disks, image+",cache=unsafe"+options)
	return devName(len(e.disks) - 1)
}

func (e *errand) job(format string, args ...any) { fmt.Fprintf(&e.table, format+"\n", args...) }

// copyOut copies a volume, which jobs knows as name, to the disk for content.
func (e *errand) copyOut(name, volume string, size int64) copied {
	c := copied{volume, e.end, size}
	e.job("copy %s %s %d", name, e.outDev, c.off)
	e.end += (size + mib - 1) / mib * mib
	return c
}

// run boots with the disks and the table, and returns what jobs printed.
func (e *errand) run(b boot) string {
	e.t.Helper()
	if err := os.Truncate(e.out, e.end); err != nil {
		e.t.Fatal(err)
	}
	e.put("table", []byte(e.table.String()))
	b.disks, b.script = e.disks, "jobs"
	return e.boot(b)
}
