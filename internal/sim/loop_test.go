package sim

import (
	"context"
	"errors"
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
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
		l.Kill, l.Lives = true, 2
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

// TestCacheInRuntimeDirectoryIsNoMoreAfterCut: what a kill leaves must be flushed to outlast the power.
func TestKilledCacheMaySurviveCut(t *testing.T) {
	for _, seed := range Seeds(2) {
		cachedLoop(seed, false).Run(t)
	}
}
