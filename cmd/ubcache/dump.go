package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ubcache/ubcache/internal/offline"
	"github.com/ubcache/ubcache/internal/ondisk"
)

// dumpParts are what dump knows, in the order in which it prints.
var dumpParts = []string{"superblock", "journal", "uuids", "btree", "nodes", "buckets"}

// newDumpCommand makes "ubcache dump".
func newDumpCommand(env *environment) *cobra.Command {
	var devices deviceFlags
	var what []string
	var asJSON, all bool
	cmd := &cobra.Command{
		Use:   "dump --cache DEV [--runtime-dir FOLDER] [--what PART,...] [--all] [--json]",
		Short: "Print the metadata of a cache device",
		Args:  wantArgs(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if devices.Cache == "" {
				return usageErrorf("which cache device? Give --cache DEV")
			}
			for _, w := range what {
				if !slices.Contains(dumpParts, w) {
					return usageErrorf("--what %q: known are %s", w, strings.Join(dumpParts, ", "))
				}
			}
			return dump(cmd.Context(), env, &devices, what, all, asJSON)
		},
	}
	devices.add(cmd, roleCache)
	runtimeDirFlag(cmd, &devices.RuntimeDir)
	f := cmd.Flags()
	f.StringSliceVar(&what, "what", []string{"superblock", "journal", "uuids", "btree", "buckets"}, "`PARTS` to print, of "+strings.Join(dumpParts, ","))
	f.BoolVar(&all, "all", false, "with btree, also the keys that hold no data: stale ones, invalidations, placeholders")
	jsonFlag(cmd, &asJSON)
	return describe(cmd, help{
		long: `
Print the metadata of a cache device at rest, as text or, with --json, as one JSON object a line with its "type".

  superblock  its fields
  journal     every whole entry found, and the keys of those that must be replayed
  uuids       the slots in use
  btree       the keys as they are after replay, in the form in which the kernel prints them:
              INODE:START len SECTORS -> [DEVICE:SECTOR gen GENERATION] dirty
  nodes       the nodes of the tree and their sets
  buckets     role, generation, priority and live sectors of each bucket

` + runtimeDirHelp + ` Its entries
are printed as "mapped".

Sectors are of 512 bytes; START counts from the beginning of the backing device, its data offset included.`,
		example: "ubcache dump --cache /dev/nvme0n1p4 --what btree,uuids --json",
		exit:    map[int]string{exitFailed: "the set cannot be read; what was read up to there is printed"},
	})
}

// A dumper prints one thing after the other, as a line of text or of JSON.
type dumper struct {
	w    *bufio.Writer
	json *json.Encoder // nil: text
}

func (d *dumper) print(v any, text string, args ...any) {
	if d.json != nil {
		_ = d.json.Encode(v) // an error of the writer stays with it until Flush
		return
	}
	fmt.Fprintf(d.w, text+"\n", args...)
}

func dump(ctx context.Context, env *environment, devices *deviceFlags, what []string, all, asJSON bool) error {
	if err := checkOutput(env, devices); err != nil {
		return err
	}
	defer endSoon(ctx, env)()
	open, err := openDevices(env, devices)
	if err != nil {
		return err
	}
	defer open.Close()
	d := &dumper{w: bufio.NewWriterSize(env.stdout, 1<<16)}
	if asJSON {
		d.json = json.NewEncoder(d.w)
		d.json.SetEscapeHTML(false)
	}
	var nodes []nodeLine
	o := offline.Options{RuntimeDirs: open.runtimeDirs}
	if slices.Contains(what, "nodes") {
		o.EachNode = func(ref offline.NodeRef, n *ondisk.Node) { nodes = append(nodes, newNodeLine(ref, n)) }
	}
	set, err := offline.Open(ctx, open.cache, o)
	defer func() { set.Close() }() // it is there after an error too
	noteMapped(env, &set.Mapped)
	if set.Super != nil {
		if slices.Contains(what, "superblock") {
			shown, err := offline.Show(open.cache)
			if err != nil {
				return err
			}
			d.superblock(shown)
		}
		for _, part := range dumpParts[1:] {
			if slices.Contains(what, part) {
				d.part(part, set, all)
			}
			if part == "nodes" {
				for i := range nodes {
					d.node(set, &nodes[i])
				}
			}
		}
	}
	if ferr := d.w.Flush(); ferr != nil {
		return ferr
	}
	return err
}

