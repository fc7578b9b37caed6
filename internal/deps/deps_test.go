package deps

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/ubcache/ubcache"

// A rule says what the files of one package, except _test.go, may import besides the standard library.
type rule struct {
	pkg    string   // directory in the module; "bench/..." stands for all below bench
	ours   []string // packages of this module; nil: all that come earlier in the table
	except []string // of those, the ones it must not import
	ext    []string // modules or import paths of others; "*" stands for any, "golang.org/x/*" for a prefix
	tests  bool     // imported by tests only, and may import package testing
	leaf   bool     // imported by nothing
	why    string
}

var (
	none = []string{}
	sys  = []string{"golang.org/x/sys", "golang.org/x/sync"} // all that the public package may pull into a user's build
)

// stack is ordered: a package may import those above it, unless its rule says less.
var stack = []rule{
	{
		pkg: "internal/ondisk", ours: none, ext: none,
		why: "the format is bytes to structs and back, so that any tool can use it: no I/O, no clock",
	},
	{
		pkg: "internal/invariant", ours: none, ext: none,
		why: "anything may check its invariants",
	},
	{
		pkg: "internal/rt", ours: none, ext: none,
		why: "all else stands on it, and what it imports could wait behind the simulation's back",
	},
	{
		pkg: "internal/uring", ours: none, ext: sys,
		why: "system calls and queues, of use to any program",
	},
	{
		pkg: "internal/blockdev", ext: sys,
		why: "devices know nothing of what is stored on them",
	},
	{
		pkg: "internal/blockdev/devtest", ours: []string{"internal/rt", "internal/blockdev"}, ext: []string{"pgregory.net/rapid"}, tests: true,
		why: "the suite that every device passes, also those of other packages",
	},
	{
		pkg: "internal/bucket", ext: sys,
		why: "allocation is asked, it does not ask",
	},
	{
		pkg: "internal/journal", except: []string{"internal/bucket"}, ext: sys,
		why: "the journal's buckets are fixed at format: it must never wait for allocation, which waits for the journal",
	},
	{
		pkg: "internal/btree", ext: sys,
		why: "a tree needs buckets and the journal, and nothing of sets and volumes",
	},
	{
		pkg: "internal/pace", ours: none, ext: none,
		why: "policies are functions of plain values, so that tables test them",
	},
	{
		pkg: "internal/cacheset", ext: sys,
		why: "joins the parts above",
	},
	{
		pkg: "internal/writeback", except: []string{"internal/cacheset"}, ext: sys,
		why: "policy alone: tested without a set",
	},
	{
		pkg: "internal/volume", ext: sys,
		why: "the request path uses the engine; front ends and the public API use it",
	},
	{
		pkg: "internal/offline", ours: []string{"internal/ondisk", "internal/rt", "internal/blockdev"}, ext: []string{"golang.org/x/*"},
		why: "a checker that shared the engine's code would share its mistakes",
	},
	{
		pkg: ".", ext: sys,
		why: "who embeds the cache gets the engine, not our command's dependencies",
	},
	{
		pkg: "internal/nbd", ours: []string{"internal/rt", "internal/blockdev"}, ext: sys,
		why: "a protocol over the Export interface that it declares: it can serve anything, and the engine cannot leak into it",
	},
	{
		pkg: "internal/ublk", ours: []string{"internal/rt", "internal/uring", "internal/blockdev"}, ext: sys,
		why: "as nbd; its commands need rings with entries of 128 bytes",
	},
	{
		pkg: "internal/control", ours: none, ext: none,
		why: "the protocol of the daemon's socket; clients such as csi take it without the engine",
	},
	{
		pkg: "internal/daemon", ext: []string{"*"},
		why: "puts everything together, and is alone in knowing metrics libraries and systemd",
	},
	{
		pkg: "internal/csi", ours: []string{"internal/control"}, ext: []string{"*"},
		why: "a client of the daemon, in a binary of its own",
	},
	{
		pkg: "internal/lab", ours: []string{".", "internal/rt", "internal/blockdev"}, ext: []string{"*"},
		why: "experiments measure what users get: the public API, on simulated time and devices",
	},
	{
		pkg: "internal/sysfs", ours: []string{"internal/control"}, ext: []string{"*"},
		why: "shows what the daemon tells, as any other client could",
	},
	{
		pkg: "internal/sim", ext: []string{"pgregory.net/rapid", "github.com/anishathalye/porcupine"}, tests: true,
		why: "checkers and workloads for tests: nothing that ships depends on them",
	},
	{
		pkg: "internal/sim/made", ext: none, tests: true,
		why: "sets in states that are hard to come to, for tests and for real kernels: made with the engine, without its public API",
		ours: []string{
			"internal/ondisk", "internal/rt", "internal/blockdev", "internal/journal", "internal/bucket", "internal/cacheset", "internal/writeback",
			"internal/volume", "internal/offline",
		},
	},
	{
		pkg: "internal/fixture", ours: []string{"internal/ondisk", "internal/rt", "internal/blockdev"}, ext: []string{"github.com/klauspost/compress"},
		why: "images for tests, and for the demo, hence without testing libraries; they were made by kernels, not by the engine",
	},
	{
		pkg: "cmd/ubcache", ext: []string{"*"}, leaf: true,
		ours: []string{
			".", "internal/ondisk", "internal/rt", "internal/blockdev", "internal/nbd", "internal/offline",
			"internal/control", "internal/daemon", "internal/lab",
			"internal/fixture", // for the demo
		},
		why: "flags, output and exit codes: what it does, it does through the public API, the daemon or the offline tools",
	},
	{
		pkg: "interop/...", ext: []string{"*"}, leaf: true,
		why: "programs that run beside a real kernel",
	},
	{
		pkg: "bench/...", ext: []string{"*"}, leaf: true,
		why: "programs that measure parts by themselves",
	},
	{
		pkg: "internal/deps", ours: none, ext: none, leaf: true,
		why: "these tests",
	},
}

