// Package interop tests against real kernels: what the kernel's bcache wrote opens here, and what we wrote attaches
// there, cleanly stopped or cut off from power.
//
// The tests have the build tag interop and run by "make interop", as root; without the tag the package is empty.
//
//	vm/      boots a kernel in a virtual machine and runs a script in it; see vm/README.md
//	guest/   the scripts that run there
//	fx/      writes and checks content that tells of each sector where it belongs and which write it is from
//
// Each kernel is booted once for everything that ends in order, and once for each power cut.
package interop
