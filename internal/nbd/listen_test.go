package nbd

import (
	"context"
	"strings"
	"testing"
)

func TestCheckAddress(t *testing.T) {
	long := strings.Repeat("x", 107)
	for _, addr := range []string{
		"unix:/run/x.sock", "unix:x", "unix:@name", "unix:" + long, "unix:@" + long, "unix:/a:b",
		"tcp:127.0.0.1:10809", "tcp:localhost:1", "tcp:[::1]:65535", "tcp:0.0.0.0:10809", "tcp:[::]:10809", "tcp:localhost:0",
	} {
		if err := CheckAddress(addr); err != nil {
			t.Error(err)
		}
	}
	for addr, want := range map[string]string{
		"":                     "unix:PATH or tcp:HOST:PORT",
		"/tmp/x":               "unix:PATH or tcp:HOST:PORT",
		"foo:bar":              "unix:PATH or tcp:HOST:PORT",
		"TCP:localhost:1":      "unix:PATH or tcp:HOST:PORT",
		"unix":                 "path is missing",
		"unix:":                "path is missing",
		"unix:@":               "path is missing",
		"unix:a\x00b":          "zero byte",
		"unix:" + long + "x":   "at most 107 bytes",
		"unix:@" + long + "x":  "at most 108 bytes",
		"tcp":                  "want tcp:HOST:PORT",
		"tcp:":                 "want tcp:HOST:PORT",
		"tcp:localhost":        "want tcp:HOST:PORT",
		"tcp:::1:10809":        "brackets",
		"tcp::10809":           "host is missing",
		"tcp:localhost:":       "port up to 65535",
		"tcp:localhost:nbd":    "port up to 65535",
		"tcp:localhost:-1":     "port up to 65535",
		"tcp:localhost:65536":  "port up to 65535",
		"tcp:localhost:+10809": "port up to 65535",
	} {
		err := CheckAddress(addr)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("CheckAddress(%q): %v, want %q", addr, err, want)
		}
		l, err := Listen(context.Background(), addr)
		if err == nil {
			l.Close()
			t.Errorf("Listen(%q) succeeded", addr)
		} else if !strings.Contains(err.Error(), want) {
			t.Errorf("Listen(%q): %v, want %q", addr, err, want)
		}
	}
	// What the limits allow, the system takes.
	for _, addr := range []string{"unix:@" + long, "tcp:127.0.0.1:0"} {
		l, err := Listen(context.Background(), addr)
		if err != nil {
			t.Error(err)
			continue
		}
		l.Close()
	}
	t.Chdir(t.TempDir())
	l, err := Listen(context.Background(), "unix:"+long)
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
}