// engine are the packages that run on whatever runtime they are given.
var engine = []string{
	"internal/bucket", "internal/journal", "internal/btree", "internal/cacheset", "internal/writeback", "internal/volume",
}

// testLibraries are imports that would put test code into what ships.
var testLibraries = []string{
	"testing", "pgregory.net/rapid", "github.com/rogpeppe/go-internal", "github.com/cockroachdb/datadriven",
	"go.uber.org/goleak", "github.com/google/go-cmp", "github.com/anishathalye/porcupine", "github.com/chromedp/chromedp",
}

// find returns the position of a package's rule, -1 if it has none.
func find(pkg string) int {
	return slices.IndexFunc(stack, func(r rule) bool {
		tree, all := strings.CutSuffix(r.pkg, "/...")
		return pkg == tree || all && strings.HasPrefix(pkg, tree+"/")
	})
}

// matches reports whether an import path is one of the modules or prefixes of a list, or lies in one.
func matches(list []string, imported string) bool {
	return slices.ContainsFunc(list, func(m string) bool {
		prefix, star := strings.CutSuffix(m, "*")
		return imported == m || star && strings.HasPrefix(imported, prefix) || strings.HasPrefix(imported, m+"/")
	})
}

// fault says why a file of package pkg, which is not a test, must not import imported; "" if it may.
func fault(pkg, imported string) string {
	at := find(pkg)
	if at < 0 {
		return "package " + pkg + " is not in the table: add it to internal/deps/deps_test.go, with the reason for what it may import"
	}
	r := stack[at]
	if own, ok := ourPackage(imported); ok {
		to := find(own)
		switch {
		case to < 0:
			return "package " + own + " is not in the table: add it to internal/deps/deps_test.go"
		case to == at && strings.HasSuffix(r.pkg, "/..."):
			return "" // parts of one tree
		case stack[to].leaf:
			return own + " is imported by nothing"
		case stack[to].tests && !r.tests:
			return own + " is imported by tests only: " + stack[to].why
		case r.ours != nil && !slices.Contains(r.ours, own):
			return pkg + " must not import " + own + ": " + r.why
		case slices.Contains(r.except, own):
			return pkg + " must not import " + own + ": " + r.why
		case r.ours == nil && to >= at:
			return own + " stands below " + pkg + " in the stack: " + r.why
		}
		return ""
	}
	if first, _, _ := strings.Cut(imported, "/"); !strings.Contains(first, ".") {
		return "" // the standard library
	}
	if !matches(r.ext, imported) {
		return pkg + " must not import " + imported + ": " + r.why
	}
	return ""
}

// ourPackage returns the directory of a package of this module.
func ourPackage(imported string) (dir string, ok bool) {
	if imported == module {
		return ".", true
	}
	return strings.CutPrefix(imported, module+"/")
}

