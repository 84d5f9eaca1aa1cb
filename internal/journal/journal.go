// Package journal is a file of records that one process appends and another reads after its death.
//
// A record accepted by Append survives the death of the process; one followed by Sync survives the
// death of the machine. Replace atomically replaces all records, and Reserve reserves disk space
// for that and for further records. The format is:
//
//	"hvdrunJ" version      8 bytes; the version is 4
//	salt   uint32          differs in each file, and after each Replace
//	record                 the run id
//	record                 the mark: where the records end
//	record …               the payloads of Append
//
// where a record is
//
//	length uint32          little endian, of the payload, not 0
//	sum    uint32          CRC-32C of salt, length and payload
//	payload
//
// and the mark, which is overwritten after each record, is
//
//	end    uint64          end of the last record
//	synced uint64          end of the last record that a Sync has put on disk
//	boot   16 bytes        the boot id of the writer's machine
//
// A reader on the same machine since the same boot requires all records before end. A reader after
// a crash of the machine requires those before synced, since the kernel may have written any part
// of the rest. A file that lacks a required record is damaged. A later record is read if it is
// complete. What follows, zeros or remains of records from before a Replace, has another salt and
// is not a record.
package journal

import (
	"bufio"
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

const (
	magic = "hvdrunJ\x04"
	// firstAt is where the first record begins.
	firstAt = int64(len(magic) + 4)
	// markLen is the size of the mark, without its frame.
	markLen = 8 + 8 + 16
	// isBehind is a bit of the version: the journal lacks records.
	isBehind = 0x80
	// frame is the number of bytes before a payload.
	frame = 8
	// MaxRecord is the largest size of a payload in bytes. The snapshot of the largest job fits.
	MaxRecord = 64 << 20
	// maxRun is the largest size of a run id in bytes.
	maxRun = 255
	// spare is the suffix of the file that the next Replace writes.
	spare = ".spare"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

var (
	// ErrLocked: another process has the journal open for writing.
	ErrLocked = errors.New("journal: another process has it open")
	// errFormat: the file is not a journal, or is one of another version.
	errFormat = errors.New("journal: the file is not a journal of a version that this program can read")
	// ErrBehind: the writer of the journal could not write its last records.
	ErrBehind = errors.New("journal: the last records could not be written")
)

// CorruptError says that a written record is damaged or missing: nothing in the file should be
// trusted.
type CorruptError struct {
	// Offset is the start of the record, or of the mark.
	Offset int64
}

// Error includes the offset.
func (e *CorruptError) Error() string {
	return fmt.Sprintf("journal: the record at byte %d is damaged or missing", e.Offset)
}

// Journal is a journal open for appending. It is not safe for concurrent use.
type Journal struct {
	path, run string
	file      *os.File
	seed      uint32 // of the checksums
	mark      mark
	lost      int64 // bytes of records lost by a crash of the machine before Open
	room      int64 // reserved size of the file
	buf       []byte
	broken    error

	next     *os.File // file that the next Replace writes; nil: not created yet
	nextRoom int64
}

// Create creates a journal at a path that does not exist, with mode 0600, locks it, and syncs it to
// disk. The run id must have 1 to 255 bytes.
func Create(path, run string) (*Journal, error) {
	if run == "" || len(run) > maxRun {
		return nil, fmt.Errorf("journal: a run id of %d bytes", len(run))
	}
	f, err := safefile.Create(path, safefile.Private)
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	j := &Journal{path: path, run: run, file: f}
	err = lock(f)
	if err == nil {
		head, seed := newHead(run)
		_, err = f.Write(head)
		j.seed, j.mark = seed, mark{end: int64(len(head))}
	}
	if err == nil {
		err = errors.Join(j.Sync(), safefile.SyncDir(filepath.Dir(path)))
	}
	if err != nil {
		return nil, fmt.Errorf("journal: %w", errors.Join(err, f.Close(), os.Remove(path)))
	}
	return j, nil
}

// newHead returns the first bytes of a file without further records, and the seed of its checksums.
func newHead(run string) (head []byte, seed uint32) {
	salt := make([]byte, 4)
	rand.Read(salt) // never fails: crypto/rand ends the program if there is no randomness
	seed = seedOf(salt)
	head = appendRecord(append([]byte(magic), salt...), []byte(run), seed)
	return mark{end: int64(len(head)) + frame + markLen}.appendTo(head, seed), seed
}

func seedOf(salt []byte) uint32 { return crc32.Checksum(salt, castagnoli) }

// mark says where the records of a file end.
type mark struct {
	end    int64 // of the last record
	synced int64 // end of the last record that is on disk
}

// appendTo appends the record of the mark to b, with the boot id of this machine.
func (m mark) appendTo(b []byte, seed uint32) []byte {
	var p [markLen]byte
	boot := machine()
	binary.LittleEndian.PutUint64(p[:], uint64(m.end))
	binary.LittleEndian.PutUint64(p[8:], uint64(m.synced))
	copy(p[16:], boot[:])
	return appendRecord(b, p[:], seed)
}

// decode decodes a mark, and returns the end of the records that a reader on this machine requires.
func (m *mark) decode(p []byte) (proven int64) {
	m.end, m.synced = int64(binary.LittleEndian.Uint64(p)), int64(binary.LittleEndian.Uint64(p[8:]))
	if boot := machine(); boot != [16]byte{} && boot == [16]byte(p[16:]) {
		return m.end
	}
	return m.synced
}

// BootID returns an id that differs from one boot of the machine to the next, or "" if it cannot be
// read.
func BootID() string {
	text, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(text))
}

// machine returns the boot id in the form of the mark, or zeros if it cannot be read. Tests replace
// it.
var machine = sync.OnceValue(func() (id [16]byte) {
	if b, err := hex.DecodeString(strings.ReplaceAll(BootID(), "-", "")); err == nil {
		copy(id[:], b)
	}
	return id
})

// Open locks a journal, passes its records to visit as Read does, and returns it ready for
// appending, with its run id. Its errors are those of Read, and ErrLocked.
func Open(path string, visit func(payload []byte) error) (*Journal, string, error) {
	f, err := safefile.Update(path, safefile.Private, false)
	if err != nil {
		return nil, "", fmt.Errorf("journal: %w", err)
	}
	j := &Journal{path: path, file: f}
	if err := j.begin(visit); err != nil {
		return nil, "", errors.Join(err, j.Close())
	}
	return j, j.run, nil
}

func (j *Journal) begin(visit func([]byte) error) error {
	if err := lock(j.file); err != nil {
		return err
	}
	s, err := read(j.file, visit)
	if err != nil {
		return err
	}
	if is, err := sameFile(j.file, j.path); err != nil || !is {
		return errors.Join(err, ErrLocked) // its writer has replaced the file
	}
	j.run, j.seed, j.mark, j.lost = s.run, s.seed, mark{s.end, s.mark.synced}, max(0, s.mark.end-s.end)
	j.next, err = safefile.Update(j.path+spare, safefile.Private, false)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		j.next = nil
	case err == nil:
		err = lock(j.next)
	}
	if err != nil && j.next != nil {
		return fmt.Errorf("journal: %s: %w", j.path+spare, err)
	}
	return errors.Join(j.Mend(), j.setMark(j.mark))
}

