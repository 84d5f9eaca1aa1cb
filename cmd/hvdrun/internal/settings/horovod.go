package settings

import (
	"strings"
)

// refused lists flags of other launchers that have no meaning here, with what to do instead. A name
// that ends in * stands for all names that begin with it.
var refused = []struct{ of, flags, advice string }{
	{horovodrun, "gloo mpi jsrun", "there is one kind of connection between workers, and nothing to choose; leave it out"},
	{horovodrun, "mpi-args binding-args", "no MPI is used; put options of the workers into the command, and variables into the environment"},
	{horovodrun, "mpi-threads-disable no-mpi-threads-disable", "no MPI is used; leave it out"},
	{horovodrun, "tcp", "workers are connected by TCP anyway; for NCCL set NCCL_IB_DISABLE=1 in the environment"},
	{horovodrun, "disable-cache", "nothing about the hosts is cached between jobs; leave it out"},
	{horovodrun, "check-build cb", "there are no optional parts to check; `hvdrun --version` names the build"},
	{horovodrun, "num-nccl-streams", "hvdrun makes no NCCL streams; leave it out"},
	{horovodrun, "thread-affinity", "workers are not bound to cores; start the command with taskset or numactl"},
	{horovodrun, "cache-capacity", "the ranks remember the names of all tensors; leave it out"},
	{horovodrun, "autotune* no-autotune*", "there is nothing to tune; leave it out"},
	{horovodrun, "hierarchical-* no-hierarchical-* torus-allreduce no-torus-allreduce", "the algorithm is chosen by size and placement; leave it out"},
	{horovodrun, "gloo-timeout-seconds", "a lost peer is seen by its connection; use --join-timeout for a worker that does not come to the next world"},
	{horovodrun, "timeline-mark-cycles no-timeline-mark-cycles", "the timeline has no cycles to mark; leave it out"},
	{horovodrun, "stall-check* no-stall-check*", "use --stall-warning and --stall-timeout; for other waits --start-timeout, --join-timeout and --finish-timeout"},
	{horovodrun, "log-with-timestamp log-without-timestamp log-hide-timestamp", "log lines bear the time; use --prefix-output-with-timestamp for the workers' output"},
	{horovodrun, "controller", "there is one kind of connection between workers, and nothing to choose; leave it out"},

	{mpirun, "x env envall genv genvall genvlist", "the variables of hvdrun's environment are passed on by themselves: write A=1 before hvdrun, or env in the job's file"},
	{mpirun, "bind-to map-by rank-by cpus-per-proc cpus-per-rank report-bindings bind-to-core bind-to-socket bynode byslot", "workers are not bound to cores; start the command with taskset or numactl, and GPUs by --bind-gpus"},
	{mpirun, "oversubscribe nooversubscribe use-hwthread-cpus", "a host has as many workers as it has slots: -H localhost:8"},
	{mpirun, "allow-run-as-root", "root may run jobs; leave it out"},
	{mpirun, "mca pmca prtemca gmca", "no MPI is used; --network-interfaces and --listen choose the network"},
	{mpirun, "wd wdir", "workers have the working directory of hvdrun: cd there first, or dir in the job's file"},
	{mpirun, "tag-output", "each line bears its rank anyway; leave it out"},
	{mpirun, "npernode ppn N npersocket", "the slots of a host: -H a:4,b:4, or --slots-per-host"},
	{mpirun, "machinefile f hosts-file default-hostfile", "use --hostfile"},
	{torchrun, "nproc-per-node nproc_per_node nnodes node-rank node_rank rdzv-* rdzv_* max-restarts max_restarts standalone master-addr master_addr master-port master_port monitor-interval monitor_interval local-addr local_addr",
		"`hvdrun torchrun` takes torchrun's command line"},
	{torchrun, "no-python no_python module", "a command is any program: write python3 -m MODULE, or use `hvdrun torchrun`"},
	{accelerate, "num-processes num_processes", "use -np"},
	{accelerate, "num-machines num_machines machine-rank machine_rank main-process-ip main_process_ip main-process-port main_process_port same-network same_network",
		"hosts are named by -H or a source of hosts, and hvdrun starts the workers on all of them"},
	{accelerate, "mixed-precision mixed_precision multi-gpu multi_gpu use-fsdp use_fsdp use-deepspeed use_deepspeed dynamo-backend dynamo_backend gpu-ids gpu_ids",
		"it is for the program: write hvdrun -np 4 accelerate launch …, or give it to Accelerator()"},
}

// The launchers whose flags are in refused.
const (
	horovodrun = "horovodrun"
	mpirun     = "mpirun"
	torchrun   = "torchrun"
	accelerate = "accelerate launch"
)

// advice returns the launcher to which the named flag belongs and what to do instead; empty if the
// flag is not in refused.
func advice(name string) (of, why string) {
	for _, r := range refused {
		for flag := range strings.FieldsSeq(r.flags) {
			if prefix, ok := strings.CutSuffix(flag, "*"); name == flag || ok && strings.HasPrefix(name, prefix) {
				return r.of, r.advice
			}
		}
	}
	return "", ""
}
