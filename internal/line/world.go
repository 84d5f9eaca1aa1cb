package line

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/plan"
)

const (
	// maxMembers and maxAddresses bound the memory that a worker allocates for a world, whose
	// encoding may be much smaller.
	maxMembers   = 1 << 20
	maxAddresses = 1 << 20
	maxText      = 16 << 20 // bytes of all addresses
	maxPort      = math.MaxUint16
	lenPort      = len(":65535")
)

// Members holds the members of a world in columns, in which each name occurs once: each of a
// thousand workers receives a thousand members.
type Members struct {
	// Hosts are in order of rank. Each has as many consecutive ranks as Counts says.
	Hosts  []string
	Counts []uint32
	// By rank: the index of its slot, and the number of addresses of its data listener. Its other
	// numbers follow from these.
	Indices, AddressCounts []uint32
	// By address, rank after rank, in order of preference: the index of its beginning in Starts,
	// and its port. The address is the beginning, a colon and the port, or only the beginning if
	// the port is 0.
	AddressStarts, AddressPorts []uint32
	Starts                      []string
	// By rank: the handles of their joins. Empty if no member has one.
	Handles [][]byte
}

// Append appends the encoded members to b. Equal members have equal encodings.
func (m *Members) Append(b []byte) []byte {
	b = appendTexts(b, m.Hosts)
	for _, column := range [][]uint32{m.Counts, m.Indices, m.AddressCounts, m.AddressStarts, m.AddressPorts} {
		b = appendNumbers(b, column)
	}
	return appendTexts(appendTexts(b, m.Starts), m.Handles)
}

func appendNumbers(b []byte, column []uint32) []byte {
	b = binary.AppendUvarint(b, uint64(len(column)))
	for _, n := range column {
		b = binary.AppendUvarint(b, uint64(n))
	}
	return b
}

func appendTexts[T string | []byte](b []byte, column []T) []byte {
	b = binary.AppendUvarint(b, uint64(len(column)))
	for _, text := range column {
		b = append(binary.AppendUvarint(b, uint64(len(text))), text...)
	}
	return b
}

// decoder reads columns. After the first error it reads nothing more.
type decoder struct {
	rest []byte
	err  error
}

func (d *decoder) number(most uint64) uint64 {
	n, size := binary.Uvarint(d.rest)
	if d.err != nil || size <= 0 || n > most {
		d.err = errors.New("the columns are cut off, or a number is too large")
		return 0
	}
	d.rest = d.rest[size:]
	return n
}

// length returns the length of a column. Each element takes at least one byte.
func (d *decoder) length() int { return int(d.number(uint64(len(d.rest)))) }

func (d *decoder) numbers() []uint32 {
	n := d.length()
	if n == 0 {
		return nil
	}
	column := make([]uint32, n)
	for i := range column {
		column[i] = uint32(d.number(math.MaxUint32))
	}
	return column
}

func texts[T string | []byte](d *decoder) []T {
	n := d.length()
	if n == 0 {
		return nil
	}
	column := make([]T, n)
	for i := range column {
		size := d.length()
		if size > len(d.rest) {
			d.err, size = errors.New("the columns are cut off"), 0
		}
		column[i], d.rest = T(d.rest[:size]), d.rest[size:]
	}
	return column
}

// members decodes what Members.Append has encoded.
func (d *decoder) members() *Members {
	m := &Members{Hosts: texts[string](d)}
	for _, column := range []*[]uint32{&m.Counts, &m.Indices, &m.AddressCounts, &m.AddressStarts, &m.AddressPorts} {
		*column = d.numbers()
	}
	m.Starts, m.Handles = texts[string](d), texts[[]byte](d)
	return m
}

// end returns an error unless everything has been read.
func (d *decoder) end() error {
	if d.err == nil && len(d.rest) > 0 {
		d.err = fmt.Errorf("%d bytes follow the columns", len(d.rest))
	}
	return d.err
}

