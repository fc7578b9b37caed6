#!/bin/bash
# Compares random reads of 4 KiB that hit the cache with other servers' reads of a file, all on one file system:
#
#   ubcache    a cached volume, all of it in the cache device, which is a file opened with O_DIRECT
#   qemu-nbd   --cache=none --aio=io_uring: O_DIRECT too
#   nbdkit     its file plugin with cache=none fadvise=random: it has no O_DIRECT, reads through the page cache, and
#              asks the kernel to drop what it has read, so that some of its reads may come from memory all the same
#
# All reads must be hits: the cache is filled before, and a round with a miss ends the script.
#
#   bench/hits.sh [--dir DIR]     DIR: where the files go, default /var/tmp; its file system must take O_DIRECT
#
# compare.bash has the method and the options that all comparisons have.
set -euo pipefail
cd "$(dirname "$0")/.."
. bench/compare.bash

rws=randread dir=/var/tmp
option() {
	[ "$1" = --dir ] && dir=$2
}
options "$@"
[ -x bin/ubcache ] || make build
file=$(mktemp -u "$dir/ubcache-hits-XXXXXX")
newfiles $((2 * size)) "$file.cache"
newfiles $((size + 8192)) "$file.backing" # with its superblock before the data
newfiles "$size" "$file.qemu" "$file.nbdkit"

serve_cached ubcache "$file"
serve qemu-nbd "qemu-nbd --cache=none --aio=io_uring -f raw -t -e 16 -k {socket} $file.qemu"
serve nbdkit "nbdkit -f -U {socket} file $file.nbdkit cache=none fadvise=random"
for who in "${servers[@]}"; do fill "$who"; done
warm ubcache

before() {
	[ "$1" != ubcache ] || missed=$(misses ubcache) hit=$(count ubcache cache.hits)
}
after() {
	[ "$1" = ubcache ] || return 0
	missed=$(($(misses ubcache) - missed))
	if [ "$missed" != 0 ]; then
		echo "$missed reads missed the cache" >&2
		exit 1
	fi
	hits=$((${hits:-0} + $(count ubcache cache.hits) - hit))
}
measure
table
echo
echo "All $hits measured reads of ubcache were hits."
