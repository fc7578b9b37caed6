#!/bin/bash
# Compares an NBD server with another one: 4 KiB random reads and writes at 1 job x depth 1, 1 x 32 and 4 x 32. Prints
# a markdown table. compare.bash has the method and the options that all comparisons have.
#
#   bench/nbd.sh                         nbdmem against nbdkit memory
#   bench/nbd.sh --file DIR/NAME         nbdmem on a file with O_DIRECT against qemu-nbd (io_uring, cache=none)
#
# --ours and --theirs replace the server commands; in them {socket}, {size} (bytes) and {file} are filled in. Each
# server gets a file of its own, NAME.ours and NAME.theirs, filled before the first round and removed at the end.
# A server must stay in the foreground and listen on {socket}.
set -euo pipefail
cd "$(dirname "$0")/.."
. bench/compare.bash

file="" ours="" theirs=""
option() {
	case $1 in
	--file) file=$2 ;;
	--ours) ours=$2 ;;
	--theirs) theirs=$2 ;;
	*) return 1 ;;
	esac
}
options "$@"

if [ -z "$ours" ]; then
	CGO_ENABLED=0 go build -o "$tmp/nbdmem" ./bench/nbdmem
	ours="$tmp/nbdmem --size {size} --socket {socket}"
	[ -z "$file" ] || ours="$tmp/nbdmem --file {file} --socket {socket}"
fi
if [ -z "$theirs" ]; then
	theirs="nbdkit -f -U {socket} memory {size}"
	[ -z "$file" ] || theirs="qemu-nbd --cache=none --aio=io_uring -f raw -t -e 16 -k {socket} {file}"
fi
[ -z "$file" ] || newfiles "$size" "$file.ours" "$file.theirs"
serve ours "${ours//\{file\}/$file.ours}"
serve theirs "${theirs//\{file\}/$file.theirs}"
fill ours
fill theirs
measure
table
