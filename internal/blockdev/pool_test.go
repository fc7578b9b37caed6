package blockdev_test

import (
	"fmt"
	"runtime"
	"sync"
	"testing"
	"unsafe"

	"github.com/ubcache/ubcache/internal/blockdev"
)

func TestPoolBuffers(t *testing.T) {
	p := blockdev.NewPool(blockdev.PoolOptions{})
	for _, size := range []int{0, 1, 512, 4096, 4097, 65536, 1 << 20, 1<<20 + 512, 4 << 20, 4<<20 + 1, 9 << 20} {
		b := p.Get(size)
		if len(b.Data) != size {
			t.Fatalf("Get(%d): %d bytes", size, len(b.Data))
		}
		if uintptr(unsafe.Pointer(unsafe.SliceData(b.Data)))%4096 != 0 {
			t.Errorf("Get(%d): not page-aligned", size)
		}
		h := b.Header(16)
		copy(h, "0123456789abcdef")
		for i := range b.Data {
			b.Data[i] = byte(i)
		}
		n := min(size, 100)
		both := b.WithHeader(16, n)
		if len(both) != 16+n || string(both[:16]) != "0123456789abcdef" || n > 0 && (both[16] != 0 || &both[16] != &b.Data[0]) {
			t.Errorf("Get(%d): WithHeader is not header and data", size)
		}
		if got := len(b.Header(blockdev.Headroom)); got != blockdev.Headroom {
			t.Errorf("headroom of %d", got)
		}
		b.Release()
	}
	if s := p.Stats(); s.InUse != 0 || s.FreeBytes == 0 {
		t.Errorf("%+v", s)
	}
	p.Trim(0)
	if s := p.Stats(); s.FreeBytes != 0 {
		t.Errorf("after Trim: %+v", s)
	}
}

func TestPoolMisuse(t *testing.T) {
	p := blockdev.NewPool(blockdev.PoolOptions{})
	b := p.Get(512)
	for name, fn := range map[string]func(){
		"a header too large": func() { b.Header(blockdev.Headroom + 1) },
		"data too large":     func() { b.WithHeader(0, 1<<20) },
		"a negative size":    func() { p.Get(-1) },
		"releasing twice":    func() { c := p.Get(1); c.Release(); c.Release() },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			fn()
		}()
	}
	b.Release()
}

func TestPoolIsBounded(t *testing.T) {
	p := blockdev.NewPool(blockdev.PoolOptions{MaxFree: 1 << 20})
	var all []*blockdev.Buffer
	for range 1000 {
		all = append(all, p.Get(4096))
	}
	if s := p.Stats(); s.InUse != 1000 {
		t.Errorf("%+v", s)
	}
	for _, b := range all {
		b.Release()
	}
	s := p.Stats()
	if s.InUse != 0 || s.FreeBytes > 1<<20 || s.FreeBytes < 1<<19 {
		t.Errorf("%+v", s)
	}
	p.TrimIdle() // all have been in use since the beginning
	b := p.Get(4096)
	b.Release()
	p.TrimIdle() // all but one have not been since
	if s := p.Stats(); s.FreeBytes > 64<<10 {
		t.Errorf("after TrimIdle: %+v", s)
	}
	p.Trim(0)
}

// Some get, others release, so that buffers wander between shards.
func TestPoolConcurrent(t *testing.T) {
	p := blockdev.NewPool(blockdev.PoolOptions{})
	handed := make(chan *blockdev.Buffer, 64)
	var givers, takers sync.WaitGroup
	for i := range 4 {
		givers.Go(func() {
			for j := range 2000 {
				b := p.Get(4096 << (j % 3))
				b.Data[0], b.Data[len(b.Data)-1] = byte(i), byte(j)
				b.Header(8)[0] = byte(j)
				if j%50 == 0 {
					p.TrimIdle()
				}
				if b.Data[0] != byte(i) || b.Header(8)[0] != byte(j) {
					t.Error("a buffer was handed out twice")
				}
				handed <- b
			}
		})
		takers.Go(func() {
			for b := range handed {
				b.Release()
			}
		})
	}
	givers.Wait()
	close(handed)
	takers.Wait()
	if s := p.Stats(); s.InUse != 0 {
		t.Errorf("%+v", s)
	}
	p.Trim(0)
	if s := p.Stats(); s.FreeBytes != 0 {
		t.Errorf("after Trim: %+v", s)
	}
}

func TestPoolAllocatesNothing(t *testing.T) {
	p := blockdev.NewPool(blockdev.PoolOptions{})
	defer p.Trim(0)
	b := p.Get(4096)
	tracked := len(p.Leaks())
	b.Release()
	if tracked == 1 {
		if n := len(p.Leaks()); n != 0 {
			t.Errorf("%d leaks after release", n)
		}
		t.Skip("under the tag invariants it does")
	}
	if n := testing.AllocsPerRun(1000, func() { p.Get(4096).Release() }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkPool(b *testing.B) {
	for _, size := range []int{4096, 65536} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			p := blockdev.NewPool(blockdev.PoolOptions{})
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					p.Get(size).Release()
				}
			})
			p.Trim(0)
		})
	}
	b.Run("handed over", func(b *testing.B) {
		p := blockdev.NewPool(blockdev.PoolOptions{})
		ch := make(chan []*blockdev.Buffer, 4)
		done := make(chan bool)
		go func() {
			for batch := range ch {
				for _, x := range batch {
					x.Release()
				}
			}
			close(done)
		}()
		b.ReportAllocs()
		for n := 0; n < b.N; n += 64 {
			batch := make([]*blockdev.Buffer, 64)
			for i := range batch {
				batch[i] = p.Get(4096)
			}
			ch <- batch
		}
		close(ch)
		<-done
		p.Trim(0)
		runtime.KeepAlive(p)
	})
}
