package lab

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/rt"
)

type closeBuffer struct {
	strings.Builder
	fail error
}

func (b *closeBuffer) Write(p []byte) (int, error) {
	if b.fail != nil {
		return 0, b.fail
	}
	return b.Builder.Write(p)
}
func (b *closeBuffer) Close() error { return nil }

// logged writes some requests.
func logged(t *testing.T, o LogOptions) string {
	t.Helper()
	var b closeBuffer
	l, err := NewLatLog(rt.New(), &b, o)
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		at, latency time.Duration
		read        bool
		off         int64
	}{
		{1500 * time.Microsecond, 1000, false, 4096},
		{60 * time.Millisecond, 2001, false, 8192},
		{99 * time.Millisecond, 500, true, 0},
		{100 * time.Millisecond, 3000, false, 12288}, // ends the interval of writes, and is in it
		{130 * time.Millisecond, 700, true, 4096},    // and that of reads
		{199 * time.Millisecond, 10, false, 0},
		{450 * time.Millisecond, 20, false, 0}, // the intervals between have no line
		{520 * time.Millisecond, 900, true, 0}, // begun at 100: over
		{540 * time.Millisecond, 5, false, 0},  // begun at 400: over
		{560 * time.Millisecond, 8, false, 0},  // not over at the end
	} {
		l.Add(x.at, x.latency, x.read, 4096, x.off)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// The lines are those of fio: see its log_avg_msec and log_max_value.
func TestLatencyLog(t *testing.T) {
	for _, x := range []struct {
		o    LogOptions
		want string
	}{
		{LogOptions{}, `1, 1000, 1, 4096, 4096
60, 2001, 1, 4096, 8192
99, 500, 0, 4096, 0
100, 3000, 1, 4096, 12288
130, 700, 0, 4096, 4096
199, 10, 1, 4096, 0
450, 20, 1, 4096, 0
520, 900, 0, 4096, 0
540, 5, 1, 4096, 0
560, 8, 1, 4096, 0
`},
		{LogOptions{Average: 100 * time.Millisecond}, `100, 2000, 1, 0, 0
130, 600, 0, 0, 0
450, 15, 1, 0, 0
520, 900, 0, 0, 0
540, 5, 1, 0, 0
560, 8, 1, 0, 0
`},
		{LogOptions{Average: 100 * time.Millisecond, Max: true}, `100, 3000, 1, 0, 0
130, 700, 0, 0, 0
450, 20, 1, 0, 0
520, 900, 0, 0, 0
540, 5, 1, 0, 0
560, 8, 1, 0, 0
`},
	} {
		if got := logged(t, x.o); got != x.want {
			t.Errorf("%+v:\n%swant\n%s", x.o, got, x.want)
		}
	}
}

func TestLatencyLogOptions(t *testing.T) {
	for _, o := range []LogOptions{{Max: true}, {Average: time.Microsecond}, {Average: -time.Millisecond}} {
		if _, err := NewLatLog(rt.New(), &closeBuffer{}, o); err == nil {
			t.Errorf("%+v is taken", o)
		}
	}
}

func TestLatencyLogThatCannotBeWritten(t *testing.T) {
	b := &closeBuffer{fail: errors.New("full")}
	l, err := NewLatLog(rt.New(), b, LogOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5 * logChunk {
		l.Add(time.Duration(i), 1, true, 512, 0)
	}
	if err := l.Close(); !errors.Is(err, b.fail) {
		t.Error(err)
	}
}

// Many lines, more than a chunk, all arrive.
func TestLatencyLogChunks(t *testing.T) {
	var b closeBuffer
	l, err := NewLatLog(rt.New(), &b, LogOptions{})
	if err != nil {
		t.Fatal(err)
	}
	const n = 3*logChunk + 7
	for i := range n {
		l.Add(time.Duration(i)*time.Millisecond, 1, true, 512, 0)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(b.String(), "\n"); got != n {
		t.Errorf("%d lines of %d", got, n)
	}
	if !strings.HasSuffix(b.String(), "\n49158, 1, 0, 512, 0\n") {
		t.Errorf("it ends with %q", b.String()[b.Len()-30:])
	}
}

// fio's own tool reads the log, and finds the latencies in it.
func TestFioReadsTheLog(t *testing.T) {
	tool, err := exec.LookPath("fio2gnuplot")
	if err != nil {
		if os.Getenv("UBCACHE_REQUIRE_TOOLS") == "1" {
			t.Fatal("UBCACHE_REQUIRE_TOOLS is 1, and there is no fio2gnuplot")
		}
		t.Skip("no fio2gnuplot")
	}
	for want, o := range map[string]LogOptions{"\n0 3000\n": {}, "\n0 2000\n": {Average: 100 * time.Millisecond}} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "exact-qd8_lat.1.log"), []byte(logged(t, o)), 0o644); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(tool, "-p", "*_lat.1.log", "-t", "lat", "-k")
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		got, err := os.ReadFile(filepath.Join(dir, "_lat.1.max"))
		if err != nil || !strings.Contains(string(got), want) {
			t.Errorf("%+v: %q, %v, want %s\n%s", o, got, err, want, out)
		}
	}
}