// markAt returns the offset of the mark.
func (j *Journal) markAt() int64 { return firstAt + frame + int64(len(j.run)) }

// setMark writes the mark.
func (j *Journal) setMark(m mark) error {
	if _, err := j.file.WriteAt(m.appendTo(nil, j.seed), j.markAt()); err != nil {
		j.broken = fmt.Errorf("journal: %w", err)
		return j.broken
	}
	j.mark = m
	return nil
}

// Lost returns the number of bytes of records that Open did not find because the machine crashed
// before a Sync.
func (j *Journal) Lost() int64 { return j.lost }

// lock locks the file until the process ends.
func lock(f *os.File) error {
	err := safefile.LockRange(f, false)
	if errors.Is(err, safefile.ErrLocked) {
		return ErrLocked
	}
	return err
}

// Locked reports whether a process has the journal open for writing. It takes no lock itself.
func Locked(path string) (bool, error) {
	f, err := safefile.Read(path)
	if err != nil {
		return false, fmt.Errorf("journal: %w", err)
	}
	defer f.Close()
	locked, err := safefile.RangeLocked(f)
	if err != nil {
		return false, fmt.Errorf("journal: %w", err)
	}
	return locked, nil
}

// Append appends a record of 1 to MaxRecord bytes, and moves the mark. It does not keep payload.
// After a failure all further calls fail, so that no record in the middle is missing.
func (j *Journal) Append(payload []byte) error {
	if j.broken != nil {
		return j.broken
	}
	if len(payload) == 0 || len(payload) > MaxRecord {
		return fmt.Errorf("journal: a record cannot have %d bytes", len(payload))
	}
	b := appendRecord(j.buf[:0], payload, j.seed)
	j.buf = b[:0]
	if _, err := j.file.Write(b); err != nil {
		j.broken = fmt.Errorf("journal: %w", err)
		return j.broken
	}
	return j.setMark(mark{j.mark.end + int64(len(b)), j.mark.synced})
}

