package sim

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// A script runs a history of one block, told in words:
//
//	+a -a ~a       write a is sent, acknowledged, has failed; A and other capitals: with FUA
//	+z +d          so too writes of zeroes (z, y) and discards (d, e)
//	+f -f          a flush is sent, acknowledged
//	+r -r=a -r!a   a read is sent, returns a, returns a and must not
//	=a !a          the same at once; 0 is what was there at first, "zero" is zeroes
//	cut kill stop  the end of a life
type script struct {
	h       *History
	numbers map[string]uint64
	starts  map[string]uint64
}

func newScript(zero bool) *script {
	return &script{
		h:       NewHistory(Volume{Size: 512 * 4, Block: 512, Zero: zero}),
		numbers: map[string]uint64{"0": 0, "zero": zeroes}, starts: map[string]uint64{},
	}
}

const scriptBlock = 2

func (s *script) send(name string) {
	kind := opWrite
	switch name {
	case "z", "y":
		kind = opZeroes
	case "d", "e":
		kind = opDiscard
	case "f":
		s.starts[name] = s.h.tick()
		return
	case "r":
		s.starts[name] = s.h.beginRead()
		return
	}
	s.numbers[name] = s.h.begin(kind, 0, scriptBlock, 1, name < "a")
}

func (s *script) read(start uint64, name string) error {
	p := make([]byte, 512)
	if number := s.numbers[name]; number != zeroes {
		putBlocks(p, 0, 512, scriptBlock, number)
	}
	defer s.h.endRead(start)
	return s.h.read(0, scriptBlock, p, start)
}

// step does one word, and returns what is wrong with its read.
func (s *script) step(word string) error {
	wants := func(name string, start uint64, bad bool) error {
		err := s.read(start, name)
		if bad == (err != nil) {
			return nil
		}
		return fmt.Errorf("%s: %w", word, errors.Join(err, errors.New("(the answer)")))
	}
	switch {
	case word == "cut":
		s.h.Crashed(Cut)
	case word == "kill":
		s.h.Crashed(Kill)
	case word == "stop":
		s.h.Crashed(Stop)
	case word[0] == '=' || word[0] == '!':
		return wants(word[1:], s.h.beginRead(), word[0] == '!')
	case word[0] == '+':
		s.send(word[1:])
	case word[0] == '~':
		s.h.end(s.numbers[word[1:]], errors.New("failed"))
	case word == "-f":
		s.h.flushed(0, s.starts["f"])
	case len(word) > 2 && word[:2] == "-r":
		return wants(word[3:], s.starts["r"], word[2] == '!')
	default:
		s.h.end(s.numbers[word[1:]], nil)
	}
	return nil
}

func TestHistory(t *testing.T) {
	for _, words := range []string{
		// while it runs
		"=0 !zero",
		"+a =0 =0 =a !0",
		"+a -a =a !0",
		"+r +a -a -r=0",
		"+r +a -a -r=a",
		"+a -a +r +b -b -r=a",
		"+a -a +b -b !a",
		"+a +b -a -b =a =a !b",
		"+a +b -a -b =b !a",
		"+a +b =a =b !a",
		"+a ~a =0 =0 =a !0",
		"+a ~a +b -b =b =a !b",
		"+a ~a =a +b -b !a",
		"+z -z =zero !0",
		"+a -a +z -z !a",
		"+z -z +a -a !zero",
		"+z -z +a +y =zero =a =zero !a",
		"+z -z +a -a +y =zero !a",
		// discards
		"+d =0 =zero =0",
		"+a -a +d -d =a =a !0",
		"+a -a +d -d =zero !a",
		"+a -a +b -b +d -d =a !b",
		"+d -d +a -a !0",
		"+d -d =0 +a -a !0",
		"+a -a +d -d =0 +e -e =a !0",
		// power cuts
		"+a -a cut =0 !a",
		"+a -a cut =a !0",
		"+a cut =a !0",
		"+a cut =0 !a",
		"+A -A cut !0",
		"+A cut =0",
		"+a -a +f -f cut !0",
		"+a +f -a -f cut =0",
		"+a -a +f cut =0",
		"+a -a +b -b cut =0",
		"+a -a +b -b cut =a !b",
		"+a -a +f -f +b -b cut =a",
		"+a -a +f -f +b -b cut !0",
		"+a -a +f -f +b cut =b",
		"+a -a +b -b +f -f cut !a",
		"+a +b -a -b =a +f -f cut !b",
		"+a +b -a -b +f -f cut =a !b",
		"+A +b -A -b cut =b",
		"+a =a cut =0",
		"+A -A +z -z cut =zero !A",
		"+A -A +z -z +f -f cut !A",
		"+a -a cut +b -b !0",
		"+a -a cut +b =0 =b !a",
		"+a -a cut +b =0 !a",
		"+A -A +a -a cut =A cut !a",
		"+a -a cut cut =a cut !0",
		"+A -A +d -d =zero cut =0",
		"+A -A +d -d =zero +f -f cut !A",
		"+A -A +d -d +f -f cut =0 !A",
		// death of the process, and orderly stops
		"+a -a kill !0",
		"+a kill =0 !a",
		"+a kill =a !0",
		"+a -a +b kill =b",
		"+a -a kill =a cut =0 !a",
		"+a -a kill =a +f -f cut !0",
		"+A -A +b -b kill cut =A",
		"+A -A +b -b kill cut !0",
		"+a -a kill kill !0",
		"+a -a kill kill cut =0",
		"+a -a stop cut !0",
		"+d -d =0 kill !zero",
	} {
		s := newScript(false)
		for word := range strings.FieldsSeq(words) {
			if err := s.step(word); err != nil {
				t.Errorf("%s: %v", words, err)
				break
			}
		}
	}
	s := newScript(true)
	for word := range strings.FieldsSeq("=zero !0 +d -d +f -f cut !0") {
		if err := s.step(word); err != nil {
			t.Errorf("zero volume: %v", err)
		}
	}
}

