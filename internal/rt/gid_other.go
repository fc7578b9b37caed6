//go:build !amd64 && !arm64

package rt

import "runtime"

// gid returns a number that no other living goroutine has: the one in "goroutine 17 [running]:".
func gid() uintptr {
	var buf [40]byte
	id := uintptr(0)
	for _, c := range buf[len("goroutine "):runtime.Stack(buf[:], false)] {
		if c < '0' || c > '9' {
			break
		}
		id = id*10 + uintptr(c-'0')
	}
	return id
}