// appendRecord appends the encoded record to b.
func appendRecord(b, payload []byte, seed uint32) []byte {
	return append(appendFrame(b, payload, seed), payload...)
}

// appendFrame appends the length and checksum that precede a payload.
func appendFrame(b, payload []byte, seed uint32) []byte {
	at := len(b)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(payload)))
	return binary.LittleEndian.AppendUint32(b, sum(seed, b[at:], payload))
}

// Sync blocks until all records are on disk.
func (j *Journal) Sync() error {
	if j.broken != nil {
		return j.broken
	}
	if err := safefile.SyncData(j.file); err != nil {
		j.broken = fmt.Errorf("journal: %w", err)
		return j.broken
	}
	return j.setMark(mark{j.mark.end, j.mark.end})
}

// Mend makes a journal usable after a failure: it appends after the last complete record. It needs
// no disk space.
func (j *Journal) Mend() error {
	fi, err := j.file.Stat()
	if err == nil {
		_, err = j.file.Seek(j.mark.end, io.SeekStart)
	}
	var zeros [64 << 10]byte
	for at := j.mark.end; err == nil && at < fi.Size(); at += int64(len(zeros)) {
		_, err = j.file.WriteAt(zeros[:min(fi.Size()-at, int64(len(zeros)))], at)
	}
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	j.broken = nil
	return nil
}

// SetBehind marks the journal as lacking records, until Replace: Read and Open return ErrBehind. It
// needs no disk space.
func (j *Journal) SetBehind() error {
	var version [1]byte
	at := int64(len(magic) - 1)
	_, err := j.file.ReadAt(version[:], at)
	if err == nil {
		version[0] |= isBehind
		_, err = j.file.WriteAt(version[:], at)
	}
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	return nil
}

// Size returns the size of the journal in bytes, without reserved space.
func (j *Journal) Size() int64 { return j.mark.end }

// Close releases the lock and closes the files.
func (j *Journal) Close() error {
	err := j.file.Close()
	if j.next != nil {
		err = errors.Join(err, j.next.Close())
	}
	return err
}

// Remove removes the journal at the path.
func Remove(path string) error {
	err := os.Remove(path + spare)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return errors.Join(os.Remove(path), err)
}

