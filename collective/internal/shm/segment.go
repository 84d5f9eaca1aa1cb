package shm

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

const invitationVersion = 1

// invitation identifies a segment. It never leaves the host, and uses the host's byte order.
type invitation struct {
	pid, fd       uint64
	device, inode uint64
	size          uint64
	nonce         [16]byte
}

const invitationSize = 1 + 5*8 + 16

func (v *invitation) encode() []byte {
	b := make([]byte, 1, invitationSize)
	b[0] = invitationVersion
	for _, n := range [...]uint64{v.pid, v.fd, v.device, v.inode, v.size} {
		b = binary.LittleEndian.AppendUint64(b, n)
	}
	return append(b, v.nonce[:]...)
}

func (v *invitation) decode(b []byte) error {
	if len(b) != invitationSize || b[0] != invitationVersion {
		return errors.New("shm: the invitation cannot be read")
	}
	for i, p := range [...]*uint64{&v.pid, &v.fd, &v.device, &v.inode, &v.size} {
		*p = binary.LittleEndian.Uint64(b[1+8*i:])
	}
	copy(v.nonce[:], b[1+5*8:])
	if v.pid > 1<<31 || v.fd > 1<<31 {
		return errors.New("shm: the invitation cannot be read")
	}
	return nil
}

// mapping is a memfd and its memory in this process.
type mapping struct {
	file   int // −1 if only the memory is left
	memory []byte
	invitation
}

// newMapping makes a memfd of size bytes that keeps its size, so that no access to it can fault.
func newMapping(name string, size int) (*mapping, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("shm: memfd_create: %w", err)
	}
	m := &mapping{file: fd}
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		m.close()
		return nil, fmt.Errorf("shm: set the size of a memfd: %w", err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		m.close()
		return nil, fmt.Errorf("shm: seal a memfd: %w", err)
	}
	if err := m.mapIn(size); err != nil {
		m.close()
		return nil, err
	}
	rand.Read(m.nonce[:])
	m.pid, m.fd = uint64(os.Getpid()), uint64(fd)
	return m, nil
}

// openMapping maps the memfd of an invitation, of at most maxSize bytes, if it still exists. The
// caller compares the nonce.
func openMapping(v *invitation, maxSize uint64) (*mapping, error) {
	if v.size < page || v.size > maxSize {
		return nil, fmt.Errorf("shm: the segment has %d bytes, and %d to %d are allowed", v.size, page, maxSize)
	}
	path := "/proc/" + strconv.FormatUint(v.pid, 10) + "/fd/" + strconv.FormatUint(v.fd, 10)
	// The descriptor may refer to another file by now. Without O_NONBLOCK, opening a pipe would
	// block.
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("shm: open the segment: %w", &os.PathError{Op: "open", Path: path, Err: err})
	}
	m := &mapping{file: fd}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		m.close()
		return nil, fmt.Errorf("shm: fstat: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || uint64(st.Dev) != v.device || st.Ino != v.inode || uint64(st.Size) != v.size {
		m.close()
		return nil, errors.New("shm: the invitation's file has been replaced")
	}
	if seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0); err != nil || seals&unix.F_SEAL_SHRINK == 0 {
		m.close()
		return nil, errors.New("shm: the invitation's file is not a sealed memfd")
	}
	if err := m.mapIn(int(v.size)); err != nil {
		m.close()
		return nil, err
	}
	m.invitation = *v
	unix.Close(fd) // the mapping does not need it; only the process that made the memfd keeps it open for others
	m.file = -1
	return m, nil
}

func (m *mapping) mapIn(size int) error {
	var st unix.Stat_t
	if err := unix.Fstat(m.file, &st); err != nil {
		return fmt.Errorf("shm: fstat: %w", err)
	}
	memory, err := mapHuge(m.file, uintptr(size))
	if err != nil {
		return fmt.Errorf("shm: map %d bytes: %w", size, err)
	}
	m.memory = memory
	m.device, m.inode, m.size = uint64(st.Dev), st.Ino, uint64(size)
	return nil
}

