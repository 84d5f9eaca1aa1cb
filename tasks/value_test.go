package tasks

import (
	"math"
	"math/big"
	"reflect"
	"testing"
	"time"
)

type length float64

func TestValues(t *testing.T) {
	for _, v := range []any{
		[]byte{}, []byte("abc"), "", "text", -1, math.MinInt64, int8(-128), uint64(math.MaxUint64), 1.5, float32(0.25), math.Inf(1),
		true, false, length(2), 3 * time.Second, time.Unix(1, 2).UTC(), *big.NewInt(77), None{}, shape{"a", []int{1}}, []string{"a", ""},
		map[string]int{"a": 1}, &shape{"b", nil}, big.NewInt(-5), [2]int{1, 2},
	} {
		want := reflect.ValueOf(v)
		b, err := encode(want)
		if err != nil {
			t.Errorf("%#v: %v", v, err)
			continue
		}
		got, err := decode(b, want.Type())
		if err != nil || !reflect.DeepEqual(got.Interface(), v) {
			t.Errorf("%#v of %d bytes became %#v, %v", v, len(b), got, err)
		}
	}
	for _, v := range []any{func() {}, make(chan int), struct{ F func() }{}} {
		if b, err := encode(reflect.ValueOf(v)); err == nil {
			t.Errorf("%T was encoded as %q", v, b)
		}
	}
}

// FuzzDecode: any bytes decode to a value of the type, or to an error.
func FuzzDecode(f *testing.F) {
	types := []reflect.Type{
		reflect.TypeFor[int8](), reflect.TypeFor[uint](), reflect.TypeFor[string](), reflect.TypeFor[[]byte](), reflect.TypeFor[bool](),
		reflect.TypeFor[float64](), reflect.TypeFor[time.Time](), reflect.TypeFor[*big.Int](), reflect.TypeFor[shape](),
	}
	for _, v := range []any{1, uint(2), "a", []byte("b"), true, 1.5, time.Unix(1, 0), big.NewInt(3), shape{"a", []int{1}}} {
		b, err := encode(reflect.ValueOf(v))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, typ := range types {
			if v, err := decode(b, typ); err == nil && v.Type() != typ {
				t.Errorf("a %v became a %v", typ, v.Type())
			}
		}
	})
}
