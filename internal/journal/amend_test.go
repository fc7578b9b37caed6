package journal

import (
	"math/rand/v2"
	"testing"
)

// TestNumbering holds seqs on disk against a plain list of them.
func TestNumbering(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var n numbering
		disk := map[uint64]uint64{}
		next, needed := uint64(10), uint64(1)
		for seq := uint64(1); seq < 10; seq++ {
			disk[seq] = seq
		}
		for seq := uint64(10); seq < 300; seq++ {
			if rng.IntN(3) == 0 {
				if rng.IntN(4) == 0 {
					needed += rng.Uint64N(seq - needed)
				}
				n.forget(needed)
				n.amended = append(n.amended, seq)
				disk[seq] = next - 1
			} else {
				disk[seq] = next
				next++
			}
			for s := needed; s <= seq; s++ {
				if d := n.disk(s); d != disk[s] {
					t.Fatalf("entry %d is %d on disk, want %d; %d amendments are known", s, d, disk[s], len(n.amended))
				}
			}
		}
	}
}
