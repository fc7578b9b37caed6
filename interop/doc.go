// Package interop tests against real kernels: what the kernel's bcache wrote opens here, and what we wrote attaches
// there, cleanly stopped or cut off from power.
//
// The tests have the build tag interop and run by "make interop", as root; without the tag the package is empty.
//
//	vm/       boots a kernel in a virtual machine and runs a script in it; see vm/README.md
//	guest/    the scripts that run there
//	fx/       writes and checks content that tells of each sector where it belongs and which write it is from
//
//	generate/ makes the images of internal/fixture
//
// Each kernel is booted once for what we format (TestFormattedHere), once for each power cut (TestPowerCuts), once for
// all that our server has left, stopped in order or killed (TestServed), once with our server in the guest, below its file
// systems (TestFileSystems), and as often as a set in writeback mode goes from the kernel to us and back (TestHandOver).
package interop
