#!/bin/bash
# Measures writeback, with files on one file system, all with O_DIRECT, preallocated and written once before:
#
#   1. random writes of 4 KiB to a cached volume in writeback mode, which go to its cache device alone, against
#      qemu-nbd --cache=none --aio=io_uring on a file. Nothing is written back meanwhile.
#   2. what is written to the cache device for each byte of such writes, by purpose: to a fresh volume, and over as much
#      that is there already
#   3. a drain, as fast as it goes, against fio writing the same blocks to the same backing device in order, 32 at a time:
#      once block by block, and once with neighbours together. Blocks of 4 KiB here and there, and of 256 KiB. fio
#      reads nothing, a drain reads the cache: so a third time fio reads as much from the cache device beside it, which
#      is what the disk below both files can do.
#   4. what random reads that hit and writes of 4 KiB take while a drain is under way, against without one: a drain
#      by the default settings with more dirty data than they want, and one as fast as it goes
#
#   bench/writeback.sh [--dir DIR] [--parts "1 2 3 4"] [--drain-jobs "1x1 1x32"]
#
# DIR is where the files go, 12 GiB in all, default /var/tmp; its file system must take O_DIRECT. What is written to is
# a sixteenth of the cache device, so that buckets which overwrites have left partly empty stay below the 70 percent
# above which writes go to the backing device. compare.bash has the method and the options that all comparisons have.
set -euo pipefail
cd "$(dirname "$0")/.."
. bench/compare.bash

size=$((128 << 20)) rounds=3 rws=randwrite dir=/var/tmp parts="1 2 3 4" drain_jobs="1x1 1x32"
option() {
	case $1 in
	--dir) dir=$2 ;;
	--parts) parts=$2 ;;
	--drain-jobs) drain_jobs=$2 ;;
	*) return 1 ;;
	esac
}
options "$@"
[ -x bin/ubcache ] || make build
CGO_ENABLED=0 go build -o "$tmp/dirty" ./bench/dirty
file=$(mktemp -u "$dir/ubcache-writeback-XXXXXX")

# newdisk BYTES PATH: newfiles, and all of it written, so that nobody allocates while we measure.
newdisk() {
	newfiles "$1" "$2"
	dd if=/dev/zero of="$2" bs=4M iflag=count_bytes count="$1" oflag=direct conv=notrunc status=none
}

# newset NAME VOLUME: the files of a set.
newset() {
	newdisk $((16 * size)) "$file.$1.cache"
	newdisk $(($2 + 8192)) "$file.$1.backing" # with its superblock before the data
}

# show: prints a table, to --out too.
show() { tee ${out:+-a "$out"}; }

# keep NAME: makes a volume keep all that is written to it in the cache.
keep() {
	ctl "$1" set "$1" cache_mode writeback
	ctl "$1" set "$1" sequential_cutoff 0
	ctl "$1" set "$1" writeback_running 0
} >/dev/null

# Writes that go round the cache would be of another kind.
before() {
	[ "$1" != ubcache ] || bypassed=$(count ubcache bypassed.bytes)
}
after() {
	if [ "$1" = ubcache ] && [ "$(count ubcache bypassed.bytes)" != "$bypassed" ]; then
		echo "writes went round the cache" >&2
		exit 1
	fi
}

writes() {
	newset ubcache "$size"
	serve_cached ubcache "$file.ubcache"
	newdisk "$size" "$file.qemu"
	serve qemu-nbd "qemu-nbd --cache=none --aio=io_uring -f raw -t -e 16 -k {socket} $file.qemu"
	keep ubcache
	for who in "${servers[@]}"; do fill "$who"; done
	measure
	printf '\nRandom writes that stay in the cache: ' | show
	table
}

# dirty NAME ARGS...: runs that program on the files of a set.
dirty() { "$tmp/dirty" --cache "$file.$1.cache" --backing "$file.$1.backing" "${@:2}"; }

cost() {
	newset cost $((8 * size))
	bin/ubcache format --cache "$file.cost.cache" --backing "$file.cost.backing" >"$tmp/format.log"
	dirty cost --span $((2 * size)) --overwrite | awk '
		BEGIN { print "\nBytes written to the cache device for each byte of random writes of 4 KiB, 32 at a time:\n"
			print "| to | purpose | bytes |\n|---|---|---|" }
		$2 != "kIOPS" { print "| " $1 " | " $2 " | " $3 " |" }' | show
}

# files_fio NAME ARGS...: runs fio on files, with its result in NAME.json.
files_fio() {
	fio --name=b --ioengine=io_uring --direct=1 --iodepth=32 --output-format=json --output="$tmp/$1.json" "${@:2}"
}