// NewMembers returns the members of a world as columns. It omits local and cross ranks, which
// plan.Place computes from the slots.
func NewMembers(w plan.World, members []Member) *Members {
	b := newColumns(len(members))
	for r, member := range members {
		b.add(w.Slots[r].Host, uint32(w.Slots[r].Index), len(member.DataAddrs), member.Handle)
		for _, addr := range member.DataAddrs {
			b.address(splitPort(addr))
		}
	}
	return b.m
}

// columns builds Members, member by member.
type columns struct {
	m       *Members
	numbers map[string]uint32 // index in Starts by address without its port
}

func newColumns(members int) columns {
	m := &Members{Indices: make([]uint32, 0, members), AddressCounts: make([]uint32, 0, members)}
	return columns{m, make(map[string]uint32)}
}

// add adds a member without its addresses, which later calls of address add.
func (c columns) add(host string, index uint32, addresses int, handle []byte) {
	m := c.m
	if last := len(m.Hosts) - 1; last < 0 || m.Hosts[last] != host {
		m.Hosts, m.Counts = append(m.Hosts, host), append(m.Counts, 0)
	}
	m.Counts[len(m.Counts)-1]++
	if len(handle) > 0 && m.Handles == nil {
		m.Handles = make([][]byte, len(m.Indices), cap(m.Indices))
	}
	if m.Handles != nil {
		m.Handles = append(m.Handles, handle)
	}
	m.Indices, m.AddressCounts = append(m.Indices, index), append(m.AddressCounts, uint32(addresses))
}

func (c columns) address(start string, port uint32) {
	number, known := c.numbers[start]
	if !known {
		number = uint32(len(c.m.Starts))
		c.numbers[start] = number
		c.m.Starts = append(c.m.Starts, start)
	}
	c.m.AddressStarts, c.m.AddressPorts = append(c.m.AddressStarts, number), append(c.m.AddressPorts, port)
}

// splitPort splits an address into the part before its port, and the port. It returns an address
// without a canonical port number whole, with port 0.
func splitPort(addr string) (start string, port uint32) {
	at := strings.LastIndexByte(addr, ':')
	if at < 0 {
		return addr, 0
	}
	n, err := strconv.ParseUint(addr[at+1:], 10, 16)
	if err != nil || addr[at+1] == '0' {
		return addr, 0
	}
	return addr[:at], uint32(n)
}

// Number returns the number that identifies the members to the driver; 0: the place is in no world.
func (p *Place) Number() uint64 {
	if p.members == nil {
		return 0
	}
	return p.members.number
}

// ReadPlace reads a line with a world, which must be newer than the generation after, and the
// line's tail, which it keeps. before is the worker's place in the last world that it has: the tail
// may be a difference from the members of that world. nil: it has no world.
func ReadPlace(m *Message, tail []byte, after uint64, before *Place) (Place, error) {
	var had *members
	if before != nil {
		had = before.members
	}
	if m.Generation <= after || m.Rank < 0 || m.Rank >= m.Size || m.Root < 0 || m.Root >= m.Size || m.Size > maxMembers {
		return Place{}, invalidReply("generation %d, rank %d of %d, root %d", m.Generation, m.Rank, m.Size, m.Root)
	}
	secret, err := hex.DecodeString(m.DataKey)
	if err != nil {
		return Place{}, invalidReply("the data key: %w", err)
	}
	key, err := identity.ParseDataKey(secret)
	if err != nil {
		return Place{}, invalidReply("%w", err)
	}
	all := &members{number: m.Number, size: m.Size, whole: tail}
	if m.Base != 0 && (had == nil || had.number != m.Base) {
		return Place{}, invalidReply("a difference from members that this worker does not have")
	} else if m.Base != 0 {
		all.whole = nil
		all.differsFrom(had, tail)
	}
	return Place{
		Generation: m.Generation, Rank: m.Rank, Size: m.Size, SyncRoot: m.Root, Seq: m.Seq,
		Store: m.StoreNumber, key: key, members: all,
	}, nil
}

