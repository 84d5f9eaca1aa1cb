package ptxtest

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/internal/kernel"
)

const head = ".version 7.0\n.target sm_70\n.address_size 64\n"

// program returns a kernel k with some registers and the given body.
func program(body string) string {
	return head + ".visible .entry k(\n\t.param .align 8 .b8 a[16]\n)\n{\n\t.reg .pred %p<2>;\n\t.reg .b16 %h<3>;\n" +
		"\t.reg .b32 %r<4>;\n\t.reg .b64 %d<4>;\n" + body + "\n\tret;\n}\n"
}

type memory struct {
	at    uint64
	bytes []byte
}

func (m *memory) Span(address uint64, n int) []byte {
	if address < m.at || address-m.at+uint64(n) > uint64(len(m.bytes)) {
		return nil
	}
	return m.bytes[address-m.at:][:n]
}

func run(t *testing.T, body string, m *memory, blocks, threads int) error {
	t.Helper()
	module, err := Parse(program(body))
	if err != nil {
		t.Fatal(err)
	}
	param := binary.LittleEndian.AppendUint64(nil, m.at)
	return module.Kernels["k"].Run(m, append(param, 7, 0, 0, 0, 0, 0, 0, 0), blocks, threads)
}

// TestThreads: each thread of each block adds to its own place.
func TestThreads(t *testing.T) {
	m := &memory{0x1000, make([]byte, 4*12)}
	err := run(t, `
	mov.u64 %d0, a;
	ld.param.u64 %d1, [%d0];
	ld.param.u32 %r0, [a+8];
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, %ntid.x;
	mul.wide.u32 %d2, %r1, %r2;
	mov.u32 %r1, %tid.x;
	cvt.u64.u32 %d3, %r1;
	add.u64 %d2, %d2, %d3;
	cvt.u32.u64 %r3, %d2;
	shl.b64 %d2, %d2, 2;
	add.u64 %d2, %d2, %d1;
	setp.lt.u32 %p0, %r3, 5;
	@%p0 bra LOW;
	add.u32 %r0, %r0, %r3;
LOW:
	st.global.b32 [%d2], %r0;`, m, 3, 4)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 12 {
		want := 7
		if i >= 5 {
			want += i
		}
		if got := binary.LittleEndian.Uint32(m.bytes[4*i:]); got != uint32(want) {
			t.Errorf("thread %d has stored %d", i, got)
		}
	}
}

func TestFaults(t *testing.T) {
	for _, c := range []struct {
		body    string
		aligned bool
	}{
		{"ld.param.u64 %d0, [a];\n\tld.global.b32 %r0, [%d0+32];", true},
		{"ld.param.u64 %d0, [a];\n\tadd.u64 %d0, %d0, 8;\n\tst.global.v4.b32 [%d0], {%r0, %r1, %r2, %r3};", false},
		{"ld.param.u64 %d0, [a];\n\tld.global.b64 %d1, [%d0+4];", false},
		{"mov.u64 %d1, a;\n\tld.param.u64 %d0, [%d1+16];", true},
	} {
		var f *fault
		if err := run(t, c.body, &memory{0x1000, make([]byte, 32)}, 1, 1); !errors.As(err, &f) || f.Aligned != c.aligned {
			t.Errorf("%s: %v", c.body, err)
		}
	}
	if err := run(t, "LOOP:\n\tbra LOOP;", &memory{}, 1, 1); err == nil {
		t.Error("a loop without an end has ended")
	}
	module, err := Parse(program(""))
	if err != nil {
		t.Fatal(err)
	}
	if module.Kernels["k"].Run(&memory{}, make([]byte, 8), 1, 1) == nil {
		t.Error("a parameter of another size")
	}
}

