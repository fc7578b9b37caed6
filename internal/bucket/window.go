package bucket

// The journal window: which buckets a needed journal entry may still hold a pointer into.

const chunkLen = 1024

// A mark says that entry seq concerns a bucket.
type mark struct {
	seq    uint64
	bucket uint32
}

// A seqQueue is a queue of marks in the order of their entries. It grows and shrinks by chunks without
// pointers, so that no push copies what is there.
type seqQueue struct {
	chunks []*[chunkLen]mark
	head   int // of the first chunk
	tail   int // of the last chunk
	spare  *[chunkLen]mark
	n      int
}

func (q *seqQueue) push(m mark) {
	if len(q.chunks) == 0 || q.tail == chunkLen {
		c := q.spare
		if q.spare = nil; c == nil {
			c = new([chunkLen]mark)
		}
		q.chunks = append(q.chunks, c)
		q.tail = 0
	}
	q.chunks[len(q.chunks)-1][q.tail] = m
	q.tail++
	q.n++
}

func (q *seqQueue) first() (mark, bool) {
	if q.n == 0 {
		return mark{}, false
	}
	return q.chunks[0][q.head], true
}

func (q *seqQueue) pop() {
	q.head++
	q.n--
	switch {
	case q.n == 0: // the last chunk stays
		q.head, q.tail = 0, 0
	case q.head == chunkLen:
		q.spare, q.chunks[0] = q.chunks[0], nil
		q.chunks, q.head = q.chunks[1:], 0
	}
}

// A window holds empty_seq: for a bucket that was emptied or evicted, the newest journal entry that may hold a
// pointer into it, and for one that was cleaned, the newest that may hold a dirty one. Only buckets that the needed part of the journal knows are in it; the side word has a
// bit for those, so that most questions never get here.
type window struct {
	seq   map[uint32]uint64 // no pointers in keys or values: the collector does not look inside
	queue seqQueue          // of what was ever put in and has not expired; older marks of a bucket are void
}

func newWindow() window { return window{seq: map[uint32]uint64{}} }

// put sets a bucket's entry, which is not older than any put before.
func (w *window) put(b uint32, seq uint64) {
	if old, ok := w.seq[b]; ok && old >= seq {
		return
	}
	w.seq[b] = seq
	w.queue.push(mark{seq, b})
}

// expire takes one bucket whose entry is before lastSeq out of the window. more is false when there is nothing
// left to do; ok is false where the mark was void.
func (w *window) expire(lastSeq uint64) (b uint32, ok, more bool) {
	m, ok := w.queue.first()
	if !ok || m.seq >= lastSeq {
		return 0, false, false
	}
	w.queue.pop()
	if w.seq[m.bucket] != m.seq {
		return 0, false, true
	}
	delete(w.seq, m.bucket)
	return m.bucket, true, true
}
