#!/bin/sh
# Compares this package's engines with fio on one file: random reads and writes of 4 KiB with O_DIRECT, at several
# depths. Rounds are interleaved, so that a slow spell of the machine hits all alike. Prints, for each, the median
# of thousand operations per second over all rounds with the lowest and highest, and the processor time per
# operation in microseconds.
#
# usage: bench/device.sh [-r rounds] [-s seconds] [-m MiB] [-d "depths"] [-o "read write"] [folder]
#
# The folder (default /var/tmp) must be on a file system with O_DIRECT; the file there is removed at the end.
set -eu

rounds=5 seconds=2 mib=512 depths="1 8 32 128" ops="read write"
while getopts r:s:m:d:o: f; do
	case $f in
	r) rounds=$OPTARG ;;
	s) seconds=$OPTARG ;;
	m) mib=$OPTARG ;;
	d) depths=$OPTARG ;;
	o) ops=$OPTARG ;;
	*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
	esac
done
shift $((OPTIND - 1))
folder=${1:-/var/tmp}
here=$(cd "$(dirname "$0")/.." && pwd)
command -v fio >/dev/null || { echo "needs fio" >&2; exit 1; }

work=$(mktemp -d "$folder/device-bench.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
file=$work/disk
dd if=/dev/urandom of="$file" bs=1M count="$mib" status=none
dd if="$file" of=/dev/null bs=4096 count=1 iflag=direct status=none 2>/dev/null ||
	{ echo "no O_DIRECT in $folder" >&2; exit 1; }
sync
(cd "$here" && go test -c -o "$work/bench.test" .)

# ours ENGINE OP DEPTH: "iops cpu"
ours() {
	BLOCKDEV_BENCH_FILE=$file "$work/bench.test" -test.run '^$' -test.benchtime "${seconds}s" \
		-test.bench "^BenchmarkDevice\$/^$1\$/^$2\$/^depth=$3\$" |
		awk '/^Benchmark/ {for (i = 2; i < NF; i++) {if ($(i+1) == "IOPS") n = $i; if ($(i+1) == "cpu-us/op") c = $i}} END {print n, c}'
}

# with_fio IOENGINE OP DEPTH: "iops cpu". psync has depth threads, io_uring one.
with_fio() {
	jobs=1 depth=$3
	if [ "$1" = psync ]; then jobs=$3 depth=1; fi
	fio --name=b --filename="$file" --ioengine="$1" --direct=1 --rw="rand$2" --bs=4k --size="${mib}m" \
		--thread --numjobs="$jobs" --iodepth="$depth" --time_based --runtime="$seconds" --group_reporting \
		--norandommap --randrepeat=0 --output-format=terse --terse-version=3 |
		awk -F';' -v op="$2" -v jobs="$jobs" '{
			n = (op == "read") ? $8 : $49
			c = ($88 + $89) / 100 * jobs # percent of each thread
			print n, (n > 0 ? c * 1e6 / n : 0)
		}'
}

round=1
while [ "$round" -le "$rounds" ]; do
	for op in $ops; do
		for depth in $depths; do
			echo "$op $depth uring $(ours uring "$op" "$depth")"
			echo "$op $depth fio-io_uring $(with_fio io_uring "$op" "$depth")"
			echo "$op $depth pread $(ours pread "$op" "$depth")"
			echo "$op $depth fio-psync $(with_fio psync "$op" "$depth")"
		done
	done
	echo "round $round of $rounds" >&2
	round=$((round + 1))
done >"$work/results"

echo "kIOPS: median (lowest-highest), processor microseconds per operation; $rounds rounds of $seconds s, $mib MiB in $folder"
printf '%-6s %5s' op depth
for who in uring fio-io_uring pread fio-psync; do printf ' | %-30s' "$who"; done
echo
for op in $ops; do
	for depth in $depths; do
		printf '%-6s %5s' "$op" "$depth"
		for who in uring fio-io_uring pread fio-psync; do
			awk -v op="$op" -v depth="$depth" -v who="$who" '$1 == op && $2 == depth && $3 == who {print $4, $5}' "$work/results" |
				sort -n | awk '
					{n[NR] = $1 / 1000; c[NR] = $2}
					END {
						m = int((NR + 1) / 2)
						printf " | %7.1f (%.1f-%.1f) %6.1f us", n[m], n[1], n[NR], c[m]
					}' | awk '{printf "%-33s", $0}'
		done
		echo
	done
done
