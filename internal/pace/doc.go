// Package pace holds the policies by which the kernel's garbage collection, as it was and as it was proposed to be, shares
// the machine with requests: how many nodes it sees in one hold of the root, when it lets go, how long it sleeps then, and
// whether buckets may be allocated meanwhile.
//
//	classic   Linux up to 6.9
//	reclaim   6.10: what was reclaimable when a collection began stays so while it is on
//	dynamic   M. Zou 2022
//	rescale   R. Pang 2025
//	paced     C. Li 2025, Linux 7.2
//
// They are functions of plain values; package cacheset has the collector that asks them. The default of this project, exact,
// is none of them: it does not collect. Source: B 3.5.
package pace
