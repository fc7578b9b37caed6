//go:build amd64 || arm64

package rt

// gid returns a number that no other living goroutine has: the address of the scheduler's record of the
// calling one. A simulation compares it to tell its own goroutines from others; nothing is read through it.
func gid() uintptr
