package tasks

import (
	"context"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/tasks/scheduler"
)

// shapeIn returns the fields of a type as they enter the hash of a function that takes the type.
func shapeIn[A any](t *testing.T) string {
	t.Helper()
	f, err := newFunction("f", func(context.Context, A) error { return nil }, reflect.TypeFor[None]())
	if err != nil {
		t.Fatal(err)
	}
	_, shape, _ := strings.Cut(typeNames(f), "{")
	return shape
}

// TestShapeIsHashed: structs of the same name with different fields are different types, also
// inside other types.
func TestShapeIsHashed(t *testing.T) {
	older := func() (direct, below, ref string) {
		type point struct{ X, Y float64 }
		return shapeIn[point](t), shapeIn[map[string][]*point](t), shapeIn[Ref[point]](t)
	}
	moved := func() (direct, below, ref string) {
		type point struct {
			hidden   int
			Y, X     float64
			unshared []int
		}
		_ = point{hidden: 1, unshared: nil}
		return shapeIn[point](t), shapeIn[map[string][]*point](t), shapeIn[Ref[point]](t)
	}
	newer := func() (direct, below, ref string) {
		type point struct{ X, Y, Z float64 }
		return shapeIn[point](t), shapeIn[map[string][]*point](t), shapeIn[Ref[point]](t)
	}
	a1, b1, r1 := older()
	a2, b2, r2 := newer()
	if a1 == a2 || b1 == b2 || r1 == r2 {
		t.Error("a struct with another field has the same shape")
	}
	if a3, b3, r3 := moved(); a1 != a3 || b1 != b3 || r1 != r3 {
		t.Error("a struct with the same exported fields has another shape")
	}
	type list struct {
		Next *list
		At   time.Time
	}
	if got := shapeIn[list](t); got != "At time.Time,Next *tasks.list,};;;" {
		t.Errorf("a recursive type has %q", got)
	}
}

// pointed returns its argument.
var pointed = Register[*shape]("pointed/v1", func(_ context.Context, s *shape) (*shape, error) { return s, nil })

// TestNilPointer: a nil pointer is a value, as an argument and as a result.
func TestNilPointer(t *testing.T) {
	p := newPlace(t, scheduler.Config{})
	p.serve(ServeConfig{})
	pool := p.connect(ConnectConfig{})
	for _, arg := range []any{(*shape)(nil), nil} {
		if got, err := pointed.Call(t.Context(), pool, arg); err != nil || got != nil {
			t.Errorf("%#v has become %v, %v", arg, got, err)
		}
	}
	if got, err := pointed.Call(t.Context(), pool, &shape{Name: "a"}); err != nil || got == nil || got.Name != "a" {
		t.Errorf("a pointer has become %v, %v", got, err)
	}
}
