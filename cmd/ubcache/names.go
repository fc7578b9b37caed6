package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// Exit statuses of the programs of bcache-tools.
const (
	oldUsage     = 1 // make-bcache: any failure
	oldShowFails = 2
)

// oldName returns what the program does when it is called by the name of one of bcache-tools' programs, or nil.
func oldName(name string) func(ctx context.Context, env *environment, args []string) int {
	switch name {
	case "make-bcache":
		return makeBcache
	case "bcache-super-show":
		return superShow
	}
	return nil
}

// superShow does what bcache-super-show 1.0.8 does, byte for byte, on both streams.
func superShow(_ context.Context, env *environment, args []string) int {
	const usage = "Usage: bcache-super-show [-f] <device>\n"
	force := false
	opts := &oldOptions{name: env.name, short: "f"}
	words, err := opts.parse(args)
	if err != nil {
		fmt.Fprintf(env.stderr, "%v\n%s", err, usage)
		return oldUsage
	}
	var paths []string
	for _, w := range words {
		if w.option == "" {
			paths = append(paths, w.value)
		} else {
			force = true
		}
	}
	if len(paths) != 1 {
		fmt.Fprint(env.stderr, usage)
		return oldUsage
	}
	sb, err := readOldSuper(paths[0])
	if e := (*os.PathError)(nil); errors.As(err, &e) && e.Op == "open" {
		fmt.Fprintf(env.stdout, "Can't open dev %s: %s\n", paths[0], sentence(e.Err)) // on standard output, yes
		return oldShowFails
	}
	if err != nil {
		fmt.Fprintln(env.stderr, "Couldn't read")
		return oldShowFails
	}
	text, failure, status := offline.SuperShow(sb, force)
	fmt.Fprint(env.stdout, text)
	if failure != "" {
		fmt.Fprintln(env.stderr, failure)
	}
	return status
}

// readOldSuper reads as much of a superblock as the tool wants: all but what was added after its time.
func readOldSuper(path string) (*ondisk.Superblock, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var b [ondisk.SuperblockBytes]byte
	if n, err := f.ReadAt(b[:], ondisk.SuperblockOffset); n < 2256 {
		return nil, err
	}
	return ondisk.DecodeSuperblock(b[:])
}

// sentence is an errno's text as the C library has it.
func sentence(err error) string {
	s := err.Error()
	r, n := utf8.DecodeRuneInString(s)
	return string(unicode.ToUpper(r)) + s[n:]
}

const makeBcacheUsage = `Usage: make-bcache [options] device
	-C, --cache		Format a cache device
	-B, --bdev		Format a backing device
	-b, --bucket		bucket size
	-w, --block		block size (default: the largest logical block of the devices)
	-o, --data-offset	data offset in sectors, or with a unit
	    --cset-uuid		UUID for the cache set
	    --writeback		enable writeback
	    --discard		enable discards
	    --cache_replacement_policy=(lru|fifo|random)
	    --wipe-bcache	overwrite bcache superblocks, but not unflushed data
	    --force		overwrite anything but unflushed data
	    --force-discard-unflushed
				with one of these two: also where there is unflushed data
	-h, --help		display this help and exit
`

// makeBcache does what make-bcache 1.0.8 does, as far as that is safe: options, the order of output and the texts
// are its own; the default block size is that of "ubcache format", bad sizes are refused, what is on the devices
// is looked at, and an option that is not known stops it.
func makeBcache(ctx context.Context, env *environment, args []string) int {
	m, err := parseMakeBcache(env.name, args)
	if errors.Is(err, errHelp) {
		fmt.Fprint(env.stdout, makeBcacheUsage)
		return 0
	}
	if err != nil {
		fmt.Fprintln(env.stderr, err)
		if old := (*oldError)(nil); errors.As(err, &old) && old.usage {
			fmt.Fprint(env.stderr, makeBcacheUsage)
		}
		return oldUsage
	}
	made, err := formatDevices(ctx, m.cache, m.backing, m.o)
	if err != nil {
		var old []string
		err = formatFailure(err, func(r *offline.FormatRefusal) string {
			text := fmt.Sprintf("Device %s already has a non-bcache superblock, remove it using wipefs and wipefs -a", r.Device)
			option := "--force"
			if r.NeedsOverwrite == offline.OverwriteBcache {
				text = fmt.Sprintf("Already a bcache device on %s, overwrite with --wipe-bcache", r.Device)
				option = "--wipe-bcache"
			}
			old = append(old, text)
			if r.NeedsDiscardUnflushed {
				option += " and --force-discard-unflushed, which gives up the unflushed data"
			}
			return "use " + option
		})
		for _, text := range old {
			fmt.Fprintln(env.stderr, text)
		}
		fmt.Fprintln(env.stderr, err)
		return oldUsage
	}
	for i := range made {
		fmt.Fprint(env.stdout, makeBcacheText(made[i].Super))
		printMarks(env.stderr, &made[i])
	}
	return 0
}

