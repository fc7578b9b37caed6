package blockdev

import "github.com/ubcache/ubcache/internal/rt"

// A layer is what all wrappers have in common: what they do not change is the wrapped device's.
type layer struct {
	Device
	rt *rt.Runtime
}

func newLayer(dev Device) layer { return layer{Device: dev, rt: RuntimeOf(dev)} }

// Runtime returns the runtime of the wrapped device.
func (l *layer) Runtime() *rt.Runtime { return l.rt }

// Unwrap returns the wrapped device.
func (l *layer) Unwrap() Device { return l.Device }

// innermost returns the device below all wrappers.
func innermost(dev Device) Device {
	for {
		l, ok := dev.(interface{ Unwrap() Device })
		if !ok {
			return dev
		}
		dev = l.Unwrap()
	}
}

// A layerQueue is a queue whose requests the wrapper may finish itself, hold back, or pass on to the queue below.
type layerQueue struct {
	completer
	below Queue
}

func (q *layerQueue) init(l *layer, complete func([]*Request)) { q.completer.init(l.rt, complete) }

func (q *layerQueue) Close() error {
	if !q.close() {
		return ErrClosed
	}
	return q.below.Close()
}
