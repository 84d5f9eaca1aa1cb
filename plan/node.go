package plan

import "strings"

// describes is what a variable of a batch system or launcher describes. It determines from which
// process a worker gets the variable.
type describes uint8

const (
	// describesJob is a value that is the same on all nodes, or a setting of the user. Workers get
	// it from the environment in which hvdrun was run.
	describesJob describes = iota + 1
	// describesNode is a node's name, its devices, its share of a job. Workers get it from the
	// process on their node that starts them: the agent or the driver.
	describesNode
	// describesPlace is a folder of one user on a node. It is treated as describesNode, except that
	// workers of another user (--run-as) do not get it.
	describesPlace
	// describesTask is the rank that another launcher gave to this process, or the channel between
	// the two. A worker is not a task of that launcher and does not get it.
	describesTask
)

// rows are names, separated by spaces, of variables that describe the same thing.
type rows struct {
	describes
	names string
}

// nodeTable has exact names before the patterns that match them too: the first match counts.
// Slurm's are those of a step of Slurm 22.05 and later; what later releases add is the node's. The
// others follow the manuals of OpenPBS, LSF, Grid Engine, PMIx, Open MPI, hydra, Flux and PALS.
var nodeTable = []rows{
	// Slurm
	{describesJob, "SLURM_CONF SLURM_CLUSTER_NAME SLURM_WORKING_CLUSTER SLURM_JOB_ID SLURM_JOBID SLURM_HET_JOB_* SLURM_HET_SIZE"},
	{describesJob, "SLURM_JOB_NAME SLURM_JOB_ACCOUNT SLURM_JOB_PARTITION SLURM_JOB_QOS SLURM_JOB_RESERVATION SLURM_JOB_DEPENDENCY"},
	{describesJob, "SLURM_JOB_USER SLURM_JOB_UID SLURM_JOB_GROUP SLURM_JOB_GID SLURM_JOB_COMMENT SLURM_JOB_LICENSES SLURM_JOB_EXTRA"},
	{describesJob, "SLURM_JOB_START_TIME SLURM_JOB_END_TIME SLURM_RESTART_COUNT SLURM_ARRAY_* SLURM_SUBMIT_DIR SLURM_SUBMIT_HOST"},
	{describesJob, "SLURM_JOB_NODELIST SLURM_NODELIST SLURM_JOB_NUM_NODES SLURM_NNODES SLURM_JOB_CPUS_PER_NODE SLURM_EXPORT_ENV"},
	{describesTask, "SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_GTIDS SLURM_TASK_PID SLURM_STEP_* SLURM_STEPID SLURM_STEPMGR"},
	{describesTask, "SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_* SLURM_TASKS_PER_NODE SLURM_DISTRIBUTION SLURM_SRUN_COMM_*"},
	{describesTask, "SLURM_LAUNCH_NODE_IPADDR SLURM_PMI_* SLURM_PMIX* SLURM_MPI_TYPE SLURM_UMASK SLURM_PTY_* SLURM_SRUN_REDUCE_*"},
	{describesTask, "SLURM_PRIO_PROCESS SLURM_RLIMIT_*"},
	{describesNode, "SLURM_* SLURMD_*"},
	// PBS and Torque
	{describesTask, "PBS_TASKNUM PBS_NODENUM PBS_VNODENUM PBS_MOMPORT"},
	{describesPlace, "PBS_JOBDIR"},
	{describesNode, "NCPUS PBS_GPUFILE"},
	{describesJob, "PBS_*"},
	// LSF, jsrun
	{describesTask, "LSF_PM_TASKID LS_JOBPID LSB_JOBPGIDS LSB_JOBPIDS LSB_TRAPSIGS LSB_XFER_OP JSM_* OMPI_LSF_*"},
	{describesNode, "LSB_BIND_CPU_LIST LSB_BIND_MEM_LIST LSB_EFFECTIVE_HOST LSB_EXEC_HOSTTYPE LS_SUBCWD_TMP"},
	{describesJob, "LSB_* LSF_*"},
	// Grid Engine
	{describesTask, "SGE_BINDING SGE_JOB_SPOOL_DIR"},
	{describesNode, "PE_HOSTFILE SGE_HGR_* SGE_SGR_*"},
	{describesJob, "SGE_*"},
	// MPI's launchers, PMI and PMIx, Flux, ALPS and PALS
	{describesJob, "OMPI_MCA_* PMIX_MCA_* PRTE_MCA_* PMIX_SYSTEM_TMPDIR PMI_DEBUG"},
	{describesTask, "OMPI_* PMIX_* PRTE_* PMI_* PMI2_* MPI_LOCALRANKID MPI_LOCALNRANKS HYDI_* MPIEXEC_* MV2_COMM_WORLD_*"},
	{describesTask, "FLUX_TASK_* FLUX_KVS_NAMESPACE FLUX_PMI_* ALPS_* PALS_*"},
	// Kubernetes' indexed jobs
	{describesNode, "JOB_COMPLETION_INDEX"},
	// Devices
	{describesNode, "CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES GPU_DEVICE_ORDINAL"},
	{describesNode, "ZE_AFFINITY_MASK ONEAPI_DEVICE_SELECTOR ASCEND_RT_VISIBLE_DEVICES HABANA_VISIBLE_DEVICES NEURON_RT_VISIBLE_CORES"},
	// The machine
	{describesNode, "HOSTNAME"},
	{describesPlace, "TMPDIR XDG_RUNTIME_DIR"},
}

// nodeVariable is a row of nodeVariables. name may end with *, which stands for any ending.
type nodeVariable struct {
	name string
	describes
}

// nodeVariables are the variables by which a batch system or launcher describes a job, a node or a
// task; the first row that matches a name counts. Other variables are the user's, and every worker
// gets them.
var nodeVariables = func() (table []nodeVariable) {
	for _, r := range nodeTable {
		for name := range strings.FieldsSeq(r.names) {
			table = append(table, nodeVariable{name, r.describes})
		}
	}
	return table
}()

// described returns what the variable of NAME=value describes; 0: it is the user's.
func described(entry string) describes {
	name, _, _ := strings.Cut(entry, "=")
	for _, v := range nodeVariables {
		if start, any := strings.CutSuffix(v.name, "*"); name == v.name || any && strings.HasPrefix(name, start) {
			return v.describes
		}
	}
	return 0
}

// WithoutNode returns those entries of env, NAME=value each, that do not describe this process's
// node, nor the task of another launcher that this process is. They are what workers on other nodes
// can use: see nodeVariables.
func WithoutNode(env []string) (kept []string) {
	for _, entry := range env {
		switch described(entry) {
		case describesNode, describesPlace, describesTask:
		default:
			kept = append(kept, entry)
		}
	}
	return kept
}

// WithNode returns a copy of env with variables that describe the node added from own, the
// environment of the process that starts a worker, unless env already has them. sameUser: the
// worker's user is that of this process.
func WithNode(env, own []string, sameUser bool) []string {
	all := env[:len(env):len(env)]
	for _, entry := range own {
		what := described(entry)
		if what != describesNode && (what != describesPlace || !sameUser) {
			continue
		}
		name, _, _ := strings.Cut(entry, "=")
		set := false
		for _, e := range env {
			set = set || strings.HasPrefix(e, name+"=")
		}
		if !set {
			all = append(all, entry)
		}
	}
	return all
}
