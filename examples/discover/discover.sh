#!/bin/sh
# discover.sh name[:slots]…: prints those of the given hosts that the name service knows now.
#
#   hvdrun -np 2 --host-discovery-script './discover.sh worker-0:4 worker-1:4 worker-2:4' python train.py
#
# This fits a place where names appear with their machines, such as a headless service of Kubernetes. To ask something
# else (a cloud's command line, a batch system), replace `present`, or print from a loop of your own. hvdrun runs the
# script every second and asks of it:
#
#   - One host a line, `name` or `name:slots`; a line without slots has what --slots-per-host says.
#   - The whole list, every time. A host that is missing is gone: its workers are stopped.
#   - If you cannot tell, exit with a status that is not 0. hvdrun then keeps the last list and asks again.
#   - The same order, every time. Of hosts that appear together, the first gets the lower ranks.
#   - Be quick: after --discovery-timeout the script is killed, with all that it has started.
#   - What you print to stderr goes to hvdrun's log.
set -u

if [ $# -eq 0 ]; then
	echo "usage: discover.sh name[:slots]..." >&2
	exit 2
fi

# present NAME succeeds if the host is there, and fails if it is not. getent says 2 for a name that is not known; any other
# failure means that we cannot tell, and ends the script.
present() {
	getent hosts "$1" >/dev/null
	case $? in
	0) return 0 ;;
	2) return 1 ;;
	*)
		echo "discover.sh: cannot look up $1" >&2
		exit 1
		;;
	esac
}

for candidate in "$@"; do
	if present "${candidate%%:*}"; then
		echo "$candidate"
	fi
done
