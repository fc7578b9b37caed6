//go:build !race

package devtest

const raceEnabled = false
