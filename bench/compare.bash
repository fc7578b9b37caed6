# Functions for scripts that compare NBD servers on the same machine in the same run, with fio's nbd engine. Sourced.
#
# A script sets what it wants otherwise than below, calls options "$@", serve and fill for each server, measure, and
# table. In each round every server gets every load, one after the other, and who goes first changes from round to
# round: slow spells of the machine hit all alike.
#
# Options of all scripts: --size BYTES, --rounds N, --runtime SECONDS (of one load), --jobs "1x1 4x32" (jobs x depth),
# --rw "randread randwrite", --bs SIZE, --out FILE (what comes out goes there too).

size=$((256 << 20)) rounds=5 runtime=3 jobs="1x1 1x32 4x32" rws="randread randwrite" bs=4k out=
servers=() # in the order in which they were started: the first is compared with each other one
pids=()
tmp=$(mktemp -d)

files=()
cleanup() {
	for p in "${pids[@]}"; do kill "$p" 2>/dev/null || true; done
	wait 2>/dev/null || true
	rm -rf "$tmp" "${files[@]}"
}
trap cleanup EXIT
trap 'exit 1' INT TERM

# newfiles BYTES PATH...: makes files of that size, to be removed at the end.
newfiles() {
	local f
	for f in "${@:2}"; do
		files+=("$f")
		fallocate -l "$1" "$f"
	done
}

# options ARGS...: takes the common ones, and those that the function option NAME VALUE of the script takes.
options() {
	while [ $# -gt 0 ]; do
		case $1 in
		--size) size=$2 ;;
		--rounds) rounds=$2 ;;
		--runtime) runtime=$2 ;;
		--jobs) jobs=$2 ;;
		--rw) rws=$2 ;;
		--bs) bs=$2 ;;
		--out) out=$2 ;;
		*)
			if [ $# -lt 2 ] || ! declare -F option >/dev/null || ! option "$1" "$2"; then
				sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2
				exit 2
			fi
			;;
		esac
		shift 2
	done
	[ -z "$out" ] || : >"$out"
}

