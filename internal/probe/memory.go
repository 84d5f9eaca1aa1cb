package probe

import (
	"debug/buildinfo"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"github.com/hvdrun/hvdrun/stacks"
)

// FromMemory reads the goroutines of another Go process from its memory. The process does not take
// part and is not stopped, so this works even if it cannot answer: a signal may have stopped it, or
// a thread that waits in the kernel for a page of a file may block everything that stops the world.
// The stack of a running goroutine is derived from its thread, and left out if that is
// inconclusive.
//
// It relies on the layout of the runtime of Go 1.26. The program needs its symbol table, which go
// build writes by default and go run does not. The reader needs the right to trace the process,
// which its parent and root have.
func FromMemory(pid int) ([]stacks.Goroutines, error) {
	m, err := openMemory(pid)
	if err != nil {
		return nil, fmt.Errorf("stacks: the memory of process %d: %w", pid, err)
	}
	defer m.file.Close()
	all, err := m.goroutines()
	if err != nil {
		return nil, fmt.Errorf("stacks: the memory of process %d: %w", pid, err)
	}
	return all, nil
}

// The offsets of fields in the runtime's structs, in Go 1.26 on 64-bit machines.
const (
	gStackLow, gStackHigh   = 0, 8
	gSchedSP, gSchedPC      = 56, 64
	gSyscallSP, gSyscallPC  = 104, 112
	gStatus                 = 144
	gSize                   = 160
	statusMask              = 0xfff // without the bit that marks a scan
	statusIdle, statusDead  = 0, 6
	statusRunning           = 2
	statusSyscall           = 3
	modNames, modCU         = 8, 32
	modFiles, modPC         = 56, 80
	modFuncs, modTable      = 104, 128
	modText, modGofunc      = 176, 320
	modSize                 = 328
	funcSize                = 44
	flagTop, flagWritesSP   = 1, 2
	inlineIndex, inlineTree = 2, 3
)

// Bounds of what is read from a process, whatever its memory contains.
const (
	mostGoroutines  = 20_000
	mostStack       = 256 << 10 // bytes of one stack, innermost first
	mostSignalStack = 64 << 10  // bytes of a thread's stack that are searched for the frame of a signal
	mostSteps       = 1 << 16   // of a table of program counters
	mostInlined     = 64
	mostSymbols     = 64 << 20 // bytes of the symbol table
	pageSize        = 4096
	mostPages       = 16 << 10
)

var errDamaged = errors.New("its runtime is not laid out as expected")

// memory gives access to the memory of a Go process.
type memory struct {
	pid     int
	file    *os.File
	pages   map[uint64][]byte // of the program's tables, which do not change
	arm     bool              // arm64; otherwise amd64
	allgs   uint64            // address of runtime.allgs
	names   uint64
	cu      uint64
	files   uint64
	pcs     uint64
	funcs   uint64
	table   uint64
	count   uint64 // number of functions
	text    uint64
	gofunc  uint64
	known   map[uint64]*place // by program counter
	threads [][2]uint64       // stack pointer and program counter of each
}

// place describes a program counter.
type place struct {
	frames []stacks.Frame // with inlined ones, innermost first
	depth  uint64         // size of the frame at that point
	flag   byte
}

func openMemory(pid int) (*memory, error) {
	dir := fmt.Sprintf("/proc/%d", pid)
	exe, err := os.Open(dir + "/exe")
	if err != nil {
		return nil, err
	}
	defer exe.Close()
	info, err := buildinfo.Read(exe)
	if err != nil {
		return nil, errors.New("it is not a Go program")
	}
	if info.GoVersion != "go1.26" && !strings.HasPrefix(info.GoVersion, "go1.26.") && !strings.HasPrefix(info.GoVersion, "go1.26-") {
		return nil, fmt.Errorf("it was built by %s; only the layout of Go 1.26 is known", stacks.Clean(info.GoVersion))
	}
	program, err := elf.NewFile(exe)
	if err != nil {
		return nil, err
	}
	m := &memory{pid: pid, pages: map[uint64][]byte{}, known: map[uint64]*place{}}
	switch program.Machine {
	case elf.EM_X86_64:
	case elf.EM_AARCH64:
		m.arm = true
	default:
		return nil, fmt.Errorf("it is for %v", program.Machine)
	}
	module, err := m.find(program, dir)
	if err != nil {
		return nil, err
	}
	if m.file, err = os.Open(dir + "/mem"); err != nil {
		return nil, err
	}
	if err := m.readModule(module); err != nil {
		m.file.Close()
		return nil, err
	}
	m.readThreads(dir)
	return m, nil
}

