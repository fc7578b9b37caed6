package sim

import (
	"context"
	"errors"
	"maps"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/rt"
)

func TestPlainVolumeSurvives(t *testing.T) {
	for _, seed := range Seeds(4) {
		small(seed).Run(t)
	}
}

func TestTwoVolumesSurviveSeveralLives(t *testing.T) {
	for _, seed := range Seeds(3) {
		l := twoVolumes(seed)
		l.Step, l.Lives = 7, 3
		l.Run(t)
	}
}

func TestKilledCacheSurvives(t *testing.T) {
	for _, seed := range Seeds(2) {
		l := cachedLoop(seed, false)
		l.Kill, l.Lives, l.Step = true, 3, 15
		l.Run(t)
	}
}

// findIn tries seeds until a loop fails, with a message that matches.
func findIn(t *testing.T, seeds int, loop func(seed uint64) Loop) {
	t.Helper()
	images := 0
	for seed := range uint64(seeds) {
		l := loop(seed)
		l.Test = t.Name()
		r, err := l.Try()
		images += r.Images
		if err == nil {
			continue
		}
		var v *Violation
		var f *Failure
		if !errors.As(err, &v) || !errors.As(err, &f) {
			t.Fatalf("found, but not as a violation: %v", err)
		}
		t.Logf("seed %d, after %d images: %v", seed, images, err)
		return
	}
	t.Errorf("not found in %d seeds, %d images", seeds, images)
}

func TestBrokenVolumesAreFound(t *testing.T) {
	ctx := context.Background()
	damages := map[string]func(e *Env, b *broken) error{
		"flush ignored": func(_ *Env, b *broken) error {
			b.flush = func() error { return nil }
			return nil
		},
		"FUA ignored": func(_ *Env, b *broken) error {
			b.write = func(p []byte, off int64, _ bool) error { return b.plain.WriteAt(ctx, p, off, false) }
			b.zeroes = func(off, n int64, _ bool) error { return b.plain.WriteZeroes(ctx, off, n, false) }
			return nil
		},
		"flush before the writes": func(_ *Env, b *broken) error {
			// a write is acknowledged when it is sent
			b.write = func(p []byte, off int64, fua bool) error {
				if fua {
					return b.plain.WriteAt(ctx, p, off, fua)
				}
				own := append([]byte(nil), p...)
				e := b.plain
				runtimeOf(e).Go("late write", func() { _ = e.WriteAt(ctx, own, off, false) })
				return nil
			}
			return nil
		},
		"neighbour's block": func(_ *Env, b *broken) error {
			b.write = func(p []byte, off int64, fua bool) error {
				if off == 512*64 || off/512%32 == 7 && off+int64(len(p)) < diskSize {
					off += 512
				}
				return b.plain.WriteAt(ctx, p, off, fua)
			}
			return nil
		},
		"stale read": func(_ *Env, b *broken) error {
			kept := map[int64][]byte{} // blocks read before; a write makes it forget its first block only
			b.read = func(p []byte, off int64) error {
				if err := b.plain.ReadAt(ctx, p, off); err != nil {
					return err
				}
				for at := int64(0); at < int64(len(p)); at += 512 {
					if old := kept[off+at]; old != nil {
						copy(p[at:], old)
					} else {
						kept[off+at] = append([]byte(nil), p[at:at+512]...)
					}
				}
				return nil
			}
			b.write = func(p []byte, off int64, fua bool) error {
				err := b.plain.WriteAt(ctx, p, off, fua)
				delete(kept, off)
				return err
			}
			return nil
		},
		"buffer used after the reply": func(_ *Env, b *broken) error {
			b.write = func(p []byte, off int64, fua bool) error {
				if fua {
					return b.plain.WriteAt(ctx, p, off, fua)
				}
				runtimeOf(b.plain).Go("late write", func() { _ = b.plain.WriteAt(ctx, p, off, false) })
				return nil
			}
			return nil
		},
		"short read": func(_ *Env, b *broken) error {
			b.read = func(p []byte, off int64) error {
				if len(p) > 1024 {
					p = p[:len(p)-1]
				}
				return b.plain.ReadAt(ctx, p, off)
			}
			return nil
		},
		"discard reveals foreign data": func(_ *Env, b *broken) error {
			b.discard = func(off, n int64) error {
				p := make([]byte, n)
				if err := b.plain.ReadAt(ctx, p, (off+32<<10)%(diskSize-n)/512*512); err != nil {
					return err
				}
				return b.plain.WriteAt(ctx, p, off, false)
			}
			return nil
		},
		"discarded blocks change": func(_ *Env, b *broken) error {
			gone, reads := map[int64]bool{}, 0
			b.discard = func(off, n int64) error {
				for at := off; at < off+n; at += 512 {
					gone[at] = true
				}
				return nil
			}
			b.write = func(p []byte, off int64, fua bool) error {
				for at := off; at < off+int64(len(p)); at += 512 {
					delete(gone, at)
				}
				return b.plain.WriteAt(ctx, p, off, fua)
			}
			b.read = func(p []byte, off int64) error {
				reads++
				err := b.plain.ReadAt(ctx, p, off)
				for at := range int64(len(p) / 512) {
					if gone[off+at*512] && reads%2 == 0 {
						clear(p[at*512:][:512])
					}
				}
				return err
			}
			return nil
		},
		"zeroes not written": func(_ *Env, b *broken) error {
			b.zeroes = func(_, _ int64, _ bool) error { return nil }
			return nil
		},
	}
	for name, damage := range damages {
		t.Run(name, func(t *testing.T) {
			findIn(t, 4, func(seed uint64) Loop {
				l := broke(seed, damage)
				l.Lives = 1 + int(seed%2)
				return l
			})
		})
	}
}

