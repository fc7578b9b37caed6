package main

import (
	"strings"
	"testing"
)

// volume is content in memory; it starts as zeroes.
type volume []byte

func (v volume) apply(s *spec, ops ...int64) volume {
	w := append(volume{}, v...)
	for _, i := range ops {
		off, n := s.op(i)
		s.fill(w[off:off+n], off, i)
	}
	return w
}

func (v volume) judge(hs []phase, acknowledged bool) (wrong []string) {
	d := newDemands(hs, int64(len(v)/sector), acknowledged)
	for q := range int64(len(v) / sector) {
		if w, _ := d.judge(q, v[q*sector:(q+1)*sector]); w != "" {
			wrong = append(wrong, w)
		}
	}
	return wrong
}

// One thread that overwrites the same sector again and again: operations 2 and 5 are sent with FUA,
// operation 3 writes zeroes.
const overwrites = "seed=7,ops=9,min=512,max=512,align=512,len=512,fua=3,zero=4"

func TestWhatMustBeThere(t *testing.T) {
	flushed := phase{Spec: overwrites, Acked: 2, Lost: []int64{5}} // 2 to 4 acknowledged, 5 in flight, 6 never sent
	forced := phase{Spec: overwrites, Lost: []int64{3}}            // 0 to 2 acknowledged, 3 (zeroes) in flight
	for _, c := range []struct {
		name         string
		h            phase
		newest       int64 // the newest operation that arrived; -1: none
		acknowledged bool
		wrong        string // what is said of it; "": nothing
	}{
		{"a flushed write is lost", flushed, 0, false, "stale"},
		{"FUA counts as a flush", flushed, 1, false, "stale"},
		{"the FUA write itself", flushed, 2, false, ""},
		{"later zeroes", flushed, 3, false, ""},
		{"a later write", flushed, 4, false, ""},
		{"one in flight", flushed, 5, false, ""},
		{"one never sent", flushed, 6, false, "no write of the history"},
		{"an acknowledged one is lost", flushed, 2, true, "stale"},
		{"zeroes instead of an acknowledged write", flushed, 3, true, "durable"},
		{"the acknowledged one", flushed, 4, true, ""},
		{"one in flight, acknowledged ones needed", flushed, 5, true, ""},
		{"FUA without a flush", forced, 1, false, "stale"},
		{"zeroes in flight", forced, 3, false, ""},
		{"zeroes in flight, acknowledged ones needed", forced, 3, true, ""},
		{"the write before them", forced, 2, true, ""},
		{"none of them", forced, -1, true, ""}, // zeroes in flight look the same
		{"none of what was flushed", phase{Spec: overwrites, Acked: 2, Lost: []int64{2}}, -1, false, "durable"},
		{"a cut loses what was not flushed, for ever", phase{Spec: overwrites, Acked: 2, Lost: []int64{5}, Fate: "cut"}, 2, true, ""},
		{"but nothing flushed", phase{Spec: overwrites, Acked: 2, Lost: []int64{5}, Fate: "cut"}, 0, true, "stale"},
		{"and so does a death without a memory", phase{Spec: overwrites, Acked: 2, Lost: []int64{5}, Fate: "forget"}, 2, true, ""},
		{"a kill loses nothing", phase{Spec: overwrites, Acked: 2, Lost: []int64{5}, Fate: "kill"}, 2, false, "stale"},
		{"nor does a stop", phase{Spec: overwrites, Acked: 2, Lost: []int64{5}, Fate: "stop"}, 2, false, "stale"},
		{"after a stop, the acknowledged one", phase{Spec: overwrites, Acked: 2, Lost: []int64{5}, Fate: "stop"}, 4, false, ""},
		{"acknowledged zeroes are lost", phase{Spec: overwrites, Lost: []int64{4}}, 2, true, "stale"},
	} {
		s := parse(c.h.Spec)
		v := make(volume, sector)
		if c.newest >= 0 {
			v = v.apply(&s, c.newest)
		}
		wrong := strings.Join(v.judge([]phase{c.h}, c.acknowledged), "; ")
		if (wrong == "") != (c.wrong == "") || !strings.Contains(wrong, c.wrong) {
			t.Errorf("%s: %q, want %q", c.name, wrong, c.wrong)
		}
	}
}

func TestForeignContent(t *testing.T) {
	h := []phase{{Spec: "seed=1,ops=4,min=512,max=512,align=512,len=4k", Acked: 4, Ended: true}}
	s := parse(h[0].Spec)
	good := make(volume, 8*sector).apply(&s, 0, 1, 2, 3)
	if w := good.judge(h, false); len(w) > 0 {
		t.Fatal(w)
	}
	off, _ := s.op(3)
	for name, change := range map[string]func(volume){
		"torn":                func(v volume) { v[off+100] ^= 1 },
		"belongs elsewhere":   func(v volume) { copy(v[(off+sector)%4096:][:sector], v[off:off+sector]) },
		"of an unknown write": func(v volume) { o := parse("seed=2,ops=9,min=4k,max=4k,len=4k"); o.fill(v[off:off+sector], off, 0) },
	} {
		v := append(volume{}, good...)
		change(v)
		if w := v.judge(h, false); len(w) == 0 {
			t.Errorf("%s: not seen", name)
		}
	}
}

// A fate is that of what has none yet, of one volume.
func TestHistoryOfALongLife(t *testing.T) {
	begin := "fx begin a " + overwrites + "\n"
	h := history(strings.NewReader(begin + "fx begin b " + overwrites + "\n" + begin + "fx cut a\n" + begin + "fx kill a\n" + begin))
	var fates []string
	for _, p := range h {
		fates = append(fates, p.Volume+" "+p.Fate)
	}
	if got := strings.Join(fates, ", "); got != "a cut, b , a cut, a kill, a " {
		t.Error(got)
	}
}

func TestChangedSinceItWasRead(t *testing.T) {
	s := parse(overwrites)
	content := func(op int64) []byte { return make(volume, sector).apply(&s, op) }
	for _, c := range []struct {
		fate        string
		before, now int64
		wrong       bool
	}{
		{fateCut, 4, 4, false},
		{fateCut, 2, 4, false}, // 4 had not been flushed
		{fateCut, 4, 2, false},
		{fateCut, 0, 1, true},
		{fateForget, 2, 4, true},
		{fateKill, 2, 4, true},
		{fateStop, 4, 2, true},
	} {
		d := newDemands([]phase{{Spec: overwrites, Acked: 3, Fate: c.fate}}, 1, true)
		if wrong := d.changed(content(c.before), content(c.now)); (wrong != "") != c.wrong {
			t.Errorf("%s: from %d to %d: %q", c.fate, c.before, c.now, wrong)
		}
	}
}

func TestHistoryOfALoss(t *testing.T) {
	h := history(strings.NewReader("fx begin a " + overwrites + "\nnoise\nfx acked a 3\nfx begin b " + overwrites + "\nfx lost a 7 5\nfx end b\n"))
	if len(h) != 2 || h[0].Acked != 3 || len(h[0].Lost) != 2 || h[0].Lost[1] != 5 || h[0].Ended || !h[1].Ended {
		t.Errorf("%+v", h)
	}
}
