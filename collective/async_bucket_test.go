package collective

import (
	"bytes"
	"math"
	"testing"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// FuzzStatements: what a rank says of its tensors is refused, or says the same when it is said
// again, and none is larger than memory can be.
func FuzzStatements(f *testing.F) {
	h := &Handle{name: "grad", request: request{dtype: kernel.Float32, op: operation.Sum, count: 7, prescale: 1, postscale: 0.5}}
	one := h.state(nil)
	f.Add(one)
	f.Add(append(h.state(one), joinStatement))
	f.Add(one[:len(one)-1])
	for do, op := range map[operation.Action]operation.Op{operation.BroadcastAsync: 0, operation.AllGatherIntoAsync: 0, operation.ReduceScatterIntoAsync: operation.Max} {
		r := request{do: do, dtype: kernel.Float32, op: op, count: 7, prescale: 1, postscale: 1}
		f.Add((&Handle{name: "weights", request: r}).state(nil))
	}
	f.Add([]byte{tensorStatement, 255, 'a'})
	f.Fuzz(func(t *testing.T, b []byte) {
		all, join, err := parseStatements(b, 1)
		if err != nil {
			if all != nil || join {
				t.Errorf("refused, but returned: %v, %v", all, join)
			}
			return
		}
		var again []byte
		for _, s := range all {
			if s.rank != 1 || s.request.count > math.MaxInt/uint64(s.request.dtype.Size()) {
				t.Errorf("taken: %+v", s)
			}
			again = (&Handle{name: s.name, request: s.request}).state(again)
		}
		if !join && !bytes.Equal(again, b) {
			t.Errorf("%q became %q", b, again)
		}
	})
}