// twoDisks is a loop whose volume, on the first disk, has a second one to do wrong with.
func twoDisks(seed uint64, damage func(e *Env, b *broken, second *blockdev.IO) error) Loop {
	l := broke(seed, nil)
	l.Disks = append(l.Disks, l.Disks[0])
	build := l.Build
	l.Prepare = func(_ context.Context, e *Env) error {
		return errors.Join(FillDevice(e.Devices[0], 0, 0, l.Volumes[0]), FillDevice(e.Devices[1], 0, 0, l.Volumes[0]))
	}
	l.Build = func(ctx context.Context, e *Env) (*System, error) {
		s, err := build(ctx, e)
		if err != nil {
			return nil, err
		}
		second, err := blockdev.NewIO(e.Devices[1], 8)
		if err != nil {
			return nil, errors.Join(err, s.Close(ctx))
		}
		end := s.Close
		s.Close = func(ctx context.Context) error {
			return errors.Join(second.Flush(), second.Close(), end(ctx))
		}
		if err := damage(e, s.Own.(*broken), second); err != nil {
			return nil, errors.Join(err, s.Close(ctx))
		}
		return s, nil
	}
	l.Reopen = l.Build
	return l
}

// TestFlipIsFound has a cache that writes to a cache device and to a backing device at the same time, and reads from
// the first until it evicts: after a power cut they may differ.
func TestFlipIsFound(t *testing.T) {
	ctx := context.Background()
	findIn(t, 4, func(seed uint64) Loop {
		l := twoDisks(seed, func(_ *Env, b *broken, second *blockdev.IO) error {
			b.write = func(p []byte, off int64, fua bool) error {
				return errors.Join(second.WriteAt(p, off, flags(fua)), b.plain.WriteAt(ctx, p, off, fua))
			}
			b.zeroes = func(off, n int64, fua bool) error {
				return errors.Join(second.WriteZeroes(off, n, flags(fua)), b.plain.WriteZeroes(ctx, off, n, fua))
			}
			b.discard = func(off, n int64) error { return nil }
			b.flush = func() error { return errors.Join(second.Flush(), b.plain.Flush(ctx)) }
			return nil
		})
		l.Stir = func(_ context.Context, e *Env, s *System) error {
			b := s.Own.(*broken)
			io, err := blockdev.NewIO(e.Devices[1], 1)
			if err != nil {
				return err
			}
			defer io.Close()
			p := make([]byte, diskSize)
			return errors.Join(io.ReadAt(p, 0), b.plain.WriteAt(ctx, p, 0, false)) // all is evicted
		}
		return l
	})
}

// TestResurrectionIsFound keeps the content from before each write, and puts it back at the next start.
func TestResurrectionIsFound(t *testing.T) {
	ctx := context.Background()
	findIn(t, 4, func(seed uint64) Loop {
		return twoDisks(seed, func(e *Env, b *broken, second *blockdev.IO) error {
			b.write = func(p []byte, off int64, fua bool) error {
				if fua {
					old := make([]byte, len(p))
					if err := errors.Join(b.plain.ReadAt(ctx, old, off), second.WriteAt(old, off, 0)); err != nil {
						return err
					}
				}
				return b.plain.WriteAt(ctx, p, off, fua)
			}
			if e.Life == 1 {
				return nil
			}
			p := make([]byte, 4096)
			const at = 512 * 40
			return errors.Join(second.ReadAt(p, at), b.plain.WriteAt(ctx, p, at, false))
		})
	})
}

