#!/bin/sh
# Runs a job that asks Slurm for its nodes. The arguments are those of hvdrun:
#
#   sh train.sh -np 2 --max-np 8 --slurm-args '--partition=low --gres=gpu:1' ./train       # on a login node
#   sbatch train.sh -np 2 --max-np 8 --slurm-args '--partition=low --gres=gpu:1' ./train   # in a job, whose node is used too
#
# Such a job needs only `hvdrun --slurm` (docs/running.md). If hvdrun is killed, this script also resumes the job, while the
# workers train. If the script and hvdrun are both killed, `hvdrun resume ~/.hvdrun-*/job` on the same machine resumes the
# job within ten minutes (--orphan-timeout). When the job of Slurm in which they run ends, the training ends, and its nodes
# are given back: run the driver where it is not preempted.
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
