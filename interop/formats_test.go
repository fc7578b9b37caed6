//go:build interop

package interop

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

const (
	kib = 1 << 10
	mib = 1 << 20
	gib = 1 << 30
)

// A cacheDisk is a cache device to format, and what the kernel must say of it.
type cacheDisk struct {
	size, block, bucket, buckets int64 // bytes, but for the last
	policy                       string
	discard                      bool
	flash                        int64 // bytes of a flash-only volume to make and use; 0: none
}

// A backingDisk is a backing device to format, and what the kernel must say of it.
type backingDisk struct {
	size, offset int64 // bytes, sectors
	label, mode  string
	load         string // what to write to it, see fx
	hold         bool   // nothing is written back, so it ends dirty
}

// A layout is what one command formats.
type layout struct {
	name         string
	makeBcache   bool     // by that name
	args         []string // besides the devices
	cache        *cacheDisk
	backings     []backingDisk
	backingFirst bool // is registered before its cache
}

// layouts are sets that we format and each kernel uses. Small loads: this is about what a format says, and that
// what the kernel then wrote is read back; the loads that grow trees are in the tests of power cuts.
var layouts = []layout{
	{
		name: "8k", args: []string{"--bucket", "8k", "--block", "512", "--writeback"},
		cache: &cacheDisk{size: 513 * 8 * kib, block: 512, bucket: 8 * kib, buckets: 513, policy: "lru"},
		backings: []backingDisk{{
			size: 16 * mib, offset: 16, mode: "writeback", hold: true,
			load: "seed=11,ops=1200,min=512,max=2k,align=512,len=15M,threads=2,flush=400",
		}},
	},
	{
		name: "64k-512", args: []string{"--bucket", "64k", "--block", "512"},
		cache: &cacheDisk{size: 41000 * kib, block: 512, bucket: 64 * kib, buckets: 640, policy: "lru"},
	},
	{
		name: "128k-4k", args: []string{"--bucket", "128k", "--block", "4k", "--label", "a label of thirty two characters"},
		cache: &cacheDisk{size: 80 * mib, block: 4 * kib, bucket: 128 * kib, buckets: 640, policy: "lru"},
		backings: []backingDisk{{
			size: 16 * mib, offset: 16, mode: "writethrough", label: "a label of thirty two characters",
			load: "seed=12,ops=400,min=4k,max=32k,align=4k,len=15M,threads=2,flush=200",
		}},
		backingFirst: true,
	},
	{
		name:  "default",
		cache: &cacheDisk{size: 320 * mib, block: 512, bucket: 512 * kib, buckets: 640, policy: "lru", flash: 8 * mib},
	},
	{
		name: "discard", args: []string{"--bucket", "1M", "--block", "4k", "--discard"},
		cache: &cacheDisk{size: 640 * mib, block: 4 * kib, bucket: mib, buckets: 640, policy: "lru", discard: true},
	},
	{
		name: "fifo", args: []string{"--bucket", "64k", "--block", "4k", "--replacement", "fifo"},
		cache: &cacheDisk{size: 513 * 64 * kib, block: 4 * kib, bucket: 64 * kib, buckets: 513, policy: "fifo", flash: 8 * mib},
	},
	{
		name: "random", args: []string{"--bucket", "64k", "--block", "512", "--replacement", "random", "--writeback"},
		cache: &cacheDisk{size: 40 * mib, block: 512, bucket: 64 * kib, buckets: 640, policy: "random"},
		backings: []backingDisk{{
			size: 16 * mib, offset: 16, mode: "writeback", hold: true,
			load: "seed=13,ops=400,min=4k,max=16k,align=4k,len=15M,threads=2,flush=200",
		}},
	},
	{
		name: "alone", args: []string{"--data-offset", "2048s", "--label", "alone"},
		backings: []backingDisk{{
			size: 16 * mib, offset: 2048, mode: "writethrough", label: "alone",
			load: "seed=14,ops=200,min=4k,max=16k,align=4k,len=14M,flush=100",
		}},
	},
	{
		name: "16M", args: []string{"--bucket", "16M", "--block", "4k"},
		cache: &cacheDisk{size: 513 * 16 * mib, block: 4 * kib, bucket: 16 * mib, buckets: 513, policy: "lru"},
	},
	{
		name: "32M", args: []string{"--bucket", "32M", "--block", "4k", "--writeback"},
		cache: &cacheDisk{size: 520 * 32 * mib, block: 4 * kib, bucket: 32 * mib, buckets: 520, policy: "lru"},
		backings: []backingDisk{{
			size: 16 * mib, offset: 16, mode: "writeback", hold: true,
			load: "seed=15,ops=400,min=4k,max=16k,align=4k,len=15M,threads=2,flush=200",
		}},
	},
	{
		name: "two", args: []string{"--bucket", "64k", "--block", "512", "--data-offset", "2048s"},
		cache: &cacheDisk{size: 40 * mib, block: 512, bucket: 64 * kib, buckets: 640, policy: "lru"},
		backings: []backingDisk{
			{size: 16 * mib, offset: 2048, mode: "writethrough", load: "seed=16,ops=200,min=512,max=8k,align=512,len=14M,flush=100"},
			{size: 24 * mib, offset: 2048, mode: "writethrough", load: "seed=17,ops=200,min=512,max=8k,align=512,len=22M,flush=100"},
		},
	},
	{
		name: "make-bcache", makeBcache: true, args: []string{"-b", "128k", "-w", "4k", "--writeback"},
		cache: &cacheDisk{size: 80 * mib, block: 4 * kib, bucket: 128 * kib, buckets: 640, policy: "lru"},
		backings: []backingDisk{{
			size: 16 * mib, offset: 16, mode: "writeback", hold: true,
			load: "seed=18,ops=400,min=4k,max=16k,align=4k,len=15M,threads=2,flush=200",
		}},
	},
	{
		name: "make-bcache-B", makeBcache: true, args: []string{"-w", "512", "-o", "24"},
		backings: []backingDisk{{
			size: 16 * mib, offset: 24, mode: "writethrough",
			load: "seed=19,ops=100,min=512,max=8k,align=512,len=15M,flush=50",
		}},
	},
}

