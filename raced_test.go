//go:build race

package ubcache

// raced: the race detector is on. In simulation one goroutine runs at a time, handed on by locks, so that it sees nothing.
const raced = true
