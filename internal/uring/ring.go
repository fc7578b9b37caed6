package uring

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrUnavailable is matched by the errors of New and Available where the system has no io_uring, or none that
// is good enough, or does not let us use it. The caller should do without.
var ErrUnavailable = errors.New("io_uring is not available")

// Options modify New.
type Options struct {
	// CQEntries is the least number of completions that have room. Default: twice the submissions.
	CQEntries uint32

	// SQE128 makes SQEs of 128 bytes, as the control commands of ublk need (kernel 5.19).
	SQE128 bool

	sys *sys // tests: what to use instead of the system calls
}

// sys is the system calls that make and drive a ring.
type sys struct {
	setup func(entries uint32, p *params) (int, error)
	enter func(fd int, submit, wait, flags uint32) (int, error)
}

// A Ring is one io_uring. See the package comment for who may call what when.
type Ring struct {
	fd       int
	features uint32
	enter    func(fd int, submit, wait, flags uint32) (int, error)

	sqMap, cqMap, sqeMap []byte // cqMap is nil where it is one with sqMap

	sqHead, sqTail, sqFlags *uint32
	sqEntries, sqStride     uint32
	tail                    uint32 // of SQEs handed out; what lies between *sqTail and this is not published
	outstanding             atomic.Int64

	// handover is written before what the kernel is given and read after what it gives back, so that the order
	// between submitter and reaper, which goes through the kernel, is one that Go's memory model knows too.
	handover atomic.Uint32

	cqHead, cqTail *uint32
	cqes           []CQE // a power of two

	files   bool // some are registered
	eventFD int
	event   *os.File // the eventfd; nil before Start
	reaper  sync.WaitGroup
}

// New makes a ring for entries submissions, rounded up to a power of two and down to the kernel's limit.
func New(entries uint32, o Options) (*Ring, error) {
	if o.sys == nil {
		o.sys = &sys{setup: sysSetup, enter: sysEnter}
	}
	p := params{flags: setupClamp}
	if o.CQEntries > 0 {
		p.flags |= setupCQSize
		p.cqEntries = max(o.CQEntries, entries)
	}
	if o.SQE128 {
		p.flags |= setupSQE128
	}
	fd, err := o.sys.setup(max(entries, 1), &p)
	if err != nil {
		return nil, setupError(err)
	}
	unix.CloseOnExec(fd)
	r := &Ring{fd: fd, features: p.features, enter: o.sys.enter}
	if p.features&FeatNoDrop == 0 {
		r.Close()
		return nil, fmt.Errorf("%w: this kernel may lose completions", ErrUnavailable)
	}
	if err := r.mapRings(&p); err != nil {
		r.Close()
		return nil, fmt.Errorf("map the rings: %w", err)
	}
	return r, nil
}

// setupError tells a system without io_uring from other failures.
func setupError(err error) error {
	switch {
	case errors.Is(err, unix.ENOSYS):
		return fmt.Errorf("%w: the kernel has none", ErrUnavailable)
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return fmt.Errorf("%w: forbidden here (a container's filter, or kernel.io_uring_disabled)", ErrUnavailable)
	case errors.Is(err, unix.ENOMEM):
		return fmt.Errorf("%w: not enough locked memory allowed (ulimit -l): %w", ErrUnavailable, err)
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("%w: this kernel lacks a feature we need: %w", ErrUnavailable, err)
	}
	return fmt.Errorf("io_uring_setup: %w", err)
}