// TestTornBlocksAreFound has a volume whose blocks are larger than what its disk writes at once.
func TestTornBlocksAreFound(t *testing.T) {
	findIn(t, 4, func(seed uint64) Loop {
		l := small(seed)
		l.Volumes = []Volume{{Size: diskSize, Block: 4096}}
		l.Strengths = []blockdev.Strength{blockdev.Torn}
		l.Prepare = func(_ context.Context, e *Env) error { return FillDevice(e.Devices[0], 0, 0, l.Volumes[0]) }
		l.Build = func(_ context.Context, e *Env) (*System, error) {
			p, err := newPlain(e.Devices[0], 4096)
			return &System{Targets: []Target{p}, Close: func(context.Context) error { return errors.Join(p.io.Flush(), p.io.Close()) }}, err
		}
		l.Reopen = l.Build
		return l
	})
}

func TestLossOnKillIsFound(t *testing.T) {
	findIn(t, 2, func(seed uint64) Loop {
		l := cachedLoop(seed, true)
		l.Kill = true
		return l
	})
}

func TestCacheInRuntimeDirectorySurvivesCuts(t *testing.T) {
	for _, seed := range Seeds(2) {
		l := cachedLoop(seed, false)
		l.Step = 15
		l.Run(t)
	}
}

// alone has a loop's only disk judged as what its volume holds without its cache.
func alone(l Loop) Loop {
	l.Alone = func(r Rest) ([][]byte, error) { return [][]byte{r.Images[0].Bytes()}, nil }
	return l
}

// TestAlone has the disk of a write-back cache looked at without what the cache has: a flush has moved all there, so
// that after a cut nothing is missing. What was only acknowledged before a kill is.
func TestAlone(t *testing.T) {
	for _, seed := range Seeds(2) {
		l := alone(cachedLoop(seed, false))
		l.Step, l.Test = 15, t.Name()
		r, err := l.Try()
		if want := 2 * r.Images; err != nil || r.Alone != want || want == 0 {
			t.Errorf("seed %d: %d images, %d looked at alone: %v", seed, r.Images, r.Alone, err)
		}
	}
	findIn(t, 2, func(seed uint64) Loop {
		l := alone(cachedLoop(seed, false))
		l.Kill = true
		return l
	})
	l := small(0)
	l.Most = 1
	l.Alone = func(Rest) ([][]byte, error) { return [][]byte{nil}, nil } // it says that it must not be
	if r, err := l.Try(); err != nil || r.Alone != 0 {
		t.Errorf("%d looked at alone: %v", r.Alone, err)
	}
	for _, p := range [][]byte{{}, make([]byte, diskSize+512)} {
		l.Alone = func(Rest) ([][]byte, error) { return [][]byte{p}, nil }
		if _, err := l.Try(); err == nil {
			t.Errorf("%d bytes are a whole volume", len(p))
		}
	}
}

// TestFailureRepeats repeats a failure by what its message says.
func TestFailureRepeats(t *testing.T) {
	loop := func() Loop {
		return broke(3, func(_ *Env, b *broken) error {
			b.flush = func() error { return nil }
			return nil
		})
	}
	_, err := loop().Try()
	var first *Failure
	if !errors.As(err, &first) {
		t.Fatalf("%v", err)
	}
	asked := regexp.MustCompile(`UBCACHE_SIM="(.*?)"`).FindStringSubmatch(first.Error())
	if asked == nil {
		t.Fatalf("no way to repeat in %q", first.Error())
	}
	only, err := parseOnly(asked[1])
	if err != nil || *only.seed != 3 {
		t.Fatalf("%+v, %v", only, err)
	}
	for range 3 {
		r, err := loop().try(only)
		var again *Failure
		if !errors.As(err, &again) || again.Err.Error() != first.Err.Error() || r.Cuts > 1 {
			t.Fatalf("first %v\nthen %v, %+v", first, err, r)
		}
	}
}

func TestHangAfterCutIsFound(t *testing.T) {
	l := small(0)
	l.Workload.Weights = Weights{Write: 2, Flush: 1}
	l.Between = func(_ context.Context, e *Env, s *System, n int) error {
		if n == 20 { // until the device works again
			b, r := s.Own.(*broken), e.Runtime
			b.flush = func() error {
				for b.plain.io.Flush() != nil {
					r.Sleep(time.Second)
				}
				return nil
			}
		}
		return nil
	}
	_, err := l.Try()
	if !errors.Is(err, rt.ErrTimeLimit) {
		t.Errorf("%v, want the time limit", err)
	}
}