// find finds the addresses of the runtime's variables.
func (m *memory) find(program *elf.File, dir string) (module uint64, err error) {
	table := program.SectionByType(elf.SHT_SYMTAB)
	if table == nil {
		return 0, errors.New("its program has no symbol table")
	}
	if table.Size > mostSymbols {
		return 0, errors.New("its symbol table is too large")
	}
	symbols, err := program.Symbols()
	if err != nil {
		return 0, err
	}
	for _, s := range symbols {
		switch s.Name {
		case "runtime.firstmoduledata":
			module = s.Value
		case "runtime.allgs":
			m.allgs = s.Value
		}
	}
	if module == 0 || m.allgs == 0 {
		return 0, errors.New("its symbol table lacks the runtime")
	}
	if program.Type != elf.ET_DYN {
		return module, nil
	}
	bias, err := loadBias(program, dir)
	m.allgs += bias
	return module + bias, err
}

// loadBias returns the offset at which a position-independent program is loaded.
func loadBias(program *elf.File, dir string) (uint64, error) {
	path, err := os.Readlink(dir + "/exe")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(read(dir+"/maps", 1<<20)) {
		fields := strings.SplitN(strings.TrimSpace(line), " ", 6)
		if len(fields) < 6 || strings.TrimSpace(fields[5]) != path {
			continue
		}
		low, _, _ := strings.Cut(fields[0], "-")
		start, err := strconv.ParseUint(low, 16, 64)
		if err != nil {
			return 0, err
		}
		for _, p := range program.Progs {
			if p.Type == elf.PT_LOAD {
				return start - p.Vaddr&^(pageSize-1), nil
			}
		}
	}
	return 0, errors.New("its program is not mapped")
}

// readModule reads the addresses of the tables of functions.
func (m *memory) readModule(at uint64) error {
	b := make([]byte, modSize)
	if err := m.read(at, b); err != nil {
		return err
	}
	word := func(offset int) uint64 { return binary.LittleEndian.Uint64(b[offset:]) }
	m.names, m.cu, m.files, m.pcs = word(modNames), word(modCU), word(modFiles), word(modPC)
	m.funcs, m.table, m.count = word(modFuncs), word(modTable), word(modTable+8)
	m.text, m.gofunc = word(modText), word(modGofunc)
	if m.count < 2 || m.count > 1<<24 || m.text == 0 {
		return errDamaged
	}
	m.count-- // the last entry marks the end
	return nil
}

// readThreads reads the threads' positions in user space.
func (m *memory) readThreads(dir string) {
	tasks, err := filepath.Glob(dir + "/task/*/syscall")
	if err != nil {
		return
	}
	for _, path := range tasks {
		fields := strings.Fields(read(path, 256))
		if len(fields) < 3 {
			continue // the thread is running
		}
		sp, err1 := strconv.ParseUint(fields[len(fields)-2], 0, 64)
		pc, err2 := strconv.ParseUint(fields[len(fields)-1], 0, 64)
		if err1 == nil && err2 == nil {
			m.threads = append(m.threads, m.interrupted(sp, pc))
		}
	}
}

// interrupted returns the position of a thread before the signal that it is handling, such as one
// for a preemption, or its current position if it handles none. The runtime handles signals on a
// separate stack, where the kernel saves the registers.
func (m *memory) interrupted(sp, pc uint64) [2]uint64 {
	context, registerSP, registerPC := 8, 40+15*8, 40+16*8 // struct rt_sigframe, ucontext and sigcontext of amd64
	if m.arm {
		context, registerSP, registerPC = 128, 176+8+31*8, 176+8+32*8
	}
	b := make([]byte, mostSignalStack)
	n, _ := m.file.ReadAt(b, int64(sp&(1<<62-1)))
	word := func(at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }
	for at := 0; at+context+registerPC+8 <= n; at += 8 {
		uc := at + context // uc_flags, uc_link, uc_stack{ss_sp, ss_flags, ss_size}
		low, size := word(uc+16), word(uc+32)
		if word(uc) < 8 && word(uc+8) == 0 && low != 0 && size <= 1<<20 && sp >= low && sp+uint64(uc) < low+size {
			return [2]uint64{word(uc + registerSP), word(uc + registerPC)}
		}
	}
	return [2]uint64{sp, pc}
}

func (m *memory) read(at uint64, b []byte) error {
	if at > 1<<62 {
		return errDamaged
	}
	n, err := m.file.ReadAt(b, int64(at))
	if n == len(b) {
		return nil
	}
	return err
}

// bytes returns up to n bytes of the program's tables. It caches their pages.
func (m *memory) bytes(at, n uint64) ([]byte, error) {
	page := at &^ (pageSize - 1)
	p := m.pages[page]
	if p == nil {
		if len(m.pages) >= mostPages {
			return nil, errDamaged
		}
		p = make([]byte, pageSize)
		if err := m.read(page, p); err != nil {
			return nil, err
		}
		m.pages[page] = p
	}
	p = p[at-page:]
	if uint64(len(p)) >= n {
		return p[:n], nil
	}
	rest, err := m.bytes(page+pageSize, n-uint64(len(p)))
	if err != nil {
		return nil, err
	}
	return append(append(make([]byte, 0, n), p...), rest...), nil
}

