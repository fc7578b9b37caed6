package pace_test

import (
	"bufio"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/pace"
)

var update = flag.Bool("update", false, "write what there is as expected")

// TestRecordedCollections runs each policy over inputs that stand in testdata/inputs, as a collection sees them, and compares with
// what stands beside them: the slice, whether it yields, how long it sleeps. "finish" ends a collection.
func TestRecordedCollections(t *testing.T) {
	in, err := os.ReadFile(filepath.Join("testdata", "inputs"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range pace.Names {
		t.Run(name, func(t *testing.T) {
			p := pace.New(name)
			var out strings.Builder
			for lines := bufio.NewScanner(strings.NewReader(string(in))); lines.Scan(); {
				line := lines.Text()
				switch {
				case line == "" || strings.HasPrefix(line, "#"):
					fmt.Fprintln(&out, line)
					continue
				case line == "finish":
					p.Finished()
					fmt.Fprintln(&out, line)
					continue
				}
				var s pace.State
				var interval, elapsed, slept string
				_, err := fmt.Sscanf(line, "nodes=%d seen=%d inflight=%d waiters=%d interval=%s elapsed=%s slept=%s",
					&s.Nodes, &s.Seen, &s.Inflight, &s.Waiters, &interval, &elapsed, &slept)
				if err != nil {
					t.Fatalf("%q: %v", line, err)
				}
				for _, d := range []struct {
					to   *time.Duration
					text string
				}{{&s.Interval, interval}, {&s.Elapsed, elapsed}, {&s.Slept, slept}} {
					if *d.to, err = time.ParseDuration(d.text); err != nil {
						t.Fatal(err)
					}
				}
				fmt.Fprintf(&out, "%s\n    slice %d, yields %v, sleeps %v\n", line, p.Slice(s), p.Yield(s), p.Sleep(s))
			}
			fmt.Fprintf(&out, "allocates while it is on: %v\n", p.Allocates())
			golden := filepath.Join("testdata", name)
			if *update {
				if err := os.WriteFile(golden, []byte(out.String()), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if out.String() != string(want) {
				t.Errorf("%s differs; got\n%s", golden, out.String())
			}
		})
	}
}

func TestNoPolicyOfThatName(t *testing.T) {
	if p := pace.New("exact"); p != nil {
		t.Errorf("exact is %T: it does not collect", p)
	}
}
