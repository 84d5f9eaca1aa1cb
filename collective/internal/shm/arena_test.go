package shm

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"unsafe"
)

// TestArena allocates and frees memory at random, and checks that what was written to an allocation
// stays there.
func TestArena(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	type block struct {
		b    []byte
		mark byte
	}
	var blocks []block
	check := func(i int) {
		k := blocks[i]
		for _, v := range k.b {
			if v != k.mark {
				t.Fatalf("memory of %d bytes was given out twice", len(k.b))
			}
		}
		Free(k.b)
		blocks = append(blocks[:i], blocks[i+1:]...)
	}
	for range 1000 {
		if len(blocks) > 20 || len(blocks) > 0 && random.IntN(2) == 0 {
			check(random.IntN(len(blocks)))
			continue
		}
		n := random.IntN(5 * page)
		if random.IntN(50) == 0 {
			n += hugePage
		}
		b, err := Alloc(n)
		if err != nil {
			t.Fatal(err)
		}
		if uintptr(unsafe.Pointer(unsafe.SliceData(b)))%64 != 0 {
			t.Fatal("not aligned")
		}
		if len(bytes.Trim(b, "\x00")) > 0 {
			t.Fatal("not zero")
		}
		k := block{b, byte(1 + random.IntN(255))}
		for i := range b {
			b[i] = k.mark
		}
		blocks = append(blocks, k)
	}
	for len(blocks) > 0 {
		check(0)
	}
	if len(arena.free) != 1 || len(arena.used) != 0 {
		t.Errorf("%d pieces are free when all is, %d in use", len(arena.free), len(arena.used))
	}
}

func TestArenaRefuses(t *testing.T) {
	for _, n := range []int{-1, 1<<63 - 1, 1 << 50} {
		if _, err := Alloc(n); err == nil {
			t.Errorf("Alloc(%d) succeeds", n)
		}
	}
	b, err := Alloc(2 * page)
	if err != nil {
		t.Fatal(err)
	}
	for name, wrong := range map[string][]byte{"heap": make([]byte, 10), "middle": b[page:], "none": nil} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("Free of %s does not panic", name)
				}
			}()
			Free(wrong)
		}()
	}
	Free(b)
}

// TestRefusedRegion: if the others cannot map a member's arena, all members use slots instead.
func TestRefusedRegion(t *testing.T) {
	members := gathering(t, 3, small(3))
	defer leave(t, members)
	members[1].regions.announced = true // although nothing was announced
	r := reductions(3)[0]
	inputs := [][]byte{random(rand.New(rand.NewPCG(1, 1)), r.t, 5000), random(rand.New(rand.NewPCG(1, 2)), r.t, 5000),
		random(rand.New(rand.NewPCG(1, 3)), r.t, 5000)}
	want := expected(inputs, &r.Reduction)
	for range 3 {
		eachMust(t, members, func(m *Member) error {
			b, err := Alloc(len(want))
			if err != nil {
				return err
			}
			defer Free(b)
			copy(b, inputs[m.index])
			if err := m.AllReduce(background, Desc{}, b, &r.Reduction); err != nil {
				return err
			}
			if !bytes.Equal(b, want) || !m.regions.met || m.regions.usable {
				t.Errorf("member %d: wrong result or path", m.index)
			}
			return nil
		})
	}
}

// TestTensorBeyondRegion: a member announces data outside of its region.
func TestTensorBeyondRegion(t *testing.T) {
	members := gathering(t, 2, small(2))
	defer leave(t, members)
	b, err := Alloc(8000)
	if err != nil {
		t.Fatal(err)
	}
	defer Free(b)
	eachMust(t, members, func(m *Member) error { // both use the same memory, which is only needed for the introduction
		return m.AllReduce(background, Desc{}, b[4000*m.index:][:4000], &sumOfFloats)
	})
	errs := each(members, func(m *Member) error {
		c, err := m.begin(background)
		if err != nil {
			return err
		}
		m.announceData(c, b)
		if m.index == 1 {
			for i := range 8 {
				c.data[i] = 0xff
			}
		}
		if err := m.arrive(background, c, Desc{}); err != nil {
			return err
		}
		_, err = m.direct(background, Desc{}, b)
		return err
	})
	if errs[0] == nil || errs[1] != nil {
		t.Error(errs)
	}
}

// TestDirectAfterAbort: an aborted member returns and its caller changes its data while another
// member still reads them. The other member does not return what it has read as a result.
func TestDirectAfterAbort(t *testing.T) {
	const n = 8 << 20
	for name, operate := range map[string]func(m *Member, data []byte, combine func(dst, a, b []byte)) error{
		"AllReduce": func(m *Member, data []byte, combine func(dst, a, b []byte)) error {
			return m.AllReduce(background, Desc{1}, data, &Reduction{Size: 1, Combine: combine})
		},
		"Reduce": func(m *Member, data []byte, combine func(dst, a, b []byte)) error {
			return m.Reduce(background, Desc{1}, data, 2, &Reduction{Size: 1, Combine: combine})
		},
		"Fold": func(m *Member, data []byte, combine func(dst, a, b []byte)) error {
			half := n / 2
			f := &Folding{Size: 1, Operands: []Operand{{0, 0}, {1, 0}}, Most: 1,
				Block: func(target []byte, operands [][]byte) { combine(target, operands[0], operands[1]) }}
			return m.Fold(background, Desc{1}, [][]byte{data[:half]}, data[half:], f)
		},
	} {
		t.Run(name, func(t *testing.T) {
			members := gathering(t, 2, nil)
			defer leave(t, members)
			data := [2][]byte{}
			for i := range data {
				var err error
				if data[i], err = Alloc(n); err != nil {
					t.Fatal(err)
				}
				defer Free(data[i])
				for j := range data[i] {
					data[i][j] = 1
				}
			}
			inLast, goOn := make(chan bool), make(chan bool)
			last := uintptr(unsafe.Pointer(&data[1][n-1]))
			combine := func(dst, a, b []byte) {
				if uintptr(unsafe.Pointer(&dst[len(dst)-1])) == last { // the last block of the last round
					close(inLast)
					<-goOn
				}
				for i := range dst {
					dst[i] = a[i] + b[i]
				}
			}
			ends := [2]chan error{make(chan error, 1), make(chan error, 1)}
			for i, m := range members {
				go func() { ends[i] <- operate(m, data[i], combine) }()
			}
			<-inLast
			members[0].Abort()
			<-ends[0]
			for j := range data[0] {
				data[0][j] = 77
			}
			close(goOn)
			wantErr(t, <-ends[1], ErrAborted)
			if data[1][n-1] != 78 {
				t.Errorf("the last byte is %d: what was changed has not been read", data[1][n-1])
			}
		})
	}
}