func (m *memory) uint32(at uint64) (uint32, error) {
	b, err := m.bytes(at, 4)
	if err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint32(b), nil
}

// text returns a string that ends with a zero byte.
func (m *memory) string(at uint64) string {
	var s []byte
	for len(s) < stacks.MaxText {
		b, err := m.bytes(at+uint64(len(s)), 1)
		if err != nil || b[0] == 0 {
			break
		}
		s = append(s, b[0])
	}
	return stacks.Clean(string(s))
}

// goroutines walks the stacks of all goroutines.
func (m *memory) goroutines() ([]stacks.Goroutines, error) {
	slice := make([]byte, 16)
	if err := m.read(m.allgs, slice); err != nil {
		return nil, err
	}
	at, n := binary.LittleEndian.Uint64(slice), binary.LittleEndian.Uint64(slice[8:])
	if n > 1<<24 {
		return nil, errDamaged
	}
	pointers := make([]byte, 8*min(n, mostGoroutines))
	if err := m.read(at, pointers); err != nil {
		return nil, err
	}
	var all []stacks.Goroutines
	seen := map[string]int{}
	g := make([]byte, gSize)
	for len(pointers) > 0 {
		address := binary.LittleEndian.Uint64(pointers)
		pointers = pointers[8:]
		if m.read(address, g) != nil {
			continue
		}
		frames, key := m.walk(g)
		if len(frames) == 0 {
			continue
		}
		if i, known := seen[key]; known {
			all[i].Count++
			continue
		}
		seen[key] = len(all)
		all = append(all, stacks.Goroutines{Count: 1, Training: stacks.Trains(frames), Frames: frames})
	}
	stacks.Sort(all)
	return all[:min(len(all), stacks.MaxGroups)], nil
}

// walk returns the stack of a goroutine, and a key that equal stacks share. It returns none if the
// goroutine has no stack, or the stack cannot be followed to its end.
func (m *memory) walk(g []byte) (frames []stacks.Frame, key string) {
	word := func(offset int) uint64 { return binary.LittleEndian.Uint64(g[offset:]) }
	low, high := word(gStackLow), word(gStackHigh)
	sp, pc, exact := word(gSchedSP), word(gSchedPC), false
	switch binary.LittleEndian.Uint32(g[gStatus:]) & statusMask {
	case statusIdle, statusDead:
		return nil, ""
	case statusRunning:
		for _, t := range m.threads {
			if t[0] >= low && t[0] < high {
				sp, pc, exact = t[0], t[1], true
			}
		}
	case statusSyscall:
		sp, pc = word(gSyscallSP), word(gSyscallPC)
	}
	if low >= high || sp < low || sp >= high {
		return nil, ""
	}
	stack := make([]byte, min(high-sp, mostStack))
	if m.read(sp, stack) != nil {
		return nil, ""
	}
	base := sp
	var pcs []byte
	for len(frames) < stacks.MaxFrames {
		p := m.place(pc, exact)
		if p == nil {
			return nil, ""
		}
		frames = append(frames, p.frames...)
		pcs = binary.LittleEndian.AppendUint64(pcs, pc)
		if p.flag&flagTop != 0 {
			return frames, string(pcs)
		}
		if p.flag&flagWritesSP != 0 && len(pcs) > 8 {
			return nil, ""
		}
		at := sp + p.depth
		sp = at + 8
		if m.arm {
			if p.depth == 0 {
				return nil, "" // the return address is in a register
			}
			at, sp = sp-8-p.depth, at
		}
		if at < base || at-base > uint64(len(stack))-8 {
			return frames, string(pcs) // the rest was not read
		}
		pc, exact = binary.LittleEndian.Uint64(stack[at-base:]), false
	}
	return frames[:stacks.MaxFrames], string(pcs)
}

// place describes a program counter; nil: it is in no function. If exact is set, pc is the address
// of the current instruction, otherwise that of the instruction after a call.
func (m *memory) place(pc uint64, exact bool) *place {
	key := pc << 1
	if exact {
		key |= 1
	}
	p, known := m.known[key]
	if !known {
		p = m.locate(pc, exact)
		m.known[key] = p
	}
	return p
}

// function is an entry of the program's table of functions.
type function struct {
	entry      uint64
	name       uint32
	pcsp       uint32
	pcfile     uint32
	pcline     uint32
	cu         uint32
	flag       byte
	inlineAt   uint32 // table of the index of inlined calls; 0: none
	inlineTree uint64 // address of the tree; 0: none
}

