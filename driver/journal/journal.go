// Package journal is a file to which one process appends records, so that another can read after
// its death what it had written down.
//
// A record that Append has taken outlives the process, whatever kills it; one that was followed by
// Sync outlives the machine. Of a record whose writing was cut off nothing is read. Replace puts
// others in the place of all records, at once, and Reserve has room kept for that and for what is
// appended then. The format:
//
//	"hvdrunJ" version      8 bytes, the version is 2
//	salt   uint32          another number in each file, and after each Replace
//	record                 the run id
//	record …               what Append was given
//
// where a record is
//
//	length uint32          little endian, of the payload, not 0
//	sum    uint32          CRC-32C of salt, length and payload
//	payload
//
// What follows the last record are bytes that the salt tells from records: zeros, or what the file
// held before a Replace. A file of version 1, which has no salt, is read and appended to as well.
package journal

import (
	"bufio"
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const (
	magic = "hvdrunJ\x02"
	first = "hvdrunJ\x01" // of version 1
	// isBehind, in the version, says that the journal lacks records.
	isBehind = 0x80
	// frame is how many bytes stand before a payload.
	frame = 8
	// MaxRecord is the most bytes of a payload.
	MaxRecord = 16 << 20
	// maxRun is the most bytes of a run id.
	maxRun = 255
	// spare is the end of the name of the file that takes the journal's place next.
	spare = ".spare"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

var (
	// ErrLocked: another process has the journal open for writing.
	ErrLocked = errors.New("journal: another process has it open")
	// ErrFormat: the file is no journal, or one of another version.
	ErrFormat = errors.New("journal: this is no journal that this version can read")
	// ErrBehind: who wrote the journal could not write the last records.
	ErrBehind = errors.New("journal: the last records could not be written")
)

// CorruptError says that a record is not what was written, and that there are others behind it: no
// torn end, but a damaged file, of which nothing should be believed.
type CorruptError struct {
	// Offset is where the record begins.
	Offset int64
}

// Error names the place.
func (e *CorruptError) Error() string {
	return fmt.Sprintf("journal: the record at byte %d is damaged", e.Offset)
}

// Journal is a file that is open for appending. It is for one goroutine.
type Journal struct {
	path, run string
	file      *os.File
	seed      uint32 // of the sums
	end       int64  // of the last whole record
	room      int64  // that the file has by Reserve
	buf       []byte
	broken    error

	next     *os.File // takes the journal's place in Replace; nil: it is to be made
	nextRoom int64
}

// Create makes a journal at a path where nothing is, with mode 0600, locks it, and has it on the
// disk when it returns. The run id has 1 to 255 bytes.
func Create(path, run string) (*Journal, error) {
	if run == "" || len(run) > maxRun {
		return nil, fmt.Errorf("journal: a run id of %d bytes", len(run))
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	j := &Journal{path: path, run: run, file: f}
	err = lock(f)
	if err == nil {
		head, seed := newHead(run)
		_, err = f.Write(head)
		j.seed, j.end = seed, int64(len(head))
	}
	if err == nil {
		err = errors.Join(j.Sync(), syncDir(filepath.Dir(path)))
	}
	if err != nil {
		return nil, fmt.Errorf("journal: %w", errors.Join(err, f.Close(), os.Remove(path)))
	}
	return j, nil
}

// newHead returns what a file begins with, and the seed of the sums in it.
func newHead(run string) (head []byte, seed uint32) {
	salt := make([]byte, 4)
	rand.Read(salt) // never fails: crypto/rand ends the program where there is no randomness
	seed = seedOf(salt)
	return appendRecord(append([]byte(magic), salt...), []byte(run), seed), seed
}

func seedOf(salt []byte) uint32 { return crc32.Checksum(salt, castagnoli) }

// Open locks the journal at the path, hands all its records to visit as Read does, and returns it
// ready for appending, with its run id. Its errors are those of Read, and ErrLocked.
func Open(path string, visit func(payload []byte) error) (*Journal, string, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
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
		return errors.Join(err, ErrLocked) // whoever has it open has put another in its place
	}
	j.run, j.end, j.seed = s.run, s.end, s.seed
	j.next, err = os.OpenFile(j.path+spare, os.O_RDWR, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		j.next = nil
	case err == nil:
		err = lock(j.next)
	}
	if err != nil && j.next != nil {
		return fmt.Errorf("journal: %s: %w", j.path+spare, err)
	}
	return j.Mend()
}

// lock takes the lock of the file, which ends with the process.
func lock(f *os.File) error {
	err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return ErrLocked
	}
	return err
}

// Locked tells whether a process has the journal at the path open for writing now. It keeps nobody
// from doing so.
func Locked(path string) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, fmt.Errorf("journal: %w", err)
	}
	defer f.Close()
	is := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &is); err != nil {
		return false, fmt.Errorf("journal: %w", err)
	}
	return is.Type != unix.F_UNLCK, nil
}

// Append writes a record of 1 to MaxRecord bytes, in one call of the system; it keeps nothing of
// payload. After a failure the journal takes nothing any more: a reader must not miss a record in
// the middle.
func (j *Journal) Append(payload []byte) error {
	if j.broken != nil {
		return j.broken
	}
	if len(payload) == 0 || len(payload) > MaxRecord {
		return fmt.Errorf("journal: a record of %d bytes", len(payload))
	}
	b := appendRecord(j.buf[:0], payload, j.seed)
	j.buf = b[:0]
	if _, err := j.file.Write(b); err != nil {
		j.broken = fmt.Errorf("journal: %w", err)
		return j.broken
	}
	j.end += int64(len(b))
	return nil
}

