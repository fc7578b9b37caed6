package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"
)

func aligned(n int64) []byte {
	b := make([]byte, n+4096)
	skip := int(-uintptr(unsafe.Pointer(&b[0])) & 4095)
	return b[skip : skip+int(n)]
}

// exitLost is the status of a write whose target went away.
const exitLost = 3

// write does the operations of s, thread by thread. A thread has one operation in flight at a time.
func write(dev, vol string, s spec) {
	t := openTarget(dev, &s)
	fmt.Printf("fx begin %s %s\n", vol, s.text)
	bufs := make([][]byte, s.threads)
	next := make([]int64, s.threads) // the first operation of each thread that is not acknowledged
	for k := range next {
		bufs[k], next[k] = aligned(s.max), int64(k)
	}
	step := s.flush
	if step == 0 {
		step = s.ops
	}
	var marked, failed atomic.Bool
	var first error
	var once sync.Once
	fail := func(err error) {
		once.Do(func() { first = err })
		failed.Store(true)
	}
	for from := int64(0); from < s.ops && !failed.Load(); from += step {
		to := min(from+step, s.ops)
		var wg sync.WaitGroup
		for k := range s.threads {
			wg.Go(func() {
				for i := next[k]; i < to && !failed.Load(); i += s.threads {
					if s.mark >= 0 && i >= s.mark && marked.CompareAndSwap(false, true) {
						fmt.Println("fx MARK")
					}
					off, n := s.op(i)
					b := bufs[k][:n]
					s.fill(b, off, i)
					if err := t.write(k, b, off, s.forced(i), s.zeroes(i)); err != nil {
						fail(err)
						return
					}
					next[k] = i + s.threads
				}
			})
		}
		wg.Wait()
		if !failed.Load() {
			if err := t.flush(); err != nil {
				fail(err)
			} else {
				fmt.Printf("fx acked %s %d\n", vol, to)
			}
		}
	}
	if failed.Load() {
		if t.alive() {
			die(first.Error()) // it refused: that is no loss
		}
		fmt.Printf("fx lost %s %s\n", vol, strings.Trim(fmt.Sprint(next), "[]"))
		fmt.Fprintln(os.Stderr, "fx:", first)
		os.Exit(exitLost)
	}
	must(t.close())
	fmt.Printf("fx end %s\n", vol)
}

// A target is what fx writes to.
type target interface {
	write(thread int64, b []byte, off int64, forced, zeroes bool) error
	flush() error
	close() error
	alive() bool // after an error: other requests are answered
}

func openTarget(dev string, s *spec) target {
	if isURI(dev) {
		return openExport(dev, s.conns, s.threads)
	}
	if s.fua > 0 || s.zero > 0 {
		die("fua and zero are for NBD")
	}
	f, err := os.OpenFile(dev, os.O_RDWR|syscall.O_DIRECT, 0)
	must(err)
	return fileTarget{f}
}

type fileTarget struct{ f *os.File }

func (t fileTarget) write(_ int64, b []byte, off int64, _, _ bool) error {
	_, err := t.f.WriteAt(b, off)
	return err
}

func (t fileTarget) flush() error {
	return os.NewSyscallError("fdatasync", syscall.Fdatasync(int(t.f.Fd())))
}
func (t fileTarget) close() error { return t.f.Close() }
func (t fileTarget) alive() bool  { return true }

// A source is what fx reads.
type source struct {
	size   int64
	readAt func(b []byte, off int64) error
}

func openSource(dev string) source {
	if isURI(dev) {
		e := openExport(dev, 1, 1)
		return source{e.size, e.threads[0].ReadAt}
	}
	f, err := os.Open(dev)
	must(err)
	end, err := f.Seek(0, 2)
	must(err)
	return source{end, func(b []byte, off int64) error {
		n, err := f.ReadAt(b, off)
		if n == len(b) {
			return nil
		}
		return errors.Join(err, fmt.Errorf("short read at %d", off))
	}}
}
