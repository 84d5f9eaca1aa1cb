package ptxtest

import (
	"encoding/binary"
	"fmt"
)

// Memory is the device's memory. Span returns n bytes of it, which the kernel may read and write,
// or nil if they are not all allocated.
type Memory interface {
	Span(address uint64, n int) []byte
}

// fault says that a kernel has accessed memory that it must not access.
type fault struct {
	Kernel  string
	Text    string // of the instruction
	Address uint64
	Size    int
	Aligned bool // the address is aligned, but not allocated
}

// Error names the instruction and the address.
func (f *fault) Error() string {
	what := "is in no allocation"
	if !f.Aligned {
		what = "is not aligned"
	}
	return fmt.Sprintf("ptxtest: %s: %s: the address %#x %s", f.Kernel, f.Text, f.Address, what)
}

// maxSteps bounds the instructions that a thread may execute.
const maxSteps = 1 << 22

type thread struct {
	kernel  *Kernel
	memory  Memory
	param   []byte
	regs    []uint64
	special map[string]uint64
}

// Run runs the kernel with blocks blocks of threads threads each, one thread after the other. param
// holds its parameters.
func (k *Kernel) Run(memory Memory, param []byte, blocks, threads int) error {
	if len(param) != k.Param {
		return fmt.Errorf("ptxtest: %s takes %d bytes, not %d", k.Name, k.Param, len(param))
	}
	t := thread{kernel: k, memory: memory, param: param, regs: make([]uint64, len(k.widths)),
		special: map[string]uint64{"%ntid.x": uint64(threads), "%nctaid.x": uint64(blocks)}}
	for block := range blocks {
		for i := range threads {
			t.special["%ctaid.x"], t.special["%tid.x"] = uint64(block), uint64(i)
			for r := range t.regs {
				t.regs[r] = 0x5a5a5a5a5a5a5a5a & (^uint64(0) >> (64 - k.widths[r])) // registers are not initialized
			}
			if err := t.run(); err != nil {
				return err
			}
		}
	}
	return nil
}

func (t *thread) value(o operand) uint64 {
	if o.reg < 0 {
		return o.constant
	}
	return t.regs[o.reg]
}

func (t *thread) run() error {
	var buffer [3]uint64
	for pc, n := 0, 0; ; n++ {
		if n == maxSteps {
			return fmt.Errorf("ptxtest: %s does not end", t.kernel.Name)
		}
		s := &t.kernel.code[pc]
		pc++
		if s.guard >= 0 && t.regs[s.guard] == 0 {
			continue
		}
		switch s.kind {
		case computes:
			args := buffer[:len(s.src)]
			for i, o := range s.src {
				args[i] = t.value(o)
			}
			t.regs[s.dst[0]] = s.eval(args)
		case splits:
			whole := t.regs[s.dst[0]]
			t.regs[s.dst[1]], t.regs[s.dst[2]] = whole&0xffff, whole>>16
		case joins:
			t.regs[s.dst[0]] = t.regs[s.dst[1]] | t.regs[s.dst[2]]<<16
		case loads, stores:
			if err := t.access(s); err != nil {
				return err
			}
		case branches:
			pc = s.target
		case reads:
			t.regs[s.dst[0]] = t.special[s.special]
		case returns:
			return nil
		}
	}
}

// access executes a load or store.
func (t *thread) access(s *step) error {
	address, size := s.offset, s.width*len(s.dst)
	if s.address.reg >= 0 {
		address += t.regs[s.address.reg]
	}
	var b []byte
	if s.memory == parameter {
		if address <= uint64(len(t.param)) && uint64(size) <= uint64(len(t.param))-address {
			b = t.param[address:][:size]
		}
	} else {
		b = t.memory.Span(address, size)
	}
	if aligned := address%uint64(size) == 0; b == nil || !aligned {
		return &fault{Kernel: t.kernel.Name, Text: s.text, Address: address, Size: size, Aligned: aligned}
	}
	for i, r := range s.dst {
		at := b[i*s.width:][:s.width]
		switch {
		case s.kind == loads && s.width == 2:
			t.regs[r] = uint64(binary.LittleEndian.Uint16(at))
		case s.kind == loads && s.width == 4:
			t.regs[r] = uint64(binary.LittleEndian.Uint32(at))
		case s.kind == loads:
			t.regs[r] = binary.LittleEndian.Uint64(at)
		case s.width == 2:
			binary.LittleEndian.PutUint16(at, uint16(t.regs[r]))
		case s.width == 4:
			binary.LittleEndian.PutUint32(at, uint32(t.regs[r]))
		default:
			binary.LittleEndian.PutUint64(at, t.regs[r])
		}
	}
	return nil
}
