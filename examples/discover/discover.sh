#!/bin/sh
# discover.sh name[:slots]…: prints those of the given hosts that the name service resolves.
#
#   hvdrun -np 2 --host-discovery-script './discover.sh worker-0:4 worker-1:4 worker-2:4' python train.py
#
# It suits name services whose names appear together with their hosts, such as a headless service of Kubernetes. For another
# source (a cloud's command line, a batch system), replace `present` or the loop. hvdrun runs the script every second and
# requires:
#
#   - One host per line, `name` or `name:slots`. The default of slots is --slots-per-host.
#   - The complete list in every run. The workers on a missing host are stopped.
#   - A status other than 0 if the hosts are unknown. hvdrun then keeps the last list and runs the script again.
#   - The same order in every run. Of hosts that appear together, the first gets the lower ranks.
#   - An end within --discovery-timeout; otherwise hvdrun kills the script and its descendants.
#   - Its stderr goes to hvdrun's log.
set -u

if [ $# -eq 0 ]; then
	echo "usage: discover.sh name[:slots]..." >&2
	exit 2
fi

# present NAME succeeds if the name resolves and fails if it is unknown, for which getent exits with 2. Other failures end the
# script, because the hosts are then unknown.
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
