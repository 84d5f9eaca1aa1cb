package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
)

// TestNodeVariables runs a job on two nodes, one of which has given a GPU to another job: each
// worker has the variables of its own node, and none that make it a task of Slurm's.
func TestNodeVariables(t *testing.T) {
	if testing.Short() {
		t.Skip("some seconds with a real Slurm: make check-slurm")
	}
	c := startCluster(t, 2)
	bin, home := c.path("bin"), c.path("home")
	for _, dir := range []string{bin, home} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	programs, err := follow.Build(t.Context(), bin)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("HOME", home)
	c.allocate("--nodelist=n1", "--gres=gpu:1", "-n1")
	script := fmt.Sprintf(`#!/bin/sh
srun sh -c 'env > %[1]s/step.$SLURMD_NODENAME'
exec %[2]s --slurm -np 4 --slots-per-host 2 --gossip-advertise 127.0.0.1 --discovery-plugin %[3]s \
	sh -c 'env > %[1]s/worker.$HOROVOD_RANK'
`, home, programs.Hvdrun, c.plugin())
	if err := os.WriteFile(c.path("job.sh"), []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	out := c.path("driver.out")
	t.Cleanup(func() {
		if t.Failed() {
			text, _ := os.ReadFile(out)
			t.Logf("%s", text)
		}
	})
	c.do("sbatch", "--wait", "-N2", "-n2", "--gres=gpu:1", "--output="+out, c.path("job.sh"))
	variables := func(file string) map[string]string {
		text, err := os.ReadFile(filepath.Join(home, file))
		if err != nil {
			t.Fatal(err)
		}
		all := make(map[string]string)
		for line := range strings.Lines(string(text)) {
			name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
			all[name] = value
		}
		return all
	}
	step := map[string]map[string]string{"n1": variables("step.n1"), "n2": variables("step.n2")}
	if step["n1"]["CUDA_VISIBLE_DEVICES"] == step["n2"]["CUDA_VISIBLE_DEVICES"] {
		t.Fatalf("the nodes have the same GPU, %s", step["n1"]["CUDA_VISIBLE_DEVICES"])
	}
	workers := map[string]int{}
	for rank := range 4 {
		w := variables(fmt.Sprintf("worker.%d", rank))
		node := w["SLURMD_NODENAME"]
		workers[node]++
		t.Logf("worker %d: %s, GPU %s, job %s", rank, node, w["CUDA_VISIBLE_DEVICES"], w["SLURM_JOB_ID"])
		for _, name := range []string{"CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "SLURM_JOB_ID", "SLURM_CPUS_ON_NODE"} {
			if w[name] != step[node][name] {
				t.Errorf("worker %d on %s: %s=%s, and in a step there %s", rank, node, name, w[name], step[node][name])
			}
		}
		if !strings.HasPrefix(w["HOROVOD_HOSTNAME"], node+"-") {
			t.Errorf("worker %d of host %s has the variables of %s", rank, w["HOROVOD_HOSTNAME"], node)
		}
		for name := range w {
			for _, task := range []string{"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_STEP", "SLURM_NTASKS", "SLURM_TASK", "PMI"} {
				if strings.HasPrefix(name, task) {
					t.Errorf("worker %d has %s=%s, of another launcher's task", rank, name, w[name])
				}
			}
		}
	}
	if workers["n1"] != 2 || workers["n2"] != 2 {
		t.Errorf("workers on nodes: %v", workers)
	}
}
