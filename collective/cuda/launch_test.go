package cuda

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/collective"
)

// ownKernels contains a kernel that sets y[i] to a·x[i] + b·y[i] for n elements, and a kernel
// without parameters.
const ownKernels = `
// Its parameters: .entry nothing (.param .u64 in_a_comment)
.version 7.0
.target sm_70
.address_size 64

.visible .entry blend(
	.param .u64 x,
	.param .u64 y,
	.param .f32 a,
	.param .f64 b,
	.param .u32 n
)
{
	.reg .pred %p<1>;
	.reg .b32 %r<8>;
	.reg .b64 %d<5>;

	mov.u32 %r0, %ctaid.x;
	mov.u32 %r1, %ntid.x;
	mul.lo.u32 %r0, %r0, %r1;
	mov.u32 %r1, %tid.x;
	add.u32 %r0, %r0, %r1;
	ld.param.u32 %r2, [n];
	setp.ge.u32 %p0, %r0, %r2;
	@%p0 bra DONE;
	ld.param.f32 %r3, [a];
	ld.param.f64 %d0, [b];
	cvt.rn.f32.f64 %r4, %d0;
	mul.wide.u32 %d1, %r0, 4;
	ld.param.u64 %d2, [x];
	cvta.to.global.u64 %d2, %d2;
	add.u64 %d2, %d2, %d1;
	ld.param.u64 %d3, [y];
	cvta.to.global.u64 %d3, %d3;
	add.u64 %d3, %d3, %d1;
	ld.global.f32 %r5, [%d2];
	ld.global.f32 %r6, [%d3];
	mul.rn.f32 %r5, %r5, %r3;
	mul.rn.f32 %r6, %r6, %r4;
	add.rn.f32 %r5, %r5, %r6;
	st.global.f32 [%d3], %r5;
DONE:
	ret;
}

.visible .entry nothing(
)
{
	ret;
}
`

func loadOwn(t *testing.T, d *Device) *Module {
	t.Helper()
	m, err := d.Load(ownKernels)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil && !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
	return m
}

