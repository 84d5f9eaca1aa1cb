#!/bin/sh
# from-file.sh [FILE]: prints the hosts in a file, by default hosts.txt in the folder of this script.
#
# When the file changes, a running job grows or shrinks. Replace it atomically: write hosts.new, then `mv hosts.new hosts.txt`.
# If the file is unreadable, cat fails and hvdrun keeps the last list.
exec cat -- "${1:-$(dirname -- "$0")/hosts.txt}"
