package blockdev

import "errors"

func newRingQueue(f *file, depth int, complete func([]*Request)) (Queue, error) {
	return nil, errors.New("not yet")
}