func (d *dumper) part(part string, s *offline.Set, all bool) {
	switch part {
	case "journal":
		d.journal(s)
	case "uuids":
		d.uuids(s)
	case "btree":
		for i := range s.Extents {
			if e := &s.Extents[i]; all || e.Live() {
				d.extent(e)
			}
		}
	case "buckets":
		d.buckets(s)
	}
}

func (d *dumper) superblock(shown *offline.Shown) {
	d.print(struct {
		Type string `json:"type"`
		*offline.Shown
	}{"superblock", shown}, "%s", shown.Text())
}

type keyLine struct {
	Type   string `json:"type"`
	Inode  uint32 `json:"inode"`
	Start  uint64 `json:"start"` // sectors
	Size   uint32 `json:"sectors"`
	Dirty  bool   `json:"dirty"`
	Dev    uint16 `json:"dev"`
	Sector uint64 `json:"sector"`
	Gen    uint8  `json:"gen"`
	State  string `json:"state"` // "live", "stale", "invalidation", "placeholder", "bad"
}

func newKeyLine(kind string, k *ondisk.Key) keyLine {
	l := keyLine{Type: kind, Inode: k.Inode(), Start: k.Start(), Size: k.Size(), Dirty: k.Dirty(), State: "live"}
	switch {
	case k.Ptrs() == 0:
		l.State = "invalidation"
	case k.IsCheck():
		l.State = "placeholder"
	default:
		l.Dev, l.Sector, l.Gen = k.P[0].Dev(), k.P[0].Sector(), k.P[0].Gen()
	}
	return l
}

func (d *dumper) extent(e *offline.Extent) {
	k := e.Key()
	l := newKeyLine("key", &k)
	if l.State == "live" && !e.Live() {
		if l.State = "bad"; e.Stale() {
			l.State = "stale"
		}
	}
	if l.State == "live" {
		d.print(l, "%v", k)
	} else {
		d.print(l, "%v %s", k, l.State)
	}
}

func (d *dumper) journal(s *offline.Set) {
	if len(s.Entries) == 0 {
		return
	}
	n := &s.Newest
	d.print(struct {
		Type    string `json:"type"`
		Newest  uint64 `json:"newest"`
		LastSeq uint64 `json:"last_seq"`
		Root    string `json:"btree_root"`
		Level   uint16 `json:"btree_level"`
		UUIDs   string `json:"uuid_bucket"`
		Prio    uint64 `json:"prio_bucket"`
	}{"journal", n.Seq, n.LastSeq, bucketRef(s, &n.Root), n.Level, bucketRef(s, &n.UUIDBucket), n.PrioBucket[0]},
		"journal: newest entry %d, needed from %d; root in %s at level %d, uuid array in %s, prio sets from bucket %d",
		n.Seq, n.LastSeq, bucketRef(s, &n.Root), n.Level, bucketRef(s, &n.UUIDBucket), n.PrioBucket[0])
	for _, e := range s.Entries {
		needed := e.Seq >= n.LastSeq
		d.print(struct {
			Type    string `json:"type"`
			Seq     uint64 `json:"seq"`
			LastSeq uint64 `json:"last_seq"`
			Index   int    `json:"journal_bucket"`
			Sector  uint64 `json:"sector"`
			Bytes   int    `json:"bytes"`
			Needed  bool   `json:"needed"`
		}{"entry", e.Seq, e.LastSeq, e.Index, e.Sector, e.Bytes, needed},
			"entry %d: last_seq %d, journal bucket %d, sector %d, %d bytes%s", e.Seq, e.LastSeq, e.Index, e.Sector, e.Bytes, map[bool]string{true: ", needed"}[needed])
		if !needed {
			continue
		}
		keys, err := s.EntryKeys(e)
		for i := range keys {
			d.entryKey(e.Seq, &keys[i])
		}
		if err != nil {
			d.print(struct {
				Type  string `json:"type"`
				Seq   uint64 `json:"seq"`
				Error string `json:"error"`
			}{"error", e.Seq, err.Error()}, "  %v", err)
		}
	}
	for i := range s.Mapped.Entries {
		e := &s.Mapped.Entries[i]
		d.print(struct {
			Type string `json:"type"`
			Seq  uint64 `json:"seq"`
			File string `json:"file"`
		}{"mapped_entry", e.Seq, s.Mapped.Path}, "entry %d: mapped, in %s, needed", e.Seq, s.Mapped.Path)
		for j := range e.Keys {
			d.entryKey(e.Seq, &e.Keys[j])
		}
	}
}

