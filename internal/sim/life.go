package sim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

// An end is how a life may have turned out, and what the next one begins with.
type end struct {
	kind     Kind
	strength string
	boot     int
	history  *History
	images   []*blockdev.MemoryDevice
	dir      string
}

// A life is one process, from its start to its death or its orderly stop.
type life struct {
	*trial
	number int // 1 and on
	seed   uint64
	cut    int  // uncut: none
	kill   bool // the process is killed, not the power cut
	begin  end
	open   func(ctx context.Context, e *Env) (*System, error)

	env   *Env
	crash []*blockdev.Crashable
	power *blockdev.Power
	death death
	ends  []end
}

// lives lets a first life end at a cut, and follows each way in which that may turn out.
func (t *trial) lives(cut int, dir string) *Failure {
	first := &life{
		trial: t, number: 1, seed: t.Seed, cut: cut, kill: t.Kill, open: t.Build,
		begin: end{history: NewHistory(t.Volumes...), dir: filepath.Join(dir, "1"), strength: "stop"},
	}
	for _, p := range t.prepared {
		d, err := copyOf(p)
		if err != nil {
			return t.failure(cut, "", 1, err)
		}
		first.begin.images = append(first.begin.images, d)
	}
	if err := os.Mkdir(first.begin.dir, 0o700); err != nil {
		return t.failure(cut, "", 1, err)
	}
	err := first.run()
	defer func() {
		for _, e := range first.ends {
			closeAll(e.images)
		}
	}()
	if err != nil {
		return t.failure(cut, first.anyStrength(), 1, err)
	}
	if !first.death.dead {
		t.finished.Store(true)
		t.ops.Store(int64(first.death.ops))
	} else {
		t.cuts.Add(1)
	}
	for i := range first.ends {
		e := &first.ends[i]
		if f := t.follow(cut, e, 2); f != nil {
			return f
		}
		closeAll(e.images)
		e.images = nil
	}
	return nil
}

// anyStrength is a strength to repeat a failure with that comes before the crash.
func (l *life) anyStrength() string {
	switch {
	case l.only.strength != "":
		return l.only.strength
	case l.cut == uncut:
		return "stop"
	case l.kill:
		return "kill"
	}
	return l.Strengths[0].String()
}

// follow opens what a life left: for another life that is cut short, and then for the checks.
func (t *trial) follow(cut int, e *end, number int) *Failure {
	t.images.Add(1)
	fail := func(err error) *Failure { return t.failure(cut, e.strength, number, err) }
	if err := t.check(e.images, e.kind, e.history); err != nil {
		return fail(fmt.Errorf("check of the devices after the %v: %w", e.kind, err))
	}
	seed := t.mix(uint64(cut), uint64(number), e.strength)
	if number > t.Lives {
		if err := t.verify(e, number, seed); err != nil {
			return fail(err)
		}
		return nil
	}
	rng := rand.New(rand.NewPCG(seed, 3))
	l := &life{trial: t, number: number, seed: seed, kill: t.Kill && rng.IntN(3) > 0, begin: *e, open: t.Reopen}
	e.images = nil // the life closes them
	if l.cut = rng.IntN(24); rng.IntN(2) == 0 {
		if l.cut = rng.IntN(400); t.Early { // not while it starts
			l.cut %= 80
		}
	}
	err := l.run()
	defer func() {
		for _, e := range l.ends {
			closeAll(e.images)
		}
	}()
	if err != nil {
		return fail(err)
	}
	next := &l.ends[rng.IntN(len(l.ends))]
	next.strength = e.strength // by which the whole chain is repeated
	return t.follow(cut, next, number+1)
}

// mix makes a seed of its own for each place where one is needed.
func (t *trial) mix(numbers ...any) uint64 {
	h := uint64(14695981039346656037)
	for _, b := range []byte(fmt.Sprint(append([]any{t.Seed}, numbers...)...)) {
		h = (h ^ uint64(b)) * 1099511628211
	}
	return h
}

// simulate runs fn in a new simulation, and returns its error or that of the simulation.
func (t *trial) simulate(s *rt.Sim, fn func(ctx context.Context) error) error {
	s.Limit = t.Limit
	var err error
	if e := s.Run(func() { err = fn(context.Background()) }); e != nil {
		return e
	}
	return err
}

