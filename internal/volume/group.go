package volume

import (
	"time"
	"unsafe"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/cacheset"
	"github.com/ubcache/ubcache/internal/rt"
)

// A group is several I/Os on a volume's devices, under way at the same time and waited for together. It belongs to
// one goroutine and is used again and again.
type group struct {
	v     *Volume
	to    [2]*below // the backing device, the cache device
	parts []part
	send  [2][]*blockdev.Request // to the backing device, to the cache device

	mu   rt.Mutex
	done rt.Cond
	left int

	op        *op  // whose it is, nil: a batch's of writeback
	request   bool // a request waits for it
	cacheLast bool // it was the cache device that was done last
}

// A part is one I/O of a group.
type part struct {
	blockdev.Request
	group  *group
	cache  bool             // on the cache device
	bounce *blockdev.Buffer // where the memory, or the range, is not aligned well enough
	dest   []byte
	skip   int // bytes before dest in the bounce buffer
}

func (g *group) init(v *Volume, back, cache *below) {
	g.v = v
	g.to = [2]*below{back, cache}
	g.mu.Init(v.rt)
	g.done.Init(&g.mu)
}

func (g *group) reset() {
	clear(g.parts)
	g.parts = g.parts[:0]
}

// add adds an I/O. off is in bytes on the device.
func (g *group) add(cache bool, r blockdev.Request) {
	p := part{Request: r, group: g, cache: cache}
	align := g.to[0].align
	if cache {
		align = g.to[1].align
	}
	if block := int64(g.to[0].info.LogicalBlock); !cache && r.Op == blockdev.OpRead && (r.Off|int64(len(r.Buf)))&(block-1) != 0 {
		// Of one of the backing device's blocks the cache has a part, with blocks that are smaller.
		end := (r.Off + int64(len(r.Buf)) + block - 1) &^ (block - 1)
		p.dest, p.skip = r.Buf, int(r.Off&(block-1))
		p.Off -= int64(p.skip)
		p.bounce = g.v.pool.Get(int(end - p.Off))
		p.Buf = p.bounce.Data
	} else if len(r.Buf) > 0 && !aligned(r.Buf, align) {
		p.bounce = g.v.pool.Get(len(r.Buf))
		p.dest, p.Buf = r.Buf, p.bounce.Data
		if r.Op == blockdev.OpWrite {
			copy(p.Buf, r.Buf)
		}
	}
	g.parts = append(g.parts, p)
}

func aligned(b []byte, align int) bool {
	return align <= 1 || uintptr(unsafe.Pointer(unsafe.SliceData(b)))&uintptr(align-1) == 0
}

// run starts all that was added and waits for it. It returns the errors of the parts as one, the backing device's
// first: look at the parts for which.
func (g *group) run() error {
	g.runSome(0, len(g.parts))
	return g.end()
}

// runSome starts the parts from one on to before another, and waits for them.
func (g *group) runSome(from, to int) {
	for i := range g.send {
		g.send[i] = g.send[i][:0]
	}
	g.begin(from, to)
	var begin time.Duration
	if g.request {
		begin = g.v.rt.Now()
	}
	for i := from; i < to; i++ {
		p := &g.parts[i]
		if p.cache {
			g.send[1] = append(g.send[1], &p.Request)
		} else {
			g.send[0] = append(g.send[0], &p.Request)
		}
	}
	if len(g.send[0]) > 0 {
		g.to[0].queue.Submit(g.send[0])
	}
	if len(g.send[1]) > 0 {
		g.to[1].queue.Submit(g.send[1])
	}
	g.mu.Lock()
	for g.left > 0 {
		g.done.Wait()
	}
	g.mu.Unlock()
	switch {
	case !g.request:
	case g.cacheLast:
		g.v.stalled(cacheset.StallCache, begin)
	default:
		g.v.stalled(cacheset.StallBacking, begin)
	}
}

// begin makes parts ready to be sent.
func (g *group) begin(from, to int) {
	g.left = to - from
	for i := from; i < to; i++ {
		g.parts[i].Owner = &g.parts[i]
	}
}

// end lets the memory of the parts go, and returns their errors.
func (g *group) end() (err error) {
	for i := range g.parts {
		p := &g.parts[i]
		if p.bounce != nil {
			if p.Op == blockdev.OpRead && p.Err == nil {
				copy(p.dest, p.Buf[p.skip:])
			}
			p.bounce.Release()
			p.bounce = nil
		}
		if p.Err != nil && (err == nil || !p.cache) {
			err = p.Err
		}
	}
	return err
}

// groupDone is told of I/Os that are done.
func groupDone(done []*blockdev.Request) {
	for _, r := range done {
		g := r.Owner.(*part).group
		g.mu.Lock()
		g.left--
		last := g.left == 0
		if last {
			g.cacheLast = r.Owner.(*part).cache
			g.done.Signal() // under the lock: whoever waits uses the group again
		}
		g.mu.Unlock()
	}
}