// lookUp finds the function of a program counter by binary search.
func (m *memory) lookUp(pc uint64) (f function, ok bool) {
	if pc < m.text {
		return f, false
	}
	offset := pc - m.text
	low, high := uint64(0), m.count
	for low < high {
		middle := (low + high) / 2
		entry, err := m.uint32(m.table + 8*middle)
		if err != nil {
			return f, false
		}
		if uint64(entry) <= offset {
			low = middle + 1
		} else {
			high = middle
		}
	}
	if low == 0 || low == m.count && !m.before(offset) {
		return f, false
	}
	at, err := m.uint32(m.table + 8*(low-1) + 4)
	if err != nil {
		return f, false
	}
	address := m.funcs + uint64(at)
	b, err := m.bytes(address, funcSize)
	if err != nil {
		return f, false
	}
	word := func(i int) uint32 { return binary.LittleEndian.Uint32(b[4*i:]) }
	f = function{
		entry: m.text + uint64(word(0)), name: word(1), pcsp: word(4), pcfile: word(5), pcline: word(6), cu: word(8), flag: b[41],
	}
	pcdata, funcdata := word(7), b[43]
	if pcdata > inlineIndex && pcdata < 64 && funcdata > inlineTree {
		index, err1 := m.uint32(address + funcSize + 4*inlineIndex)
		tree, err2 := m.uint32(address + funcSize + 4*uint64(pcdata) + 4*inlineTree)
		if err1 == nil && err2 == nil && tree != ^uint32(0) {
			f.inlineAt, f.inlineTree = index, m.gofunc+uint64(tree)
		}
	}
	return f, true
}

// before reports whether an offset lies before the end of the program's text.
func (m *memory) before(offset uint64) bool {
	end, err := m.uint32(m.table + 8*m.count)
	return err == nil && offset < uint64(end)
}

func (m *memory) locate(pc uint64, exact bool) *place {
	f, ok := m.lookUp(pc)
	if !ok {
		return nil
	}
	depth, ok := m.value(&f, f.pcsp, pc)
	if !ok || depth < 0 {
		return nil
	}
	p := &place{depth: uint64(depth), flag: f.flag}
	if !exact && pc > f.entry {
		pc--
	}
	for range mostInlined {
		index, ok := m.value(&f, f.inlineAt, pc)
		if f.inlineTree == 0 || !ok || index < 0 {
			break
		}
		b, err := m.bytes(f.inlineTree+16*uint64(index), 16)
		if err != nil {
			break
		}
		p.frames = append(p.frames, m.frame(&f, binary.LittleEndian.Uint32(b[4:]), pc))
		pc = f.entry + uint64(binary.LittleEndian.Uint32(b[8:]))
	}
	p.frames = append(p.frames, m.frame(&f, f.name, pc))
	return p
}

func (m *memory) frame(f *function, name uint32, pc uint64) stacks.Frame {
	frame := stacks.Frame{Func: m.string(m.names + uint64(name))}
	file, ok := m.value(f, f.pcfile, pc)
	if ok && file >= 0 {
		if offset, err := m.uint32(m.cu + 4*(uint64(f.cu)+uint64(file))); err == nil && offset != ^uint32(0) {
			frame.File = m.string(m.files + uint64(offset))
		}
	}
	if line, ok := m.value(f, f.pcline, pc); ok {
		frame.Line = int(max(0, line))
	}
	return frame
}

// value looks up a program counter in a table of values, which has pairs of differences as varints.
func (m *memory) value(f *function, table uint32, target uint64) (value int32, ok bool) {
	if table == 0 {
		return -1, false
	}
	at, pc, value := m.pcs+uint64(table), f.entry, int32(-1)
	quantum := uint64(1)
	if m.arm {
		quantum = 4
	}
	for i := range mostSteps {
		change, err := m.varint(&at)
		if err != nil || change == 0 && i > 0 {
			return 0, false
		}
		if change&1 != 0 {
			value += int32(^(change >> 1))
		} else {
			value += int32(change >> 1)
		}
		step, err := m.varint(&at)
		if err != nil {
			return 0, false
		}
		if pc += uint64(step) * quantum; target < pc {
			return value, true
		}
	}
	return 0, false
}

func (m *memory) varint(at *uint64) (v uint32, err error) {
	for shift := 0; shift < 35; shift += 7 {
		b, err := m.bytes(*at, 1)
		if err != nil {
			return 0, err
		}
		*at++
		if v |= uint32(b[0]&0x7f) << shift; b[0] < 0x80 {
			return v, nil
		}
	}
	return 0, errDamaged
}

// readable is whether Go programs for this machine can be read.
const readable = runtime.GOARCH == "amd64" || runtime.GOARCH == "arm64"