// run lives the life. What it leaves is in l.ends.
func (l *life) run() error {
	s := rt.NewSim(l.seed)
	l.env = &Env{Runtime: s.Runtime(), Dir: l.begin.dir, Boot: l.begin.boot, Life: l.number, Seed: l.seed}
	l.power = new(blockdev.Power)
	l.death.limit = l.cut
	l.death.die = l.dieByPower
	if l.kill {
		l.death.die = l.dieAlone
		l.killBetween(s)
	}
	return l.simulate(s, func(ctx context.Context) error {
		if err := l.attach(); err != nil {
			return err
		}
		err := l.work(ctx)
		if l.death.dead {
			err = nil
		}
		if err == nil {
			err = l.leave()
		}
		for _, c := range l.crash {
			err = errors.Join(err, c.Close())
		}
		return err
	})
}

// killBetween lets every other kill come not at an operation, but some turns of goroutines after the one before.
func (l *life) killBetween(s *rt.Sim) {
	if l.cut == 0 || l.cut == uncut || l.cut%2 == 0 {
		return
	}
	turns := 1 + int(l.mix("turns", l.cut, l.number)%64)
	l.death.limit = -1
	s.Trace = func(_ time.Duration, _ string, _ int) {
		if l.death.ops >= l.cut {
			if turns--; turns == 0 {
				l.death.come()
			}
		}
	}
}

// attach makes the devices. The clock stands still meanwhile.
func (l *life) attach() error {
	for i, m := range l.begin.images {
		m.SetRuntime(l.env.Runtime)
		slow := blockdev.NewDelaying(m, blockdev.Latency{})
		c, err := blockdev.NewCrashable(slow, blockdev.CrashableOptions{Power: l.power})
		if err != nil {
			return err
		}
		slow.SetLatency(l.latency(i))
		l.crash = append(l.crash, c)
		if l.kill {
			l.env.Devices = append(l.env.Devices, &tap{Device: c, d: &l.death})
			continue
		}
		way := &tap{Device: newSerial(c), d: &l.death}
		l.env.Devices = append(l.env.Devices, blockdev.NewDelaying(way, toDisk))
	}
	return nil
}

// toDisk is the time from the process to the disk: writes overtake one another there too.
var toDisk = blockdev.Latency{Write: 15 * time.Microsecond, Jitter: 1}

func (t *trial) latency(disk int) blockdev.Latency {
	if l := t.Disks[disk].Latency; l != (blockdev.Latency{}) {
		return l
	}
	return fast
}

// work starts the system, loads it, and stops it.
func (l *life) work(ctx context.Context) error {
	h := l.begin.history
	s, err := l.open(ctx, l.env)
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	if l.number > 1 && l.seed%4 == 0 {
		if err := h.ReadAll(ctx, s.Targets, rand.New(rand.NewPCG(l.seed, 2))); err != nil && !l.death.dead {
			return errors.Join(err, s.Close(ctx))
		}
	}
	w := l.Workload
	w.Seed = l.mix("workload", l.number)
	if l.Between != nil {
		w.Between = func(ctx context.Context, n int) error { return l.Between(ctx, l.env, s, n) }
	}
	err = w.Run(ctx, l.env.Runtime, h, s.Targets)
	if e := s.Close(ctx); e != nil && err == nil {
		err = fmt.Errorf("stop: %w", e)
	}
	return err
}

// dieByPower takes pictures of what the devices may show after a power cut at this moment.
func (l *life) dieByPower() {
	l.begin.history.Freeze()
	l.power.Cut()
	l.pictures()
}

// pictures adds an end for each strength.
func (l *life) pictures() {
	for _, s := range l.Strengths {
		if l.number == 1 && l.only.strength != "" && l.only.strength != s.String() {
			continue
		}
		e := end{kind: Cut, strength: s.String(), boot: l.begin.boot + 1}
		var err error
		e.dir, err = os.MkdirTemp(filepath.Dir(l.begin.dir), "cut")
		rng := rand.New(rand.NewPCG(l.seed, l.mix(l.cut, e.strength)))
		for _, c := range l.crash {
			d, e2 := c.Crash(rng, s)
			if e2 == nil {
				e.images = append(e.images, d)
			}
			err = errors.Join(err, e2)
		}
		if err != nil {
			panic(err)
		}
		l.ends = append(l.ends, e)
	}
}

// dieAlone keeps what is in the runtime directory at this moment. What the devices have accepted will be there.
func (l *life) dieAlone() {
	l.begin.history.Freeze()
	e := end{kind: Kill, strength: "kill", boot: l.begin.boot}
	var err error
	if e.dir, err = os.MkdirTemp(filepath.Dir(l.begin.dir), "kill"); err == nil {
		err = os.CopyFS(e.dir, os.DirFS(l.begin.dir))
	}
	if err != nil {
		panic(err)
	}
	l.power.Cut() // nothing more is accepted
	l.ends = append(l.ends, e)
}

