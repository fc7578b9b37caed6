//go:build interop

package interop

import (
	"archive/tar"
	"bytes"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestFileSystems runs our server inside the guest, below the kernel's nbd, ext4 and xfs, and then gives the same disks
// to the kernel's bcache, and back.
func TestFileSystems(t *testing.T) {
	for _, k := range kernels() {
		t.Run(k, func(t *testing.T) {
			t.Parallel()
			fileSystems(t, k)
		})
	}
}

func fileSystems(t *testing.T, kernel string) {
	p := newPlace(t, kernel)
	s := &diskSet{name: "filesystems", dir: p.dir, cache: p.image("cache", 40*mib)}
	s.backings = []string{p.image("ext4", 64*mib), p.image("xfs", 320*mib)} // less is none for mkfs.xfs
	must(t, program(t, "ubcache"), "format", "--bucket", "64k", "--block", "512", "--cache", s.cache, "--backing", s.backings[0], "--backing", s.backings[1])
	must(t, fx(t), "super", s.backings[1], "flags=2") // writearound
	p.put("tree.tar", archive(t))
	path, err := filepath.Abs(program(t, "ubcache"))
	if err != nil {
		t.Fatal(err)
	}
	var disks []string
	for _, i := range s.images() {
		disks = append(disks, i+",cache=unsafe,unmap")
	}
	out := p.boot(boot{disks: disks, limit: 5 * time.Minute, script: "filesystems", env: []string{"UBCACHE=" + path}})
	t.Logf("it printed:\n%s", out)
	for _, line := range strange(p.shared("filesystems.log")) {
		t.Errorf("the kernel says: %s", line)
	}
	if log := p.shared("serve.log"); strings.Contains(log, "level=ERROR") {
		t.Errorf("ubcache serve logged an error:\n%s", tail(log, 20))
	}
	p.check(s.checkFlags()...)
}

// archive makes a small tree of files as a tar archive: always the same.
func archive(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	rnd := rand.NewChaCha8([32]byte{1})
	pick := rand.New(rand.NewPCG(1, 1))
	put := func(h tar.Header, data []byte) {
		h.ModTime, h.Size = time.Unix(1700000000, 0), int64(len(data))
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	file := func(name string, size int) {
		data := make([]byte, size)
		rnd.Read(data)
		put(tar.Header{Name: name, Mode: 0o640, Typeflag: tar.TypeReg}, data)
	}
	for _, dir := range []string{"small", "large", "gone", "deep"} {
		put(tar.Header{Name: dir + "/", Mode: 0o755, Typeflag: tar.TypeDir}, nil)
	}
	for i := range 120 {
		file(fmt.Sprintf("small/%d", i), pick.IntN(12*kib))
	}
	for i := range 3 {
		file(fmt.Sprintf("large/%d", i), mib+pick.IntN(mib))
	}
	for i := range 20 {
		file(fmt.Sprintf("gone/%d", i), pick.IntN(200*kib))
	}
	name := "deep/"
	for i := range 12 {
		name += strings.Repeat("d", i+1) + "/"
		put(tar.Header{Name: name, Mode: 0o700, Typeflag: tar.TypeDir}, nil)
		file(name+"file", 100*i)
	}
	put(tar.Header{Name: "link", Mode: 0o777, Typeflag: tar.TypeSymlink, Linkname: "small/7"}, nil)
	put(tar.Header{Name: "same", Mode: 0o640, Typeflag: tar.TypeLink, Linkname: "large/1"}, nil)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
