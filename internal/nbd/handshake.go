package nbd

import (
	"errors"
	"fmt"
	"io"
	"strings"
)

const (
	maxOptionLen = 64 << 10 // bytes of an option's data
	maxSkipLen   = 1 << 20  // an option longer than this ends the connection, one between is skipped
	maxOptions   = 1000     // in one handshake
	maxContexts  = 32       // queries in one option
)

var (
	errAborted   = errors.New("client aborted the handshake")
	errHandshake = errors.New("bad handshake")
)

// A metaContext is a metadata context that a client has selected.
type metaContext struct {
	id   uint32
	name string
}

// A handshake is the first phase of a connection: the client asks and chooses, until an export is chosen.
type handshake struct {
	srv        *Server
	rw         io.ReadWriter
	noZeroes   bool
	structured bool

	contexts     []metaContext // selected
	contextsOf   *export       // for this export
	export       *export
	geo          geometry
	out          []byte
	transmission bool

	// open prepares the export for transmission, before the client is told that it may start.
	open func(h *handshake) error
}

// run talks to the client until transmission can start.
func (h *handshake) run() error {
	h.out = be.AppendUint64(h.out[:0], magicInit)
	h.out = be.AppendUint64(h.out, magicOption)
	h.out = be.AppendUint16(h.out, flagFixedNewstyle|flagNoZeroes)
	if err := h.send(); err != nil {
		return err
	}
	var b [optionSize]byte
	if _, err := io.ReadFull(h.rw, b[:4]); err != nil {
		return err
	}
	flags := be.Uint32(b[:])
	if flags&^(flagFixedNewstyle|flagNoZeroes) != 0 {
		return fmt.Errorf("%w: unknown client flags %#x", errHandshake, flags)
	}
	h.noZeroes = flags&flagNoZeroes != 0
	for range maxOptions {
		if _, err := io.ReadFull(h.rw, b[:]); err != nil {
			return err
		}
		if be.Uint64(b[:]) != magicOption {
			return fmt.Errorf("%w: wrong magic number of an option", errHandshake)
		}
		if err := h.option(be.Uint32(b[8:]), be.Uint32(b[12:])); err != nil {
			return err
		}
		if h.transmission {
			return nil
		}
	}
	return fmt.Errorf("%w: too many options", errHandshake)
}

// option reads the data of one option and answers it.
func (h *handshake) option(opt, length uint32) error {
	if length > maxOptionLen {
		if opt == optExportName || length > maxSkipLen {
			return fmt.Errorf("%w: option %d with %d bytes", errHandshake, opt, length)
		}
		if _, err := io.CopyN(io.Discard, h.rw, int64(length)); err != nil {
			return err
		}
		h.reply(opt, repErrTooBig, "option is too long")
		return h.send()
	}
	var data []byte
	if length > 0 {
		data = make([]byte, length)
		if _, err := io.ReadFull(h.rw, data); err != nil {
			return err
		}
	}
	switch opt {
	case optExportName:
		return h.exportName(data)
	case optAbort:
		h.reply(opt, repAck, "")
		h.send() // the client may be gone already
		return errAborted
	case optList:
		h.list(data)
	case optInfo, optGo:
		if err := h.info(opt, data); err != nil {
			return err
		}
	case optStructuredReply:
		if len(data) > 0 {
			h.reply(opt, repErrInvalid, "unexpected data")
		} else {
			h.structured = true
			h.reply(opt, repAck, "")
		}
	case optListMeta, optSetMeta:
		h.meta(opt, data)
	case optStartTLS:
		h.reply(opt, repErrPolicy, "TLS is not configured")
	default:
		h.reply(opt, repErrUnsup, "unknown option")
	}
	return h.send()
}

// exportName answers the old way of choosing: there is no error reply, only the end of the connection.
func (h *handshake) exportName(name []byte) error {
	e := h.srv.lookup(string(name))
	if e == nil {
		return fmt.Errorf("%w: unknown export %q", errHandshake, name)
	}
	h.choose(e)
	if err := h.open(h); err != nil {
		return err
	}
	h.out = be.AppendUint64(h.out[:0], h.geo.size)
	h.out = be.AppendUint16(h.out, h.geo.flags(h.structured))
	if !h.noZeroes {
		h.out = append(h.out, make([]byte, exportNamePadding)...)
	}
	h.transmission = true
	return h.send()
}

// choose takes e for transmission.
func (h *handshake) choose(e *export) {
	h.export = e
	h.geo = e.Info().geometry(h.srv.opts.MaxRequest)
	if h.contextsOf != e || !h.structured {
		h.contexts = nil
	}
}

func (h *handshake) list(data []byte) {
	if len(data) > 0 {
		h.reply(optList, repErrInvalid, "unexpected data")
		return
	}
	for _, e := range h.srv.list() {
		description := e.Info().Description
		k := h.begin(optList, repServer)
		h.out = be.AppendUint32(h.out, uint32(len(e.name)))
		h.out = append(h.out, e.name...)
		h.out = append(h.out, clip(description)...)
		h.end(k)
	}
	h.reply(optList, repAck, "")
}

