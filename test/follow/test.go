package follow

import (
	"context"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

// test is the test to which a job belongs.
type test struct {
	t     *testing.T
	limit <-chan struct{} // closed when waits give up
	told  bool            // the story of the job was printed
}

// Test starts a job of a test, in its own folder. The job ends with the test at the latest. Its
// only time limit is that of the run of tests, shortly before which it is killed. If the test
// fails, the end of the job's story is printed and its folder is kept.
func (p Programs) Test(t *testing.T, j Job) *Running {
	t.Helper()
	limit := make(chan struct{})
	timer := time.AfterFunc(time.Until(sandbox.Limit()), func() { close(limit) })
	t.Cleanup(func() { timer.Stop() })
	j.Dir = t.TempDir()
	r, err := p.start(j, &test{t: t, limit: limit})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// end is called for each hvdrun of the job after the test.
func (test *test) end(r *Running) {
	t := test.t
	if !r.Over() || t.Failed() {
		r.Kill()
	}
	if !t.Failed() || test.told {
		return
	}
	test.told = true
	res, err := r.Wait()
	if err != nil {
		t.Log(err)
	}
	kept, err := sandbox.Keep(r.Dir)
	if err != nil {
		t.Log(err)
	}
	t.Logf("the job's folder is kept: %s\n%s", kept, res.Story())
}

// bound returns a context that ends when waits give up.
func (test *test) bound(ctx context.Context) context.Context {
	ctx, cancel := context.WithDeadline(ctx, sandbox.Limit())
	context.AfterFunc(ctx, cancel)
	return ctx
}

// Await calls done until it returns true. It returns false when the limit of the run of tests is
// near. It pauses between calls as [Poll] does.
func Await(t *testing.T, done func() bool) bool {
	end := sandbox.Limit()
	for {
		asked := time.Now()
		if done() {
			return true
		}
		if time.Now().After(end) {
			return false
		}
		time.Sleep(pause(asked))
	}
}

// pause returns how long to wait before the next observation of something, given when the last one
// began. After a slow observation, such as reading all of /proc, the pause is longer, so that the
// observed processes get the processor.
func pause(asked time.Time) time.Duration { return max(5*time.Millisecond, 10*time.Since(asked)) }