// makeBcacheText is what make-bcache prints of a superblock that it has written.
func makeBcacheText(sb *ondisk.Superblock) string {
	s := fmt.Sprintf("UUID:\t\t\t%v\nSet UUID:\t\t%v\nversion:\t\t%d\n", sb.UUID, sb.SetUUID, sb.Version)
	if sb.IsBacking() {
		return s + fmt.Sprintf("block_size:\t\t%d\ndata_offset:\t\t%d\n", sb.BlockSize, sb.DataOffset())
	}
	return s + fmt.Sprintf("nbuckets:\t\t%d\nblock_size:\t\t%d\nbucket_size:\t\t%d\nnr_in_set:\t\t%d\nnr_this_dev:\t\t%d\nfirst_bucket:\t\t%d\n",
		sb.NBuckets(), sb.BlockSize, sb.BucketSectors(), sb.NrInSet, sb.NrThisDev, sb.FirstBucket)
}

// oldMake is a command line of make-bcache.
type oldMake struct {
	cache   string
	backing []string
	o       offline.FormatOptions
}

var errHelp = errors.New("help")

// oldError is an error in the words of bcache-tools or of getopt.
type oldError struct {
	text  string
	usage bool // the usage follows
}

func (e *oldError) Error() string { return e.text }

// parseMakeBcache reads a command line. -C and -B hold for all devices that follow, up to the next of them.
func parseMakeBcache(name string, args []string) (*oldMake, error) {
	opts := &oldOptions{
		name: name, short: "CBb:w:o:h",
		long: []string{
			"cache", "bdev", "bucket:", "block:", "data-offset:", "cset-uuid:", "writeback", "discard",
			"cache_replacement_policy:", "wipe-bcache", "force", "force-discard-unflushed", "help",
		},
	}
	words, err := opts.parse(args)
	if err != nil {
		return nil, err
	}
	m := &oldMake{}
	caches, devices, mode := 0, 0, ""
	for _, w := range words {
		var err error
		switch w.option {
		case "C", "cache":
			mode = "C"
		case "B", "bdev":
			mode = "B"
		case "b", "bucket":
			m.o.Bucket, err = positive("bucket size", w.value, parseSize)
		case "w", "block":
			m.o.Block, err = positive("block size", w.value, parseSize)
		case "o", "data-offset":
			m.o.DataOffset, err = positive("data offset", w.value, parseSectors)
		case "cset-uuid":
			if m.o.SetUUID, err = ondisk.ParseUUID(w.value); err != nil || m.o.SetUUID.IsZero() {
				err = &oldError{text: "Bad uuid"}
			}
		case "writeback":
			m.o.CacheMode = ondisk.Writeback
		case "discard":
			m.o.Discard = true
		case "cache_replacement_policy":
			m.o.Replacement, err = parseReplacement(w.value)
		case "wipe-bcache":
			m.o.Overwrite = max(m.o.Overwrite, offline.OverwriteBcache)
		case "force":
			m.o.Overwrite = offline.OverwriteAnything
		case "force-discard-unflushed":
			m.o.DiscardUnflushed = true
		case "h", "help":
			return nil, errHelp
		default:
			devices++
			switch mode {
			case "C":
				caches++
				m.cache = w.value
			case "B":
				m.backing = append(m.backing, w.value)
			default:
				return nil, &oldError{text: "Please specify -C or -B"}
			}
		}
		if err != nil {
			return nil, err
		}
	}
	switch {
	case devices == 0:
		return nil, &oldError{text: "Please supply a device", usage: true}
	case caches > 1:
		return nil, fmt.Errorf("%d cache devices: a set has one, no kernel takes more", caches)
	case m.o.DiscardUnflushed && m.o.Overwrite == offline.OverwriteNothing:
		return nil, errors.New("--force-discard-unflushed needs --wipe-bcache or --force too")
	}
	return m, nil
}

