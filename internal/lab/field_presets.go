package lab

import (
	"fmt"
	"time"

	"github.com/ubcache/ubcache/internal/blockdev"
)

const (
	kib = 1 << 10
	gib = 1 << 30
	gb  = 1_000_000_000
)

// localSSD is the cache device of B 3.7 #1 to #3. Raw, with 8 KiB: 14.1k reads (110 MiB/s) and 42.2k writes (330 MiB/s) a
// second, 106.64 us on average. That gives all there is here:
//
//	PerMiB  1 s / (110 + 330) = 2.273 ms: what it moves in a second. Of 8 KiB, 17.8 us.
//	Read    106.64 us - 17.8 us = 88.9 us, and Write the same: there is one average for both.
//
// By the law of Little 56.3k a second at 106.64 us are 6.0 under way at a time. Jitter and the time of a flush were not
// reported: they are those of the preset nvme.
func localSSD() Model {
	const perMiB = time.Second / (110 + 330)
	const base = 106640*time.Nanosecond - perMiB/128
	return Model{
		Name:    "local SSD",
		Latency: blockdev.Latency{Read: base, Write: base, Flush: 150 * time.Microsecond, Jitter: 0.2, PerMiB: perMiB},
		Basis:   "raw figures of #3: 14.1k and 42.2k IOPS of 8 KiB, 106.64 us",
	}
}

// preset is a model of a device of which no raw figure was reported.
func preset(name string) Model {
	l, err := blockdev.LatencyPreset(name)
	if err != nil {
		panic(err)
	}
	return Model{Name: name, Latency: l, Basis: "no raw figure was reported; a usual one of its kind"}
}

// fastNetwork is the network disk of B 3.7 #1 to #3, of which no raw figure was reported. That of the usual one, 125 MB/s, is less than
// what they wrote through it for an hour, stalls included; so it moves what they wrote before the stall, 486 MiB/s.
func fastNetwork() Model {
	m := preset("network")
	m.Latency.PerMiB, m.Latency.Parallel = time.Second/486, 256
	m.Name, m.Basis = "network, 486 MiB/s", "no raw figure was reported; what was written through it before the stall (#2)"
	return m
}

// sataPerMiB is what a SATA link of 500 MiB/s takes.
const sataPerMiB = 2 * time.Millisecond

// sata is the disk of B 3.7 #14 in one of its two states: writes of 4 KiB, one at a time, with the percentiles and the
// mean that were reported; the part of the requests at which the tail begins is the one that gives that mean. A discard
// that cannot be queued stops the disk.
func sata(name, basis string, mean time.Duration, tail ...blockdev.Percentile) Model {
	const usual = 65 * time.Microsecond // of a write that nothing is in the way of
	moved := sataPerMiB / 256           // is added to each
	// mean = usual*knee + (first.Part-knee)*half + the mean of the tail
	first := tail[0]
	half := float64(usual+first.Time) / 2
	knee := (half*first.Part - float64(mean-blockdev.Percentiles(tail).Mean())) / (half - float64(usual))
	list := append(blockdev.Percentiles{{Part: 0, Time: usual}, {Part: knee, Time: usual}}, tail...)
	for i := range list {
		list[i].Time -= moved
	}
	return Model{
		Name: name, Basis: basis,
		Latency: blockdev.Latency{
			Read: 150 * time.Microsecond, Flush: 2 * time.Millisecond, Jitter: 0.3, PerMiB: sataPerMiB, Writes: &list,
			Discard: sataDiscard, Exclusive: true,
		},
	}
}

// sataDiscard is an assumption: nobody has reported how long a discard of that disk takes.
const sataDiscard = 10 * time.Millisecond

func sataFresh() Model {
	const us = time.Microsecond
	return sata("SATA SSD, fresh", "#14 after a discard of the whole device: mean 80.65 us, p99 330 us, p99.9 1.156 ms, max 7.696 ms", 80650*time.Nanosecond,
		blockdev.Percentile{Part: 0.99, Time: 330 * us}, blockdev.Percentile{Part: 0.999, Time: 1156 * us}, blockdev.Percentile{Part: 1, Time: 7696 * us})
}

func sataWorn() Model {
	const us = time.Microsecond
	return sata("SATA SSD, worn", "#14 worn: mean 1.404 ms, p95 8.291 ms, p99 14.746 ms, p99.9 89.654 ms, max 109.65 ms", 1403600*time.Nanosecond,
		blockdev.Percentile{Part: 0.95, Time: 8291 * us}, blockdev.Percentile{Part: 0.99, Time: 14746 * us},
		blockdev.Percentile{Part: 0.999, Time: 89654 * us}, blockdev.Percentile{Part: 1, Time: 109650 * us})
}