// entryKey prints a key of a journal entry.
func (d *dumper) entryKey(seq uint64, k *ondisk.Key) {
	d.print(struct {
		keyLine
		Seq uint64 `json:"seq"`
	}{newKeyLine("entry_key", k), seq}, "  %v", *k)
}

// bucketRef names the bucket that a reference to metadata points to.
func bucketRef(s *offline.Set, k *ondisk.Key) string {
	return fmt.Sprintf("bucket %d gen %d, %d sectors", s.Geo.Bucket(k.P[0].Sector()), k.P[0].Gen(), k.Size())
}

func (d *dumper) uuids(s *offline.Set) {
	for i := range s.Slots {
		e := &s.Slots[i]
		if e.Unused() {
			continue
		}
		kind := "backing device"
		switch {
		case e.Retired():
			kind = "retired"
		case e.FlashOnly():
			kind = "flash-only volume"
		}
		d.print(struct {
			Type        string      `json:"type"`
			Slot        int         `json:"slot"`
			Kind        string      `json:"kind"`
			UUID        ondisk.UUID `json:"uuid"`
			Label       string      `json:"label"`
			FirstReg    uint32      `json:"first_reg"`
			LastReg     uint32      `json:"last_reg"`
			Invalidated uint32      `json:"invalidated"`
			Flags       uint32      `json:"flags"`
			Sectors     uint64      `json:"sectors"`
		}{"slot", i, kind, e.UUID, e.LabelString(), e.FirstReg, e.LastReg, e.Invalidated, e.Flags, e.Sectors},
			"slot %d: %s, uuid %v, label %q, first attached %d, last %d, retired %d, flags %#x, %d sectors",
			i, kind, e.UUID, e.LabelString(), e.FirstReg, e.LastReg, e.Invalidated, e.Flags, e.Sectors)
	}
}

type setLine struct {
	Block   uint32 `json:"block"`
	Version uint32 `json:"version"`
	Words   uint32 `json:"words"`
}

type nodeLine struct {
	Type   string    `json:"type"`
	Level  int       `json:"level"`
	Bucket uint64    `json:"bucket"`
	Gen    uint8     `json:"gen"`
	Key    string    `json:"key"`
	Seq    string    `json:"seq"`
	Blocks uint32    `json:"blocks_written"`
	Sets   []setLine `json:"sets"`
	Error  string    `json:"error,omitempty"`

	sector uint64
}

func newNodeLine(ref offline.NodeRef, n *ondisk.Node) nodeLine {
	l := nodeLine{Type: "node", Level: ref.Level, Gen: ref.Key.P[0].Gen(), Key: ref.Key.String(), Seq: fmt.Sprintf("%016x", n.Seq), Blocks: n.Used, sector: ref.Sector()}
	for i := range n.Sets {
		l.Sets = append(l.Sets, setLine{n.Sets[i].Block, n.Sets[i].Version, n.Sets[i].Keys})
	}
	if n.Err != nil {
		l.Error = n.Err.Error()
	}
	return l
}

func (d *dumper) node(s *offline.Set, l *nodeLine) {
	l.Bucket = s.Geo.Bucket(l.sector)
	sets := make([]string, len(l.Sets))
	for i, x := range l.Sets {
		sets[i] = fmt.Sprintf("%d:%d", x.Block, x.Words)
	}
	suffix := ""
	if l.Error != "" {
		suffix = "; " + l.Error
	}
	d.print(l, "node level %d bucket %d gen %d key %s seq %s: %d blocks, sets (block:words) %s%s", l.Level, l.Bucket, l.Gen, l.Key, l.Seq, l.Blocks, strings.Join(sets, " "), suffix)
}

func (d *dumper) buckets(s *offline.Set) {
	for b := range s.Role {
		lag := ondisk.GenAfter(s.Gen[b], s.OldestGen[b])
		d.print(struct {
			Type   string       `json:"type"`
			Bucket int          `json:"bucket"`
			Role   offline.Role `json:"role"`
			Gen    uint8        `json:"gen"`
			Disk   uint8        `json:"prio_set_gen"`
			Lag    uint8        `json:"oldest_pointer_lag"`
			Prio   uint16       `json:"prio"`
			Used   uint32       `json:"live_sectors"`
		}{"bucket", b, s.Role[b], s.Gen[b], s.DiskGen[b], lag, s.Prio[b], s.Used[b]},
			"bucket %d: %v, gen %d (%d in the prio set, oldest pointer %d behind), prio %d, %d live sectors", b, s.Role[b], s.Gen[b], s.DiskGen[b], lag, s.Prio[b], s.Used[b])
	}
}