# serve NAME COMMAND: runs a server, which must stay in the foreground, and waits for its socket. {socket} and {size}
# in the command are filled in.
serve() {
	local cmd=${2//\{socket\}/$tmp/$1.sock}
	cmd=${cmd//\{size\}/$size}
	bash -c "exec $cmd" >"$tmp/$1.log" 2>&1 &
	pids+=($!)
	servers+=("$1")
	echo $! >"$tmp/$1.pid"
	for _ in $(seq 200); do
		[ ! -S "$tmp/$1.sock" ] || return 0
		kill -0 $! 2>/dev/null || break
		sleep 0.05
	done
	echo "$1 does not serve: $cmd" >&2
	cat "$tmp/$1.log" >&2
	exit 1
}

# serve_cached NAME FILE: makes FILE.cache, twice as large as the volume, and FILE.backing one set, and serves it, with
# NAME as the volume. The files are there. ctl and count speak with it.
serve_cached() {
	bin/ubcache format --cache "$2.cache" --backing "$2.backing" >"$tmp/format.log"
	serve "$1" "$PWD/bin/ubcache serve --cache $2.cache --volume $1=$2.backing --nbd unix:{socket} --socket $tmp/$1.control"
}

# ctl NAME COMMAND ARGS...: runs ubcache get, set or status for a server.
ctl() { UBCACHE_SOCKET=$tmp/$1.control bin/ubcache "${@:2}"; }

# count NAME FIELD...: sums up counters of a server's status, named as cache.hits.
count() {
	ctl "$1" status --json | python3 -c '
import functools, json, sys
total = json.load(sys.stdin)["total"]
print(sum(functools.reduce(dict.get, name.split("."), total) for name in sys.argv[1:]))' "${@:2}"
}
misses() { count "$1" cache.misses bypassed.read_misses; }

# warm NAME: reads all of it until there are no misses.
warm() {
	local pass before
	for pass in $(seq 8); do
		before=$(misses "$1")
		load "$1" --rw=randread --bs=64k --iodepth=8 --output="$tmp/warm.log"
		[ "$(misses "$1")" != "$before" ] || return 0
	done
	echo "$1: still misses after $pass passes" >&2
	ctl "$1" status >&2
	exit 1
}

# load NAME ARGS...: has fio work on a server.
load() {
	fio --name=b --ioengine=nbd --uri="nbd+unix:///?socket=$tmp/$1.sock" --size="$size" "${@:2}"
}

# fill NAME: writes all of it, so that no read meets a hole. An export that can only be read comes filled.
fill() {
	load "$1" --rw=write --bs=1m --iodepth=4 --output="$tmp/fill.log" || grep -q -i -e 'read.only' -e 'not permitted' "$tmp/fill.log" ||
		{ cat "$tmp/$1.log" "$tmp/fill.log" >&2; exit 1; }
}

# cpu NAME: what the server has used, in clock ticks.
cpu() { awk '{ sub(/.*\) /, ""); print $12 + $13 }' "/proc/$(cat "$tmp/$1.pid")/stat"; }

# measure: the rounds. Functions before and after of the script, where there are, are called around each load with the
# name of the server.
measure() {
	local round rw job i n=${#servers[@]} who ticks
	for round in $(seq "$rounds"); do
		for rw in $rws; do
			for job in $jobs; do
				for i in $(seq "$n"); do
					who=${servers[$(((round + i) % n))]}
					! declare -F before >/dev/null || before "$who"
					ticks=$(cpu "$who")
					load "$who" --rw="$rw" --bs="$bs" --numjobs="${job%x*}" --iodepth="${job#*x}" --time_based --runtime="$runtime" \
						--norandommap --randrepeat=0 --group_reporting --output-format=json --output="$tmp/$round.$rw.$job.$who.json"
					echo "$(($(cpu "$who") - ticks))" >"$tmp/$round.$rw.$job.$who.cpu"
					! declare -F after >/dev/null || after "$who"
				done
			done
		done
	done
}

# table: what came out, in markdown.
table() {
	python3 - "$tmp" "$rounds" "$rws" "$jobs" "$(getconf CLK_TCK)" "$bs" "${servers[@]}" <<'PY' | tee ${out:+-a "$out"}
import json, statistics, sys

tmp, rounds, rws, jobs, tick, bs = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(), sys.argv[4].split(), int(sys.argv[5]), sys.argv[6]
servers = sys.argv[7:]

def load(round, rw, job, who):
    text = open(f"{tmp}/{round}.{rw}.{job}.{who}.json").read()
    d = json.loads(text[text.index("{"):])["jobs"][0]["read" if "read" in rw else "write"]
    p = d["clat_ns"]["percentile"]
    cpu = int(open(f"{tmp}/{round}.{rw}.{job}.{who}.cpu").read()) / tick
    return d["iops"] / 1e3, p["50.000000"] / 1e3, p["99.000000"] / 1e3, cpu / d["total_ios"] * 1e6

def spread(values, digits):
    if not values:
        return "-"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"

first = servers[0]
print(f"{bs}, jobs x depth, {rounds} rounds. Each figure: median (least-most) of the rounds. The last four columns: {first}")
print(f"divided by that server, within each round. CPU is that of the server process, in µs per I/O.\n")
print(f"| load | server | kIOPS | p50 µs | p99 µs | CPU | {first} / it: IOPS | p50 | p99 | CPU |")
print("|---|---|---|---|---|---|---|---|---|---|")
for rw in rws:
    for job in jobs:
        got = {who: [load(r, rw, job, who) for r in range(1, rounds + 1)] for who in servers}
        for who in servers:
            cells = [spread([g[i] for g in got[who]], 1) for i in range(4)]
            for i in range(4):
                cells.append("" if who == first else spread([o[i] / t[i] for o, t in zip(got[first], got[who]) if t[i]], 2))
            print(f"| {rw} {job} | {who} | " + " | ".join(cells) + " |")
PY
}