// mapRings maps what the kernel made and finds the parts.
func (r *Ring) mapRings(p *params) error {
	if bits.OnesCount32(p.sqEntries) != 1 || bits.OnesCount32(p.cqEntries) != 1 {
		return fmt.Errorf("odd ring sizes %d and %d", p.sqEntries, p.cqEntries)
	}
	sqSize := int(p.sq.array + p.sqEntries*4)
	cqSize := int(p.cq.cqes) + int(p.cqEntries)*int(unsafe.Sizeof(CQE{}))
	single := p.features&FeatSingleMmap != 0
	if single {
		sqSize = max(sqSize, cqSize)
	}
	r.sqStride = uint32(unsafe.Sizeof(SQE{}))
	if p.flags&setupSQE128 != 0 {
		r.sqStride *= 2
	}
	var err error
	if r.sqMap, err = r.mmap(offSQRing, sqSize); err != nil {
		return err
	}
	cq := r.sqMap
	if !single {
		if r.cqMap, err = r.mmap(offCQRing, cqSize); err != nil {
			return err
		}
		cq = r.cqMap
	}
	if r.sqeMap, err = r.mmap(offSQEs, int(p.sqEntries*r.sqStride)); err != nil {
		return err
	}
	word := func(m []byte, off uint32) *uint32 { return (*uint32)(unsafe.Pointer(&m[off])) }
	r.sqHead, r.sqTail, r.sqFlags = word(r.sqMap, p.sq.head), word(r.sqMap, p.sq.tail), word(r.sqMap, p.sq.flags)
	r.cqHead, r.cqTail = word(cq, p.cq.head), word(cq, p.cq.tail)
	r.cqes = unsafe.Slice((*CQE)(unsafe.Pointer(&cq[p.cq.cqes])), p.cqEntries)
	r.sqEntries = p.sqEntries
	// The array maps places in the ring to SQEs. Ours always lie in the same place.
	array := unsafe.Slice(word(r.sqMap, p.sq.array), p.sqEntries)
	for i := range array {
		array[i] = uint32(i)
	}
	r.tail = atomic.LoadUint32(r.sqTail)
	return nil
}

func (r *Ring) mmap(off int64, size int) ([]byte, error) {
	return unix.Mmap(r.fd, off, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
}

// Features returns the kernel's feature bits, Feat*.
func (r *Ring) Features() uint32 { return r.features }

// Entries returns how many SQEs fit in one Submit.
func (r *Ring) Entries() int { return int(r.sqEntries) }

// Get returns the next free SQE, cleared, or nil when the ring is full: then Submit, or wait for completions.
func (r *Ring) Get() *SQE {
	queued := r.tail - atomic.LoadUint32(r.sqHead)
	if queued >= r.sqEntries || r.outstanding.Load()+int64(queued) >= int64(len(r.cqes)) {
		return nil
	}
	s := r.at(r.tail)
	clear(unsafe.Slice((*byte)(unsafe.Pointer(s)), r.sqStride))
	r.tail++
	return s
}

func (r *Ring) at(index uint32) *SQE {
	return (*SQE)(unsafe.Pointer(&r.sqeMap[(index&(r.sqEntries-1))*r.sqStride]))
}

// Submit hands all SQEs got since the last time to the kernel, with one system call unless it is interrupted or
// comes across one it cannot take (which completes with an error). On an error the kernel has not taken all:
// Submit again later, or Withdraw the rest.
func (r *Ring) Submit() error {
	r.handover.Store(r.tail)
	atomic.StoreUint32(r.sqTail, r.tail)
	for {
		n := r.tail - atomic.LoadUint32(r.sqHead)
		if n == 0 {
			return nil
		}
		taken, err := r.enter(r.fd, n, 0, 0)
		r.outstanding.Add(int64(taken))
		switch {
		case err == unix.EINTR:
		case err != nil:
			return err
		case taken == 0:
			return unix.EAGAIN
		}
	}
}

// Withdraw takes back, calling fn for each, the SQEs that the kernel has not taken.
func (r *Ring) Withdraw(fn func(*SQE)) {
	head := atomic.LoadUint32(r.sqHead)
	for i := head; i != r.tail; i++ {
		fn(r.at(i))
	}
	r.tail = head
	atomic.StoreUint32(r.sqTail, head)
}

// Reap moves completions to dst, as many as there are and fit, and returns their number. It does not wait.
func (r *Ring) Reap(dst []CQE) int {
	n := r.reap(dst)
	// The kernel keeps what did not fit in the ring, and says so by a flag; it only hands it over when asked.
	for n == 0 && len(dst) > 0 && atomic.LoadUint32(r.sqFlags)&sqCQOverflow != 0 {
		if _, err := r.enter(r.fd, 0, 0, enterGetEvents); err != nil && err != unix.EINTR && err != unix.EBUSY {
			break
		}
		n = r.reap(dst)
	}
	return n
}

func (r *Ring) reap(dst []CQE) int {
	head := *r.cqHead // ours
	n := min(int(atomic.LoadUint32(r.cqTail)-head), len(dst))
	if n == 0 {
		return 0
	}
	r.handover.Load()
	mask := uint32(len(r.cqes) - 1)
	for i := range n {
		dst[i] = r.cqes[(head+uint32(i))&mask]
	}
	atomic.StoreUint32(r.cqHead, head+uint32(n))
	r.outstanding.Add(-int64(n))
	return n
}

// Start runs a goroutine that calls ready whenever completions may have arrived, until Close. It should Reap
// until there are none; what arrives after its last look brings the next call. Start is called once.
func (r *Ring) Start(ready func()) error {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("eventfd: %w", err)
	}
	fd32 := int32(fd)
	if err := sysRegister(r.fd, registerEventFD, unsafe.Pointer(&fd32), 1); err != nil {
		unix.Close(fd)
		return fmt.Errorf("register the eventfd: %w", err)
	}
	event := os.NewFile(uintptr(fd), "io_uring eventfd")
	conn, err := event.SyscallConn()
	if err != nil {
		event.Close()
		return fmt.Errorf("eventfd: %w", err)
	}
	r.event, r.eventFD = event, fd
	r.reaper.Go(func() {
		// The netpoller is edge-triggered: each completion signals the eventfd and so wakes us, read or not.
		// So it is never read, and RawConn.Read only serves to sleep: it calls its function whenever the file
		// may have become readable, and an edge that comes between the call and the sleep ends the sleep.
		// It returns when the file is closed.
		_ = conn.Read(func(uintptr) bool {
			ready()
			return false
		})
	})
	return nil
}