// Read passes the records of a journal to visit, in order, and returns its run id and the end of
// the last record; an incomplete one may follow. The payload is valid until visit returns.
// An error of visit ends the reading. Read also returns errFormat, ErrBehind, *CorruptError, and
// errors of r. Its memory is at most twice the size of the largest record.
func Read(r io.Reader, visit func(payload []byte) error) (run string, end int64, err error) {
	s, err := read(r, visit)
	if err != nil {
		return "", 0, err
	}
	return s.run, s.end, nil
}

func read(r io.Reader, visit func(payload []byte) error) (*reader, error) {
	s := &reader{r: bufio.NewReaderSize(r, 64<<10)}
	err := s.head()
	for err == nil {
		var payload []byte
		if payload, err = s.next(); err == nil {
			err = visit(payload)
		}
	}
	if err != io.EOF {
		return nil, err
	}
	return s, nil
}

// reader reads a journal record by record.
type reader struct {
	r      *bufio.Reader
	run    string
	seed   uint32 // of the checksums
	mark   mark
	proven int64 // end of the records that must exist
	end    int64 // end of the last complete record
	buf    []byte
}

// head reads everything before the records of Append.
func (s *reader) head() error {
	head := make([]byte, len(magic)+4)
	n, err := io.ReadFull(s.r, head[:len(magic)])
	if err != nil && !isEnd(err) {
		return fmt.Errorf("journal: %w", err)
	}
	last := len(magic) - 1
	if n > last && head[last]&isBehind != 0 {
		if head[last] &^= isBehind; string(head[:n]) == magic {
			return ErrBehind
		}
		return errFormat
	}
	if string(head[:n]) != magic {
		return errFormat
	}
	if _, err := io.ReadFull(s.r, head[n:]); err != nil {
		return cmp.Or(failure(err), errFormat)
	}
	s.seed, s.end, s.proven = seedOf(head[n:]), int64(len(head)), math.MaxInt64
	name, err := s.next()
	if err != nil {
		return err
	}
	if s.run = string(name); len(s.run) > maxRun {
		return errFormat
	}
	p, err := s.next()
	if err != nil {
		return err
	}
	if len(p) != markLen {
		return errFormat
	}
	s.proven = s.mark.decode(p)
	return nil
}

// next returns the next record, or io.EOF after the last complete one. It returns *CorruptError if
// a required record is missing.
func (s *reader) next() ([]byte, error) {
	payload, err := s.record()
	switch {
	case err != nil:
		return nil, err
	case payload != nil:
		s.end += frame + int64(len(payload))
		return payload, nil
	case s.end < s.proven:
		return nil, &CorruptError{s.end}
	}
	return nil, io.EOF
}

// record reads the record at the current position, or returns nil if no complete one begins there.
func (s *reader) record() ([]byte, error) {
	var head [frame]byte
	if _, err := io.ReadFull(s.r, head[:]); err != nil {
		return nil, failure(err)
	}
	length := binary.LittleEndian.Uint32(head[:4])
	if length == 0 || length > MaxRecord {
		return nil, nil
	}
	// The length may be garbage, so memory is allocated only for data that exists.
	s.buf = s.buf[:0]
	for left := int(length); left > 0; {
		n := min(left, 64<<10)
		s.buf = append(s.buf, make([]byte, n)...)
		if _, err := io.ReadFull(s.r, s.buf[len(s.buf)-n:]); err != nil {
			return nil, failure(err)
		}
		left -= n
	}
	if binary.LittleEndian.Uint32(head[4:]) != sum(s.seed, head[:4], s.buf) {
		return nil, nil
	}
	return s.buf, nil
}

// failure returns nil if the error only means the end of the file.
func failure(err error) error {
	if isEnd(err) {
		return nil
	}
	return fmt.Errorf("journal: %w", err)
}

func isEnd(err error) bool { return err == io.EOF || err == io.ErrUnexpectedEOF }

func sum(seed uint32, length, payload []byte) uint32 {
	return crc32.Update(crc32.Update(seed, castagnoli, length), castagnoli, payload)
}
