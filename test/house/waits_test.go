package house

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// timing are the functions by which a test can end a wait at a time.
var timing = map[string][]string{
	"time":    {"After", "AfterFunc", "NewTimer", "Sleep"},
	"context": {"WithTimeout", "WithTimeoutCause", "WithDeadline", "WithDeadlineCause"},
}

const (
	virtual  = "it is called in bubbles of testing/synctest"
	nothing  = "the test waits for something that must not happen: no test fails because a machine is slow"
	trigger  = "the end of the time is what is tested: a slow machine only ends it later"
	slowness = "it makes something slow"
	measures = "a benchmark"
)

// waits lists the test files with waits that have a time limit other than sandbox.Limit, outside of
// a bubble of testing/synctest: the number of these waits, and why no test fails because of them on
// slow processors. A pause of at most 20 ms between two observations does not count.
var waits = map[string]struct {
	uses int
	why  string
}{
	"internal/agent/client/ssh_test.go":        {1, trigger},
	"internal/agent/run_test.go":               {1, nothing},
	"cmd/hvdrun/internal/jobrun/story_test.go": {1, virtual},
	"collective/killed_test.go":                {1, measures},
	"collective/waits_test.go":                 {1, measures},
	"discovery/gossip/member_test.go":          {1, virtual},
	"discovery/gossip/memnet_test.go":          {1, virtual},
	"discovery/plugin/plugin_test.go":          {1, trigger},
	"discovery/poll_test.go":                   {3, virtual},
	"driver/loop_test.go":                      {1, virtual},
	"elastic/elastictest/network_test.go":      {4, virtual},
	"elastic/gradient/bench_test.go":           {1, measures},
	"elastic/run_test.go":                      {1, virtual},
	"elastic/sigterm_test.go":                  {2, virtual},
	"examples/gomlx/job_test.go":               {1, "training on real data, in make check-all only"},
	"internal/gpu/nvml_test.go":                {2, virtual},
	"internal/journal/etcd/etcd_test.go":       {1, trigger},
	"plugins/http/source_test.go":              {1, virtual},
	"plugins/slurm/source_test.go":             {1, trigger},
	"test/torch/soak_test.go":                  {1, measures},
	"torchrun/dynamic/scale_test.go":           {1, slowness},
	"torchrun/dynamic/scenarios_test.go":       {10, virtual},
	"torchrun/store/etcd/etcd_test.go":         {1, nothing},
	"tasks/leave_test.go":                      {2, virtual},
	"test/browser/main_test.go":                {1, "a browser that hangs is asked again, in make check-all only"},
	"test/browser/steer_test.go":               {2, "a browser that hangs is asked again, in make check-all only"},
	"test/e2e/netns/ssh_test.go":               {1, slowness},
	"test/kubernetes/main_test.go":             {1, "servers that do not start, in make check-all only"},
}

// TestWaits: the clock decides no test.
func TestWaits(t *testing.T) {
	found := map[string][]string{}
	for _, s := range sources(t) {
		if !s.test() {
			continue
		}
		for _, use := range timed(s.file) {
			found[s.path] = append(found[s.path], s.fset.Position(use.node.Pos()).String()+": "+use.what)
		}
	}
	for path, uses := range found {
		if len(uses) != waits[path].uses {
			t.Errorf("%d of %s:\n\t%s\nwait for an event, until sandbox.Limit at most, or in virtual time", len(uses), path, strings.Join(uses, "\n\t"))
		}
	}
	for path := range waits {
		if found[path] == nil {
			t.Errorf("%s does not use the clock: it needs no exception", path)
		}
	}
}

// timed returns where a file ends a wait by the clock, outside of bubbles.
func timed(file *ast.File) (found []use) {
	var bubbles []ast.Node
	calls := map[ast.Node]*ast.CallExpr{}
	ast.Inspect(file, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok {
			calls[call.Fun] = call
			if sel, ok := call.Fun.(*ast.SelectorExpr); ok {
				if x, ok := sel.X.(*ast.Ident); ok && x.Name == "synctest" && sel.Sel.Name == "Test" {
					bubbles = append(bubbles, n)
				}
			}
		}
		return true
	})
	inside := func(n ast.Node) bool {
		for _, b := range bubbles {
			if b.Pos() <= n.Pos() && n.End() <= b.End() {
				return true
			}
		}
		return false
	}
	for _, use := range uses(file, timing) {
		if call := calls[use.node]; !inside(use.node) && (call == nil || !isPause(call) && !isLimited(call)) {
			found = append(found, use)
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok && !inside(n) {
			if sel, ok := call.Fun.(*ast.SelectorExpr); ok && strings.HasPrefix(sel.Sel.Name, "Set") && strings.HasSuffix(sel.Sel.Name, "Deadline") &&
				len(call.Args) == 1 && adds(call.Args[0]) {
				found = append(found, use{n, sel.Sel.Name})
			}
		}
		return true
	})
	return found
}

// isPause reports whether a call has the argument n * time.Millisecond, n at most 20.
func isPause(call *ast.CallExpr) bool {
	if len(call.Args) == 0 {
		return false
	}
	number := "1"
	last := call.Args[0]
	if product, ok := last.(*ast.BinaryExpr); ok && product.Op == token.MUL {
		if n, ok := product.X.(*ast.BasicLit); ok {
			number, last = n.Value, product.Y
		}
	}
	n, err := strconv.Atoi(number)
	return err == nil && n <= 20 && types.ExprString(last) == "time.Millisecond"
}

// isLimited reports whether an argument of a call is sandbox.Limit, or the time until it.
func isLimited(call *ast.CallExpr) bool {
	return slices.ContainsFunc(call.Args, func(e ast.Expr) bool { return strings.Contains(types.ExprString(e), "sandbox.Limit(") })
}

// adds reports whether an expression calls a method Add, as time.Now().Add does.
func adds(e ast.Expr) bool {
	call, ok := e.(*ast.CallExpr)
	if !ok {
		return false
	}
	sel, ok := call.Fun.(*ast.SelectorExpr)
	return ok && sel.Sel.Name == "Add"
}

// TestWaitsAreFound: a wait within a bubble, or one that ends with the run, does not count.
func TestWaitsAreFound(t *testing.T) {
	const text = `package p
import ("context"; "time"; "testing/synctest")
func f(c net.Conn) {
	synctest.Test(nil, func(*testing.T) { <-time.After(1) })
	<-time.After(1)
	context.WithTimeout(nil, 1)
	context.WithCancel(nil)
	context.WithDeadline(nil, sandbox.Limit())
	<-time.After(20 * time.Millisecond)
	c.SetReadDeadline(time.Now().Add(1))
	c.SetReadDeadline(sandbox.Limit())
}`
	file, err := parser.ParseFile(token.NewFileSet(), "f.go", text, 0)
	if err != nil {
		t.Fatal(err)
	}
	var what []string
	for _, use := range timed(file) {
		what = append(what, use.what)
	}
	if got := strings.Join(what, " "); got != "time.After context.WithTimeout SetReadDeadline" {
		t.Errorf("found %s", got)
	}
}