// info answers optInfo and optGo.
func (h *handshake) info(opt uint32, data []byte) error {
	name, rest, ok := takeString(data)
	if !ok || len(rest) < 2 || len(rest) != 2+2*int(be.Uint16(rest)) {
		h.reply(opt, repErrInvalid, "lengths do not fit")
		return nil
	}
	e := h.srv.lookup(name)
	if e == nil {
		h.reply(opt, repErrUnknown, "no export of that name")
		return nil
	}
	saved := h.contexts
	h.choose(e)
	if opt == optGo {
		if err := h.open(h); err != nil {
			h.srv.log.Error("export could not be opened", "export", e.name, "err", err)
			h.contexts = saved
			h.reply(opt, repErrUnknown, "the export could not be opened")
			return nil
		}
	}

	k := h.begin(opt, repInfo)
	h.out = be.AppendUint16(h.out, infoExport)
	h.out = be.AppendUint64(h.out, h.geo.size)
	h.out = be.AppendUint16(h.out, h.geo.flags(h.structured))
	h.end(k)
	blockSize := opt == optGo
	for rest = rest[2:]; len(rest) > 0; rest = rest[2:] {
		switch be.Uint16(rest) {
		case infoBlockSize:
			blockSize = true
		case infoName:
			h.infoString(opt, infoName, e.name)
		case infoDescription:
			if h.geo.Description != "" {
				h.infoString(opt, infoDescription, clip(h.geo.Description))
			}
		}
		if len(h.out) > maxOptionLen {
			return fmt.Errorf("%w: the same information asked for again and again", errHandshake)
		}
	}
	if blockSize {
		k := h.begin(opt, repInfo)
		h.out = be.AppendUint16(h.out, infoBlockSize)
		h.out = be.AppendUint32(h.out, h.geo.min)
		h.out = be.AppendUint32(h.out, h.geo.pref)
		h.out = be.AppendUint32(h.out, h.geo.max)
		h.end(k)
	}
	h.reply(opt, repAck, "")
	h.transmission = opt == optGo
	if opt == optInfo {
		h.contexts = saved
	}
	return nil
}

func (h *handshake) infoString(opt uint32, info uint16, s string) {
	k := h.begin(opt, repInfo)
	h.out = be.AppendUint16(h.out, info)
	h.out = append(h.out, s...)
	h.end(k)
}

// meta answers optListMeta and optSetMeta.
func (h *handshake) meta(opt uint32, data []byte) {
	if opt == optSetMeta {
		h.contexts, h.contextsOf = nil, nil
	}
	if !h.structured {
		h.reply(opt, repErrInvalid, "structured replies were not negotiated")
		return
	}
	name, rest, ok := takeString(data)
	if !ok || len(rest) < 4 {
		h.reply(opt, repErrInvalid, "lengths do not fit")
		return
	}
	count := be.Uint32(rest)
	rest = rest[4:]
	if count > maxContexts {
		h.reply(opt, repErrTooBig, "too many queries")
		return
	}
	queries := make([]string, 0, count)
	for range count {
		var q string
		if q, rest, ok = takeString(rest); !ok {
			h.reply(opt, repErrInvalid, "lengths do not fit")
			return
		}
		queries = append(queries, q)
	}
	if len(rest) > 0 {
		h.reply(opt, repErrInvalid, "lengths do not fit")
		return
	}
	e := h.srv.lookup(name)
	if e == nil {
		h.reply(opt, repErrUnknown, "no export of that name")
		return
	}
	var known []string
	if e.status != nil {
		known = e.status.MetaContexts()
	}
	for i, ctx := range known {
		if !selected(ctx, queries, opt == optListMeta) {
			continue
		}
		id := uint32(0)
		if opt == optSetMeta {
			id = uint32(i + 1)
			h.contexts, h.contextsOf = append(h.contexts, metaContext{id, ctx}), e
		}
		k := h.begin(opt, repMeta)
		h.out = be.AppendUint32(h.out, id)
		h.out = append(h.out, ctx...)
		h.end(k)
	}
	h.reply(opt, repAck, "")
}

// selected reports whether a query asks for the context. When listing, no query means all, and a namespace with
// its colon means all in it.
func selected(ctx string, queries []string, listing bool) bool {
	if listing && len(queries) == 0 {
		return true
	}
	for _, q := range queries {
		if q == ctx || listing && strings.HasSuffix(q, ":") && strings.HasPrefix(ctx, q) {
			return true
		}
	}
	return false
}

// takeString takes a length and that many bytes from the front of data.
func takeString(data []byte) (s string, rest []byte, ok bool) {
	if len(data) < 4 {
		return "", nil, false
	}
	n := be.Uint32(data)
	if data = data[4:]; n > uint32(len(data)) {
		return "", nil, false
	}
	return string(data[:n]), data[n:], true
}

// clip shortens a text for people to what the protocol allows in a string.
func clip(s string) string { return s[:min(len(s), maxNameLen)] }

// begin starts a reply; end, with what begin returned, sets its length.
func (h *handshake) begin(opt, typ uint32) int {
	k := len(h.out)
	h.out = be.AppendUint64(h.out, magicOptReply)
	h.out = be.AppendUint32(h.out, opt)
	h.out = be.AppendUint32(h.out, typ)
	h.out = be.AppendUint32(h.out, 0)
	return k
}

func (h *handshake) end(k int) {
	be.PutUint32(h.out[k+optReplySize-4:], uint32(len(h.out)-k-optReplySize))
}

// reply adds a reply with a message for people, or nothing.
func (h *handshake) reply(opt, typ uint32, message string) {
	k := h.begin(opt, typ)
	h.out = append(h.out, message...)
	h.end(k)
}

func (h *handshake) send() error {
	_, err := h.rw.Write(h.out)
	h.out = h.out[:0]
	return err
}
