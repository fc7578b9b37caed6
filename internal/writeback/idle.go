package writeback

// An Idle counts how long nobody has used a set, for all its volumes. Source: B 5.5.
type Idle struct {
	updates int
	atMax   bool
}

// Tick notes an update of one of the set's volumes, or, if busy, a request to any of them, and reports whether the set
// is idle, so that all volumes are to write back as fast as they can: it is after six updates of each of them, for each
// of them. Whoever knows that this must not be, because it is switched off, says busy too.
func (i *Idle) Tick(busy bool, volumes int) (atMax bool) {
	if busy {
		*i = Idle{}
		return false
	}
	i.updates++
	i.atMax = i.atMax || i.updates >= 6*volumes*volumes
	return i.atMax
}