const (
	inMemory = "the whole index fits in memory: how much of it the reporters' kernels kept was not reported"
	noCPU    = "work of the processor takes no time, where a policy does not charge for it"
)

// Presets returns the experiments of the field.
func Presets() []Field {
	worn := sataWorn()
	return []Field{
		{
			Name: "field-375g", Seed: 1, Scale: 1,
			About: "fio randrw of 8 KiB, depth 1, a file of 900 GB; 375 GB of local SSD before a network disk of 1 TB (B 3.7 #1-#3)",
			Cache: 375 * gb, Backing: 1000 * gb, File: 900 * gb, Bucket: 256 * kib, Block: 4 * kib, Mode: "writethrough",
			CacheModel: localSSD(), BackingModel: fastNetwork(), NodeCache: 4 * gib,
			FillSize: 8 * kib, FillNodes: 5876, FillBytes: 340 * gb,
			Jobs: []Job{{Name: "write", Size: 8 * kib, Depth: 256}, {Name: "read", Reads: 100, Size: 8 * kib, Depth: 1}},
			Warm: 10 * time.Second, Span: 6 * time.Minute,
			Notes: []string{
				"fio's requests took 5.07 us, so the page cache had them: at the volume there is what it writes back, 256 at a time (assumed: as many as" +
					" Linux lets a SCSI disk's queue have), and one reader",
				"filled to the number of nodes reported; its cache was said to be 1/2 to 2/3 in use, which with 8 KiB and leaves two thirds full are fewer nodes",
				inMemory, noCPU,
			},
			Reported: []Reported{
				{Ref: "#1", Policy: "classic", What: "longest stall of writes", Value: "24.3 s; later 40.7 s", Metric: "gap"},
				{Ref: "#1", Policy: "reclaim", What: "longest stall of writes", Value: "no stall", Metric: "gap"},
				{Ref: "#1", Policy: "reclaim", What: "writes/s", Value: "unchanged", Metric: "iops", Note: "beside ours with classic"},
				{Ref: "#2", Policy: "classic", What: "reads/s, stalls included", Value: "26.0k", Metric: "iops", Job: 1, Note: "theirs came from memory"},
				{Ref: "#2", Policy: "classic", What: "writes/s, stalls included", Value: "26.0k", Metric: "iops", Note: "theirs went to memory"},
				{Ref: "#2", Policy: "classic", What: "writes in the slowest second", Value: "0", Metric: "min-iops"},
				{Ref: "#3", Policy: "classic", What: "collection, average", Value: "45.3 s", Metric: "gc-average"},
				{Ref: "#3", Policy: "classic", What: "collection, longest", Value: "62.0 s", Metric: "gc-longest"},
				{Ref: "#3", Policy: "classic", What: "interval", Value: "286 s", Metric: "gc-interval"},
				{Ref: "#3", Policy: "classic", What: "nodes", Value: "5876", Metric: "gc-nodes"},
			},
		},
		{
			Name: "field-750g", Seed: 1, Scale: 1,
			About: "fio randwrite of 4 KiB, depth 10, 900 GB; 750 GB of NVMe, kernel 6.6 (B 3.7 #7)",
			Cache: 750 * gb, Backing: 1000 * gb, File: 900 * gb, Bucket: 256 * kib, Block: 4 * kib, Mode: "writethrough",
			CacheModel: preset("nvme"), BackingModel: preset("network"), NodeCache: 8 * gib,
			FillSize: 4 * kib, FillBytes: 750 * gb / 8,
			Jobs: []Job{{Name: "write", Size: 4 * kib, Depth: 10}},
			Warm: 10 * time.Second, Span: 50 * time.Minute,
			Notes: []string{
				"how full the cache was, the mode and the backing device were not reported: an eighth (two of its collections after the start), writethrough, a network disk",
				inMemory, noCPU,
			},
			Reported: []Reported{
				{Ref: "#7", Policy: "classic", What: "latency beside collections", Value: "276-297 us", Metric: "p50", Note: "by the backing device"},
				{Ref: "#7", Policy: "classic", What: "highest during collections", Value: "24.5 ms", Metric: "gc-max", Note: "theirs may be a mean over a window"},
				{Ref: "#7", Policy: "classic", What: "collection, average", Value: "2.88 s", Metric: "gc-average"},
				{Ref: "#7", Policy: "classic", What: "collection, longest", Value: "3.46 s", Metric: "gc-longest"},
				{Ref: "#7", Policy: "classic", What: "interval", Value: "133 s", Metric: "gc-interval"},
				{Ref: "#7", Policy: "rescale", What: "highest during collections", Value: "1.10 ms", Metric: "gc-max"},
				{Ref: "#7", Policy: "rescale", What: "collection, average", Value: "3.62 s", Metric: "gc-average"},
				{Ref: "#7", Policy: "rescale", What: "collection, longest", Value: "3.87 s", Metric: "gc-longest"},
				{Ref: "#7", Policy: "rescale", What: "interval", Value: "58 s", Metric: "gc-interval"},
			},
		},
		{
			Name: "field-6t", Seed: 1, Scale: 8,
			About: "fio randwrite of 4 KiB, depth 128, 12 TB, 25 h; 6 TB of SSD, kernel 6.6 (B 3.7 #9, #10, and the retest with reclaim in both arms)",
			Cache: 750 * gb, Backing: 1500 * gb, File: 1499 * gb, Bucket: 256 * kib, Block: 4 * kib, Mode: "writethrough",
			CacheModel: preset("nvme"), BackingModel: preset("network"), NodeCache: 8 * gib,
			FillSize: 4 * kib, FillNodes: 144330 / 8, FillBytes: 700 * gb,
			Jobs: []Job{{Name: "write", Size: 4 * kib, Depth: 128}},
			Warm: 10 * time.Second, Span: 25 * time.Minute,
			Notes: []string{
				"one eighth of the sizes, the same nodes: an eighth as many of them. A slice of N/100 and its hold are an eighth, slices of 10 nodes are as they were;" +
					" of a collection's time, what goes by nodes is an eighth, and 100 sleeps of 100 ms stay; a collection is due eight times as often",
				"mode and backing device were not reported: writethrough, a network disk",
				inMemory, noCPU,
			},
			Reported: []Reported{
				{Ref: "#9", Policy: "classic", What: "writes/s", Value: "11.8k", Metric: "iops"},
				{Ref: "#9", Policy: "classic", What: "mean", Value: "10.9 ms", Metric: "mean"},
				{Ref: "#9", Policy: "classic", What: "longest", Value: "5.32 s", Metric: "max"},
				{Ref: "#9", Policy: "classic", What: "collection, average", Value: "381 s", Metric: "gc-average", Note: "at 1/8 57 s (B 3.6)"},
				{Ref: "#9", Policy: "classic", What: "collection, longest", Value: "825 s", Metric: "gc-longest"},
				{Ref: "#9", Policy: "classic", What: "interval", Value: "3834 s", Metric: "gc-interval", Note: "at 1/8 479 s"},
				{Ref: "#10", Policy: "classic", What: "nodes", Value: "144330", Metric: "gc-nodes", Note: "at 1/8 18041"},
				{Ref: "retest", Policy: "reclaim", What: "p50 during collections", Value: "210 ms", Metric: "gc-p50"},
				{Ref: "retest", Policy: "reclaim", What: "longest", Value: "3.5 s", Metric: "gc-max", Note: "at 1/8 0.44 s, if it is a hold"},
				{Ref: "retest", Policy: "rescale", What: "p50 during collections", Value: "25 ms", Metric: "gc-p50", Note: "at 1/8 the same"},
				{Ref: "retest", Policy: "rescale", What: "longest", Value: "0.8 s", Metric: "gc-max"},
				{Ref: "retest", Policy: "rescale", What: "collection, average", Value: "622 s", Metric: "gc-average", Note: "at 1/8 78 s"},
				{Ref: "retest", Policy: "rescale", What: "interval", Value: "3518 s", Metric: "gc-interval", Note: "at 1/8 440 s"},
				{Ref: "retest", Policy: "rescale", What: "nodes", Value: "175491", Metric: "gc-nodes", Note: "at 1/8 21936"},
				{Ref: "#12", Policy: "paced", What: "p50 during collections", Value: "4 ms", Metric: "gc-p50"},
			},
		},
		{
			Name: "field-24h", Seed: 1, Scale: 64,
			About: "24 h of 4 KiB in writethrough mode, taken to be on the 6 TB of field-6t (B 3.7 #12)",
			Cache: 6000 * gb / 64, Backing: 12000 * gb / 64, File: 12000*gb/64 - gb, Bucket: 256 * kib, Block: 4 * kib, Mode: "writethrough",
			CacheModel: preset("nvme"), BackingModel: preset("network"), NodeCache: 2 * gib,
			FillSize: 4 * kib, FillNodes: 175491 / 64, FillBytes: 85 * gb,
			Jobs: []Job{{Name: "write", Size: 4 * kib, Depth: 128}},
			Warm: 10 * time.Second, Span: 24 * time.Hour / 64,
			Notes: []string{
				"one part in 64 of the sizes and of the day, the same nodes: a 64th as many of them, and a collection is due 64 times as often; N/100 is below" +
					" 100, so that slices of classic and reclaim are 100 nodes; slices of 10 nodes are as they were",
				"device and depth were not reported: those of field-6t",
				inMemory, noCPU,
			},
			Reported: []Reported{
				{Ref: "#12", Policy: "rescale", What: "p50 during collections", Value: "20 ms", Metric: "gc-p50"},
				{Ref: "#12", Policy: "paced", What: "p50 during collections", Value: "4 ms", Metric: "gc-p50"},
			},
		},
		{
			Name: "field-discard", Seed: 1, Scale: 1,
			About: "fio randwrite of 4 KiB, depth 1, 10 GiB, in writeback mode, 10 percent; 120 GB of SATA SSD, worn and fresh, without and with discards (B 3.7 #14-#16)",
			Cache: 120 * gb, Backing: 1000 * gb, File: 10 * gib, Bucket: 512 * kib, Block: 4 * kib, Mode: "writeback",
			CacheModel: sataFresh(), BackingModel: preset("hdd"), NodeCache: gib,
			Jobs: []Job{{Name: "write", Size: 4 * kib, Depth: 1}},
			Warm: 5 * time.Second, Span: 4 * time.Minute,
			Variants: []Variant{{Name: "worn", CacheModel: &worn}, {Name: "fresh"}, {Name: "fresh, discard", Discard: true}},
			Notes: []string{
				"what wears a disk, and how a discard mends it, is not modelled: worn and fresh are two disks with the latencies reported of the one",
				fmt.Sprintf("how long a discard takes was not reported: %v is assumed, during which the disk does nothing else", sataDiscard),
				"the reported runs with discards had the kernel's, in the way of whoever wants a bucket; no policy here has those. Ours come in the background, of up" +
					" to 8 MiB at a time, and rest as long as they take; a start discards all that is empty, so they go on through the whole span",
				"the figures of #14 are of the cached device; they are taken for raw ones, so that only what is beside them is a result",
			},
			Reported: []Reported{
				{Ref: "#14", Policy: "exact", What: "worn: writes/s", Value: "710", Metric: "iops", Only: "worn"},
				{Ref: "#14", Policy: "exact", What: "worn: mean", Value: "1.40 ms", Metric: "mean", Only: "worn", Note: "calibrated"},
				{Ref: "#14", Policy: "exact", What: "worn: p99", Value: "14.7 ms", Metric: "p99", Only: "worn", Note: "calibrated"},
				{Ref: "#14", Policy: "exact", What: "worn: longest", Value: "110 ms", Metric: "max", Only: "worn", Note: "calibrated"},
				{Ref: "#14", Policy: "exact", What: "fresh: writes/s", Value: "12.0k", Metric: "iops", Only: "fresh"},
				{Ref: "#14", Policy: "exact", What: "fresh: mean", Value: "80.7 us", Metric: "mean", Only: "fresh", Note: "calibrated"},
				{Ref: "#14", Policy: "exact", What: "fresh: p99", Value: "330 us", Metric: "p99", Only: "fresh", Note: "calibrated"},
				{Ref: "#14", Policy: "exact", What: "fresh: longest", Value: "7.70 ms", Metric: "max", Only: "fresh", Note: "calibrated"},
				{Ref: "#15", Policy: "exact", What: "discards: writes/s", Value: "4.60k", Metric: "iops", Only: "fresh, discard", Note: "theirs in line"},
				{Ref: "#15", Policy: "exact", What: "discards: mean", Value: "214 us", Metric: "mean", Only: "fresh, discard", Note: "theirs in line"},
				{Ref: "#15", Policy: "exact", What: "discards: p99", Value: "2.87 ms", Metric: "p99", Only: "fresh, discard", Note: "theirs in line"},
				{Ref: "#15", Policy: "exact", What: "discards: p99.9", Value: "5.80 ms", Metric: "p99.9", Only: "fresh, discard", Note: "theirs in line"},
				{Ref: "#15", Policy: "exact", What: "discards: p99.99", Value: "16.6 ms", Metric: "p99.99", Only: "fresh, discard", Note: "theirs in line"},
				{Ref: "#15", Policy: "exact", What: "discards: longest", Value: "3.57 s", Metric: "max", Only: "fresh, discard", Note: "theirs in line"},
				{Ref: "#16", Policy: "exact", What: "a month later: writes/s", Value: "7.78k", Metric: "iops", Only: "fresh, discard", Note: "theirs in line"},
				{Ref: "#16", Policy: "exact", What: "a month later: longest", Value: "53.5 ms", Metric: "max", Only: "fresh, discard", Note: "theirs in line"},
			},
		},
	}
}
