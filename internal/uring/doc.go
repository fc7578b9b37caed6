// Package uring is io_uring on bare system calls: rings, submission, completion, sleeping until something has
// completed.
//
//	submitter                          kernel                         reaper
//	Get: a free SQE      SQ  head -->  takes them in order
//	fill it             tail <--
//	Submit ------- io_uring_enter -->  works on them, in any order
//	                                   puts results   --> tail  CQ    Reap: takes them
//	                                   eventfd ----- netpoller -----> Start's function
//
// The rings are shared memory. Each index has one writer: SQ tail and CQ head are ours, SQ head and CQ tail the
// kernel's. What an index hands over is written before it and read after it, so all four are accessed by
// sync/atomic, which orders more than enough.
//
// # What holds
//
//   - One goroutine submits at a time (Get, Submit, Withdraw), one reaps at a time (Reap); the two may run at the
//     same time.
//   - No completion is lost. Get hands out no SQE whose completion might not find room in the CQ; should the CQ
//     overflow nevertheless (several completions for one SQE), the kernel keeps the rest and Reap asks for it.
//     Kernels that would drop it (before 5.5) are refused.
//   - Memory named in an SQE must stay reachable and in place until the completion is reaped: Go sees no
//     reference in a ring.
//   - The goroutine that reaps sleeps in Go's netpoller, not in a thread of its own.
//
// Numbers and layouts are those of the kernel's io_uring(7) interface on 64-bit systems.
package uring
