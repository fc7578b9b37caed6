package journal

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/rt"
)

var rewrite = flag.Bool("rewrite", false, "write what the commands in testdata print into the files")

// TestOrder runs the scripts in testdata: each command is followed by the writes and flushes that it causes, in their
// order, and what the entries among them say.
func TestOrder(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	must(t, err)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			b, err := os.ReadFile(file)
			must(t, err)
			var got strings.Builder
			simulate(t, 1, func(r *rt.Runtime) {
				s := &script{t: t, r: r, ctx: context.Background(), l: smallest}
				expected := false
				for _, line := range strings.SplitAfter(string(b), "\n") {
					switch {
					case strings.HasPrefix(line, "#"):
						got.WriteString(line)
						expected = false
					case strings.TrimSpace(line) == "":
						if !expected {
							got.WriteString(line)
						}
						expected = false
					case strings.HasPrefix(line, "  "):
						expected = true
					default:
						got.WriteString(line)
						got.WriteString(s.run(strings.Fields(line)))
						got.WriteString("\n")
						expected = true
					}
				}
				s.end()
			})
			out := strings.TrimRight(got.String(), "\n") + "\n"
			if *rewrite {
				must(t, os.WriteFile(file, []byte(out), 0o644))
			} else if out != string(b) {
				t.Errorf("%s prints now, with -rewrite into the file:\n%s", file, out)
			}
		})
	}
}

// A script is a set that commands are given to.
type script struct {
	t      testing.TB
	r      *rt.Runtime
	ctx    context.Context
	l      layout
	disk   *blockdev.MemoryDevice
	crash  *blockdev.Crashable
	log    *blockdev.TraceLog
	w      *world
	m      *model
	shared *Shared
}

// build puts a world on the disk.
func (s *script) build() {
	var err error
	s.crash, err = blockdev.NewCrashable(s.disk, blockdev.CrashableOptions{})
	must(s.t, err)
	s.log = blockdev.NewTraceLog(s.r)
	trace := blockdev.NewTracing(blockdev.NewDelaying(s.crash, blockdev.Latency{Write: time.Millisecond, Flush: time.Millisecond}), s.log,
		blockdev.TraceOptions{Only: func(r *blockdev.Request) bool { return r.Op != blockdev.OpRead }})
	s.w = newWorld(s.t, trace, s.m, 1, s.shared)
	s.w.check.resume(s.disk.Bytes())
}

func (s *script) end() {
	if s.w != nil {
		_ = s.w.close(s.ctx)
		must(s.t, s.crash.Close())
		s.w = nil
	}
}

