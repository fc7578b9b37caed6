package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/fixture"
	"github.com/ubcache/ubcache/internal/nbd"
)

// TestMain makes the test binary answer to the names of the program, so that scripts run it as users do.
func TestMain(m *testing.M) {
	os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin")
	self := func() { os.Exit(run(&environment{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr}, os.Args)) }
	testscript.Main(m, map[string]func(){"ubcache": self, "make-bcache": self, "bcache-super-show": self})
}

// TestScripts runs the commands the way users do: testdata/script has one script for a theme. What scripts can
// call besides testscript's own commands:
//
//	exits STATUS PROGRAM ARG...   run it, and want that exit status
//	image FILE SIZE               make a sparse file; SIZE as truncate takes it
//	fill FILE OFFSET HEX          write bytes
//	fixture NAME ROLE FILE        unpack a disk of a fixture
//	formatted NAME FILE           unpack an image of the folder formats
//	digest FILE...                remember what is in them
//	unchanged FILE...             they are as they were at digest
//	holds FILE OFFSET SIZE BYTE   all of that part is that byte, in hex; with "!", none of it is
//	nbd write SOCKET EXPORT OFFSET SIZE BYTE   write it to an export, and flush
//	nbd read SOCKET EXPORT OFFSET SIZE BYTE    read it, and want that
//	nbd open SOCKET EXPORT SIZE   connect, want that size to be told, and stay
//	nbd close EXPORT              end that connection
//
// and the condition [tool:NAME], which fails the test where the tool is missing and must not be.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 filepath.Join("testdata", "script"),
		RequireExplicitExec: true,
		Condition: func(cond string) (bool, error) {
			name, ok := strings.CutPrefix(cond, "tool:")
			if !ok {
				return false, fmt.Errorf("unknown condition %q", cond)
			}
			_, err := exec.LookPath(name)
			if err != nil && os.Getenv("UBCACHE_REQUIRE_TOOLS") == "1" {
				return false, fmt.Errorf("UBCACHE_REQUIRE_TOOLS is 1, and there is no %s", name)
			}
			return err == nil, nil
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"exits":     scriptExits,
			"image":     scriptImage,
			"fill":      scriptFill,
			"fixture":   scriptFixture,
			"formatted": scriptFormatted,
			"digest":    scriptDigest,
			"unchanged": scriptUnchanged,
			"holds":     scriptHolds,
			"nbd":       scriptNBD,
		},
		Setup: func(e *testscript.Env) error {
			e.Values[digests{}] = map[string]string{}
			clients := map[string]*nbd.Client{}
			e.Values[nbdClients{}] = clients
			e.Defer(func() {
				for _, c := range clients {
					c.Close()
				}
			})
			e.Setenv("TMPDIR", e.WorkDir)
			return nil
		},
	})
}

func scriptExits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits STATUS PROGRAM ARG...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	got := 0
	if err != nil {
		e, ok := err.(*exec.ExitError)
		if !ok {
			ts.Fatalf("%v", err)
		}
		got = e.ExitCode()
	}
	if got != want {
		ts.Fatalf("exit status %d, want %d", got, want)
	}
}

func scriptImage(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: image FILE SIZE")
	}
	n, err := parseSize(args[1])
	ts.Check(err)
	path := ts.MkAbs(args[0])
	os.Remove(path)
	ts.Check(os.WriteFile(path, nil, 0o600))
	ts.Check(os.Truncate(path, n))
}

func scriptFill(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 3 {
		ts.Fatalf("usage: fill FILE OFFSET HEX")
	}
	off, err := parseSize(args[1])
	ts.Check(err)
	b, err := hex.DecodeString(args[2])
	ts.Check(err)
	f, err := os.OpenFile(ts.MkAbs(args[0]), os.O_WRONLY, 0)
	ts.Check(err)
	_, err = f.WriteAt(b, off)
	ts.Check(err)
	ts.Check(f.Close())
}

