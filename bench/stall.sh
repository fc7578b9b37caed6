#!/usr/bin/env bash
# The stall beside real kernels: one job on the bcache of a kernel in a virtual machine, and on our server over the kernel's nbd in
# the same machine, one policy after the other: 1 KiB random writes over a writeback cache of small buckets, so that the index
# has about a thousand nodes: FILL MiB of them (250), then RUN seconds (40) without, and as many with a forced collection every 5 s.
#
# Everything is emulated, and small: compare only rows of one machine and one day. It shows which kind of stall a system has,
# not how long that is on real hardware. As root. Takes some 5 minutes a row.
#
#   bench/stall.sh [--kernels "6.1 6.12 7.2"] [--policies "classic reclaim paced exact"] [--on 7.2] [--rounds 3] [--out DIR]
#   bench/stall.sh --why "6.12 7.2" [--rounds 3] [--out DIR]
#
# With --why, these kernels alone, and each time in which nothing was completed: what was waited for, and what went on. TUNE and
# BUCKET in the environment change the kernel's cache before the job begins (TUNE='echo 20 >$volume/writeback_percent', BUCKET=16k);
# KICK is a command that is run when a stop has lasted two seconds.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
top=$(dirname "$here")
kernels="6.1 6.12 7.2" policies="classic reclaim paced exact" on=7.2 rounds=3 out= why=
while [ $# -gt 0 ]; do
  case $1 in
    --kernels) kernels=$2 ;;
    --policies) policies=$2 ;;
    --on) on=$2 ;;
    --why) kernels=$2 policies= why=1 ;;
    --rounds) rounds=$2 ;;
    --out) out=$2 ;;
    *) sed -n '2,/^set/p' "$0" | grep '^#' | cut -c3-; exit 2 ;;
  esac
  shift 2
done
[ -z "$policies" ] || [ -x "$top/bin/ubcache" ] || { echo "stall.sh: build first: make" >&2; exit 1; }
out=${out:-$(mktemp -d)}
mkdir -p "$out"
images=$(mktemp -d -p /dev/shm)
trap 'rm -rf "$images"' EXIT

# row NAME KERNEL POLICY: one boot; POLICY is empty for the kernel's own bcache.
row() {
  local dir=$out/$1
  mkdir -p "$dir"
  rm -f "$images"/*.img
  truncate -s 1G "$images/cache.img"
  truncate -s 2G "$images/backing.img"
  if ! "$top/interop/vm/run" -k "$2" -m 2048 -t 900 -d "$images/cache.img,cache=unsafe" -d "$images/backing.img,cache=unsafe" -o "$dir" \
    -e "POLICY=$3" -e "UBCACHE=$top/bin/ubcache" ${FILL:+-e "FILL=$FILL"} ${RUN:+-e "RUN=$RUN"} \
    ${why:+-e "WHY=$here/stall/why" -e "TUNE=${TUNE:-}" -e "BUCKET=${BUCKET:-8k}" -e "KICK=${KICK:-}"} "$here/stall/guest" >"$dir/log" 2>&1; then
    echo "$1: failed, see $dir/log" >&2
    tail -5 "$dir/log" >&2
    return 1
  fi
  "$here/stall/summary" "$1" "$dir"
  [ -z "$why" ] || "$here/stall/why-summary" "$dir"
}

printf '%-22s %-8s %8s %8s %8s %9s %9s %12s\n' system phase iops 'p50 ms' 'p99 ms' 'p99.9 ms' 'max ms' 'longest gap'
for round in $(seq "$rounds"); do
  for k in $kernels; do row "kernel-$k-$round" "$k" ""; done
  for p in $policies; do row "$p-$round" "$on" "$p"; done
done
echo "logs: $out"