// Where reads after a crash may go to and fro, they still tell what was flushed, and what was written since.
func TestLooseHistory(t *testing.T) {
	for _, words := range []string{
		"+a -a +b -b cut =0 =a =b =0",
		"+A -A +b -b cut =A =b =A !0",
		"+a -a +f -f cut !0",
		"+a -a cut =0 =a +b -b =b !a",
		"+a -a cut =a +b =0 =b !a",
		"+a -a +b kill =a =b =a !0",
		"+a -a cut =0 stop =a =0",
		"+a -a cut =0 cut =a",
		"+a -a cut =a +b -b +f -f cut !a",
		"+a -a +b -b !a",
		"+a -a +d -d =0 !zero",
	} {
		s := newScript(false)
		s.h.volumes[0].Loose = true
		for word := range strings.FieldsSeq(words) {
			if err := s.step(word); err != nil {
				t.Errorf("%s: %v", words, err)
				break
			}
		}
	}
}

// What the check below knows of a history: operations with the times of their events, and values in place of names.
type event struct {
	read       bool
	value      int // a write's own, 1 and on, or what a read returned; 0 is what was there at first
	start, end int // end 0: no reply
	hard       bool
}

// orders calls fn with each order of events in which each lies between its start and its end and reads return what
// was written last; those without a reply may be missing. It returns whether fn returned true for one.
func orders(events []event, fn func(values []int) bool) bool {
	var values []int // as written, in order
	used := make([]bool, len(events))
	var next func() bool
	next = func() bool {
		done := true
		for i, e := range events {
			if used[i] {
				continue
			}
			if e.end != 0 {
				done = false
			}
			first := !slices.ContainsFunc(events, func(o event) bool { // nothing that is left had ended before
				return o.end != 0 && o.end < e.start && !used[slices.Index(events, o)]
			})
			last := 0
			if len(values) > 0 {
				last = values[len(values)-1]
			}
			if !first || e.read && (e.end == 0 || e.value != last) {
				continue
			}
			used[i] = true
			if !e.read {
				values = append(values, e.value)
			}
			ok := next()
			if !e.read {
				values = values[:len(values)-1]
			}
			used[i] = false
			if ok {
				return true
			}
		}
		return done && fn(values)
	}
	return next()
}

