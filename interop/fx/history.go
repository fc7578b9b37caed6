package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// phase is one "fx write" in a volume's history.
type phase struct {
	Volume string  `json:"volume"`
	Spec   string  `json:"spec"`
	Acked  int64   `json:"acked"` // operations below this are durable
	Ended  bool    `json:"ended"`
	Lost   []int64 `json:"lost,omitempty"` // the target went away: each thread's first operation that was not acknowledged
	Fate   string  `json:"fate,omitempty"` // what came next; "": nothing has
}

// Fates. After a kill and a stop all is there that was acknowledged. After the other two that was not flushed may be
// lost; a kernel that was cut off may also have the old data of it in the cache and the new on the backing device, or the
// other way round, and show one until it drops its copy, and then the other (B 1.8).
const (
	fateCut    = "cut"    // the power went while a kernel wrote
	fateForget = "forget" // our server was killed, and whoever came next had nothing of what it kept in memory
	fateKill   = "kill"   // our server was killed and came back
	fateStop   = "stop"   // our server was stopped in order
)

func history(r io.Reader) []phase {
	var h []phase
	last := map[string]int{}
	in := bufio.NewScanner(r)
	for in.Scan() {
		w := strings.Fields(in.Text())
		if len(w) < 3 || w[0] != "fx" {
			continue
		}
		switch w[1] {
		case "begin":
			last[w[2]] = len(h)
			h = append(h, phase{Volume: w[2], Spec: w[3]})
		case "acked":
			h[last[w[2]]].Acked = size(w[3])
		case "lost":
			for _, n := range w[3:] {
				h[last[w[2]]].Lost = append(h[last[w[2]]].Lost, size(n))
			}
		case "end":
			h[last[w[2]]].Ended = true
		case fateCut, fateForget, fateKill, fateStop:
			for i := range h {
				if h[i].Volume == w[2] && h[i].Fate == "" {
					h[i].Fate = w[1]
				}
			}
		}
	}
	return h
}

func readHistory(file, vol string) (hs []phase) {
	var all []phase
	b, err := os.ReadFile(file)
	must(err)
	must(json.Unmarshal(b, &all))
	for _, p := range all {
		if p.Volume == vol {
			hs = append(hs, p)
		}
	}
	return hs
}

// started tells whether operation i may have reached the volume: without a report on where it ended, any may.
func (p *phase) started(s *spec, i int64) bool {
	return i < s.ops && (len(p.Lost) == 0 || i <= p.Lost[i%s.threads])
}

// acknowledged tells whether operation i is known to have succeeded.
func (p *phase) acknowledged(s *spec, i int64) bool {
	return i < p.Acked || len(p.Lost) > 0 && i < p.Lost[i%s.threads]
}

// survives tells whether what was acknowledged must be there, and not only what was flushed. While nothing has happened
// yet it is as whoever asks says.
func (p *phase) survives(acknowledged bool) bool {
	return p.Fate == fateKill || p.Fate == fateStop || p.Fate == "" && acknowledged
}

// unsettled tells whether one may see an operation, then not, then see it again, with no write between.
func (p *phase) unsettled(i int64) bool { return p.Fate == fateCut && i >= p.Acked }

// at names an operation; phase is one more than its index, 0: none.
type at struct{ phase, op int32 }

// demands says of each sector what it must hold: the newest write that counts (need), or a later one.
type demands struct {
	hs    []phase
	specs []spec
	need  []at
	zero  []bool // zeroes will do: need wrote them, or is none, or a later operation that had been started did
	count int64  // of operations that must be there, unless written over
}

func newDemands(hs []phase, sectors int64, acknowledged bool) *demands {
	d := &demands{hs: hs, specs: make([]spec, len(hs)), need: make([]at, sectors), zero: make([]bool, sectors)}
	for q := range d.zero {
		d.zero[q] = true
	}
	for k := range hs {
		p, s := &hs[k], &d.specs[k]
		*s = parse(p.Spec)
		end := s.ops
		if len(p.Lost) > 0 {
			end = min(end, slices.Max(p.Lost)+1)
		}
		for i := range end {
			counts := i < p.Acked || p.acknowledged(s, i) && (s.forced(i) || p.survives(acknowledged))
			if counts {
				d.count++
			} else if !s.zeroes(i) || !p.started(s, i) {
				continue
			}
			off, n := s.op(i)
			for q := off / sector; q < (off+n)/sector; q++ {
				if counts {
					d.need[q], d.zero[q] = at{int32(k + 1), int32(i)}, s.zeroes(i)
				} else {
					d.zero[q] = true
				}
			}
		}
	}
	return d
}