// appendRecord appends a record of the payload to b.
func appendRecord(b, payload []byte, seed uint32) []byte {
	at := len(b)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(payload)))
	b = binary.LittleEndian.AppendUint32(b, sum(seed, b[at:], payload))
	return append(b, payload...)
}

// Sync blocks until all records are on the disk.
func (j *Journal) Sync() error {
	if j.broken != nil {
		return j.broken
	}
	if err := unix.Fdatasync(int(j.file.Fd())); err != nil {
		j.broken = fmt.Errorf("journal: %w", err)
	}
	return j.broken
}

// Mend makes a journal that has failed take records again, after the last that was written whole.
// It takes no room.
func (j *Journal) Mend() error {
	fi, err := j.file.Stat()
	if err == nil {
		_, err = j.file.Seek(j.end, io.SeekStart)
	}
	var zeros [64 << 10]byte
	for at := j.end; err == nil && at < fi.Size(); at += int64(len(zeros)) {
		_, err = j.file.WriteAt(zeros[:min(fi.Size()-at, int64(len(zeros)))], at)
	}
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	j.broken = nil
	return nil
}

// SetBehind says that the journal lacks records, until Replace: Read and Open return ErrBehind. It
// takes no room.
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

// Size is how many bytes the journal has, without what Reserve keeps.
func (j *Journal) Size() int64 { return j.end }

// Close lets go of the lock and the files.
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

// Read hands the records of a journal to visit, in order, and returns its run id and where its last
// whole record ends: what follows is the torn end of one, or nothing. The payload is the visitor's
// until it returns. An error of visit ends it; besides, it returns ErrFormat, ErrBehind,
// *CorruptError, and what r does. It takes no more memory than twice the largest record it meets.
func Read(r io.Reader, visit func(payload []byte) error) (run string, end int64, err error) {
	s, err := read(r, visit)
	if err != nil {
		return "", 0, err
	}
	return s.run, s.end, nil
}

func read(r io.Reader, visit func(payload []byte) error) (*reader, error) {
	s := &reader{r: bufio.NewReaderSize(r, 64<<10)}
	if err := s.head(); err != nil {
		return nil, err
	}
	name, err := s.next()
	if err == io.EOF || err == nil && len(name) > maxRun {
		return nil, ErrFormat
	}
	for s.run = string(name); err == nil; {
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

// reader reads record by record.
type reader struct {
	r    *bufio.Reader
	run  string
	seed uint32 // of the sums
	end  int64  // of the last whole record
	buf  []byte
}

// head reads what stands before the records.
func (s *reader) head() error {
	head := make([]byte, len(magic)+4)
	n, err := io.ReadFull(s.r, head[:len(magic)])
	if err != nil && !isEnd(err) {
		return fmt.Errorf("journal: %w", err)
	}
	last := len(magic) - 1
	if n > last && head[last]&isBehind != 0 {
		if head[last] &^= isBehind; string(head[:n]) == magic || string(head[:n]) == first {
			return ErrBehind
		}
		return ErrFormat
	}
	switch string(head[:n]) {
	case first:
	case magic:
		if _, err := io.ReadFull(s.r, head[n:]); err != nil {
			return cmp.Or(failure(err), ErrFormat)
		}
		s.seed, n = seedOf(head[n:]), len(head)
	default:
		return ErrFormat
	}
	s.end = int64(n)
	return nil
}

// next returns the next record, io.EOF where there is no whole one any more, and *CorruptError
// where a damaged one has another behind it.
func (s *reader) next() ([]byte, error) {
	payload, n, whole, err := s.record()
	switch {
	case err != nil:
		return nil, err
	case whole:
		s.end += n
		return payload, nil
	case n == 0:
		return nil, io.EOF
	}
	if _, _, whole, err := s.record(); err != nil {
		return nil, err
	} else if whole {
		return nil, &CorruptError{s.end}
	}
	return nil, io.EOF
}

// record reads what stands where a record should; n is 0 where its end is beyond that of the file,
// or nowhere.
func (s *reader) record() (payload []byte, n int64, whole bool, err error) {
	var head [frame]byte
	if _, err := io.ReadFull(s.r, head[:]); err != nil {
		return nil, 0, false, failure(err)
	}
	length := binary.LittleEndian.Uint32(head[:4])
	if length == 0 || length > MaxRecord {
		return nil, 0, false, nil
	}
	// A length may be garbage: memory is taken for what is there.
	s.buf = s.buf[:0]
	for left := int(length); left > 0; {
		n := min(left, 64<<10)
		s.buf = append(s.buf, make([]byte, n)...)
		if _, err := io.ReadFull(s.r, s.buf[len(s.buf)-n:]); err != nil {
			return nil, 0, false, failure(err)
		}
		left -= n
	}
	whole = binary.LittleEndian.Uint32(head[4:]) == sum(s.seed, head[:4], s.buf)
	return s.buf, frame + int64(length), whole, nil
}

// failure drops an error that tells of the file's end.
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

// syncDir has the entries of a folder on the disk.
func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
