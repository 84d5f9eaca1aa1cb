package tasks

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
	"github.com/hvdrun/hvdrun/tasks/scheduler"
)

// complain fails with a text of n bytes that are not UTF-8.
var complain = Register[int]("complain/v1", func(_ context.Context, n int) (int, error) {
	return 0, errors.New("no room " + strings.Repeat("\xff", n))
})

// TestLargeTexts: an error of any size arrives; Submit refuses what cannot be sent, and names that
// are not UTF-8. The errors of tasks behind a failed one name that task, not each other.
func TestLargeTexts(t *testing.T) {
	p := newPlace(t, scheduler.Config{})
	p.serve(ServeConfig{})
	pool := p.connect(ConnectConfig{})
	ctx := t.Context()
	_, err := complain.Call(ctx, pool, 5<<20)
	var failed *FunctionError
	if !errors.As(err, &failed) || !strings.HasPrefix(failed.Text, "no room ") || len(failed.Text) > link.MaxText {
		t.Errorf("a long error is %.100v", err)
	}
	if !strings.HasSuffix(failed.Text, "bytes more)") {
		t.Errorf("a text that was cut does not say so: …%q", failed.Text[len(failed.Text)-50:])
	}
	for _, s := range []*taskspb.SubmitTask{{Args: make([]byte, link.MaxSubmit)}, {Options: &taskspb.TaskOptions{Needs: make([]uint64, link.MaxNeeds+1)}}} {
		if err := checkSubmit(s, &options{}); err == nil {
			t.Errorf("a task of %d arguments in %d bytes is sent", len(s.GetOptions().GetNeeds()), len(s.GetArgs()))
		}
	}
	for name, f := range map[string]*Func[int]{"prefer": double.With(Prefer("\xff")), "resource": double.With(Resource(strings.Repeat("r", 300), 1))} {
		if _, err := f.Submit(ctx, pool, 1); err == nil || !strings.Contains(err.Error(), "is not UTF-8; at most 255") {
			t.Errorf("a %s that cannot be sent: %v", name, err)
		}
	}
	if _, err := newFunction("\xff", func(context.Context) error { return nil }, nil); err == nil {
		t.Error("a name that cannot be sent is taken")
	}
	root, err := complain.Submit(ctx, pool, 1000)
	if err != nil {
		t.Fatal(err)
	}
	behind := root
	for range 3 {
		if behind, err = double.Submit(ctx, pool, behind); err != nil {
			t.Fatal(err)
		}
	}
	sent := behind.Err(ctx)
	here, err := double.Submit(ctx, pool, behind) // it has failed, as the client knows
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{sent, here.Err(ctx)} {
		var chain *DependencyError
		if !errors.As(err, &chain) || strings.Count(chain.Text, "on which it depends") != 1 || !strings.Contains(chain.Text, "of complain/v1, on which it depends, has failed: no room") {
			t.Errorf("a task behind others has failed with %v", err)
		}
	}
}