// judge says what is wrong with a sector's content, "" for nothing, and whether it is a write beyond what it needs.
func (d *demands) judge(q int64, b []byte) (wrong string, beyond bool) {
	rec, need := b[:16], d.need[q]
	if !bytes.Equal(b[16:], b[:sector-16]) {
		return "not one record repeated: torn or foreign data", false
	}
	if bytes.Equal(rec, make([]byte, 16)) {
		if !d.zero[q] {
			return fmt.Sprintf("zero, but %s operation %d is durable", d.hs[need.phase-1].Spec, need.op), false
		}
		return "", false
	}
	num, seed, op := parseRecord(rec)
	k := d.phase(seed)
	switch {
	case num != uint64(q):
		return fmt.Sprintf("holds the data of sector %d (seed %d operation %d)", num, seed, op), false
	case k < 0 || !d.hs[k].started(&d.specs[k], op):
		return fmt.Sprintf("holds seed %d operation %d, which no write of the history has", seed, op), false
	case int32(k+1) < need.phase || int32(k+1) == need.phase && int32(op) < need.op:
		return fmt.Sprintf("stale: seed %d operation %d, but seed %d operation %d is durable", seed, op, d.specs[need.phase-1].seed, need.op), false
	}
	s := &d.specs[k]
	if off, n := s.op(op); q*sector < off || q*sector >= off+n || s.zeroes(op) {
		return fmt.Sprintf("holds seed %d operation %d, which did not write that there", seed, op), false
	}
	return "", need != at{int32(k + 1), int32(op)}
}

func parseRecord(rec []byte) (num uint64, seed uint32, op int64) {
	return binary.LittleEndian.Uint64(rec), binary.LittleEndian.Uint32(rec[8:]), int64(binary.LittleEndian.Uint32(rec[12:]))
}

// phase returns the index of the newest phase with that seed, -1: none.
func (d *demands) phase(seed uint32) int {
	k := len(d.specs) - 1
	for ; k >= 0 && d.specs[k].seed != seed; k-- {
	}
	return k
}

// changed says what is wrong with a sector that was read before, when there has been no write since; "" for nothing.
func (d *demands) changed(before, now []byte) string {
	if bytes.Equal(before, now) {
		return ""
	}
	for _, b := range [][]byte{before, now} {
		_, seed, op := parseRecord(b)
		if k := d.phase(seed); k >= 0 && d.hs[k].unsettled(op) {
			return ""
		}
	}
	_, seed, op := parseRecord(before)
	_, seedNow, opNow := parseRecord(now)
	return fmt.Sprintf("was seed %d operation %d and is seed %d operation %d, with no write between", seed, op, seedNow, opNow)
}

// check verifies each sector: it must hold the newest durable write to it, or a later write that was started. With
// acknowledged, every acknowledged write counts as durable. before, if there is one, has what was read last.
func check(dev string, hs []phase, acknowledged bool, before string) {
	f := openSource(dev)
	d := newDemands(hs, f.size/sector, acknowledged)
	buf, old := make([]byte, 1<<20), make([]byte, 1<<20)
	var last source
	if before != "" {
		if last = openSource(before); last.size != f.size {
			die(fmt.Sprintf("%s has %d bytes, %s %d", before, last.size, dev, f.size))
		}
	}
	var bad, written, beyond int64
	for pos := int64(0); pos < f.size; {
		n := min(int64(len(buf)), f.size-pos)
		must(f.readAt(buf[:n], pos))
		if before != "" {
			must(last.readAt(old[:n], pos))
		}
		for p := int64(0); p < n; p += sector {
			wrong, more := d.judge((pos+p)/sector, buf[p:p+sector])
			if wrong == "" && before != "" {
				wrong = d.changed(old[p:p+sector], buf[p:p+sector])
			}
			if wrong != "" {
				if bad++; bad <= 10 {
					fmt.Printf("sector %d: %s\n", (pos+p)/sector, wrong)
				}
			}
			if !bytes.Equal(buf[p:p+16], zeroRecord[:]) {
				written++
			}
			if more {
				beyond++
			}
		}
		pos += n
	}
	fmt.Printf("%d operations count\n", d.count)
	fmt.Printf("%d sectors, %d written, %d of them from writes not acknowledged as durable, %d wrong\n", f.size/sector, written, beyond, bad)
	if bad > 0 {
		os.Exit(1)
	}
}

var zeroRecord [16]byte

func model(file string, hs []phase) {
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	must(err)
	for _, p := range hs {
		s := parse(p.Spec)
		b := make([]byte, s.max)
		for i := int64(0); i < s.ops; i++ {
			off, n := s.op(i)
			s.fill(b[:n], off, i)
			must2(f.WriteAt(b[:n], off))
		}
	}
	must(f.Close())
}
