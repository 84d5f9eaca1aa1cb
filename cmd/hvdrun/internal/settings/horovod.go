package settings

import (
	"strings"
)

// refused are flags of horovodrun that have no meaning here, with what to do instead. A name that
// ends in * stands for all that begin with it.
var refused = []struct{ flags, advice string }{
	{"gloo mpi jsrun", "there is one kind of connection between workers, and nothing to choose; leave it out"},
	{"mpi-args binding-args", "no MPI is used; put options of the workers into the command, and variables into the environment"},
	{"mpi-threads-disable no-mpi-threads-disable", "no MPI is used; leave it out"},
	{"tcp", "workers are connected by TCP anyway; for NCCL set NCCL_IB_DISABLE=1 in the environment"},
	{"disable-cache", "nothing about the hosts is cached between jobs; leave it out"},
	{"check-build cb", "there are no optional parts to check; `hvdrun --version` names the build"},
	{"num-nccl-streams", "hvdrun makes no NCCL streams; leave it out"},
	{"thread-affinity", "workers are not bound to cores; start the command with taskset or numactl"},
	{"cache-capacity", "the ranks remember the names of all tensors; leave it out"},
	{"autotune* no-autotune*", "there is nothing to tune; leave it out"},
	{"hierarchical-* no-hierarchical-* torus-allreduce no-torus-allreduce", "the algorithm is chosen by size and placement; leave it out"},
	{"gloo-timeout-seconds", "a lost peer is seen by its connection; use --join-timeout for a worker that does not come to the next world"},
	{"timeline-mark-cycles no-timeline-mark-cycles", "the timeline has no cycles to mark; leave it out"},
	{"stall-check* no-stall-check*", "use --stall-warning and --stall-timeout; for other waits --start-timeout, --join-timeout and --finish-timeout"},
	{"log-with-timestamp log-without-timestamp log-hide-timestamp", "log lines bear the time; use --prefix-output-with-timestamp for the workers' output"},
	{"controller", "there is one kind of connection between workers, and nothing to choose; leave it out"},
}

// advice says what to do instead of giving the flag of horovodrun of that name, or "" where it is
// none of the refused.
func advice(name string) string {
	for _, r := range refused {
		for flag := range strings.FieldsSeq(r.flags) {
			if prefix, ok := strings.CutSuffix(flag, "*"); name == flag || ok && strings.HasPrefix(name, prefix) {
				return r.advice
			}
		}
	}
	return ""
}
