#!/bin/bash
# Compares the tools at rest with the device's own sequential speed, rounds interleaved: "ubcache cat" and
# "ubcache check --data" against dd with O_DIRECT over the same amount of data, on a set that a real kernel left
# (fixture wb-crash-7.2: 255 MiB volume, 165 MiB of it dirty in the cache). Prints medians with their ranges.
#
#   bench/atrest.sh [DIR [ROUNDS]]     DIR: where the images go, default /var/tmp; its file system must take O_DIRECT
set -euo pipefail
cd "$(dirname "$0")/.."
dir=$(mktemp -d "${1:-/var/tmp}/ubcache-atrest-XXXXXX") rounds=${2:-5}
trap 'rm -rf "$dir"' EXIT
src=internal/fixture/testdata/wb-crash-7.2
[ -x bin/ubcache ] || make build
zstd -q -d --long=24 "$src/cache.img.zst" -o "$dir/cache.img"
zstd -q -d --long=24 "$src/backing0.img.zst" -o "$dir/backing.sparse"
cp --sparse=never "$dir/backing.sparse" "$dir/backing.img" # so that holes cost a read, as on a disk
rm "$dir/backing.sparse"
set_flags=(--cache "$dir/cache.img" --backing "$dir/backing.img")
bin/ubcache cat "${set_flags[@]}" >"$dir/flat.img"
cached=$(bin/ubcache check "${set_flags[@]}" --json | sed -n 's/.*"cached_bytes": \([0-9]*\).*/\1/p')
size=$(stat -c %s "$dir/flat.img")
sync

# speed NAME BYTES COMMAND...: runs it and notes MB/s
speed() {
	local t0 t1
	t0=$(date +%s%N)
	"${@:3}" >/dev/null
	t1=$(date +%s%N)
	echo "$1 $(($2 * 1000 / (t1 - t0)))" >>"$dir/speeds"
}
for _ in $(seq "$rounds"); do
	speed "dd flat image, direct" "$size" dd if="$dir/flat.img" bs=1M iflag=direct status=none
	speed "ubcache cat" "$size" bin/ubcache cat "${set_flags[@]}"
	speed "dd cached bytes, direct" "$cached" dd if="$dir/flat.img" bs=1M count=$((cached >> 20)) iflag=direct status=none
	speed "ubcache check --data" "$cached" bin/ubcache check --data "${set_flags[@]}"
done
awk '{ n = $NF; $NF = ""; v[$0] = v[$0] " " n }
	END { for (k in v) { m = split(v[k], a, " "); for (i = 1; i < m; i++) for (j = i + 1; j <= m; j++) if (a[j] < a[i]) { x = a[i]; a[i] = a[j]; a[j] = x }
		printf "%-26s %6d MB/s (%d to %d)\n", k, a[int((m + 1) / 2)], a[1], a[m] } }' "$dir/speeds" | sort