// positive refuses zero, which to the library means the default.
func positive(what, s string, parse func(string) (int64, error)) (int64, error) {
	n, err := parse(s)
	if err == nil && n == 0 {
		err = errors.New("is zero")
	}
	if err != nil {
		return 0, fmt.Errorf("%s: %w", what, err)
	}
	return n, nil
}

// parseSectors reads a size that is in sectors where it has no unit.
func parseSectors(s string) (int64, error) {
	n, err := parseSize(s)
	if err != nil || strings.Trim(s, "0123456789") != "" {
		return n, err
	}
	if n > math.MaxInt64/ondisk.SectorSize {
		return 0, fmt.Errorf("%q sectors is too much", s)
	}
	return n * ondisk.SectorSize, nil
}

// oldOptions reads a command line in the way of getopt_long: options and other words in any order, which is kept;
// short ones together; long ones abbreviated; "--" ends them.
type oldOptions struct {
	name  string   // of the program
	short string   // a colon follows those that take a value
	long  []string // as well
}

// oldWord is an option and its value, or, with option "", another word.
type oldWord struct{ option, value string }

func (o *oldOptions) fail(format string, args ...any) error {
	return &oldError{o.name + ": " + fmt.Sprintf(format, args...), true}
}

func (o *oldOptions) parse(args []string) (words []oldWord, err error) {
	for len(args) > 0 {
		a := args[0]
		args = args[1:]
		switch {
		case a == "--":
			for _, rest := range args {
				words = append(words, oldWord{"", rest})
			}
			return words, nil
		case len(o.long) > 0 && strings.HasPrefix(a, "--"):
			w, rest, err := o.parseLong(a[2:], args)
			if err != nil {
				return nil, err
			}
			words, args = append(words, w), rest
		case len(a) > 1 && a[0] == '-':
			for a = a[1:]; a != ""; {
				c := a[:1]
				a = a[1:]
				i := strings.Index(o.short, c)
				if i < 0 || c == ":" {
					return nil, o.fail("invalid option -- '%s'", c)
				}
				w := oldWord{option: c}
				if strings.HasPrefix(o.short[i+1:], ":") {
					switch {
					case a != "":
						w.value, a = a, ""
					case len(args) > 0:
						w.value, args = args[0], args[1:]
					default:
						return nil, o.fail("option requires an argument -- '%s'", c)
					}
				}
				words = append(words, w)
			}
		default:
			words = append(words, oldWord{"", a})
		}
	}
	return words, nil
}

func (o *oldOptions) parseLong(a string, args []string) (oldWord, []string, error) {
	name, value, given := strings.Cut(a, "=")
	var found []string
	for _, l := range o.long {
		bare := strings.TrimSuffix(l, ":")
		if bare == name {
			found = []string{l}
			break
		}
		if strings.HasPrefix(bare, name) {
			found = append(found, l)
		}
	}
	if len(found) > 1 {
		return oldWord{}, nil, o.fail("option '--%s' is ambiguous", name)
	}
	if len(found) == 0 {
		return oldWord{}, nil, o.fail("unrecognized option '--%s'", a)
	}
	bare, wants := strings.CutSuffix(found[0], ":")
	switch {
	case given && !wants:
		return oldWord{}, nil, o.fail("option '--%s' doesn't allow an argument", bare)
	case wants && !given && len(args) == 0:
		return oldWord{}, nil, o.fail("option '--%s' requires an argument", bare)
	case wants && !given:
		return oldWord{bare, args[0]}, args[1:], nil
	}
	return oldWord{bare, value}, args, nil
}