// A source is one parsed file of the tree.
type source struct {
	pkg  string // its directory in the module, "." for the root
	path string
	test bool
	file *ast.File
	fset *token.FileSet
}

func (s *source) imports() []string {
	var list []string
	for _, i := range s.file.Imports {
		p, _ := strconv.Unquote(i.Path.Value)
		list = append(list, p)
	}
	return list
}

// tree returns the Go files of the module, whatever their build tags.
func tree(t *testing.T) []*source {
	t.Helper()
	const root = "../.."
	fset := token.NewFileSet()
	var list []*source
	err := filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			if os.IsNotExist(err) {
				return nil // gone since its directory was read
			}
			return err
		}
		if d.IsDir() {
			if name == root {
				return nil
			}
			if base := d.Name(); base == "testdata" || base[0] == '.' || base[0] == '_' {
				return filepath.SkipDir
			}
			if _, err := os.Stat(filepath.Join(name, "go.mod")); err == nil {
				return filepath.SkipDir // another module
			}
			return nil
		}
		if filepath.Ext(name) != ".go" || d.Name()[0] == '.' {
			return nil
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		f, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		list = append(list, &source{
			pkg: path.Dir(rel), path: rel, test: strings.HasSuffix(rel, "_test.go"), file: f, fset: fset,
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func TestImportsGoUpTheStack(t *testing.T) {
	for _, s := range tree(t) {
		if find(s.pkg) < 0 {
			t.Errorf("%s: %s", s.path, fault(s.pkg, ""))
			continue
		}
		if s.test {
			continue // what tests import is limited by the compiler alone
		}
		for _, i := range s.imports() {
			if f := fault(s.pkg, i); f != "" {
				t.Errorf("%s: %s", s.path, f)
			}
		}
	}
}

func TestEngineUsesItsRuntime(t *testing.T) {
	for _, s := range tree(t) {
		if s.test || !slices.Contains(engine, s.pkg) {
			continue
		}
		for _, f := range runtimeFaults(s) {
			t.Errorf("%s: the simulation of internal/rt does not see this, so histories would differ or hang", f)
		}
	}
}

func TestNoTestLibrariesInWhatShips(t *testing.T) {
	for _, s := range tree(t) {
		if s.test || !strings.HasPrefix(s.pkg, "internal/") && s.pkg != "." && !strings.HasPrefix(s.pkg, "cmd/") {
			continue
		}
		if at := find(s.pkg); at >= 0 && stack[at].tests {
			continue
		}
		for _, i := range s.imports() {
			if matches(testLibraries, i) {
				t.Errorf("%s imports %s: keep it to _test.go files", s.path, i)
			}
		}
	}
}

// What the engine may not import, and what of two packages it may use.
var (
	notInEngine = []string{"sync", "math/rand", "math/rand/v2", "crypto/rand"}

	timeInEngine = []string{
		"Duration", "Nanosecond", "Microsecond", "Millisecond", "Second", "Minute", "Hour",
		"Time", "Unix", // what WallTime returns, and the stored form of it
	}
	contextNotInEngine = []string{"WithTimeout", "WithTimeoutCause", "WithDeadline", "WithDeadlineCause", "AfterFunc"}
)

// runtimeFaults lists what a file uses for time, randomness, concurrency and waiting that does not come from
// internal/rt.
func runtimeFaults(s *source) []string {
	var faults []string
	add := func(n ast.Node, format string, args ...any) {
		faults = append(faults, fmt.Sprintf("%s:%d: %s", s.path, s.fset.Position(n.Pos()).Line, fmt.Sprintf(format, args...)))
	}
	names := map[string]string{} // of imported packages in this file
	for _, i := range s.file.Imports {
		p, _ := strconv.Unquote(i.Path.Value)
		if slices.Contains(notInEngine, p) { // sync/atomic is fine: it never waits
			add(i, "imports %s", p)
		}
		name := path.Base(p)
		if i.Name != nil {
			name = i.Name.Name
		}
		if name == "." {
			add(i, "imports %s without a name", p)
		}
		names[name] = p
	}
	ast.Inspect(s.file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectStmt:
			add(n, "select")
		case *ast.GoStmt:
			add(n, "go statement")
		case *ast.ChanType:
			add(n, "channel")
		case *ast.SendStmt:
			add(n, "channel")
		case *ast.UnaryExpr:
			if n.Op == token.ARROW {
				add(n, "channel")
			}
		case *ast.SelectorExpr:
			x, ok := n.X.(*ast.Ident)
			if !ok {
				break
			}
			switch p := names[x.Name]; {
			case p == "time" && !slices.Contains(timeInEngine, n.Sel.Name),
				p == "context" && slices.Contains(contextNotInEngine, n.Sel.Name):
				add(n, "%s.%s", p, n.Sel.Name)
			}
		}
		return true
	})
	return faults
}

func TestTableItself(t *testing.T) {
	seen := map[string]bool{}
	for i, r := range stack {
		if r.why == "" || seen[r.pkg] {
			t.Errorf("%s: twice, or without a reason", r.pkg)
		}
		seen[r.pkg] = true
		for _, o := range append(slices.Clone(r.ours), r.except...) {
			if j := find(o); j < 0 || j >= i {
				t.Errorf("%s names %s, which does not stand above it", r.pkg, o)
			}
		}
	}
	for _, e := range engine {
		if !seen[e] {
			t.Errorf("%s is in engine but not in the table", e)
		}
	}
}

func TestFault(t *testing.T) {
	for _, c := range []struct {
		pkg, imported string
		ok            bool
	}{
		{"internal/ondisk", "encoding/binary", true},
		{"internal/ondisk", "golang.org/x/sys/cpu", false},
		{"internal/ondisk", module + "/internal/rt", false},
		{"internal/uring", "golang.org/x/sys/unix", true},
		{"internal/blockdev", module + "/internal/uring", true},
		{"internal/bucket", module + "/internal/journal", false},
		{"internal/bucket", module + "/internal/blockdev/devtest", false},
		{"internal/sim", module + "/internal/blockdev/devtest", true},
		{"internal/journal", module + "/internal/bucket", false},
		{"internal/journal", module + "/internal/blockdev", true},
		{"internal/btree", module + "/internal/bucket", true},
		{"internal/writeback", module + "/internal/cacheset", false},
		{"internal/writeback", module + "/internal/btree", true},
		{"internal/volume", module + "/internal/writeback", true},
		{"internal/nbd", module + "/internal/volume", false},
		{"internal/nbd", module + "/internal/blockdev", true},
		{"internal/offline", module + "/internal/btree", false},
		{"internal/offline", "golang.org/x/sync/errgroup", true},
		{"internal/daemon", module, true},
		{"internal/daemon", module + "/internal/sim", false},
		{"internal/control", module, false},
		{".", "golang.org/x/sync/errgroup", true},
		{".", "github.com/spf13/cobra", false},
		{".", "golang.org/x/sysextra", false},
		{"cmd/ubcache", module + "/internal/fixture", true},
		{"cmd/ubcache", module + "/internal/btree", false},
		{"internal/lab", module + "/cmd/ubcache", false},
		{"interop/fx", "anything.example/at/all", true},
		{"interop/fx", module + "/interop/vm", true},
		{"internal/util", "fmt", false},
		{"internal/rt", module + "/internal/util", false},
	} {
		if f := fault(c.pkg, c.imported); (f == "") != c.ok {
			t.Errorf("%s imports %s: %q", c.pkg, c.imported, f)
		}
	}
}

func TestRuntimeFaults(t *testing.T) {
	for _, c := range []struct{ code, want string }{
		{`import "time"; var d time.Duration = 3 * time.Second`, ""},
		{`import "sync/atomic"; var n atomic.Int64`, ""},
		{`import "time"; var _ = time.Now()`, "time.Now"},
		{`import t "time"; var _ = t.Sleep`, "time.Sleep"},
		{`import "time"; var _ = time.Time{}.Add`, ""},
		{`import . "time"`, "without a name"},
		{`import "sync"; var mu sync.Mutex`, "imports sync"},
		{`import "math/rand/v2"; var _ = rand.Uint64()`, "imports math/rand/v2"},
		{`import "context"; var _ = context.WithTimeout`, "context.WithTimeout"},
		{`import "context"; var _ = context.WithCancel`, ""},
		{`func f() { go f() }`, "go statement"},
		{`func f() { select {} }`, "select"},
		{`var c chan int`, "channel"},
		{`import "context"; func f(c context.Context) { <-c.Done() }`, "channel"},
	} {
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, "x.go", "package x; "+c.code, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		got := strings.Join(runtimeFaults(&source{path: "x.go", file: f, fset: fset}), "\n")
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", c.code, got, c.want)
		}
	}
}