// A disk is one image and the name that the guest knows it by.
type disk struct{ image, dev string }

// TestFormattedHere formats images with ubcache and hands them to a real kernel: it must accept each, say of it what
// was asked for, attach what belongs together, and use it. What it then leaves, stopped in order, must be what our own
// tools read: the same content, and nothing wrong.
func TestFormattedHere(t *testing.T) {
	for _, k := range kernels() {
		t.Run(k, func(t *testing.T) {
			t.Parallel()
			formattedHere(t, k)
		})
	}
}

func formattedHere(t *testing.T, kernel string) {
	p := newPlace(t, kernel)
	var disks []string
	plug := func(image, options string) disk {
		d := disk{image, devName(len(disks))}
		disks = append(disks, image+",cache=unsafe"+options)
		return d
	}
	type set struct {
		layout
		cacheDisk disk
		disks     []disk // of the backings
	}
	var sets []set
	var table strings.Builder
	job := func(format string, args ...any) { fmt.Fprintf(&table, format+"\n", args...) }
	for _, l := range layouts {
		s := set{layout: l}
		if c := l.cache; c != nil {
			options := ""
			if c.discard {
				options = ",unmap"
			}
			s.cacheDisk = plug(p.image(l.name+"-cache", c.size), options)
		}
		for i, b := range l.backings {
			s.disks = append(s.disks, plug(p.image(fmt.Sprintf("%s-backing%d", l.name, i), b.size), ""))
		}
		must(t, program(t, l.command()), l.commandLine(s.cacheDisk.image, s.disks)...)
		sets = append(sets, s)

		registerCache := func() {
			if l.cache != nil {
				job("register %s", s.cacheDisk.dev)
			}
		}
		if !l.backingFirst {
			registerCache()
		}
		for _, d := range s.disks {
			job("register %s", d.dev)
		}
		if l.backingFirst {
			registerCache()
		}
	}
	var devs []string
	for _, s := range sets {
		if s.cache != nil {
			devs = append(devs, s.cacheDisk.dev)
		}
		for _, d := range s.disks {
			devs = append(devs, d.dev)
			if s.cache != nil {
				job("attached %s", d.dev)
			} else {
				job("alone %s", d.dev)
			}
		}
	}
	job("record %s", strings.Join(devs, " "))
	for _, s := range sets {
		for i, d := range s.disks {
			hold := "-"
			if s.backings[i].hold {
				hold = "hold"
			}
			job("write %s %s %s", d.dev, hold, s.backings[i].load)
		}
		if c := s.cache; c != nil && c.flash > 0 {
			job("flash %s flash-%s %d seed=20,ops=200,min=4k,max=16k,align=4k,len=%d,flush=100", s.cacheDisk.dev, s.name, c.flash, c.flash)
		}
	}
	p.put("table", []byte(table.String()))
	p.boot(boot{disks: disks, limit: 420 * time.Second, script: "jobs"})

	for _, s := range sets {
		t.Run(s.name, func(t *testing.T) {
			p := &place{t: t, kernel: kernel, dir: p.dir, share: p.share}
			var args []string
			if s.cache != nil {
				p.saidOfCache(s.cacheDisk, *s.cache)
				args = append(args, "--cache", s.cacheDisk.image)
				p.show(s.cacheDisk.image)
			}
			for i, d := range s.disks {
				b := s.backings[i]
				p.saidOfBacking(d, b, s.cache != nil)
				p.show(d.image)
				kernel := parseContent(t, p.shared(d.dev+".hash"))
				if s.cache != nil {
					p.cat(d.dev+".cat", kernel, "--cache", s.cacheDisk.image, "--backing", d.image)
				} else { // all of it is on the device itself, and begins where we told the kernel
					plain := parseContent(t, must(t, fx(t), "hash", d.image, strconv.FormatInt(b.offset*512, 10)))
					if plain.SHA256 != kernel.SHA256 {
						t.Errorf("%s: the kernel reads other data than begins at sector %d; %s", d.image, b.offset, differs(plain, kernel))
					} else {
						t.Logf("kernel %s and the disk from sector %d on agree on %d bytes, sha256 %s", p.kernel, b.offset, plain.Size, plain.SHA256)
					}
				}
				args = append(args, "--backing", d.image)
			}
			if s.cache == nil {
				return
			}
			if s.cache.flash > 0 {
				name := "flash-" + s.name
				p.cat(name+".cat", parseContent(t, p.shared(name+".hash")), "--cache", s.cacheDisk.image, "--flash", name)
			}
			p.check(args...)
		})
	}
}

