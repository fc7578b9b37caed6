// Package daemon runs what serves: it opens devices in the order in which they depend on each other, puts the
// front ends before them, and takes all down again in the reverse order.
//
// For now it serves sets at rest, for reading: ReadOnly.
package daemon