# least NAME...: the least of their MB/s.
least() {
	(cd "$tmp" && python3 -c 'import json, sys
def speed(name):
    text = open(name + ".json").read()
    job = json.loads(text[text.index("{"):])["jobs"][0]
    return max(job[way]["bw_bytes"] for way in ("read", "write")) / 1e6
print("%.1f" % min(speed(name) for name in sys.argv[1:]))' "$@")
}

# replay NAME LOG: writes what a log has.
replay() { files_fio "$1" --read_iolog="$tmp/$2" --replay_no_stall=1; }

drains() {
	local round bs kind kinds="drain sorted merged both"
	newset drains $((8 * size))
	bin/ubcache format --cache "$file.drains.cache" --backing "$file.drains.backing" >"$tmp/format.log"
	for round in $(seq "$rounds"); do
		for bs in 4 256; do
			for kind in $kinds; do
				case $kind in
				drain)
					dirty drains --bs $((bs << 10)) --span $((8 * size)) --bytes $((2 * size)) --drain --iolog "$tmp/$bs" \
						--iolog-file "$file.drains.backing" | sed -n 's/^drain MB.s //p' >>"$tmp/drain.$bs.drain"
					;;
				both)
					files_fio reads --filename="$file.drains.cache" --size=$((8 * size)) --io_size=$((2 * size)) --rw=randread \
						--bs=${bs}k &
					replay writes "$bs.sorted"
					wait $!
					least reads writes >>"$tmp/drain.$bs.both"
					;;
				*)
					replay writes "$bs.$kind"
					least writes >>"$tmp/drain.$bs.$kind"
					;;
				esac
			done
		done
		kinds=${kinds#* }\ ${kinds%% *} # who goes first changes
	done
	python3 - "$tmp" <<'PY' | show
import statistics, sys

def spread(values, digits=0):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"

print("\nDrains, in MB/s, median (least-most); fio writes the same blocks to the same file in order:\n")
print("| extents | who | MB/s | drain / it |\n|---|---|---|---|")
names = {"drain": "drain", "sorted": "fio", "merged": "fio, neighbours together", "both": "fio, and one that reads beside"}
for bs in 4, 256:
    got = {k: [float(x) for x in open(f"{sys.argv[1]}/drain.{bs}.{k}")] for k in names}
    for k, name in names.items():
        ratio = "" if k == "drain" else spread([a / b for a, b in zip(got["drain"], got[k])], 2)
        print(f"| {bs} KiB | {name} | {spread(got[k])} | {ratio} |")
PY
}

# refill: makes four times the size of what the load works on dirty, where that is no longer so.
refill() {
	[ "$(count drained dirty_bytes)" -gt $((3 * size)) ] ||
		load drained --offset="$size" --size=$((4 * size)) --rw=randwrite --bs=4k --iodepth=32 --output="$tmp/refill.log"
}

latencies() {
	local round how rw job
	newset drained $((5 * size))
	serve_cached drained "$file.drained"
	keep drained
	fill drained
	for round in $(seq "$rounds"); do
		for how in without default unthrottled; do
			for job in $drain_jobs; do
				for rw in randread randwrite; do
					refill
					case $how in
					default) ctl drained set drained writeback_percent 10 ;;
					unthrottled) ctl drained set drained writeback_percent 0 ;;
					esac >/dev/null
					[ $how = without ] || ctl drained set drained writeback_running 1 >/dev/null
					load drained --rw=$rw --bs=4k --numjobs="${job%x*}" --iodepth="${job#*x}" --time_based --runtime="$runtime" \
						--norandommap --randrepeat=0 --group_reporting --output-format=json --output="$tmp/$round.$how.$rw.$job.json"
					count drained dirty_bytes >"$tmp/$round.$how.$rw.$job.left"
					ctl drained set drained writeback_running 0 >/dev/null
				done
			done
		done
	done
	python3 - "$tmp" "$rounds" "$drain_jobs" "$size" <<'PY' | show
import json, statistics, sys

tmp, rounds, jobs, size = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(), int(sys.argv[4])

def load(round, how, rw, job):
    text = open(f"{tmp}/{round}.{how}.{rw}.{job}.json").read()
    d = json.loads(text[text.index("{"):])["jobs"][0]["read" if "read" in rw else "write"]
    p = d["clat_ns"]["percentile"]
    left = int(open(f"{tmp}/{round}.{how}.{rw}.{job}.left").read())
    return d["iops"] / 1e3, p["50.000000"] / 1e3, p["99.000000"] / 1e3, left / (5 * size)

def spread(values, digits):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"

print(f"\nLatency with a drain under way, {rounds} rounds, median (least-most); ratios within each round. Where nothing is left,")
print("the drain was over before the load.\n")
print("| load | drain | kIOPS | p50 µs | p99 µs | dirty at the end | p50 / without | p99 / without |\n|---|---|---|---|---|---|---|---|")
for rw in "randread", "randwrite":
    for job in jobs:
        without = [load(r, "without", rw, job) for r in range(1, rounds + 1)]
        for how in "without", "default", "unthrottled":
            got = [load(r, how, rw, job) for r in range(1, rounds + 1)]
            cells = [spread([g[i] for g in got], 1) for i in range(3)] + [spread([100 * g[3] for g in got], 0) + " %"]
            cells += ["", ""] if how == "without" else [spread([a[i] / b[i] for a, b in zip(got, without)], 2) for i in (1, 2)]
            print(f"| {rw} {job} | {how} | {' | '.join(cells)} |")
PY
}

for part in $parts; do
	case $part in
	1) writes ;;
	2) cost ;;
	3) drains ;;
	4) latencies ;;
	esac
done
