package torch

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/elastic"
	pack "github.com/hvdrun/hvdrun/python"
)

// train trains a state that PyTorch knows as Linear(3, 2) for n steps, with one worker, and returns
// it; each step adds 1 to all weights. It continues from the newest checkpoint in dir, and writes a
// new one there.
func train(t *testing.T, dir string, n int) (weight, bias []float32, step int64) {
	t.Helper()
	w, err := elastic.Init(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	weight, bias = make([]float32, 6), make([]float32, 2)
	state := elastic.NewState(w, elastic.Tensor("model.weight", weight), elastic.Tensor("model.bias", bias),
		elastic.Value("step", &step), elastic.Checkpoint(dir))
	if err := elastic.Run(t.Context(), state, func(context.Context) error {
		for range n {
			for i := range weight {
				weight[i]++
			}
			step++
			if err := state.Commit(); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return weight, bias, step
}

// TestCheckpoints: PyTorch continues from a checkpoint of a Go program, and a Go program from one
// of PyTorch.
func TestCheckpoints(t *testing.T) {
	needTorch(t)
	dir := filepath.Join(t.TempDir(), "checkpoints")
	train(t, dir, 2)
	folder, err := pack.Install(t.TempDir(), false)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), *python, "-c", `
import sys, torch
import hvdrun.torch as hvd
job = hvd.init("gloo")
net = torch.nn.Linear(3, 2)
state = job.state(model=net, step=0)
assert state.restore(sys.argv[1])
assert state.step == 2 and (net.weight == 2).all() and (net.bias == 0).all(), (state.step, net.weight)
for step in job.steps(state, total=3, batch=1):
    with step:
        step.commit(lambda: [p.data.add_(5 + torch.arange(p.numel()).reshape(p.shape)) for p in net.parameters()])
state.save(sys.argv[1])
opt = torch.optim.Adam(net.parameters())
net(torch.ones(3)).sum().backward()
opt.step()
whole = job.state(model=net, optimizer=opt, big=torch.randn(700000).to(torch.bfloat16), step=9, name=("a", None, float("inf"), {1: b"x"}))
whole.save(sys.argv[2])
other = torch.nn.Linear(3, 2)
adam = torch.optim.Adam(other.parameters())
again = job.state(model=other, optimizer=adam, big=torch.zeros(700000, dtype=torch.bfloat16), step=0, name=None)
assert again.restore(sys.argv[2])
assert again.name == whole.name and again.step == 9 and (again.big == whole.big).all() and (other.weight == net.weight).all()
assert str(adam.state_dict()) == str(opt.state_dict())
`, dir, filepath.Join(t.TempDir(), "whole"))
	cmd.Env = pack.AddPath(os.Environ(), folder)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	weight, bias, step := train(t, dir, 0)
	if want := []float32{7, 8, 9, 10, 11, 12}; !slices.Equal(weight, want) || !slices.Equal(bias, []float32{5, 6}) || step != 3 {
		t.Errorf("%v %v at step %d, want %v", weight, bias, step, want)
	}
}
