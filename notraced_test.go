//go:build !race

package ubcache

const raced = false