// leave completes the ends when the process is gone.
func (l *life) leave() error {
	h := l.begin.history
	if !l.death.dead {
		l.ends = append(l.ends, end{kind: Stop, strength: "stop", boot: l.begin.boot, dir: l.begin.dir})
		if !l.kill {
			l.pictures() // the power may be cut just after the stop
		}
	}
	if l.only.strength != "" && l.number == 1 {
		l.ends = slices.DeleteFunc(l.ends, func(e end) bool {
			skip := e.strength != l.only.strength
			if skip {
				closeAll(e.images)
			}
			return skip
		})
	}
	for i := range l.ends {
		e := &l.ends[i]
		e.history = h.Clone()
		e.history.Crashed(e.kind)
		if e.kind == Cut {
			continue
		}
		for _, m := range l.begin.images {
			d, err := copyOf(m)
			if err != nil {
				return err
			}
			e.images = append(e.images, d)
		}
	}
	return nil
}

// verify opens what a life left, and checks that each block holds what it may, and goes on to hold that.
func (t *trial) verify(e *end, number int, seed uint64) error {
	s := rt.NewSim(seed)
	env := &Env{Runtime: s.Runtime(), Dir: e.dir, Boot: e.boot, Life: number, Seed: seed}
	rng := rand.New(rand.NewPCG(seed, 4))
	for i, m := range e.images {
		m.SetRuntime(env.Runtime)
		env.Devices = append(env.Devices, blockdev.NewDelaying(m, t.latency(i)))
	}
	err := t.simulate(s, func(ctx context.Context) error {
		for restart := range 2 {
			s, err := t.Reopen(ctx, env)
			if err != nil {
				return fmt.Errorf("reopen after the %v: %w", e.kind, err)
			}
			err = t.stability(ctx, env, e, s, rng, restart > 0)
			if e := s.Close(ctx); e != nil {
				err = errors.Join(err, fmt.Errorf("stop: %w", e))
			}
			if err != nil {
				return err
			}
			env.Life++
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := t.check(e.images, Stop, e.history); err != nil {
		return fmt.Errorf("check of the devices after %v and stop: %w", e.kind, err)
	}
	return nil
}

// stability reads all, stirs, and reads all again.
func (t *trial) stability(ctx context.Context, env *Env, e *end, s *System, rng *rand.Rand, again bool) error {
	after := e.kind.String()
	if again {
		after += ", stop and start"
	}
	if err := e.history.ReadAll(ctx, s.Targets, rng); err != nil {
		return fmt.Errorf("after %s: %w", after, err)
	}
	if t.Stir == nil || again {
		return nil
	}
	if err := t.Stir(ctx, env, s); err != nil {
		return fmt.Errorf("stir: %w", err)
	}
	if err := e.history.ReadAll(ctx, s.Targets, rng); err != nil {
		return fmt.Errorf("changed without a write, after %s and stir: %w", after, err)
	}
	return nil
}

// check looks at the devices of a system that is at rest.
func (t *trial) check(images []*blockdev.MemoryDevice, kind Kind, h *History) error {
	r := rt.New()
	for _, m := range images {
		m.SetRuntime(r)
	}
	rest := Rest{Images: images, Kind: kind}
	if t.Check != nil {
		if err := t.Check(context.Background(), rest); err != nil {
			return err
		}
	}
	if t.Alone == nil {
		return nil
	}
	volumes, err := t.Alone(rest)
	if err != nil {
		return fmt.Errorf("volumes without their cache: %w", err)
	}
	for i, p := range volumes {
		if p == nil {
			continue
		}
		if err := h.allows(i, p); err != nil {
			return fmt.Errorf("volume %d without its cache: %w", i, err)
		}
		t.alone.Add(1)
	}
	return nil
}

// copyOf returns a device with the same content.
func copyOf(m *blockdev.MemoryDevice) (*blockdev.MemoryDevice, error) {
	i := m.Info()
	d, err := blockdev.Memory(i.Size, blockdev.MemoryOptions{
		Name: i.Name, LogicalBlock: i.LogicalBlock, PhysicalBlock: i.PhysicalBlock, BufferAlign: i.BufferAlign,
		NoDiscard: !i.CanDiscard, Rotational: i.Rotational,
	})
	if err != nil {
		return nil, err
	}
	const page = 4096
	from, to := m.Bytes(), d.Bytes()
	var none [page]byte
	for at := 0; at < len(from); at += page {
		p := from[at:min(at+page, len(from))]
		if !bytes.Equal(p, none[:len(p)]) {
			copy(to[at:], p)
		}
	}
	return d, nil
}

func closeAll(devices []*blockdev.MemoryDevice) {
	for _, d := range devices {
		d.Close()
	}
}
