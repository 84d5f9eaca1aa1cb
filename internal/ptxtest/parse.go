// Package ptxtest runs kernels written in PTX on the processor, thread by thread. It supports the
// part of the language in which the kernels of package cuda are written, and nothing else. It
// checks what a compiler checks: operands have the width of the instruction, registers and labels
// exist, memory is aligned. Where devices may choose, for example the bits of a NaN, it chooses
// results that no kernel should rely on.
//
// It shows what kernels compute and which memory they access. It does not simulate warps, caches,
// shared memory or timing.
package ptxtest

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// Module is a parsed text of PTX.
type Module struct {
	Version, Target string
	Kernels         map[string]*Kernel
}

// Kernel is one entry of a module. Several goroutines may run it.
type Kernel struct {
	Name string
	// Param is the size of its parameters in bytes, as [Kernel.Pack] arranges them.
	Param int
	// Params are the sizes of the parameters in bytes.
	Params []int

	params map[string]param
	more   bool  // another parameter follows
	widths []int // of the registers, in bits; 1 for a predicate
	names  map[string]int
	code   []step
	labels map[string]int
}

// param is a parameter: its size, and its offset among all of them.
type param struct{ size, offset int }

// operand is a register or a constant.
type operand struct {
	reg      int // -1: none
	constant uint64
}

// step is one instruction.
type step struct {
	text    string
	guard   int // the predicate that must be true; -1: none
	dst     []int
	src     []operand
	address operand
	offset  uint64
	memory  memoryKind
	width   int // size of an element of memory, in bytes
	target  int
	eval    func(a []uint64) uint64
	kind    stepKind
	special string
}

type stepKind uint8

const (
	computes stepKind = iota
	splits            // splits one register into two halves
	joins
	loads
	stores
	branches
	reads // reads a special register
	returns
)

type memoryKind uint8

const (
	global memoryKind = iota
	parameter
)

// Parse parses a module.
func Parse(text string) (*Module, error) {
	m := &Module{Kernels: map[string]*Kernel{}}
	var k *Kernel
	var jumps map[int]string
	for n, line := range strings.Split(text, "\n") {
		if strings.ContainsFunc(line, func(r rune) bool { return r > unicode.MaxASCII }) { // including comments
			return nil, fmt.Errorf("ptxtest: line %d: %q: not ASCII", n+1, line)
		}
		if i := strings.Index(line, "//"); i >= 0 {
			line = line[:i]
		}
		line = strings.TrimSpace(line)
		var err error
		switch {
		case line == "" || line == "{" || line == ")":
		case k == nil:
			k, err = m.directive(line)
			jumps = map[int]string{}
		case line == "}":
			err = k.resolve(jumps)
			m.Kernels[k.Name], k = k, nil
		default:
			err = k.line(line, jumps)
		}
		if err != nil {
			return nil, fmt.Errorf("ptxtest: line %d: %q: %w", n+1, line, err)
		}
	}
	if k != nil || m.Version == "" || m.Target == "" {
		return nil, fmt.Errorf("ptxtest: the module is not whole")
	}
	return m, nil
}

func (m *Module) directive(line string) (*Kernel, error) {
	word, rest, _ := strings.Cut(line, " ")
	switch word {
	case ".version":
		m.Version = rest
	case ".target":
		m.Target = rest
	case ".address_size":
		if rest != "64" {
			return nil, fmt.Errorf("addresses of %s bits", rest)
		}
	case ".visible":
		name, entry := strings.CutPrefix(rest, ".entry ")
		name, open := strings.CutSuffix(name, "(")
		if !entry || !open || m.Kernels[name] != nil || m.Version == "" {
			return nil, fmt.Errorf("no entry")
		}
		return &Kernel{Name: name, params: map[string]param{}, names: map[string]int{}, labels: map[string]int{}}, nil
	default:
		return nil, fmt.Errorf("unknown directive")
	}
	return nil, nil
}

// line parses a parameter, a declaration, a label or an instruction.
func (k *Kernel) line(line string, jumps map[int]string) error {
	if rest, ok := strings.CutPrefix(line, ".param "); ok {
		return k.parameter(rest)
	}
	if k.more {
		return fmt.Errorf("no parameter after a comma")
	}
	if label, ok := strings.CutSuffix(line, ":"); ok {
		if _, there := k.labels[label]; there {
			return fmt.Errorf("a second label")
		}
		k.labels[label] = len(k.code)
		return nil
	}
	line, ok := strings.CutSuffix(line, ";")
	if !ok {
		return fmt.Errorf("no semicolon")
	}
	if rest, ok := strings.CutPrefix(line, ".reg ."); ok {
		return k.declare(rest)
	}
	s := step{text: line, guard: -1, address: operand{reg: -1}}
	if rest, ok := strings.CutPrefix(line, "@"); ok {
		guard, rest, _ := strings.Cut(rest, " ")
		var err error
		if s.guard, err = k.register(guard, 1); err != nil {
			return err
		}
		line = rest
	}
	op, rest, _ := strings.Cut(line, " ")
	if err := k.instruction(&s, op, operands(rest)); err != nil {
		return err
	}
	if s.kind == branches {
		jumps[len(k.code)] = rest
	}
	k.code = append(k.code, s)
	return nil
}