func (l *layout) command() string {
	if l.makeBcache {
		return "make-bcache"
	}
	return "ubcache"
}

func (l *layout) commandLine(cache string, backings []disk) []string {
	var args []string
	cacheFlag, backingFlag := "-C", "-B"
	if !l.makeBcache {
		args = []string{"format"}
		cacheFlag, backingFlag = "--cache", "--backing"
	}
	args = append(args, l.args...)
	if cache != "" {
		args = append(args, cacheFlag, cache)
	}
	for _, b := range backings {
		args = append(args, backingFlag, b.image)
	}
	return args
}

// attributes are a device's in sysfs, by the name of the file below its folder bcache.
func (p *place) attributes(d disk) map[string]string {
	p.t.Helper()
	var all map[string]string
	if err := json.Unmarshal([]byte(p.shared("attributes.json")), &all); err != nil {
		p.t.Fatalf("attributes of %s: %v", d.image, err)
	}
	short := map[string]string{}
	dir := "/sys/block/" + d.dev + "/bcache/"
	for path, v := range all {
		if name, ok := strings.CutPrefix(path, dir); ok {
			short[name] = v
		}
	}
	return short
}

func (p *place) accepted(d disk) {
	p.t.Helper()
	if v := p.shared(d.dev + ".verdict"); v != "accepted" {
		p.t.Errorf("%s: the kernel's verdict is %s", filepath.Base(d.image), v)
	}
}

func (p *place) saidOfCache(d disk, want cacheDisk) {
	p.t.Helper()
	p.accepted(d)
	a := p.attributes(d)
	said := []attribute{
		{"block_size", bytesOf(a["block_size"]), strconv.FormatInt(want.block, 10)},
		{"bucket_size", bytesOf(a["bucket_size"]), strconv.FormatInt(want.bucket, 10)},
		{"nbuckets", a["nbuckets"], strconv.FormatInt(want.buckets, 10)},
		{"cache_replacement_policy", chosen(a["cache_replacement_policy"]), want.policy},
	}
	if discard, known := a["discard"]; known || p.kernel == "6.1" || p.kernel == "6.12" { // newer ones have no such attribute
		said = append(said, attribute{"discard", discard, flag(want.discard)})
	}
	p.saidOf(d, said)
}

func (p *place) saidOfBacking(d disk, want backingDisk, attached bool) {
	p.t.Helper()
	p.accepted(d)
	a := p.attributes(d)
	state := "no cache"
	if attached {
		state = "clean"
	}
	p.saidOf(d, []attribute{
		{"cache_mode", chosen(a["cache_mode"]), want.mode},
		{"label", a["label"], want.label},
		{"state", a["state"], state},
		{"running", a["running"], "1"},
		{"dev/size", a["dev/size"], strconv.FormatInt(want.size/512-want.offset, 10)},
	})
}

// An attribute is one in sysfs: what the kernel says, and what we asked for.
type attribute struct{ name, got, want string }

func (p *place) saidOf(d disk, attributes []attribute) {
	p.t.Helper()
	var said []string
	for _, a := range attributes {
		if a.got != a.want {
			p.t.Errorf("%s: the kernel says %s %q, want %q", filepath.Base(d.image), a.name, a.got, a.want)
		}
		said = append(said, fmt.Sprintf("%s %q", a.name, a.got))
	}
	p.t.Logf("kernel %s of %s: %s", p.kernel, filepath.Base(d.image), strings.Join(said, ", "))
}

func flag(b bool) string {
	if b {
		return "1"
	}
	return "0"
}

// chosen returns the word in brackets: "lru [fifo] random" is fifo.
func chosen(s string) string {
	_, s, _ = strings.Cut(s, "[")
	s, _, _ = strings.Cut(s, "]")
	return s
}

// bytesOf turns the kernel's "0.5k" or "64.0k" into bytes.
func bytesOf(s string) string {
	unit := map[byte]float64{'k': kib, 'M': mib, 'G': gib}
	if s == "" || unit[s[len(s)-1]] == 0 {
		return s
	}
	f, err := strconv.ParseFloat(s[:len(s)-1], 64)
	if err != nil {
		return s
	}
	return strconv.FormatInt(int64(f*unit[s[len(s)-1]]), 10)
}
