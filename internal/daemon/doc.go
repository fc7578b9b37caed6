// Package daemon runs what serves: it opens devices in the order in which they depend on each other, puts the
// front ends before them, and takes all down again in the reverse order.
//
// ReadOnly serves a set at rest, by package offline. Serve runs a set, by the root package:
//
//	start: control socket (answers "starting"), devices, set, volumes, NBD listeners, ready
//	end:   listeners, jobs (cancelled), requests in flight (10 s), control socket (2 s), jobs (1 s), set (60 s and 15 s), devices
//
// While it runs, jobs (a flush, a detach) go on whether anybody waits for them or not, and flash-only volumes come and
// go.
//
// What fails on the way up takes down what is there, in the order of the end. Nothing that was acknowledged depends
// on the end: a process that is killed loses none of it.
package daemon