// parameter parses the declaration of a parameter: a number or a structure.
func (k *Kernel) parameter(text string) error {
	if len(k.Params) > 0 && !k.more || len(k.widths)+len(k.code) > 0 {
		return fmt.Errorf("no comma before a parameter")
	}
	text, k.more = strings.CutSuffix(text, ",")
	p, align := param{}, 8
	class, name, _ := strings.Cut(text, " ")
	if rest, ok := strings.CutPrefix(text, ".align 8 .b8 "); ok {
		base, size, _ := strings.Cut(rest, "[")
		n, err := strconv.Atoi(strings.TrimSuffix(size, "]"))
		if err != nil {
			return fmt.Errorf("no parameter that is understood")
		}
		name, p.size = base, n
	} else {
		bits, err := strconv.Atoi(strings.TrimLeft(class, ".busf"))
		if err != nil || bits != 32 && bits != 64 || !slices.Contains([]string{".b", ".u", ".s", ".f"}, class[:2]) {
			return fmt.Errorf("no parameter that is understood")
		}
		p.size, align = bits/8, bits/8
	}
	if _, there := k.params[name]; there || name == "" {
		return fmt.Errorf("a second parameter %s", name)
	}
	p.offset = (k.Param + align - 1) / align * align
	k.Param = p.offset + p.size
	k.params[name], k.Params = p, append(k.Params, p.size)
	return nil
}

// Pack arranges arguments as Run expects them. There must be as many as Params, each of its size.
func (k *Kernel) Pack(args ...[]byte) []byte {
	all := make([]byte, 0, k.Param)
	for _, a := range args {
		all = append(append(all, make([]byte, -len(all)&(min(len(a), 8)-1))...), a...)
	}
	return all
}

func (k *Kernel) resolve(jumps map[int]string) error {
	for at, label := range jumps {
		target, ok := k.labels[label]
		if !ok {
			return fmt.Errorf("no label %s", label)
		}
		k.code[at].target = target
	}
	if len(k.code) == 0 || k.code[len(k.code)-1].kind != returns {
		return fmt.Errorf("the kernel does not end")
	}
	return nil
}

var registerWidths = map[string]int{"pred": 1, "b16": 16, "b32": 32, "b64": 64}

// declare declares registers: single ones, or %r<n> for %r0 to %r(n-1).
func (k *Kernel) declare(text string) error {
	class, names, _ := strings.Cut(text, " ")
	width, ok := registerWidths[class]
	if !ok {
		return fmt.Errorf("registers of type %s", class)
	}
	for _, name := range strings.Split(names, ",") {
		name = strings.TrimSpace(name)
		all := []string{name}
		if base, count, several := strings.Cut(name, "<"); several {
			n, err := strconv.Atoi(strings.TrimSuffix(count, ">"))
			if err != nil {
				return err
			}
			all = all[:0]
			for i := range n {
				all = append(all, fmt.Sprint(base, i))
			}
		}
		for _, name := range all {
			if _, there := k.names[name]; there || !strings.HasPrefix(name, "%") {
				return fmt.Errorf("a second %s", name)
			}
			k.names[name] = len(k.widths)
			k.widths = append(k.widths, width)
		}
	}
	return nil
}

// operands splits a text at commas outside braces.
func operands(text string) []string {
	var all []string
	depth, from := 0, 0
	for i, c := range text {
		switch {
		case c == '{':
			depth++
		case c == '}':
			depth--
		case c == ',' && depth == 0:
			all = append(all, strings.TrimSpace(text[from:i]))
			from = i + 1
		}
	}
	if last := strings.TrimSpace(text[from:]); last != "" {
		all = append(all, last)
	}
	return all
}

// register returns the register with the name, which must have the width.
func (k *Kernel) register(name string, width int) (int, error) {
	i, ok := k.names[name]
	if !ok {
		return 0, fmt.Errorf("no register %s", name)
	}
	if k.widths[i] != width {
		return 0, fmt.Errorf("%s has %d bits, not %d", name, k.widths[i], width)
	}
	return i, nil
}

// value parses a register or a constant of a width.
func (k *Kernel) value(text string, width int) (operand, error) {
	if strings.HasPrefix(text, "%") {
		r, err := k.register(text, width)
		return operand{reg: r}, err
	}
	c, err := strconv.ParseUint(text, 0, max(width, 2))
	return operand{reg: -1, constant: c}, err
}

// group returns the registers of a braced list, or of a single name.
func (k *Kernel) group(text string, count, width int) ([]int, error) {
	names := []string{text}
	if inner, ok := strings.CutPrefix(text, "{"); ok {
		names = operands(strings.TrimSuffix(inner, "}"))
	}
	if len(names) != count {
		return nil, fmt.Errorf("%d registers, not %d", len(names), count)
	}
	all := make([]int, count)
	for i, name := range names {
		var err error
		if all[i], err = k.register(name, width); err != nil {
			return nil, err
		}
	}
	return all, nil
}
