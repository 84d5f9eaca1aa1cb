#!/bin/sh
# One more node for the job of train.sh, which submits this script as often as it has use for nodes.
#SBATCH --cpus-per-task=4
# The agent is a step of its own: a step gets SIGTERM when the grace of a preemption begins, a batch
# script does not. Then it asks its workers to leave, and gives them so long.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
exec srun --nodes=1 --ntasks=1 --mpi=none "${HVDRUN:-hvdrun}" agent --name "$SLURMD_NODENAME-$SLURM_JOB_ID" \
	--slots "${SLOTS:-1}" --drain-timeout 50s --key-file "$AGENT_KEY" --label "$AGENT_LABEL" --bind 0.0.0.0:0 --join "$AGENT_JOIN"
