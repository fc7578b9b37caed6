// Package nbd serves and reads volumes over the Network Block Device protocol: fixed newstyle handshake,
// simple and structured replies, FUA, trim, write zeroes, block status.
//
// # Server
//
// A [Server] holds [Export]s by name and any number of listeners. An export is anything that makes queues of
// blockdev.Requests; [DeviceExport] turns a blockdev.Device into one. Each connection has a queue of its own.
//
//	socket --readv--> reader --Submit(batch)--> export's queue --complete--> replies --writev--> socket
//	                  until its input                                        by whoever finished them,
//	                  is dry                                                 else the writer goroutine
//
// The reader goroutine takes all that has arrived, turns the whole requests in it into one batch, and submits that
// when no more is there. A write's payload is copied from the input buffer, or, what has not arrived yet, read by
// readv straight into its buffer. Completions are collected in a list; whoever adds to it while nobody writes becomes
// the writer and sends all there is with one writev, never waiting: when the socket is full, the rest goes to a
// writer goroutine, which may wait. While the reader is inside Submit it is the one who will write, so an export
// that completes at once answers a whole batch with one system call. Data travels from the export's buffer to the
// socket without a copy: the reply header is put in the room before the page-aligned data. No request costs an
// allocation or a goroutine, block status aside.
//
// # What holds
//
//   - Each request gets exactly one reply; a request that is refused touches nothing else. Only a frame that
//     cannot be understood (wrong magic) ends the connection.
//   - A request, its buffer and its bytes of the budgets are held from the moment it was parsed until its reply is
//     written or the connection is given up. A client that stops in the middle of a frame, or stops taking
//     replies, is given up after [Options.StallTimeout]; an idle one may stay for ever. Until then it keeps no
//     other connection's small requests waiting, and no more of the common budget than its share.
//   - Lengths given by the peer are checked before anything is allocated for them.
//   - Locks (conn.out.mu, Server.mu) are held for memory operations only, never over I/O or calls to an export.
//
// # Client
//
// [Dial] connects to any NBD server and is a blockdev.Device, so a volume can have a remote backing device.
//
// The protocol is doc/proto.md of https://github.com/NetworkBlockDevice/nbd.
package nbd
