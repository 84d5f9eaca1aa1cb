#!/bin/sh
# Runs a job that asks Slurm for its nodes: sh train.sh [FLAGS…] -- COMMAND…, on a login node, or
# sbatch train.sh …. FLAGS are those of hvdrun. If hvdrun is killed, the script resumes the
# job, while the workers train.
#SBATCH --job-name=train-driver --ntasks=1
set -eu
hvdrun=${HVDRUN:-hvdrun}
folder=$(mktemp -d "$HOME/.hvdrun-XXXXXX") # on a file system that all nodes share
stopped=
trap 'rm -rf "$folder"' EXIT
trap 'stopped=yes; kill -TERM "$driver"' INT TERM

"$hvdrun" --slurm --job-dir "$folder/job" "$@" &
driver=$!
while :; do
	status=0
	wait "$driver" || status=$?
	if kill -0 "$driver" 2>/dev/null; then
		continue # a signal has arrived, which the driver has handled
	fi
	if [ "$status" != 137 ] || [ -n "$stopped" ]; then
		exit "$status"
	fi
	sleep 1
	"$hvdrun" resume "$folder/job" &
	driver=$!
done