func function(t *testing.T, m *Module, name string) *Function {
	t.Helper()
	f, err := m.Function(name)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestLaunch(t *testing.T) {
	f := newNode(t).process()
	d := open(t, f, Config{})
	m := loadOwn(t, d)
	blend, nothing := function(t, m, "blend"), function(t, m, "nothing")
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	const n = 300
	values1, values2 := make([]float32, n), make([]float32, n)
	for i := range values1 {
		values1[i], values2[i] = float32(i), 1000
	}
	x, y := vector(t, d, values1), vector(t, d, values2)
	if err := blend.Launch(s, Linear(n-1), x, y, float32(2), 0.5, uint32(n-1)); err != nil {
		t.Fatal(err)
	}
	if err := s.Synchronize(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, got := range values(t, y) {
		if want := 2*float32(i) + 500; i < n-1 && got != want || i == n-1 && got != 1000 {
			t.Fatalf("element %d is %v", i, got)
		}
	}
	if err := nothing.Launch(s, Grid{}); err != nil || f.grid != [7]uint32{1, 1, 1, 1, 1, 1, 0} {
		t.Error(f.grid, err)
	}
	// The fake supports only one dimension, and returns an error.
	err = nothing.Launch(s, Grid{Blocks: Dim{X: 2, Y: 3, Z: 4}, Threads: Dim{X: 5, Y: 6, Z: 7}, Shared: 8})
	if !isCode(err, invalidValue) || f.grid != [7]uint32{2, 3, 4, 5, 6, 7, 8} {
		t.Error(f.grid, err)
	}
	if err := errors.Join(s.Synchronize(t.Context()), m.Close()); err != nil {
		t.Fatal(err)
	}
	_, gone := m.Function("blend")
	for _, err := range []error{gone, m.Close(), nothing.Launch(s, Grid{})} {
		if !errors.Is(err, ErrClosed) {
			t.Errorf("after the end: %v", err)
		}
	}
}

// TestLaunchRefuses: arguments for which the driver would read invalid memory are errors.
func TestLaunchRefuses(t *testing.T) {
	n := newNode(t)
	d, other := open(t, n.process(), Config{}), open(t, n.process(), Config{})
	m := loadOwn(t, d)
	blend := function(t, m, "blend")
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	far, err := other.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	x, elsewhere := vector(t, d, []float32{1}), vector(t, other, []float32{1})
	good := []any{x, x, float32(1), 2.0, uint32(1)}
	with := func(i int, v any) []any {
		args := slices.Clone(good)
		args[i] = v
		return args
	}
	for _, c := range []struct {
		what     string
		stream   *Stream
		grid     Grid
		args     []any
		argument int
	}{
		{"too few", s, Grid{}, good[:4], -1},
		{"too many", s, Grid{}, append(slices.Clone(good), int32(1)), -1},
		{"a number for an address", s, Grid{}, with(0, uint32(7)), 0},
		{"a float for an address", s, Grid{}, with(1, 1.5), 1},
		{"an integer for a float", s, Grid{}, with(2, int32(1)), 2},
		{"a wider float", s, Grid{}, with(2, 1.0), 2},
		{"a narrower float", s, Grid{}, with(3, float32(1)), 3},
		{"a wider integer", s, Grid{}, with(4, uint64(1)), 4},
		{"an integer of no certain width", s, Grid{}, with(4, 1), 4},
		{"nothing", s, Grid{}, with(0, nil), 0},
		{"another device's slice", s, Grid{}, with(1, elsewhere), 1},
		{"another device's stream", far, Grid{}, good, -1},
		{"no grid", s, Grid{Blocks: Dim{Y: -1}}, good, -1},
		{"no memory to share", s, Grid{Shared: -1}, good, -1},
	} {
		var e *LaunchError
		if err := blend.Launch(c.stream, c.grid, c.args...); !errors.As(err, &e) || e.Argument != c.argument || e.Function != "blend" {
			t.Errorf("%s: %v", c.what, err)
		}
	}
	if _, err := m.Function("blent"); !isCode(err, notFound) || !strings.Contains(err.Error(), "blent") {
		t.Error(err)
	}
	if _, err := d.Load("nonsense"); !isCode(err, invalidPTX) {
		t.Error(err)
	}
}

// TestLaunchBeforeCollective: a collective after a stream reads what the stream's kernels have
// written, and kernels that are launched afterwards read its result.
func TestLaunchBeforeCollective(t *testing.T) {
	for name, config := range configs {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 3, 1, config)
			w.must(t, func(rank int, d *Device, g *collective.Group) error {
				m, err := d.Load(ownKernels)
				if err != nil {
					return err
				}
				defer m.Close()
				blend, err := m.Function("blend")
				if err != nil {
					return err
				}
				s, err := d.NewStream()
				if err != nil {
					return err
				}
				defer s.Close()
				ones, y := vector(t, d, slices.Repeat([]float32{1}, 700)), vector(t, d, slices.Repeat([]float32{1}, 700))
				want := float32(1)
				for step := range 3 {
					if err := blend.Launch(s, Linear(700), ones, y, float32(rank), 1.0, uint32(700)); err != nil {
						return err
					}
					if err := AllReduceWith(context.Background(), g, y, collective.Sum, Options{After: s}); err != nil {
						return err
					}
					if err := blend.Launch(s, Linear(700), y, y, float32(0.25), 0.25, uint32(700)); err != nil {
						return err
					}
					want = (3*want + 3) / 2
					if err := s.Synchronize(t.Context()); err != nil {
						return err
					}
					if got := values(t, y); !slices.Equal(got, slices.Repeat([]float32{want}, 700)) {
						return fmt.Errorf("step %d: %v, want %v", step, got[0], want)
					}
				}
				return nil
			})
		})
	}
}

// TestEntries parses kernels as compilers write them.
func TestEntries(t *testing.T) {
	bits64, whole64, whole32, float := parameter{size: 8}, parameter{size: 8, whole: true}, parameter{size: 4, whole: true}, parameter{size: 4, float: true}
	for text, want := range map[string]map[string][]parameter{
		"": {},
		".visible .entry a(.param .u64 p, .param .f32 q){": {"a": {whole64, float}},
		".entry a ( ) {}": {"a": {}},
		".entry a\n{":     {"a": {}},
		".weak .entry _Z1aPfi(\n\t.param .u64 .ptr .global .align 4 _Z1aPfi_param_0,\n\t.param .s32 _Z1aPfi_param_1\n)\n.maxntid 128, 1, 1\n{": {
			"_Z1aPfi": {whole64, whole32}},
		"/* .entry no( */ .entry a( // .param .u32 x,\n .param .b64 p /* , .param .u32 y */ ) {} .entry b(.param .align 8 .b8 s[16]) { div /": {
			"a": {bits64}, "b": {parameter{}}},
		".entry a(.param .u64 p /* no end": {"a": {whole64}},
	} {
		if got := entries(text); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s\n%v, want %v", text, got, want)
		}
	}
}