// TestHistoryAgainstAllOrders compares the checks, during a run and after a power cut, with a search for an order of
// all operations that explains what was read.
func TestHistoryAgainstAllOrders(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	names := []string{"0", "a", "b", "c", "g", "h", "i", "j"}
	bad, good, lost, kept := 0, 0, 0, 0
	for range 4000 {
		s := newScript(false)
		var events []event
		var open []int // numbers of events without reply
		writes, now, ok := 0, 0, true
		flushSent, flushed := 0, 0
		log := ""
		for len(events) < 6 && ok {
			now++
			switch k := rng.IntN(7); {
			case k < 3:
				e := event{read: rng.IntN(2) == 0, start: now}
				if !e.read {
					writes++
					e.value = writes
				}
				open = append(open, len(events))
				events = append(events, e)
				name := names[e.value]
				if e.read {
					s.starts[fmt.Sprint(now)] = s.h.beginRead()
					log += fmt.Sprintf(" +r%d", now)
				} else {
					s.send(name)
					log += " +" + name
				}
			case k < 6 && len(open) > 0:
				i := rng.IntN(len(open))
				e := &events[open[i]]
				open = slices.Delete(open, i, i+1)
				e.end = now
				if !e.read {
					name := names[e.value]
					s.h.end(s.numbers[name], nil)
					log += " -" + name
					break
				}
				e.value = rng.IntN(writes + 1)
				name := names[e.value]
				log += fmt.Sprintf(" -r%d=%s", e.start, name)
				got := s.read(s.starts[fmt.Sprint(e.start)], name) == nil
				ok = orders(events, func([]int) bool { return true })
				if got != ok {
					t.Fatalf("%s: %v, want %v", log, got, ok)
				}
			case k == 6 && flushSent == 0:
				flushSent = now
				s.send("f")
				log += " +f"
			case k == 6:
				s.step("-f")
				flushed, flushSent = flushSent, 0
				log += " -f"
			}
		}
		if !ok {
			bad++
			continue
		}
		good++
		for i := range events {
			e := &events[i]
			e.hard = !e.read && e.end != 0 && e.end < flushed
		}
		s.h.Crashed(Cut)
		for v := range writes + 1 {
			// there is an order, and in it a point from which on all may be lost, with v written last before it
			want := orders(events, func(values []int) bool {
				at := slices.Index(values, v)
				if at < 0 && v != 0 {
					return false
				}
				return !slices.ContainsFunc(values[at+1:], func(w int) bool {
					return slices.ContainsFunc(events, func(e event) bool { return e.hard && e.value == w })
				})
			})
			name := names[v]
			c := script{h: s.h.Clone(), numbers: s.numbers}
			if got := c.read(c.h.beginRead(), name) == nil; got != want {
				t.Fatalf("%s cut =%s: %v, want %v", log, name, got, want)
			}
			if want {
				kept++
			} else {
				lost++
			}
		}
	}
	t.Logf("%d histories with a wrong read, %d without; after the cut %d values may be read, %d not", bad, good, kept, lost)
}

// TestHistoryIsPruned writes a block often enough for what is long gone to be dropped, while a slow read goes on.
func TestHistoryIsPruned(t *testing.T) {
	s := newScript(false)
	slow := s.h.beginRead()
	for range 100 {
		s.h.end(s.h.begin(opWrite, 0, scriptBlock, 1, true), nil)
	}
	s.numbers["old"] = 50
	if err := s.read(slow, "old"); err != nil {
		t.Errorf("a read under way since before the write: %v", err)
	}
	for range 100 {
		s.h.end(s.h.begin(opWrite, 0, scriptBlock, 1, true), nil)
	}
	if n := len(s.h.volumes[0].blocks[scriptBlock]); n > 20 {
		t.Errorf("%d entries", n)
	}
	if err := s.read(s.h.beginRead(), "old"); err == nil {
		t.Error("an old value is accepted")
	}
}

func TestContentSaysWhatItIs(t *testing.T) {
	block := func(volume int, number uint64, at int64) []byte {
		p := make([]byte, 4096)
		putBlocks(p, volume, 4096, at, number)
		return p
	}
	mixed := block(1, 12, 17)
	copy(mixed[1024:2048], block(1, 13, 17)[1024:])
	torn := block(1, 12, 17)
	copy(torn[100:], block(1, 13, 17)[100:512])
	shifted := append(block(1, 12, 17)[512:], make([]byte, 512)...)
	holes := block(1, 12, 17)
	clear(holes[512:])
	for _, c := range []struct {
		p    []byte
		want string
	}{
		{block(1, 12, 17), ""},
		{make([]byte, 4096), ""},
		{block(1, 12, 99), "write 12 of block 99 of volume 1"},
		{block(0, 12, 17), "write 12 of block 17 of volume 0"},
		{mixed, "a mixture: in sectors 0-1 write 12 of block 17 of volume 1; in sectors 2-3 write 13 of"},
		{torn, "in sectors 0-0 write 12 of block 17 of volume 1 up to byte 96, then other bytes"},
		{shifted, "sector 1 of write 12 of block 17"},
		{holes, "in sectors 1-7 zeroes"},
		{slices.Repeat([]byte{0xdb}, 4096), "unknown bytes (dbdb"},
	} {
		_, wrong := identify(c.p, 1, 17)
		if (wrong == "") != (c.want == "") || !strings.Contains(wrong, c.want) {
			t.Errorf("%q, want %q", wrong, c.want)
		}
	}
}
