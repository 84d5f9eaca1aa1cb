#!/bin/sh
# Runs a job that asks Slurm for its nodes: sh train.sh COMMAND…, on a login node, or sbatch
# train.sh COMMAND…. MIN and MAX are bounds of the number of workers, SLOTS is how many a node has,
# and FLAGS are more flags of hvdrun.
#SBATCH --job-name=train-driver --ntasks=1
set -eu
here=${HERE:-$PWD} # where agent.sh is; a folder that all nodes see
hvdrun=${HVDRUN:-hvdrun}
name=train-$(hostname -s)-$$
folder=$(mktemp -d "$HOME/.hvdrun-XXXXXX") # all nodes see it, and nobody else
trap 'rm -rf "$folder"' EXIT
trap 'kill -TERM "$driver"' INT TERM

export HVDRUN="$hvdrun" SLOTS="${SLOTS:-1}" # for agent.sh, as what follows
export AGENT_KEY="$folder/key" AGENT_LABEL="$name"
port=$((20000 + $$ % 10000))
export AGENT_JOIN="${ADDRESS:-$(hostname)}:$port"
"$hvdrun" agent --generate-key "$AGENT_KEY"

# The driver is the member of the cluster that the agents join.
# shellcheck disable=SC2086
"$hvdrun" -np "${MIN:-1}" --min-np "${MIN:-1}" --max-np "${MAX:-8}" --elastic-timeout 24h --job-dir "$folder/job" \
	--gossip-bind "0.0.0.0:$port" --gossip-join "$AGENT_JOIN" --gossip-key-file "$AGENT_KEY" --gossip-label "$AGENT_LABEL" \
	--discovery-plugin "${PLUGIN:-/usr/lib/hvdrun/plugins/slurm}" --discovery-config job_name="$name" \
	--discovery-config script="$here/agent.sh" --discovery-config slots="$SLOTS" ${FLAGS:-} -- "$@" &
driver=$!
while :; do
	status=0
	wait "$driver" || status=$?
	kill -0 "$driver" 2>/dev/null || exit "$status" # else a signal has come, which the driver has now
done