// mapHuge maps a file at a multiple of hugePage, so that whole huge pages can be mapped.
func mapHuge(fd int, size uintptr) ([]byte, error) {
	size = (size + page - 1) &^ (page - 1)
	room := size + hugePage
	place, err := unix.MmapPtr(-1, 0, nil, room, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	before := -uintptr(place) % hugePage
	at, err := unix.MmapPtr(fd, 0, unsafe.Add(place, before), size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED)
	if err != nil {
		unix.MunmapPtr(place, room)
		return nil, err
	}
	if before > 0 {
		unix.MunmapPtr(place, before)
	}
	unix.MunmapPtr(unsafe.Add(at, size), hugePage-before)
	return unsafe.Slice((*byte)(at), size), nil
}

func (m *mapping) close() {
	if m.memory != nil {
		unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(m.memory)), uintptr(len(m.memory)))
		m.memory = nil
	}
	if m.file >= 0 {
		unix.Close(m.file)
	}
}

// Segment is memory shared by members on one host, before this process has joined it. The caller
// must call either Join or Close, once.
type Segment struct {
	*mapping
	*header
	layout layout

	mu   sync.Mutex
	used bool
}

// Create makes a segment for the given number of members, from 1 to 512. It fails if the system has
// no memfd.
func Create(members int) (*Segment, error) {
	return create(newLayout(members))
}

func create(l layout) (*Segment, error) {
	if err := l.check(); err != nil {
		return nil, err
	}
	m, err := newMapping("hvdrun", l.size())
	if err != nil {
		return nil, err
	}
	s := &Segment{mapping: m, layout: l, header: (*header)(unsafe.Pointer(unsafe.SliceData(m.memory)))}
	s.members = uint64(l.members)
	s.bank, s.in, s.out = uint64(l.bank), uint64(l.in), uint64(l.out)
	s.header.nonce = s.mapping.nonce
	s.magic = magic
	return s, nil
}

// Open maps the segment of an invitation. It fails if this process cannot access the process that
// made the segment, because it belongs to another user or another process namespace.
func Open(invite []byte, members int) (*Segment, error) {
	var v invitation
	if err := v.decode(invite); err != nil {
		return nil, err
	}
	most := uint64(page + maxMembers*(&layout{members: maxMembers, bank: maxBank, in: maxSlot, out: maxSlot}).area())
	m, err := openMapping(&v, most)
	if err != nil {
		return nil, err
	}
	s := &Segment{mapping: m, header: (*header)(unsafe.Pointer(unsafe.SliceData(m.memory)))}
	if err := s.verify(members); err != nil {
		m.close()
		return nil, err
	}
	return s, nil
}

// verify checks the header and takes the layout from it.
func (s *Segment) verify(members int) error {
	h := *s.header // a copy: others may write to it meanwhile
	if h.magic != magic || h.nonce != s.mapping.nonce {
		return errors.New("shm: the invitation's file holds another segment")
	}
	if h.members != uint64(members) {
		return fmt.Errorf("shm: the segment is for %d members, not %d", h.members, members)
	}
	if max(h.bank, h.in, h.out) > maxSlot {
		return errors.New("shm: the sizes in the segment's header are not valid")
	}
	s.layout = layout{members: members, bank: int(h.bank), in: int(h.in), out: int(h.out)}
	if err := s.layout.check(); err != nil {
		return err
	}
	if s.layout.size() != len(s.memory) {
		return errors.New("shm: the segment's size does not fit its header")
	}
	return nil
}

// Invitation returns at most 128 bytes by which other processes of this host find the segment. They
// are not secret. They are valid as long as the process that created the segment has it open, as a
// Segment or as a Member.
func (s *Segment) Invitation() []byte { return s.invitation.encode() }

// Close releases a segment that this process has not joined.
func (s *Segment) Close() error {
	if !s.take() {
		return errors.New("shm: the segment is closed or joined")
	}
	s.mapping.close()
	return nil
}

// take reports whether the caller is the first to take the segment.
func (s *Segment) take() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used {
		return false
	}
	s.used = true
	return true
}
