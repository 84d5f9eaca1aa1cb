#!/bin/sh
# Runs a job that asks Slurm for its nodes: sh train.sh [FLAGS…] -- COMMAND…, on a login node, or
# sbatch train.sh …. FLAGS are those of hvdrun. Where hvdrun is killed another goes on, as the
# workers do meanwhile.
#SBATCH --job-name=train-driver --ntasks=1
set -eu
hvdrun=${HVDRUN:-hvdrun}
folder=$(mktemp -d "$HOME/.hvdrun-XXXXXX") # all nodes see it, and nobody else
stopped=
trap 'rm -rf "$folder"' EXIT
trap 'stopped=yes; kill -TERM "$driver"' INT TERM

"$hvdrun" --slurm --job-dir "$folder/job" "$@" &
driver=$!
while :; do
	status=0
	wait "$driver" || status=$?
	if kill -0 "$driver" 2>/dev/null; then
		continue # a signal has come, which the driver has now
	fi
	if [ "$status" != 137 ] || [ -n "$stopped" ]; then
		exit "$status"
	fi
	sleep 1
	"$hvdrun" resume "$folder/job" &
	driver=$!
done