// run carries out one command and returns what it prints, each line indented.
func (s *script) run(args []string) string {
	var said []string
	number := func(i int) int {
		n, err := strconv.Atoi(args[i])
		must(s.t, err)
		return n
	}
	switch args[0] {
	case "format": // [mapping] [buckets=N]: a new set
		s.end()
		s.m, s.shared = newModel(s.l), nil
		for _, a := range args[1:] {
			if a == "mapping" {
				s.shared = NewShared()
			}
		}
		s.disk = newDisk(s.t, s.l, s.r)
		s.build()
		must(s.t, s.w.format(s.ctx))
	case "append": // LEAF KEYS
		must(s.t, s.w.append(s.ctx, number(1), number(2), false))
		said = append(said, "acknowledged")
	case "flush": // [N]: by so many at the same time
		n := 1
		if len(args) > 1 {
			n = number(1)
		}
		var g rt.WaitGroup
		g.Init(s.r)
		for range n {
			g.Go("flush", func() { must(s.t, s.w.sync(s.ctx)) })
		}
		g.Wait()
	case "data": // the write of a block of data
		must(s.t, s.w.io.WithPurpose(blockdev.ForData).WriteAt(make([]byte, 512), 1<<20, 0))
	case "root": // [urgent]
		must(s.t, s.w.changeRoot(s.ctx, false, len(args) > 1))
	case "leaf": // LEAF [split]
		must(s.t, s.w.writeLeaf(s.ctx, number(1), len(args) > 2, false))
	case "sleep":
		d, err := time.ParseDuration(args[1])
		must(s.t, err)
		s.r.Sleep(d)
	case "hold": // leaves are not written until "let go"
		s.w.hold = true
	case "let": // go
		s.w.hold = false
	case "fill": // LEAF KEYS: appends and flushes until there is no room
		n := 0
		for ; ; n++ {
			short, cancel := s.r.WithTimeout(s.ctx, 300*time.Millisecond)
			err := s.w.append(short, number(1), number(2), false)
			cancel()
			if err != nil {
				break
			}
			must(s.t, s.w.sync(s.ctx))
		}
		s.log.Take()
		said = append(said, fmt.Sprintf("%d times", n))
	case "stats":
		st := s.w.j.Stats()
		said = append(said, fmt.Sprintf("open %d, durable %d, oldest pinned %d, last_seq %d, %d of %d blocks, %d entries, %d of them empty, reserved %d",
			st.Seq, st.Durable, st.Oldest, st.LastSeq, st.UsedBlocks, st.Blocks, st.Entries, st.EmptyEntries, st.Reserved))
	case "stop":
		s.end2()
	case "cut", "kill": // what is flushed is there, or what was written and the mapping
		s.crash.Power().Cut()
		disk, err := s.crash.Crash(rand.New(rand.NewPCG(1, 1)), map[string]blockdev.Strength{"cut": blockdev.Torn, "kill": blockdev.Prefix}[args[0]])
		must(s.t, err)
		if s.shared != nil {
			s.shared = s.shared.Clone()
		}
		if args[0] == "cut" {
			s.shared = NewShared()
		}
		s.m = s.m.clone()
		s.end()
		s.disk = disk
		return ""
	case "open": // reads and replays
		s.build()
		floor := s.m.synced
		if s.shared != nil && s.shared.check.Load() != 0 {
			floor = s.m.appended
		}
		rec, err := s.w.read(s.ctx, floor)
		must(s.t, err)
		said = append(said, fmt.Sprintf("entries %d-%d, %d of them in the mapping", rec.Entries[0].Seq, rec.Entries[len(rec.Entries)-1].Seq, rec.Mapped))
		must(s.t, s.w.open(s.ctx, rec))
	default:
		s.t.Fatalf("no command %q", args[0])
	}
	return s.picture(said)
}

// end2 stops cleanly and keeps the disk.
func (s *script) end2() {
	must(s.t, s.w.close(s.ctx))
	s.w = nil
}

var journalWrite = regexp.MustCompile(`^write (\d+)\+(\d+) journal fua$`)

// picture turns the trace into text, with places in the ring instead of bytes.
func (s *script) picture(said []string) string {
	var b strings.Builder
	for line := range strings.Lines(s.log.Take()) {
		line = strings.TrimSpace(line)
		if m := journalWrite.FindStringSubmatch(line); m != nil {
			off, _ := strconv.ParseInt(m[1], 10, 64)
			geo := ondisk.NewGeometry(s.l.superblock())
			j, err := ondisk.DecodeJSet(s.disk.Bytes()[off:][:geo.BucketBytes()-off%geo.BucketBytes()], &geo)
			must(s.t, err)
			line = fmt.Sprintf("write journal fua, bucket %d byte %d +%s: entry %d, last_seq %d, %d words, root %d",
				off/geo.BucketBytes()-int64(geo.FirstBucket), off%geo.BucketBytes(), m[2], j.Seq, j.LastSeq, j.Keys, j.PrioBucket[0]-202)
		}
		fmt.Fprintf(&b, "  %s\n", line)
	}
	for _, line := range said {
		fmt.Fprintf(&b, "  %s\n", line)
	}
	return b.String()
}
