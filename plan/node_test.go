package plan

import (
	"slices"
	"strings"
	"testing"
)

// TestNodeVariables: a worker of another node gets the job's variables from the driver's
// environment, and the node's variables from the agent's. A rank that another launcher has set
// reaches no worker.
func TestNodeVariables(t *testing.T) {
	driver := []string{
		"PATH=/bin", "SLURM_JOB_ID=7", "SLURM_PROCID=0", "SLURM_LOCALID=0", "SLURMD_NODENAME=n1", "SLURM_JOB_GPUS=2",
		"SLURM_STEP_GPUS=2", "SLURM_NTASKS=1", "CUDA_VISIBLE_DEVICES=2", "ROCR_VISIBLE_DEVICES=2", "ZE_AFFINITY_MASK=2",
		"TMPDIR=/scratch/first", "XDG_RUNTIME_DIR=/run/user/1", "PMI_RANK=0", "PMIX_RANK=0", "OMPI_COMM_WORLD_RANK=0",
		"OMPI_MCA_btl=tcp", "PMIX_MCA_gds=hash", "PBS_JOBID=9.s", "PBS_NODENUM=0", "LSB_JOBID=3", "LSF_PM_TASKID=1",
		"SGE_TASK_ID=1", "PE_HOSTFILE=/var/spool/first", "HOSTNAME=first", "SLURM_A_NAME_OF_NEXT_YEAR=first",
		"SLURMISH=mine", "CUDA_VISIBLE_DEVICES_OF_MINE=1", "HOSTNAMES=all", "TMPDIRS=all",
	}
	agent := []string{
		"PATH=/agent", "SLURM_JOB_ID=8", "SLURM_PROCID=1", "SLURMD_NODENAME=n2", "SLURM_JOB_GPUS=0", "CUDA_VISIBLE_DEVICES=0",
		"TMPDIR=/scratch/second", "PMIX_RANK=1", "OMPI_MCA_btl=self", "HOSTNAME=second",
	}
	job := []string{
		"PATH=/bin", "SLURM_JOB_ID=7", "OMPI_MCA_btl=tcp", "PMIX_MCA_gds=hash", "PBS_JOBID=9.s", "LSB_JOBID=3", "SGE_TASK_ID=1",
		"SLURMISH=mine", "CUDA_VISIBLE_DEVICES_OF_MINE=1", "HOSTNAMES=all", "TMPDIRS=all",
	}
	node := []string{"SLURMD_NODENAME=n2", "SLURM_JOB_GPUS=0", "CUDA_VISIBLE_DEVICES=0"}
	sent := WithoutNode(driver)
	if !slices.Equal(sent, job) {
		t.Errorf("sent: %q", sent)
	}
	if got, want := WithNode(sent, agent, true), slices.Concat(job, node, []string{"TMPDIR=/scratch/second", "HOSTNAME=second"}); !slices.Equal(got, want) {
		t.Errorf("of the same user: %q", got)
	}
	if got, want := WithNode(sent, agent, false), slices.Concat(job, node, []string{"HOSTNAME=second"}); !slices.Equal(got, want) {
		t.Errorf("of another user: %q", got)
	}
	given := append(slices.Clone(job), "CUDA_VISIBLE_DEVICES=5")
	if got := WithNode(given, agent, true); !slices.Contains(got, "CUDA_VISIBLE_DEVICES=5") || slices.Contains(got, "CUDA_VISIBLE_DEVICES=0") {
		t.Errorf("a person's own choice: %q", got)
	}
	if got := WithNode(sent, driver, true); !slices.Contains(got, "CUDA_VISIBLE_DEVICES=2") || slices.Contains(got, "SLURM_PROCID=0") {
		t.Errorf("on the driver's own node: %q", got)
	}
}

// TestNodeTable: each row of the table can match, and no row is there twice.
func TestNodeTable(t *testing.T) {
	for i, v := range nodeVariables {
		name := strings.Replace(v.name, "*", "X", 1)
		j := slices.IndexFunc(nodeVariables, func(o nodeVariable) bool {
			start, any := strings.CutSuffix(o.name, "*")
			return o.name == name || any && strings.HasPrefix(name, start)
		})
		if j != i {
			t.Errorf("%s is hidden by %s", v.name, nodeVariables[j].name)
		}
	}
}
