package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// hash describes size bytes of dev at from; size -1: all to its end.
func hash(dev string, from, size int64) {
	f := openSource(dev)
	end := f.size
	if size >= 0 {
		end = from + size
	}
	var r struct {
		Size   int64    `json:"size"`
		Sha256 string   `json:"sha256"`
		Chunk  int64    `json:"chunk"`
		Chunks []string `json:"chunks"` // first 8 bytes of the sha256 of each chunk; "-": all zero
	}
	r.Size, r.Chunk = end-from, 1<<20
	all, buf, zero := sha256.New(), make([]byte, r.Chunk), make([]byte, r.Chunk)
	for pos := from; pos < end; {
		n := min(r.Chunk, end-pos)
		must(f.readAt(buf[:n], pos))
		all.Write(buf[:n])
		c := "-"
		if !bytes.Equal(buf[:n], zero[:n]) {
			h := sha256.Sum256(buf[:n])
			c = hex.EncodeToString(h[:8])
		}
		r.Chunks = append(r.Chunks, c)
		pos += n
	}
	r.Sha256 = hex.EncodeToString(all.Sum(nil))
	b, _ := json.Marshal(r)
	fmt.Println(string(b))
}

func sysfs(dirs []string) {
	out := map[string]string{}
	for _, d := range dirs {
		if st, err := os.Stat(d); err == nil && st.IsDir() {
			d = strings.TrimRight(d, "/") + "/" // follows a symbolic link
		}
		filepath.WalkDir(d, func(p string, e fs.DirEntry, err error) error {
			if err != nil || !e.Type().IsRegular() {
				return nil
			}
			if i, err := e.Info(); err != nil || i.Mode().Perm()&0o444 == 0 {
				return nil
			}
			if b, err := os.ReadFile(p); err == nil {
				out[filepath.Clean(p)] = strings.TrimRight(string(b), "\n")
			} else {
				out[filepath.Clean(p)] = "error: " + errors.Unwrap(err).Error()
			}
			return nil
		})
	}
	print(out)
}

// super edits the superblock in sector 8, for what make-bcache has no option for.
func super(img string, args []string) {
	f, err := os.OpenFile(img, os.O_RDWR, 0)
	must(err)
	b := make([]byte, 4096)
	must2(f.ReadAt(b, 4096))
	field := map[string][2]int{"version": {16, 8}, "flags": {104, 8}, "incompat": {128, 8}, "nbuckets": {184, 8}, "bucket": {194, 2}, "bucket_hi": {2256, 2}}
	for _, a := range args {
		k, v, _ := strings.Cut(a, "=")
		at, ok := field[k]
		n, err := strconv.ParseUint(v, 0, 8*8)
		if must(err); !ok {
			die("unknown field " + k)
		}
		for i := 0; i < at[1]; i++ {
			b[at[0]+i] = byte(n >> (8 * i))
		}
	}
	keys := int(binary.LittleEndian.Uint16(b[206:]))
	binary.LittleEndian.PutUint64(b, crc64(b[8:208+8*keys]))
	must2(f.WriteAt(b, 4096))
	must(f.Close())
}

// crc64 is the ECMA-182 polynomial, most significant bit first, inverted before and after.
func crc64(p []byte) uint64 {
	c := ^uint64(0)
	for _, x := range p {
		c ^= uint64(x) << 56
		for i := 0; i < 8; i++ {
			if c>>63 == 1 {
				c = c<<1 ^ 0x42f0e1eba9ea3693
			} else {
				c <<= 1
			}
		}
	}
	return ^c
}
