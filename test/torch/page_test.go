package torch

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
)

// data and a net for the program of docs/horovod.md: a batch of the last step has fewer samples
// than ranks.
const (
	before = `import torch, torch.nn.functional as F

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(784, 10)

    def forward(self, x):
        return F.log_softmax(self.layer(x.flatten(1)), 1)

torch.manual_seed(1)
data = [(torch.randn(1, 28, 28), i % 10) for i in range(130)]
epochs = 2
`
	after = `
assert state.step == 6 and not torch.isnan(net.layer.weight).any(), state.step
print("all", state.step, flush=True)
`
)

// TestHorovodPage runs the program of docs/horovod.md as it stands there.
func TestHorovodPage(t *testing.T) {
	needTorch(t)
	page, err := os.ReadFile("../../docs/horovod.md")
	if err != nil {
		t.Fatal(err)
	}
	_, code, _ := strings.Cut(string(page), "```python\n")
	code, _, found := strings.Cut(code, "```\n")
	if !found {
		t.Fatal("docs/horovod.md has no program")
	}
	program := filepath.Join(t.TempDir(), "page.py")
	if err := os.WriteFile(program, []byte(before+code+after), 0o600); err != nil {
		t.Fatal(err)
	}
	r := follow.Programs{Hvdrun: hvdrun}.Test(t, follow.Job{
		Flags: []string{"-np", "3", "--min-np", "1", "-H", "localhost:3"}, Command: []string{*python, program},
		Env: []string{"XDG_CACHE_HOME=" + t.TempDir(), "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1"},
	})
	res, err := r.Wait()
	out := follow.Tail(r.OutputPath(), 20000)
	if err != nil || res.Status != 0 || strings.Count(out, "all 6") != 3 {
		t.Errorf("status %d, %v\n%s", res.Status, err, out)
	}
}