// TestRefused: programs that a compiler would refuse are refused.
func TestRefused(t *testing.T) {
	for _, body := range []string{
		"add.u32 %r0, %r1, %d0;", "add.u32 %r0, %r1;", "add.u32 %r9, %r1, %r2;", "add.u128 %r0, %r1, %r2;", "mov.b16 %h0, 65536;",
		"mov.b32 {%h0, %r1}, %r0;", "mov.b32 {%h0}, %r0;", "@%r0 bra X;\nX:", "bra NOWHERE;", "X:\nX:", "add.u32 %r0, %r1, %r2",
		"ld.global.v3.b32 {%r0, %r1, %r2}, [%d0];", "ld.shared.b32 %r0, [%d0];", "st.param.b32 [a], %r0;", "ld.global.b32 %r0, [%r1];",
		"ld.global.b32 %h0, [%d0];", "ld.global.b32 %r0, %d0;", ".reg .b32 %r1;", ".reg .b8 %x;", ".reg .b32 x;", "mov.u32 %r0, %laneid;",
		"// n × 4 threads", ".param .align 8 .b8 b[8]", "ld.param.u64 %d0, [a+16];", "ld.global.bf16 %h0, [%d0];", "selp.b32 %r0, %r1, %r2, %r3;",
	} {
		if _, err := Parse(program("\t" + body)); err == nil {
			t.Errorf("%q is not refused", body)
		}
	}
	for _, text := range []string{
		"", head + "garbage", ".version 7.0\n.address_size 32", strings.TrimSuffix(program(""), "}\n"), strings.Replace(program(""), "\tret;\n", "", 1),
		strings.Replace(program(""), "a[16]", "a[16],", 1), strings.Replace(program(""), "a[16]", "a[16],\n\t.param .u64 a", 1),
		strings.Replace(program(""), "a[16]", "a[16]\n\t.param .u64 b", 1), strings.Replace(program(""), ".align 8 .b8 a[16]", ".u8 a", 1),
		program("") + program(""), strings.Replace(program(""), head, "", 1),
	} {
		if _, err := Parse(text); err == nil {
			t.Errorf("%q is not refused", text)
		}
	}
}

// TestParameters: several parameters of different sizes are where a compiler would put them.
func TestParameters(t *testing.T) {
	module, err := Parse(strings.Replace(program(`
	ld.param.u64 %d0, [at];
	ld.param.f32 %r0, [a];
	mov.u64 %d1, c;
	ld.param.b64 %d2, [%d1+8];
	st.global.b32 [%d0], %r0;
	st.global.b64 [%d0+8], %d2;`), ".param .align 8 .b8 a[16]", ".param .f32 a,\n\t.param .u64 at,\n\t.param .s32 b,\n\t.param .align 8 .b8 c[16]", 1))
	if err != nil {
		t.Fatal(err)
	}
	k, m := module.Kernels["k"], &memory{0x1000, make([]byte, 16)}
	if !slices.Equal(k.Params, []int{4, 8, 4, 16}) || k.Param != 40 {
		t.Errorf("%v in %d bytes", k.Params, k.Param)
	}
	param := k.Pack([]byte{1, 2, 3, 4}, []byte{0, 0x10, 0, 0, 0, 0, 0, 0}, []byte{9, 9, 9, 9}, []byte("0123456789abcdef"))
	if err := k.Run(m, param, 1, 1); err != nil {
		t.Fatal(err)
	}
	if string(m.bytes) != "\x01\x02\x03\x04\x00\x00\x00\x0089abcdef" {
		t.Errorf("stored %q", m.bytes)
	}
}

// TestApproximations: the results are close to the exact ones, but not equal.
func TestApproximations(t *testing.T) {
	for _, c := range []struct {
		op   string
		x    float32
		want float64
	}{
		{"ex2", -20, 0x1p-20}, {"ex2", 0.5, math.Sqrt2}, {"lg2", 0.125, -3}, {"lg2", 3, math.Log2(3)},
	} {
		got := single(forms[c.op+".approx.f32"].eval([]uint64{uint64(math.Float32bits(c.x))}))
		if got == float64(float32(c.want)) || math.Abs(got-c.want) > 1e-6*math.Abs(c.want) {
			t.Errorf("%s of %v is %v, want nearly %v", c.op, c.x, got, c.want)
		}
	}
}

// TestHalves: the conversions of half-precision numbers, which this package implements itself,
// agree with those of internal/kernel.
func TestHalves(t *testing.T) {
	for h := range 1 << 16 {
		want, got := kernel.FromFloat16(uint16(h)), widenHalf(uint16(h))
		if want != got && (want == want || got == got) || want == 0 && math.Signbit(float64(want)) != math.Signbit(float64(got)) {
			t.Fatalf("%#x is %v, not %v", h, got, want)
		}
		for _, near := range []float32{want, math.Nextafter32(want, 1e9), math.Nextafter32(want, -1e9), want * 1.00048828125, want * 0.9997} {
			if near == near && roundHalf(float64(near)) != kernel.ToFloat16(near) {
				t.Fatalf("%v is rounded to %#x, not %#x", near, roundHalf(float64(near)), kernel.ToFloat16(near))
			}
		}
	}
}
