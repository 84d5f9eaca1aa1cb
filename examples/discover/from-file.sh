#!/bin/sh
# from-file.sh [FILE]: prints the hosts that stand in a file, hosts.txt beside this script by default.
#
# Edit the file while the job runs, and the job grows or shrinks. Replace it in one step, so that no half of it is ever
# read: write hosts.new, then `mv hosts.new hosts.txt`. If the file cannot be read, cat's exit status says so, and hvdrun
# keeps the last list.
exec cat -- "${1:-$(dirname -- "$0")/hosts.txt}"
