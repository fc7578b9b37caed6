package main

import (
	"encoding/binary"
	"strconv"
	"strings"
)

const sector = 512

type spec struct {
	text                      string
	seed                      uint32
	ops, threads, flush, mark int64
	conns, fua, zero          int64
	min, max, align, off, len int64
	seq                       bool
}

func size(s string) int64 {
	m := int64(1)
	switch {
	case strings.HasSuffix(s, "k"):
		m = 1 << 10
	case strings.HasSuffix(s, "M"):
		m = 1 << 20
	case strings.HasSuffix(s, "G"):
		m = 1 << 30
	}
	n, err := strconv.ParseInt(strings.TrimRight(s, "kMG"), 10, 64)
	must(err)
	return n * m
}

func parse(text string) spec {
	s := spec{text: text, threads: 1, conns: 1, mark: -1, min: 4096, max: 4096, align: 4096}
	for _, kv := range strings.Split(text, ",") {
		k, v, _ := strings.Cut(kv, "=")
		switch k {
		case "seed":
			s.seed = uint32(size(v))
		case "ops":
			s.ops = size(v)
		case "threads":
			s.threads = size(v)
		case "flush":
			s.flush = size(v)
		case "mark":
			s.mark = size(v)
		case "conns":
			s.conns = size(v)
		case "fua":
			s.fua = size(v)
		case "zero":
			s.zero = size(v)
		case "min":
			s.min = size(v)
		case "max":
			s.max = size(v)
		case "align":
			s.align = size(v)
		case "off":
			s.off = size(v)
		case "len":
			s.len = size(v)
		case "order":
			s.seq = v == "seq"
		default:
			die("unknown key in spec: " + kv)
		}
	}
	if s.len/s.threads < s.max || s.min%sector != 0 || s.align%sector != 0 || s.min > s.max {
		die("bad spec: " + text)
	}
	return s
}

// mix is the splitmix64 finalizer.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// op returns the range that operation i writes.
func (s *spec) op(i int64) (off, n int64) {
	part := s.len / s.threads / s.align * s.align
	base := s.off + i%s.threads*part
	h := mix(uint64(s.seed)<<32 ^ uint64(i))
	n = s.min + int64(mix(h)%uint64((s.max-s.min)/s.align+1))*s.align
	if s.seq {
		return base + (i/s.threads)*s.max%(part/s.max*s.max), n
	}
	return base + int64(h%uint64((part-n)/s.align+1))*s.align, n
}

// forced tells whether operation i is durable once it is acknowledged.
func (s *spec) forced(i int64) bool { return s.fua > 0 && i%s.fua == s.fua-1 }

// zeroes tells whether operation i writes zeroes.
func (s *spec) zeroes(i int64) bool { return s.zero > 0 && i%s.zero == s.zero-1 }

// fill makes the content that operation i writes at off.
func (s *spec) fill(b []byte, off int64, i int64) {
	if s.zeroes(i) {
		clear(b)
		return
	}
	var r [16]byte
	for p := int64(0); p < int64(len(b)); p += sector {
		binary.LittleEndian.PutUint64(r[:], uint64((off+p)/sector))
		binary.LittleEndian.PutUint32(r[8:], s.seed)
		binary.LittleEndian.PutUint32(r[12:], uint32(i))
		for q := p; q < p+sector; q += 16 {
			copy(b[q:], r[:])
		}
	}
}
