#!/bin/bash
# Compares an NBD server with another one, same machine, same run, rounds interleaved, with fio's nbd engine:
# 4 KiB random reads and writes at 1 job x depth 1, 1 x 32 and 4 x 32. Prints a markdown table with the medians, and
# the median and range over the rounds of the ratios. The CPU is that of the server process per I/O.
#
#   bench/nbd.sh                         nbdmem against nbdkit memory
#   bench/nbd.sh --file DIR/NAME         nbdmem on a file with O_DIRECT against qemu-nbd (io_uring, cache=none)
#
# --ours and --theirs replace the server commands; in them {socket}, {size} (bytes) and {file} are filled in. Each
# server gets a file of its own, NAME.ours and NAME.theirs, filled before the first round and removed at the end.
# A server must stay in the foreground and listen on {socket}.
set -euo pipefail
cd "$(dirname "$0")/.."

size=$((256 << 20)) rounds=5 runtime=3 file= ours= theirs= jobs="1x1 1x32 4x32" rws="randread randwrite" out= bs=4k
while [ $# -gt 0 ]; do
	case $1 in
	--size) size=$2 ;;
	--rounds) rounds=$2 ;;
	--runtime) runtime=$2 ;;
	--file) file=$2 ;;
	--ours) ours=$2 ;;
	--theirs) theirs=$2 ;;
	--jobs) jobs=$2 ;;
	--rw) rws=$2 ;;
	--bs) bs=$2 ;;
	--out) out=$2 ;;
	*) sed -n '2,14p' "$0"; exit 2 ;;
	esac
	shift 2
done

tmp=$(mktemp -d)
pids=()
cleanup() {
	for p in "${pids[@]}"; do kill "$p" 2>/dev/null || true; done
	wait 2>/dev/null || true
	rm -rf "$tmp"
	[ -z "$file" ] || rm -f "$file.ours" "$file.theirs"
}
trap cleanup EXIT

if [ -z "$ours" ]; then
	CGO_ENABLED=0 go build -o "$tmp/nbdmem" ./bench/nbdmem
	ours="$tmp/nbdmem --size {size} --socket {socket}"
	[ -z "$file" ] || ours="$tmp/nbdmem --file {file} --socket {socket}"
fi
if [ -z "$theirs" ]; then
	theirs="nbdkit -f -U {socket} memory {size}"
	[ -z "$file" ] || theirs="qemu-nbd --cache=none --aio=io_uring -f raw -t -e 16 -k {socket} {file}"
fi

# start NAME COMMAND: runs a server and waits for its socket.
start() {
	local cmd=${2//\{socket\}/$tmp/$1.sock}
	cmd=${cmd//\{size\}/$size}
	cmd=${cmd//\{file\}/$file.$1}
	[ -z "$file" ] || fallocate -l "$size" "$file.$1"
	bash -c "exec $cmd" >"$tmp/$1.log" 2>&1 &
	pids+=($!)
	echo $! >"$tmp/$1.pid"
	for _ in $(seq 100); do
		[ -S "$tmp/$1.sock" ] && break
		sleep 0.05
	done
	if ! fio --name=fill --ioengine=nbd --uri="nbd+unix:///?socket=$tmp/$1.sock" --rw=write --bs=1m --iodepth=4 \
		--size="$size" --output="$tmp/fill.log"; then
		# an export that can only be read comes filled
		grep -q -i -e 'read.only' -e 'not permitted' "$tmp/fill.log" || { cat "$tmp/$1.log" "$tmp/fill.log" >&2; exit 1; }
	fi
}
cpu() { awk '{ sub(/.*\) /, ""); print $12 + $13 }' "/proc/$(cat "$tmp/$1.pid")/stat"; }

start ours "$ours"
start theirs "$theirs"
for round in $(seq "$rounds"); do
	for rw in $rws; do
		for job in $jobs; do
			# who goes first changes from round to round
			[ $((round % 2)) = 1 ] && order="ours theirs" || order="theirs ours"
			for who in $order; do
				before=$(cpu $who)
				fio --name=b --ioengine=nbd --uri="nbd+unix:///?socket=$tmp/$who.sock" --rw="$rw" --bs="$bs" \
					--numjobs="${job%x*}" --iodepth="${job#*x}" --size="$size" --time_based --runtime="$runtime" \
					--norandommap --randrepeat=0 --group_reporting --output-format=json --output="$tmp/$round.$rw.$job.$who.json"
				echo "$(($(cpu $who) - before))" >"$tmp/$round.$rw.$job.$who.cpu"
			done
		done
	done
done

python3 - "$tmp" "$rounds" "$rws" "$jobs" "$(getconf CLK_TCK)" "$bs" <<'PY' | tee ${out:+"$out"}
import json, statistics, sys

tmp, rounds, rws, jobs, tick, bs = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(), sys.argv[4].split(), int(sys.argv[5]), sys.argv[6]

def load(round, rw, job, who):
    text = open(f"{tmp}/{round}.{rw}.{job}.{who}.json").read()
    d = json.loads(text[text.index("{"):])["jobs"][0]["read" if "read" in rw else "write"]
    p = d["clat_ns"]["percentile"]
    cpu = int(open(f"{tmp}/{round}.{rw}.{job}.{who}.cpu").read()) / tick
    return d["iops"], p["50.000000"] / 1e3, p["99.000000"] / 1e3, cpu / d["total_ios"] * 1e6

def ratio(ours, theirs, i):
    r = [o[i] / t[i] for o, t in zip(ours, theirs) if t[i]]
    return f"{statistics.median(r):.2f} ({min(r):.2f}-{max(r):.2f})"

print(f"Medians of {rounds} rounds, ours / theirs; ratio: median (least-most) of the rounds' ratios; {bs}, jobs x depth.\n")
print("| load | kIOPS | ratio | p50 µs | ratio | p99 µs | ratio | server CPU µs per I/O | ratio |")
print("|---|---|---|---|---|---|---|---|---|")
for rw in rws:
    for job in jobs:
        o = [load(r, rw, job, "ours") for r in range(1, rounds + 1)]
        t = [load(r, rw, job, "theirs") for r in range(1, rounds + 1)]
        cells = []
        for i, scale in ((0, 1e-3), (1, 1), (2, 1), (3, 1)):
            mo, mt = (statistics.median(x[i] for x in s) * scale for s in (o, t))
            cells += [f"{mo:.1f} / {mt:.1f}", ratio(o, t, i)]
        print(f"| {rw} {job} | " + " | ".join(cells) + " |")
PY
