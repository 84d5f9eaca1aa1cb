package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/hvdrun/hvdrun/tasks"
)

// mixes returns bytes that depend on salt and on all arguments, or fails.
var mixes = tasks.Register[[]byte]("mixes/v1", func(ctx context.Context, salt uint64, size int, lasts time.Duration, fails bool, of ...[]byte) ([]byte, error) {
	select {
	case <-time.After(lasts):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if fails {
		return nil, errors.New("as it is to")
	}
	return mix(salt, size, of), nil
})

func mix(salt uint64, size int, of [][]byte) []byte {
	h := sha256.New()
	h.Write(binary.LittleEndian.AppendUint64(nil, salt))
	for _, b := range of {
		h.Write(b)
	}
	sum := h.Sum(nil)
	return bytes.Repeat(sum, size/len(sum)+1)[:size]
}

// node is a task of the model.
type node struct {
	salt      uint64
	size      int
	lasts     time.Duration
	fails     bool
	of        []int  // the expected result, if it succeeds
	value     []byte // the expected result, if it succeeds
	future    *tasks.Future[[]byte]
	cancelled bool // Cancel was called
	end       end
}

// end is the outcome of a task.
type end uint8

const (
	right end = iota
	failed
	dependent // not run, because another task did not succeed
	cancelled
)

// perRound is the largest number of tasks that depend on each other.
const perRound = 1000

// model submits n tasks that depend on each other, some of which fail and some of which are
// cancelled, and compares their outcomes with those that are possible.
func model(ctx context.Context, n int, seed uint64, lasts time.Duration) error {
	pool, err := tasks.Connect(ctx, tasks.ConnectConfig{})
	if err != nil {
		return err
	}
	defer pool.Close()
	dice := rand.New(rand.NewPCG(seed, 0))
	var seen [4]int
	for done := 0; done < n; {
		nodes := make([]node, min(perRound, n-done))
		if err := round(ctx, pool, dice, nodes, lasts); err != nil {
			return fmt.Errorf("after %d tasks: %w", done, err)
		}
		for i := range nodes {
			seen[nodes[i].end]++
		}
		done += len(nodes)
		fmt.Printf("%d left\n", n-done)
	}
	fmt.Printf("%d right, %d of them fail, %d depend on such, %d are cancelled\n", n, seen[failed], seen[dependent], seen[cancelled])
	return nil
}

// round submits tasks, cancels some, and checks all.
func round(ctx context.Context, pool *tasks.Pool, dice *rand.Rand, nodes []node, lasts time.Duration) error {
	for i := range nodes {
		t := &nodes[i]
		t.draw(dice, nodes[:i], lasts)
		args := []any{t.salt, t.size, t.lasts, t.fails}
		for _, k := range t.of {
			args = append(args, nodes[k].future)
		}
		var err error
		if t.future, err = mixes.Submit(ctx, pool, args...); err != nil {
			return err
		}
		if dice.IntN(50) == 0 { // one of the earlier tasks, most of which have not ended
			k := i - dice.IntN(min(i+1, 20))
			nodes[k].cancelled = true
			nodes[k].future.Cancel()
		}
	}
	for i := range nodes {
		if err := nodes[i].check(ctx, nodes); err != nil {
			return fmt.Errorf("task %d of the round: %w", i, err)
		}
	}
	return nil
}

// draw chooses the properties of the task at random.
func (t *node) draw(dice *rand.Rand, before []node, lasts time.Duration) {
	t.salt, t.size, t.fails = dice.Uint64(), 1+dice.IntN(200), dice.IntN(100) == 0
	if dice.IntN(20) == 0 { // some are inlined, others stored
		t.size = 102_300 + dice.IntN(200)
	}
	if lasts > 0 {
		t.lasts = time.Duration(dice.Int64N(int64(2 * lasts)))
	}
	var of [][]byte
	if dice.IntN(3) > 0 && len(before) > 0 {
		for range 1 + dice.IntN(3) {
			k := len(before) - 1 - dice.IntN(min(len(before), 100))
			t.of, of = append(t.of, k), append(of, before[k].value)
		}
	}
	t.value = mix(t.salt, t.size, of)
}

// check waits for the task, and returns an error if its outcome is not possible.
func (t *node) check(ctx context.Context, nodes []node) error {
	got, err := t.future.Get(ctx)
	var byFunction *tasks.FunctionError
	var byOther *tasks.DependencyError
	switch {
	case err == nil && !bytes.Equal(got, t.value):
		return fmt.Errorf("%d bytes that begin with %x, and must be %d that begin with %x", len(got), got[:min(8, len(got))], t.size, t.value[:min(8, t.size)])
	case err == nil:
		t.end = right
	case errors.As(err, &byFunction):
		t.end = failed
	case errors.As(err, &byOther):
		t.end = dependent
	case errors.Is(err, tasks.ErrCancelled):
		t.end = cancelled
	default:
		return err
	}
	// A cancelled task can have ended before, for the tasks that depend on it.
	may, must := false, false
	for _, k := range t.of {
		may = may || nodes[k].end != right
		must = must || nodes[k].end == failed || nodes[k].end == dependent
	}
	switch {
	case t.end == cancelled && t.cancelled:
		return nil
	case t.end == dependent && may, t.end != dependent && !must && t.fails == (t.end == failed) && t.end != cancelled:
		return nil
	}
	return fmt.Errorf("its end is %d (%v); it is to fail: %v; it depends on failed ones: %v; it was cancelled: %v", t.end, err, t.fails, must, t.cancelled)
}