func scriptFixture(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 3 {
		ts.Fatalf("usage: fixture NAME ROLE FILE")
	}
	f, err := fixture.Get(args[0])
	ts.Check(err)
	dir, err := os.MkdirTemp(ts.Getenv("WORK"), "fixture")
	ts.Check(err)
	path, err := f.Extract(args[1], dir)
	ts.Check(err)
	ts.Check(os.Rename(path, ts.MkAbs(args[2])))
}

func scriptFormatted(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: formatted NAME FILE")
	}
	all, err := fixture.Formats()
	ts.Check(err)
	for _, f := range all {
		if f.Name == args[0] {
			path, err := f.Extract(ts.Getenv("WORK"))
			ts.Check(err)
			ts.Check(os.Rename(path, ts.MkAbs(args[1])))
			return
		}
	}
	ts.Fatalf("there is no image %s", args[0])
}

func scriptHolds(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 4 {
		ts.Fatalf("usage: holds FILE OFFSET SIZE BYTE")
	}
	off, want := scriptBytes(ts, args[1:])
	got := make([]byte, len(want))
	f, err := os.Open(ts.MkAbs(args[0]))
	ts.Check(err)
	defer f.Close()
	_, err = f.ReadAt(got, off)
	ts.Check(err)
	if neg && bytes.Contains(got, want[:1]) || !neg && !bytes.Equal(got, want) {
		ts.Fatalf("%s holds something else at %d", args[0], off)
	}
}

// scriptBytes reads offset, size and byte.
func scriptBytes(ts *testscript.TestScript, args []string) (off int64, b []byte) {
	off, err := parseSize(args[0])
	ts.Check(err)
	n, err := parseSize(args[1])
	ts.Check(err)
	b, err = hex.DecodeString(args[2])
	ts.Check(err)
	return off, bytes.Repeat(b, int(n))
}

type nbdClients struct{}

func scriptNBD(ts *testscript.TestScript, neg bool, args []string) {
	clients := ts.Value(nbdClients{}).(map[string]*nbd.Client)
	dial := func() *nbd.Client {
		c, err := nbd.Dial(context.Background(), "unix", ts.MkAbs(args[1]), args[2], nbd.DialOptions{})
		ts.Check(err)
		return c
	}
	switch {
	case !neg && len(args) == 6 && (args[0] == "write" || args[0] == "read"):
		off, want := scriptBytes(ts, args[3:])
		c := dial()
		defer c.Close()
		io, err := blockdev.NewIO(c, 1)
		ts.Check(err)
		defer io.Close()
		if args[0] == "write" {
			for piece := range slices.Chunk(want, 64<<10) {
				ts.Check(io.WriteAt(piece, off, 0))
				off += int64(len(piece))
			}
			ts.Check(io.Flush())
			return
		}
		got := make([]byte, len(want))
		ts.Check(io.ReadAt(got, off))
		if !bytes.Equal(got, want) {
			ts.Fatalf("%s holds something else at %d", args[2], off)
		}
	case !neg && len(args) == 4 && args[0] == "open":
		n, err := parseSize(args[3])
		ts.Check(err)
		c := dial()
		clients[args[2]] = c
		if got := c.Info().Size; got != n {
			ts.Fatalf("%s is said to have %d bytes", args[2], got)
		}
	case !neg && len(args) == 2 && args[0] == "close":
		clients[args[1]].Close()
		delete(clients, args[1])
	default:
		ts.Fatalf("usage: see TestScripts")
	}
}

type digests struct{}

func scriptDigest(ts *testscript.TestScript, _ bool, args []string) {
	known := ts.Value(digests{}).(map[string]string)
	for _, a := range args {
		known[a] = digestFile(ts, a)
	}
}

func scriptUnchanged(ts *testscript.TestScript, neg bool, args []string) {
	known := ts.Value(digests{}).(map[string]string)
	for _, a := range args {
		if _, ok := known[a]; !ok {
			ts.Fatalf("no digest of %s", a)
		}
		if same := known[a] == digestFile(ts, a); same == neg {
			ts.Fatalf("%s: unchanged is %v", a, same)
		}
	}
}

