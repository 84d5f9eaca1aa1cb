package agreement

import (
	"bytes"
	"math"
	"testing"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// FuzzStatements: statements about a rank's tensors are refused, or encode to the same bytes again.
// No accepted tensor is larger than memory can be.
func FuzzStatements(f *testing.F) {
	r := Request{Type: kernel.Float32, Op: operation.Sum, Count: 7, Prescale: 1, Postscale: 0.5}
	one := r.state(nil, "grad")
	f.Add(one)
	f.Add(append(r.state(one, "grad"), joinStatement))
	f.Add(one[:len(one)-1])
	for do, op := range map[operation.Action]operation.Op{operation.BroadcastAsync: 0, operation.AllGatherIntoAsync: 0, operation.ReduceScatterIntoAsync: operation.Max} {
		r := Request{Do: do, Type: kernel.Float32, Op: op, Count: 7, Prescale: 1, Postscale: 1}
		f.Add(r.state(nil, "weights"))
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
			if s.rank != 1 || s.request.Count > math.MaxInt/uint64(s.request.Type.Size()) {
				t.Errorf("taken: %+v", s)
			}
			again = s.request.state(again, s.name)
		}
		if !join && !bytes.Equal(again, b) {
			t.Errorf("%q became %q", b, again)
		}
	})
}