func TestParseOnly(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"", ""},
		{"seed=7 cut=123 strength=torn", ""},
		{"seed=7 cut=never", ""},
		{"cut=-", "invalid syntax"},
		{"strength=strong", "want prefix, reordered, torn, kill or stop"},
		{"seeds=3-9", ""},
		{"seeds=9-3", "want first-last"},
		{"seeds=9", "seeds"},
		{"sed=1", "no key"},
	} {
		_, err := parseOnly(c.in)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%q: %v, want %q", c.in, err, c.want)
		}
	}
}

// TestStages counts what a loop calls.
func TestStages(t *testing.T) {
	var mu sync.Mutex
	calls := map[string]int{}
	count := func(what string) {
		mu.Lock()
		defer mu.Unlock()
		calls[what]++
	}
	l := small(0)
	l.Step, l.Most = 20, 3
	build, reopen := l.Build, l.Reopen
	l.Build = func(ctx context.Context, e *Env) (*System, error) { count("build"); return build(ctx, e) }
	l.Reopen = func(ctx context.Context, e *Env) (*System, error) { count("reopen"); return reopen(ctx, e) }
	l.Stir = func(context.Context, *Env, *System) error { count("stir"); return nil }
	l.Check = func(_ context.Context, r Rest) error {
		if len(r.Images) != 1 || r.Images[0].Info().Size != diskSize {
			t.Errorf("%+v", r)
		}
		count("check after " + r.Kind.String())
		return nil
	}
	r, err := l.Try()
	want := map[string]int{"build": 3, "reopen": 18, "stir": 9, "check after cut": 9, "check after stop": 9}
	if err != nil || r.Cuts != 3 || r.Images != 9 || !maps.Equal(calls, want) {
		t.Errorf("%+v, %v: %v, want %v", r, err, calls, want)
	}
	l.Most = -1
	clear(calls)
	r, err = l.Try()
	want = map[string]int{"build": 1, "reopen": 8, "stir": 4, "check after cut": 3, "check after stop": 5}
	if err != nil || r.Cuts != 0 || r.Images != 4 || r.Ops == 0 || !maps.Equal(calls, want) {
		t.Errorf("no cut: %+v, %v: %v, want %v", r, err, calls, want)
	}
}

// TestFailuresOfOtherKinds are not taken for the cut.
func TestFailuresOfOtherKinds(t *testing.T) {
	odd := errors.New("odd")
	for name, change := range map[string]func(l *Loop){
		"prepare": func(l *Loop) { l.Prepare = func(context.Context, *Env) error { return odd } },
		"build":   func(l *Loop) { l.Build = func(context.Context, *Env) (*System, error) { return nil, odd } },
		"reopen":  func(l *Loop) { l.Reopen = func(context.Context, *Env) (*System, error) { return nil, odd } },
		"between": func(l *Loop) { l.Between = func(context.Context, *Env, *System, int) error { return odd } },
		"stir":    func(l *Loop) { l.Stir = func(context.Context, *Env, *System) error { return odd } },
		"check":   func(l *Loop) { l.Check = func(context.Context, Rest) error { return odd } },
		"panic":   func(l *Loop) { l.Stir = func(context.Context, *Env, *System) error { panic(odd) } },
	} {
		l := small(0)
		change(&l)
		_, err := l.Try()
		var f *Failure
		if !errors.Is(err, odd) || !errors.As(err, &f) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestWorkloadOnRealRuntime runs without a simulation. What overlaps is kept apart: memory is not atomic by blocks.
func TestWorkloadOnRealRuntime(t *testing.T) {
	r := rt.New()
	dev, err := blockdev.Memory(diskSize, blockdev.MemoryOptions{Runtime: r})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	p, err := newPlain(dev, 512)
	if err != nil {
		t.Fatal(err)
	}
	defer p.io.Close()
	var mu sync.RWMutex
	b := &broken{plain: p}
	b.read = func(q []byte, off int64) error {
		mu.RLock()
		defer mu.RUnlock()
		return p.io.ReadAt(q, off)
	}
	b.write = func(q []byte, off int64, _ bool) error {
		mu.Lock()
		defer mu.Unlock()
		return p.io.WriteAt(q, off, 0)
	}
	b.discard = func(_, _ int64) error { return nil }
	b.zeroes = func(off, n int64, _ bool) error { return b.write(make([]byte, n), off, false) }
	h := NewHistory(Volume{Size: diskSize, Block: 512, Zero: true})
	w := Workload{Seed: 1, Requests: 2000, Clients: 8, Think: time.Microsecond}
	if err := w.Run(t.Context(), r, h, []Target{b}); err != nil {
		t.Error(err)
	}
}
