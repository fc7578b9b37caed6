package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/ubcache/ubcache/internal/offline"
)

// newCheckCommand makes "ubcache check".
func newCheckCommand(env *environment) *cobra.Command {
	var devices deviceFlags
	var asJSON, data bool
	cmd := &cobra.Command{
		Use:   "check --cache DEV [--backing DEV]... [--runtime-dir FOLDER] [--data] [--json]",
		Short: "Read everything, report everything, change nothing",
		Args:  wantArgs(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if devices.Cache == "" {
				return usageErrorf("which cache device? Give --cache DEV")
			}
			return check(cmd, env, &devices, data, asJSON)
		},
	}
	devices.add(cmd, roleCache, roleBacking)
	runtimeDirFlag(cmd, &devices.RuntimeDir)
	cmd.Flags().BoolVar(&data, "data", false, "read all cached data too, to find what the device cannot read any more")
	jsonFlag(cmd, &asJSON)
	return describe(cmd, help{
		long: `
Read all metadata of a cache set at rest - superblocks, journal, generations, uuids, the whole tree - hold the parts
against each other and against the backing devices that are given, and report all that is found. Nothing is changed.

Each finding is a line: severity, code, device and place, what is there. Severities, from the least:

  harmless      what the kernel and this program leave behind in normal operation, after a power cut too
  degraded      no data is lost; something works less well, or a kernel may refuse the set until repaired
  data at risk  some data is lost or cannot be told from older data; the places are named
  fatal         the set cannot be opened, not even for reading

` + runtimeDirHelp + `

docs/check.md explains every code.`,
		example: "ubcache check --cache /dev/nvme0n1p4 --backing /dev/sdb --backing /dev/sdc",
		exit: map[int]string{
			exitDone:   "nothing above harmless was found",
			exitFailed: "something above harmless was found, or the check failed",
		},
	})
}

// A checkReport is the JSON of a check.
type checkReport struct {
	Cache    string            `json:"cache"`
	SetUUID  string            `json:"set_uuid,omitempty"`
	Worst    *offline.Severity `json:"worst"` // null: nothing was found at all
	Findings []offline.Finding `json:"findings"`
	Stats    offline.Stats     `json:"totals"`
	Buckets  map[string]int64  `json:"buckets,omitempty"` // by role
}

func check(cmd *cobra.Command, env *environment, d *deviceFlags, data, asJSON bool) error {
	open, err := openDevices(env, d)
	if err != nil {
		return err
	}
	defer open.Close()
	nodes, bytes := newProgress(env, "tree nodes", false), newProgress(env, "cached data", true)
	o := offline.CheckOptions{Data: data, DataProgress: bytes.set}
	o.Progress, o.RuntimeDirs = nodes.set, open.runtimeDirs
	set, _, err := offline.Check(cmd.Context(), open.cache, open.backings, o)
	defer func() { set.Close() }() // it is there after an error too
	nodes.end()
	bytes.end()
	noteMapped(env, &set.Mapped)
	if err != nil {
		return err
	}
	r := checkReport{Cache: d.Cache, Findings: set.Report.Findings(), Stats: set.Stats, Buckets: bucketCounts(set)}
	if set.Super != nil {
		r.SetUUID = set.Super.SetUUID.String()
	}
	worst, found := set.Report.Worst()
	if found {
		r.Worst = &worst
	}
	if asJSON {
		if r.Findings == nil {
			r.Findings = []offline.Finding{}
		}
		if err := writeJSON(env.stdout, r); err != nil {
			return err
		}
	} else {
		printCheck(env.stdout, &r)
	}
	if found && worst > offline.Harmless {
		return silentError(exitFailed)
	}
	return nil
}

func printCheck(w io.Writer, r *checkReport) {
	for i := range r.Findings {
		fmt.Fprintln(w, r.Findings[i].String())
	}
	s := &r.Stats
	if s.Nodes > 0 {
		fmt.Fprintf(w, "set %s: %d levels, %d nodes, %d keys; cached %d bytes in %d extents, of which dirty %d bytes in %d; %d keys replayed from the journal\n",
			r.SetUUID, s.Depth, s.Nodes, s.Keys, s.CachedBytes, s.Extents, s.DirtyBytes, s.DirtyExtents, s.ReplayedKeys)
	}
	switch {
	case r.Worst == nil:
		fmt.Fprintln(w, "result: nothing found")
	case *r.Worst == offline.Harmless:
		fmt.Fprintln(w, "result: nothing above harmless")
	default:
		n := 0
		for _, f := range r.Findings {
			if f.Severity > offline.Harmless {
				n++
			}
		}
		fmt.Fprintf(w, "result: %d findings above harmless, the worst is: %v\n", n, *r.Worst)
	}
}

// bucketCounts counts the buckets of each role.
func bucketCounts(s *offline.Set) map[string]int64 {
	if len(s.Role) == 0 {
		return nil
	}
	n := make(map[string]int64)
	for _, r := range s.Role {
		n[r.String()]++
	}
	return n
}
