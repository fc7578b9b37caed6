package nbd

import "encoding/binary"

// All numbers on the wire are big endian.
var be = binary.BigEndian

// Magic numbers.
const (
	magicInit       = 0x4e42444d41474943 // "NBDMAGIC"
	magicOption     = 0x49484156454f5054 // "IHAVEOPT"
	magicOptReply   = 0x0003e889045565a9
	magicRequest    = 0x25609513
	magicSimple     = 0x67446698
	magicStructured = 0x668e33ef
)

// Handshake flags, of the server and of the client.
const (
	flagFixedNewstyle = 1 << 0
	flagNoZeroes      = 1 << 1
)

// Transmission flags.
const (
	flagHasFlags     = 1 << 0
	flagReadOnly     = 1 << 1
	flagSendFlush    = 1 << 2
	flagSendFUA      = 1 << 3
	flagRotational   = 1 << 4
	flagSendTrim     = 1 << 5
	flagSendZeroes   = 1 << 6
	flagSendDF       = 1 << 7
	flagMultiConn    = 1 << 8
	flagSendCache    = 1 << 10
	flagSendFastZero = 1 << 11
)

// Options.
const (
	optExportName      = 1
	optAbort           = 2
	optList            = 3
	optStartTLS        = 5
	optInfo            = 6
	optGo              = 7
	optStructuredReply = 8
	optListMeta        = 9
	optSetMeta         = 10
)

// Option reply types.
const (
	repAck         = 1
	repServer      = 2
	repInfo        = 3
	repMeta        = 4
	repErr         = 1 << 31
	repErrUnsup    = repErr + 1
	repErrPolicy   = repErr + 2
	repErrInvalid  = repErr + 3
	repErrPlatform = repErr + 4
	repErrTLSReqd  = repErr + 5
	repErrUnknown  = repErr + 6
	repErrShutdown = repErr + 7
	repErrTooBig   = repErr + 9
)

// Information types of optInfo and optGo.
const (
	infoExport      = 0
	infoName        = 1
	infoDescription = 2
	infoBlockSize   = 3
)

// Commands.
const (
	cmdRead        = 0
	cmdWrite       = 1
	cmdDisc        = 2
	cmdFlush       = 3
	cmdTrim        = 4
	cmdCache       = 5
	cmdWriteZeroes = 6
	cmdBlockStatus = 7
)

// Command flags.
const (
	cmdFlagFUA      = 1 << 0
	cmdFlagNoHole   = 1 << 1
	cmdFlagDF       = 1 << 2
	cmdFlagReqOne   = 1 << 3
	cmdFlagFastZero = 1 << 4
)

// Structured replies.
const (
	chunkFlagDone = 1 << 0

	chunkNone        = 0
	chunkOffsetData  = 1
	chunkOffsetHole  = 2
	chunkBlockStatus = 5
	chunkErrBit      = 1 << 15
	chunkError       = chunkErrBit + 1
	chunkErrorOffset = chunkErrBit + 2
)

// Sizes of frames, in bytes.
const (
	requestSize       = 28 // magic u32, flags u16, type u16, cookie u64, offset u64, length u32
	simpleSize        = 16 // magic u32, error u32, cookie u64
	chunkSize         = 20 // magic u32, flags u16, type u16, cookie u64, length u32
	offsetDataSize    = chunkSize + 8
	errorChunkSize    = chunkSize + 6
	optionSize        = 16  // magic u64, option u32, length u32
	optReplySize      = 20  // magic u64, option u32, type u32, length u32
	exportNamePadding = 124 // zero bytes after the answer to optExportName, unless both sides said no
	maxNameLen        = 4096
	maxMessageLen     = 4096
	defaultMaxBlock   = 32 << 20 // what clients assume they may send when told nothing
)

// header is a request as it is on the wire.
type header struct {
	flags  uint16
	cmd    uint16
	cookie uint64
	offset uint64
	length uint32
}

// decodeRequest reads the requestSize bytes in b; ok is false when the magic number is wrong.
func decodeRequest(b []byte) (h header, ok bool) {
	_ = b[requestSize-1]
	h.flags = be.Uint16(b[4:])
	h.cmd = be.Uint16(b[6:])
	h.cookie = be.Uint64(b[8:])
	h.offset = be.Uint64(b[16:])
	h.length = be.Uint32(b[24:])
	return h, be.Uint32(b) == magicRequest
}

// encode puts the request into the requestSize bytes of b.
func (h header) encode(b []byte) {
	_ = b[requestSize-1]
	be.PutUint32(b, magicRequest)
	be.PutUint16(b[4:], h.flags)
	be.PutUint16(b[6:], h.cmd)
	be.PutUint64(b[8:], h.cookie)
	be.PutUint64(b[16:], h.offset)
	be.PutUint32(b[24:], h.length)
}

func putSimple(b []byte, errno uint32, cookie uint64) {
	_ = b[simpleSize-1]
	be.PutUint32(b, magicSimple)
	be.PutUint32(b[4:], errno)
	be.PutUint64(b[8:], cookie)
}

func putChunk(b []byte, flags, typ uint16, cookie uint64, length uint32) {
	_ = b[chunkSize-1]
	be.PutUint32(b, magicStructured)
	be.PutUint16(b[4:], flags)
	be.PutUint16(b[6:], typ)
	be.PutUint64(b[8:], cookie)
	be.PutUint32(b[16:], length)
}

func putOffsetData(b []byte, cookie, offset uint64, n uint32) {
	putChunk(b, chunkFlagDone, chunkOffsetData, cookie, n+8)
	be.PutUint64(b[chunkSize:], offset)
}

func putErrorChunk(b []byte, cookie uint64, errno uint32) {
	putChunk(b, chunkFlagDone, chunkError, cookie, 6)
	be.PutUint32(b[chunkSize:], errno)
	be.PutUint16(b[chunkSize+4:], 0)
}