// World decodes the members. A thousand, with their addresses, take 0.2 ms. An error means that the
// driver's answer is not valid.
func (p Place) World() (World, error) {
	m, err := p.members.decode()
	if err != nil {
		return World{}, invalidReply("%w", err)
	}
	slots := make([]plan.Slot, len(m.Indices))
	for rank, r := range rows(m) {
		slots[rank].SlotID = r.slot()
	}
	if err := plan.Place(slots); err != nil {
		return World{}, invalidReply("%w", err)
	}
	return World{
		World: plan.World{Generation: p.Generation, Slots: slots},
		Rank:  p.Rank, SyncRoot: p.SyncRoot, Seq: p.Seq, Key: p.key, Store: p.Store, columns: m,
	}, nil
}

func invalidReply(format string, args ...any) error {
	return fmt.Errorf("line: the driver's answer is not valid: "+format, args...)
}

// checkHosts checks that each rank has a host and an index.
func checkHosts(m *Members) error {
	indices := m.Indices
	if len(indices) > maxMembers || len(m.Hosts) != len(m.Counts) {
		return fmt.Errorf("the world has %d ranks, and %d hosts with %d counts", len(indices), len(m.Hosts), len(m.Counts))
	}
	left := uint64(len(indices))
	for _, count := range m.Counts {
		if uint64(count) > left {
			return errors.New("the world has more slots than ranks")
		}
		left -= uint64(count)
	}
	if left > 0 {
		return errors.New("the world has more ranks than slots")
	}
	for rank, index := range indices {
		if index > math.MaxInt32 {
			return fmt.Errorf("the place of rank %d is out of range", rank)
		}
	}
	return nil
}

// checkAddrs checks what World.DataAddrs and World.Handles rely on.
func checkAddrs(m *Members) error {
	counts, starts, ports := m.AddressCounts, m.AddressStarts, m.AddressPorts
	if len(counts) != len(m.Indices) || len(starts) != len(ports) || len(starts) > maxAddresses {
		return fmt.Errorf("the world has %d ranks with addresses, and %d addresses with %d ports", len(counts), len(starts), len(ports))
	}
	if n := len(m.Handles); n != 0 && n != len(counts) {
		return fmt.Errorf("the world has %d handles for %d ranks", n, len(counts))
	}
	all := 0
	for r, n := range counts {
		if n > maxAddrs {
			return fmt.Errorf("the world has %d addresses for rank %d, more than allowed", n, r)
		}
		all += int(n)
	}
	if all != len(starts) {
		return fmt.Errorf("the world has %d addresses, but its ranks have %d", len(starts), all)
	}
	text := 0
	for i, s := range starts {
		if uint64(s) >= uint64(len(m.Starts)) || ports[i] > maxPort {
			return fmt.Errorf("the start %d or the port %d of an address is out of range", s, ports[i])
		}
		if text += len(m.Starts[s]) + lenPort; text > maxText {
			return fmt.Errorf("the addresses have more than %d bytes", maxText)
		}
	}
	return nil
}

// Handles returns the handles of the joins of all ranks, by rank; nil if none has one. The slices
// are read-only.
func (w World) Handles() [][]byte {
	if w.columns == nil {
		return nil
	}
	return w.columns.Handles
}

// DataAddrs returns the addresses of each rank's data listener, in order of preference. Each call
// allocates new slices.
func (w World) DataAddrs() [][]string {
	if w.columns == nil {
		return nil
	}
	addrs := make([][]string, len(w.columns.AddressCounts))
	for rank, r := range rows(w.columns) {
		for i, port := range r.ports {
			addr := r.of.Starts[r.starts[i]]
			if port != 0 {
				addr += ":" + strconv.FormatUint(uint64(port), 10)
			}
			addrs[rank] = append(addrs[rank], addr)
		}
	}
	return addrs
}
