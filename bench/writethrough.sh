#!/bin/bash
# Compares random writes of 4 KiB to a cached volume in write-through mode with writes to the bare file, all on one
# file system and with O_DIRECT:
#
#   ubcache        a cached volume, all of it in the cache before, so that each write goes to both files
#   kernel-order   the same with the attribute crash_stability at kernel: no write waits until it is durable that what it
#                  overwrites in the cache no longer counts, so that after a power cut reads may change from old to new
#   bare           the same NBD server without a cache: what the cache costs
#   qemu-nbd       --cache=none --aio=io_uring
#
#   bench/writethrough.sh [--dir DIR]     DIR: where the files go, default /var/tmp; its file system must take O_DIRECT
#
# compare.bash has the method and the options that all comparisons have.
set -euo pipefail
cd "$(dirname "$0")/.."
. bench/compare.bash

rws=randwrite dir=/var/tmp
option() {
	[ "$1" = --dir ] && dir=$2
}
options "$@"
[ -x bin/ubcache ] || make build
CGO_ENABLED=0 go build -o "$tmp/nbdmem" ./bench/nbdmem
file=$(mktemp -u "$dir/ubcache-writethrough-XXXXXX")
newfiles "$size" "$file.bare" "$file.qemu"
cached="ubcache kernel-order"
for who in $cached; do
	newfiles $((2 * size)) "$file.$who.cache"
	newfiles $((size + 8192)) "$file.$who.backing" # with its superblock before the data
	serve_cached "$who" "$file.$who"
done
serve bare "$tmp/nbdmem --file $file.bare --socket {socket}"
serve qemu-nbd "qemu-nbd --cache=none --aio=io_uring -f raw -t -e 16 -k {socket} $file.qemu"
ctl kernel-order set kernel-order crash_stability kernel >/dev/null
for who in "${servers[@]}"; do fill "$who"; done
for who in $cached; do
	warm "$who"
	case $(ctl "$who" get "$who" cache_mode) in
	*"[writethrough]"*) ;;
	*) echo "$who is not in write-through mode" >&2; exit 1 ;;
	esac
done

# Writes that go round the cache would cost less.
before() {
	case " $cached " in *" $1 "*) bypassed=$(count "$1" bypassed.bytes) ;; esac
}
after() {
	case " $cached " in
	*" $1 "*)
		if [ "$(count "$1" bypassed.bytes)" != "$bypassed" ]; then
			echo "writes of $1 went round the cache" >&2
			exit 1
		fi
		;;
	esac
}
measure
table
