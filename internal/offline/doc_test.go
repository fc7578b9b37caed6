package offline

import (
	"flag"
	"fmt"
	"os"
	"sort"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the table of codes to docs/check.md")

// TestCodesAreDocumented holds the table in docs/check.md against the codes.
func TestCodesAreDocumented(t *testing.T) {
	const (
		path  = "../../docs/check.md"
		begin = "<!-- codes: go test ./internal/offline -run Documented -update -->\n"
	)
	have, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text, _, ok := strings.Cut(string(have), begin)
	if !ok {
		t.Fatalf("%s has no line %q", path, begin)
	}
	byName := make([]string, 0, len(codes))
	for c, e := range codes {
		byName = append(byName, string(c))
		if e.text == "" || !strings.HasSuffix(e.text, ".") {
			t.Errorf("%s is not explained in a sentence: %q", c, e.text)
		}
	}
	sort.Strings(byName)
	table := "\n| code | severity | meaning |\n|---|---|---|\n"
	for _, n := range byName {
		table += fmt.Sprintf("| `%s` | %v | %s |\n", n, Code(n).Severity(), Code(n).Explain())
	}
	want := text + begin + table
	if string(have) == want {
		return
	}
	if !*update {
		t.Fatalf("%s is not up to date: run this test with -update", path)
	}
	if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
		t.Fatal(err)
	}
}
