package nbd

import (
	"errors"
	"fmt"
	"io"
)

const (
	maxReplyLen = 64 << 10 // of a server's answer to an option, in bytes
	maxReplies  = 10000    // to one option
)

// Errors of Dial and List. A RefusedError says more.
var (
	ErrProtocol = errors.New("nbd: the peer breaks the protocol")
	ErrRefused  = errors.New("nbd: refused by the server")
)

// A RefusedError is a server's refusal of an option. It matches ErrRefused.
type RefusedError struct {
	Code    uint32 // NBD_REP_ERR_...
	Message string // what the server says, may be empty
}

func (e *RefusedError) Error() string {
	what := fmt.Sprintf("error %d", e.Code&^repErr)
	switch e.Code {
	case repErrUnsup:
		what = "not supported"
	case repErrPolicy:
		what = "not allowed"
	case repErrInvalid:
		what = "invalid request"
	case repErrTLSReqd:
		what = "TLS is required"
	case repErrUnknown:
		what = "no such export"
	case repErrShutdown:
		what = "shutting down"
	}
	if e.Message == "" {
		return "nbd: refused by the server: " + what
	}
	return fmt.Sprintf("nbd: refused by the server: %s (%s)", what, e.Message)
}

func (e *RefusedError) Unwrap() error { return ErrRefused }

func protocolError(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrProtocol, fmt.Sprintf(format, args...))
}

// negotiated is what a client knows after its handshake.
type negotiated struct {
	size           uint64
	flags          uint16
	min, pref, max uint32 // bytes
	structured     bool
}

// clientHandshake is the client's side of the handshake.
type clientHandshake struct {
	rw       io.ReadWriter
	fixed    bool
	noZeroes bool
}

func (h *clientHandshake) greet() error {
	var b [18]byte
	if _, err := io.ReadFull(h.rw, b[:]); err != nil {
		return err
	}
	if be.Uint64(b[:]) != magicInit {
		return protocolError("not an NBD server")
	}
	if be.Uint64(b[8:]) != magicOption {
		return protocolError("the server speaks the old style, which has no options")
	}
	server := be.Uint16(b[16:])
	h.fixed = server&flagFixedNewstyle != 0
	h.noZeroes = server&flagNoZeroes != 0
	var out [4]byte
	be.PutUint32(out[:], uint32(server&(flagFixedNewstyle|flagNoZeroes)))
	_, err := h.rw.Write(out[:])
	return err
}

func (h *clientHandshake) send(opt uint32, data []byte) error {
	b := be.AppendUint64(make([]byte, 0, optionSize+len(data)), magicOption)
	b = be.AppendUint32(b, opt)
	b = be.AppendUint32(b, uint32(len(data)))
	_, err := h.rw.Write(append(b, data...))
	return err
}

// receive reads one answer to opt. A refusal is a *RefusedError.
func (h *clientHandshake) receive(opt uint32) (typ uint32, data []byte, err error) {
	var b [optReplySize]byte
	if _, err := io.ReadFull(h.rw, b[:]); err != nil {
		return 0, nil, err
	}
	if be.Uint64(b[:]) != magicOptReply || be.Uint32(b[8:]) != opt {
		return 0, nil, protocolError("not an answer to option %d", opt)
	}
	typ = be.Uint32(b[12:])
	n := be.Uint32(b[16:])
	if n > maxReplyLen {
		return 0, nil, protocolError("an answer of %d bytes to option %d", n, opt)
	}
	data = make([]byte, n)
	if _, err := io.ReadFull(h.rw, data); err != nil {
		return 0, nil, err
	}
	if typ&repErr != 0 {
		return 0, nil, &RefusedError{typ, string(data[:min(len(data), maxMessageLen)])}
	}
	return typ, data, nil
}

// run chooses an export.
func (h *clientHandshake) run(name string, structured bool) (n negotiated, err error) {
	if len(name) > maxNameLen {
		return n, fmt.Errorf("nbd: export name is longer than %d bytes", maxNameLen)
	}
	if err := h.greet(); err != nil {
		return n, err
	}
	n.min, n.pref, n.max = 1, 4096, defaultMaxBlock
	if !h.fixed {
		err = h.exportName(name, &n)
		return n, err
	}
	if structured {
		if err := h.send(optStructuredReply, nil); err != nil {
			return n, err
		}
		switch typ, _, err := h.receive(optStructuredReply); {
		case errors.Is(err, ErrRefused):
		case err != nil:
			return n, err
		case typ != repAck:
			return n, protocolError("answer %d to structured replies", typ)
		default:
			n.structured = true
		}
	}
	data := be.AppendUint32(nil, uint32(len(name)))
	data = append(data, name...)
	data = be.AppendUint16(data, 1)
	data = be.AppendUint16(data, infoBlockSize)
	if err := h.send(optGo, data); err != nil {
		return n, err
	}
	haveExport := false
	for range maxReplies {
		typ, data, err := h.receive(optGo)
		var refused *RefusedError
		if errors.As(err, &refused) && refused.Code == repErrUnsup {
			err = h.exportName(name, &n)
			return n, err
		}
		if err != nil {
			return n, err
		}
		switch {
		case typ == repAck:
			if !haveExport {
				return n, protocolError("the export was not described")
			}
			return n, n.check()
		case typ != repInfo || len(data) < 2:
			return n, protocolError("answer %d of %d bytes to GO", typ, len(data))
		}
		switch info := be.Uint16(data); {
		case info == infoExport && len(data) == 12:
			n.size, n.flags = be.Uint64(data[2:]), be.Uint16(data[10:])
			haveExport = true
		case info == infoBlockSize && len(data) == 14:
			n.min, n.pref, n.max = be.Uint32(data[2:]), be.Uint32(data[6:]), be.Uint32(data[10:])
		case info == infoExport, info == infoBlockSize:
			return n, protocolError("information %d of %d bytes", info, len(data))
		}
	}
	return n, protocolError("no end of answers to GO")
}

// exportName chooses in the old way.
func (h *clientHandshake) exportName(name string, n *negotiated) error {
	if err := h.send(optExportName, []byte(name)); err != nil {
		return err
	}
	b := make([]byte, 10, 10+exportNamePadding)
	if !h.noZeroes {
		b = b[:cap(b)]
	}
	if _, err := io.ReadFull(h.rw, b); err != nil {
		if errors.Is(err, io.EOF) {
			return &RefusedError{repErrUnknown, "the server hung up"}
		}
		return err
	}
	n.size, n.flags = be.Uint64(b), be.Uint16(b[8:])
	return n.check()
}

func (n *negotiated) check() error {
	switch {
	case n.size > 1<<63-1:
		return protocolError("size %d", n.size)
	case n.min == 0 || n.min&(n.min-1) != 0 || n.min > 64<<10:
		return protocolError("smallest block %d", n.min)
	case n.max < n.min:
		return protocolError("largest block %d", n.max)
	}
	return nil
}

// list asks for the names of all exports.
func (h *clientHandshake) list() (names []string, err error) {
	if err := h.greet(); err != nil {
		return nil, err
	}
	if err := h.send(optList, nil); err != nil {
		return nil, err
	}
	for range maxReplies {
		typ, data, err := h.receive(optList)
		if err != nil {
			return nil, err
		}
		if typ == repAck {
			h.send(optAbort, nil) // a courtesy
			return names, nil
		}
		name, _, ok := takeString(data)
		if typ != repServer || !ok {
			return nil, protocolError("answer %d to LIST", typ)
		}
		names = append(names, name)
	}
	return nil, protocolError("no end of exports")
}
