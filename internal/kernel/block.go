package kernel

// atOnce is the maximum number of bytes of a result that one call of assembler code computes. The
// garbage collector cannot stop a goroutine inside such a call, and goroutines that it has already
// stopped must wait until it can.
const atOnce = 128 << 10

// inBlocks returns a table that calls all vector code of t for blocks.
func (t table) inBlocks() *table {
	for i := range t.combine {
		for j, f := range t.combine[i] {
			if f != nil {
				t.combine[i][j] = combineBlocks(f)
			}
		}
		if f := t.divide[i]; f != nil {
			t.divide[i] = func(b []byte, n int) { eachBlock(b, func(b []byte) { f(b, n) }) }
		}
		if f := t.scale[i]; f != nil {
			t.scale[i] = func(b []byte, factor float64) { eachBlock(b, func(b []byte) { f(b, factor) }) }
		}
		if f := t.narrow[i]; f != nil {
			t.narrow[i] = convertBlocks(f, Type(i).Size(), Float32.Size())
		}
		if f := t.widen[i]; f != nil {
			t.widen[i] = convertBlocks(f, Float32.Size(), Type(i).Size())
		}
	}
	return &t
}

func combineBlocks(f func(dst, a, b []byte)) func(dst, a, b []byte) {
	return func(dst, a, b []byte) {
		if len(a) != len(dst) || len(b) != len(dst) {
			unequal()
		}
		for len(dst) > atOnce {
			f(dst[:atOnce], a[:atOnce], b[:atOnce])
			dst, a, b = dst[atOnce:], a[atOnce:], b[atOnce:]
		}
		f(dst, a, b)
	}
}

func eachBlock(b []byte, f func([]byte)) {
	for len(b) > atOnce {
		f(b[:atOnce])
		b = b[atOnce:]
	}
	f(b)
}

// convertBlocks calls f for blocks of slices whose elements have these sizes in bytes.
func convertBlocks(f func(dst, src []byte), to, from int) func(dst, src []byte) {
	out, in := atOnce, atOnce/to*from
	return func(dst, src []byte) {
		if len(dst)/to != len(src)/from {
			unequal()
		}
		for len(dst) > out {
			f(dst[:out], src[:in])
			dst, src = dst[out:], src[in:]
		}
		f(dst, src)
	}
}

// Copy is the built-in copy, in blocks, for slices that may be large: the runtime also copies
// memory in assembler code. dst and src must not overlap.
func Copy(dst, src []byte) int {
	n := min(len(dst), len(src))
	for at := 0; at < n; {
		at += copy(dst[at:min(n, at+atOnce)], src[at:])
	}
	return n
}