// Wake makes the goroutine of Start call its function, as a completion would.
func (r *Ring) Wake() {
	one := [8]byte{0: 1} // in the machine's order, any number but 0 will do
	_, _ = unix.Write(r.eventFD, one[:])
}

// RegisterFiles makes fds known to the ring: an SQE with FixedFile names one by its index, which spares the
// kernel a look-up.
func (r *Ring) RegisterFiles(fds []int32) error {
	if len(fds) == 0 {
		return nil
	}
	err := sysRegister(r.fd, registerFiles, unsafe.Pointer(&fds[0]), uint32(len(fds)))
	r.files = r.files || err == nil
	return err
}

// Supports reports whether the kernel knows an operation.
func (r *Ring) Supports(op uint8) bool {
	var p probe
	if err := sysRegister(r.fd, registerProbe, unsafe.Pointer(&p), uint32(len(p.ops))); err != nil {
		return false
	}
	return op <= p.lastOp && p.ops[op].flags&1 != 0
}

// Close ends the goroutine of Start, having waited for a call of its function to return, and releases the ring.
// Operations still under way are cancelled or left to end by themselves; their memory may be written to until
// then, so it is for the caller to have none.
func (r *Ring) Close() error {
	if r.fd < 0 {
		return os.ErrClosed
	}
	if r.event != nil {
		r.event.Close()
		r.reaper.Wait()
	}
	if r.files { // the kernel takes its time to forget a ring, and would keep the files open until then
		_ = sysRegister(r.fd, unregisterFiles, nil, 0)
	}
	for _, m := range [][]byte{r.sqMap, r.cqMap, r.sqeMap} {
		if m != nil {
			_ = unix.Munmap(m)
		}
	}
	err := unix.Close(r.fd)
	r.fd = -1
	return err
}

// Available reports whether rings for reading and writing files can be made here. The error matches
// ErrUnavailable and says why not. The answer is found out once.
func Available() error { return available() }

var available = sync.OnceValue(func() error { return tryRing(Options{}) })

// tryRing makes a ring with the options, and sends one operation through it.
func tryRing(o Options) error {
	r, err := New(4, o)
	if err != nil {
		return err
	}
	defer r.Close()
	if !r.Supports(OpRead) || !r.Supports(OpWrite) {
		return fmt.Errorf("%w: this kernel's cannot read and write", ErrUnavailable)
	}
	arrived := make(chan CQE, 1)
	err = r.Start(func() {
		var c [1]CQE
		if r.Reap(c[:]) == 1 {
			arrived <- c[0]
		}
	})
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	r.Get().Opcode = OpNop
	if err := r.Submit(); err != nil {
		return fmt.Errorf("%w: io_uring_enter: %w", ErrUnavailable, err)
	}
	select {
	case c := <-arrived:
		if c.Res != 0 {
			return fmt.Errorf("%w: an empty operation failed: %w", ErrUnavailable, unix.Errno(-c.Res))
		}
		return nil
	case <-time.After(5 * time.Second):
		return fmt.Errorf("%w: an empty operation does not complete", ErrUnavailable)
	}
}