func digestFile(ts *testscript.TestScript, path string) string {
	f, err := os.Open(ts.MkAbs(path))
	ts.Check(err)
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, f)
	ts.Check(err)
	return hex.EncodeToString(h.Sum(nil))
}

// command runs a command line within the test and returns its exit status and what it wrote.
func command(args ...string) (status int, stdout, stderr string) {
	var out, errs bytes.Buffer
	status = run(&environment{stdin: strings.NewReader(""), stdout: &out, stderr: &errs}, args)
	return status, out.String(), errs.String()
}

// needTool returns the path of a program that bcache-tools or others bring, or skips the test.
func needTool(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	switch {
	case err == nil:
		return path
	case os.Getenv("UBCACHE_REQUIRE_TOOLS") == "1":
		t.Fatalf("UBCACHE_REQUIRE_TOOLS is 1, and there is no %s", name)
	default:
		t.Skipf("there is no %s", name)
	}
	return ""
}

// sparse makes a file of zeroes and returns its path.
func sparse(t *testing.T, name string, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestEveryCommandHasHelp(t *testing.T) {
	status, _, _ := command("ubcache", "--help")
	if status != exitDone {
		t.Fatalf("status %d", status)
	}
	root := newRootCommand(&environment{name: "ubcache", stdout: io.Discard, stderr: io.Discard})
	for _, c := range root.Commands() {
		t.Run(c.Name(), func(t *testing.T) {
			status, out, errs := command("ubcache", c.Name(), "--help")
			if status != exitDone || errs != "" {
				t.Errorf("status %d, errors %q", status, errs)
			}
			for _, section := range []string{"USAGE\n", "OPTIONS\n", "EXAMPLE\n", "EXIT STATUS\n", "  2  "} {
				if !strings.Contains(out, section) {
					t.Errorf("no %q in the help:\n%s", section, out)
				}
			}
			for _, line := range strings.Split(c.Long, "\n") {
				if len(line) > 120 {
					t.Errorf("line of %d characters: %s", len(line), line)
				}
			}
			status, out, errs = command("ubcache", c.Name(), "--no-such-flag")
			if status != exitUsage || out != "" || strings.Count(errs, "\n") != 1 {
				t.Errorf("unknown flag: status %d, %q, %q", status, out, errs)
			}
		})
	}
}

func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if status, out, _ := command("ubcache", "completion", shell); status != exitDone || len(out) < 1000 {
			t.Errorf("%s: status %d, %d bytes", shell, status, len(out))
		}
	}
	if status, out, _ := command("ubcache", "__complete", "form"); status != exitDone || !strings.HasPrefix(out, "format\t") {
		t.Errorf("completes to %q, status %d", out, status)
	}
}

func TestWrongUsage(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"", "which command?"},
		{"shw", `unknown command "shw"; did you mean set, show?`},
		{"show", "which device?"},
		{"version extra", `unexpected argument "extra"`},
		{"format", "which devices?"},
		{"format --cache a --cache b", "given twice (a and b)"},
		{"format --cache=", "is empty"},
		{"format --bucket 64kk", `unknown unit "kk"`},
		{"format --cache x --set-uuid 12", `"12" is not a UUID`},
		{"format --cache x --set-uuid 00000000-0000-0000-0000-000000000000", "all zero is no UUID"},
		{"format --cache x --replacement mru", "want lru, fifo or random"},
		{"format --cache x --force-discard-unflushed", "needs --force too"},
	} {
		status, out, errs := command(append([]string{"ubcache"}, strings.Fields(c.args)...)...)
		if status != exitUsage || out != "" || !strings.Contains(errs, c.want) {
			t.Errorf("%q: status %d, %q, %q; want %q", c.args, status, out, errs, c.want)
		}
	}
}
