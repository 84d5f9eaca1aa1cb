#!/bin/sh
# One more node for the job of train.sh, which submits this script as often as it has use for nodes.
#SBATCH --cpus-per-task=4
# The agent drains when it is asked to end. It asks workers to leave, and gives them so long.
exec "${HVDRUN:-hvdrun}" agent --name "$SLURMD_NODENAME-$SLURM_JOB_ID" --slots "${SLOTS:-1}" --drain-timeout 50s \
	--key-file "$AGENT_KEY" --label "$AGENT_LABEL" --bind 0.0.0.0:0 --join "$AGENT_JOIN"
