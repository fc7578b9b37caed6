// Command dirty writes data that stays in the cache of a volume, and may bring it to the backing device, for
// measurements of the engine without a server: what it writes to the cache device, and how fast a drain is.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/journal"
	"github.com/ubcache/ubcache/internal/ondisk"
	"github.com/ubcache/ubcache/internal/volume"
	"github.com/ubcache/ubcache/internal/writeback"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "dirty:", err)
		os.Exit(1)
	}
}

// A load is blocks that are written, in any order.
type load struct {
	v      *volume.Volume
	cache  *blockdev.Counting
	bs     int64
	depth  int
	blocks int64 // of the volume that are written to
	rng    *rand.Rand
}

func run() (err error) {
	var (
		cache  = flag.String("cache", "", "cache device")
		back   = flag.String("backing", "", "backing device, formatted together with it")
		span   = flag.Int64("span", 256<<20, "bytes of the volume to write to")
		bytes  = flag.Int64("bytes", 0, "bytes to write; 0: all of the span")
		bs     = flag.Int64("bs", 4096, "bytes of a write")
		depth  = flag.Int("depth", 32, "writes at a time")
		seed   = flag.Uint64("seed", 1, "of what is written where")
		over   = flag.Bool("overwrite", false, "write as much again, to random places of the same span")
		drain  = flag.Bool("drain", false, "then write all of it back")
		iolog  = flag.String("iolog", "", "with --drain: write FILE.sorted and FILE.merged for fio, what was written in order")
		target = flag.String("iolog-file", "", "the file that these name")
	)
	flag.Parse()
	ctx := context.Background()
	dev, err := blockdev.Open(*cache, blockdev.Options{})
	if err != nil {
		return err
	}
	counting := blockdev.NewCounting(dev)
	defer counting.Close()
	backing, err := blockdev.Open(*back, blockdev.Options{})
	if err != nil {
		return err
	}
	defer backing.Close()
	shared := journal.NewShared()
	defer shared.Close()
	set, err := cacheset.Open(ctx, counting, cacheset.Options{Shared: shared})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, set.Close(ctx)) }()
	v, err := volume.Open(set, backing)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, v.Close()) }()
	v.SetSequentialCutoff(0)
	if err := v.SetMode(ondisk.Writeback); err != nil {
		return err
	}
	if err := v.ChangeWriteback(func(s *writeback.Settings) error { s.Running = false; return nil }); err != nil {
		return err
	}
	l := &load{v: v, cache: counting, bs: *bs, depth: *depth, blocks: *span / *bs, rng: rand.New(rand.NewPCG(*seed, 0))}
	if *bytes == 0 {
		*bytes = *span
	}
	once := l.someOf(*bytes / *bs)
	if err := l.measure("fresh", once); err != nil {
		return err
	}
	if *over {
		again := make([]int64, *bytes / *bs)
		for i := range again {
			again[i] = l.rng.Int64N(l.blocks)
		}
		if err := l.measure("overwrites", again); err != nil {
			return err
		}
	}
	if !*drain {
		return nil
	}
	if *iolog != "" {
		slices.Sort(once)
		if err := l.writeLogs(*iolog, *target, once); err != nil {
			return err
		}
	}
	dirty := v.DirtySectors() * ondisk.SectorSize
	begin := time.Now()
	if err := v.WriteBack(ctx); err != nil {
		return err
	}
	fmt.Printf("drain MB/s %.1f\n", float64(dirty)/1e6/time.Since(begin).Seconds())
	return nil
}

// someOf returns n blocks, each another one, in random order.
func (l *load) someOf(n int64) []int64 {
	list := make([]int64, l.blocks)
	for i := range list {
		list[i] = int64(i)
	}
	l.rng.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	return list[:min(n, l.blocks)]
}

// measure writes the blocks and prints how fast that was, and what the cache device was written for each byte of it.
func (l *load) measure(name string, blocks []int64) error {
	before := l.written()
	begin := time.Now()
	if err := l.write(blocks); err != nil {
		return err
	}
	took := time.Since(begin)
	io, err := blockdev.NewIO(l.v, 1)
	if err != nil {
		return err
	}
	defer io.Close()
	if err := io.Flush(); err != nil { // what it takes to keep them counts
		return err
	}
	total := float64(int64(len(blocks)) * l.bs)
	fmt.Printf("%s kIOPS %.1f\n", name, float64(len(blocks))/1e3/took.Seconds())
	sum := int64(0)
	for p, n := range l.written() {
		n -= before[p]
		sum += n
		if n > 0 {
			fmt.Printf("%s %s %.4f\n", name, blockdev.Purpose(p), float64(n)/total)
		}
	}
	fmt.Printf("%s total %.4f\n", name, float64(sum)/total)
	if s := l.v.Stats(); s.Bypassed > 0 {
		return fmt.Errorf("%d sectors went round the cache", s.Bypassed)
	}
	return nil
}

// written returns how many bytes were written to the cache device, by purpose.
func (l *load) written() (bytes [blockdev.NumPurposes]int64) {
	for p := range bytes {
		bytes[p] = l.cache.Counts(blockdev.Purpose(p), blockdev.OpWrite).Bytes
	}
	return bytes
}

// write writes the blocks, depth at a time.
func (l *load) write(blocks []int64) error {
	done := make(chan *blockdev.Request, l.depth)
	q, err := l.v.NewQueue(l.depth, func(list []*blockdev.Request) {
		for _, r := range list {
			done <- r
		}
	})
	if err != nil {
		return err
	}
	defer q.Close()
	pool := blockdev.NewPool(blockdev.PoolOptions{})
	for range l.depth {
		buf := pool.Get(int(l.bs)).Data
		for i := range buf {
			buf[i] = byte(l.rng.Uint32())
		}
		done <- &blockdev.Request{Op: blockdev.OpWrite, Buf: buf}
	}
	batch := make([]*blockdev.Request, 0, l.depth)
	for idle := 0; idle < l.depth; {
		r := <-done
		for more := true; more; {
			if r.Err != nil {
				return r.Err
			}
			if len(blocks) == 0 {
				idle++
			} else {
				r.Off, blocks = blocks[0]*l.bs, blocks[1:]
				batch = append(batch, r)
			}
			select {
			case r = <-done:
			default:
				more = false
			}
		}
		if len(batch) > 0 {
			q.Submit(batch)
			batch = batch[:0]
		}
	}
	return nil
}

// writeLogs writes what fio is to repeat: each block by itself, and neighbours together, up to 1 MiB.
func (l *load) writeLogs(name, target string, blocks []int64) error {
	for _, kind := range []struct {
		suffix string
		most   int64
	}{{".sorted", 1}, {".merged", max(1<<20/l.bs, 1)}} {
		f, err := os.Create(name + kind.suffix)
		if err != nil {
			return err
		}
		w := bufio.NewWriter(f)
		fmt.Fprintf(w, "fio version 2 iolog\n%s add\n%s open\n", target, target)
		for i := 0; i < len(blocks); {
			n := int64(1)
			for n < kind.most && i+int(n) < len(blocks) && blocks[i+int(n)] == blocks[i]+n {
				n++
			}
			fmt.Fprintf(w, "%s write %d %d\n", target, dataOffset+blocks[i]*l.bs, n*l.bs)
			i += int(n)
		}
		fmt.Fprintf(w, "%s close\n", target)
		if err := errors.Join(w.Flush(), f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// dataOffset is where a backing device's data begins, if it was formatted as usual.
const dataOffset = 8192
