package timeline

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

const (
	maxRows     = 4096     // rows for single tensors
	maxBuffered = 64 << 10 // bytes after which the buffer is written
)

// rankFile is the file of one rank, open for appending.
type rankFile struct {
	path, old string
	run       string
	rank      int
	name      string // name of the process in the trace; if empty, it is that of the rank
	offset    int64  // nanoseconds to add to times of this process's clock, for those of rank 0's
	limit     int64  // size at which the file is moved away
	host      string
	mode      fs.FileMode

	file   *os.File
	size   int64
	buffer []byte
	rows   map[string]int // numbers of rows, by tensor or lane, whose names are in the file
}

// Path returns the name of the file of a rank, and the name to which the file is moved when it has
// reached its limit.
func Path(filename string, rank int) (path, old string) {
	stem := strings.TrimSuffix(filename, ".json") + ".rank." + strconv.Itoa(rank)
	return stem + ".json", stem + ".old.json"
}

func openRank(cfg Config, rank int, offset int64) (*rankFile, error) {
	f := &rankFile{run: cfg.RunID, rank: rank, offset: offset, limit: cfg.MaxBytes / 2, mode: safefile.Mode(cfg.Shared)}
	f.path, f.old = Path(cfg.Filename, rank)
	return f, f.begin()
}

// begin opens the file for appending. It truncates the file of another run.
func (f *rankFile) begin() error {
	f.host, _ = os.Hostname() // for display only
	if f.ofThisRun() {
		return f.open(false)
	}
	if err := os.Remove(f.old); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return f.open(true)
}

// header is the second line of a file, which identifies the run.
func (f *rankFile) header() string {
	name := f.name
	if name == "" {
		name = "rank " + strconv.Itoa(f.rank)
	}
	return fmt.Sprintf(`{"name":"process_name","ph":"M","pid":%d,"args":{"name":%s,"run":%s}},`, f.rank, appendString(nil, name), appendString(nil, f.run))
}

// ofThisRun reports whether the file was begun in this run, by this process or by another one that
// had the rank before.
func (f *rankFile) ofThisRun() bool {
	file, err := safefile.Read(f.path)
	if err != nil {
		return false
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	return lines.Scan() && lines.Text() == "[" && lines.Scan() && lines.Text() == f.header()
}

// open opens the file, which must belong to this user: other users may be able to create files in
// its folder, such as /tmp.
func (f *rankFile) open(empty bool) (err error) {
	f.file, err = safefile.AppendPlain(f.path, os.O_WRONLY, f.mode)
	if err != nil {
		return err
	}
	info, err := f.file.Stat()
	if err == nil && empty && info.Mode().IsRegular() {
		if err = f.file.Truncate(0); err == nil {
			info, err = f.file.Stat()
		}
	}
	if err != nil {
		return errors.Join(err, f.file.Close())
	}
	f.size, f.rows = info.Size(), map[string]int{}
	if f.size == 0 {
		f.buffer = append(append(append(f.buffer, "[\n"...), f.header()...), '\n')
	}
	return nil
}

func (f *rankFile) close() error { return errors.Join(f.flush(), f.file.Close()) }

// flush writes the buffer in one call, so that lines of two processes do not mix, and moves the
// file away if it has reached its limit.
func (f *rankFile) flush() error {
	if len(f.buffer) == 0 {
		return nil
	}
	n, err := f.file.Write(f.buffer)
	f.size += int64(n)
	f.buffer = f.buffer[:0]
	if err != nil || f.size < f.limit {
		return err
	}
	if err := f.file.Close(); err != nil {
		return err
	}
	if err := os.Rename(f.path, f.old); err != nil {
		return err
	}
	return f.open(false)
}

// row returns the number of the row of a lane or tensor, and writes the row's name to the file if
// it is not there yet. Row 0 is the row of the group of all ranks.
func (f *rankFile) row(s *collective.Span) int {
	key := s.Tensor
	if key == "" {
		key = "\x00" + strconv.FormatUint(s.Lane, 16)
	}
	if n, ok := f.rows[key]; ok {
		return n
	}
	if len(f.rows) >= maxRows {
		return maxRows
	}
	n, name := len(f.rows)+1, s.Tensor
	switch {
	case s.Tensor == "" && s.Lane == 0:
		n, name = 0, "all ranks"
	case s.Tensor == "":
		name = fmt.Sprintf("group %x", s.Lane)
	}
	f.rows[key] = n
	f.buffer = fmt.Appendf(f.buffer, `{"name":"thread_name","ph":"M","pid":%d,"tid":%d,"args":{"name":`, f.rank, n)
	f.buffer = append(appendString(f.buffer, name), "}},\n"...)
	return n
}

// span buffers an event that began at begun, in nanoseconds since 1970 of this process's clock. It
// writes the buffer if that is full.
func (f *rankFile) span(begun int64, s *collective.Span) error {
	row := f.row(s)
	name, kind := s.Name, "operation"
	if s.Phase != "" {
		name, kind = s.Phase, "phase"
	}
	b := append(f.buffer, `{"name":`...)
	b = appendString(b, name)
	b = append(b, `,"cat":"`...)
	b = append(b, kind...)
	b = append(b, `","ph":"X","ts":`...)
	b = appendMicros(b, begun+f.offset)
	b = append(b, `,"dur":`...)
	b = appendMicros(b, int64(s.Duration))
	b = f.place(b, row)
	b = append(b, `,"args":{"generation":`...)
	b = strconv.AppendUint(b, s.Generation, 10)
	if s.Bytes > 0 {
		b = append(b, `,"bytes":`...)
		b = strconv.AppendInt(b, int64(s.Bytes), 10)
	}
	if s.Algorithm != "" {
		b = append(b, `,"algorithm":`...)
		b = appendString(b, s.Algorithm)
	}
	f.buffer = append(b, "}},\n"...)
	if len(f.buffer) < maxBuffered {
		return nil
	}
	return f.flush()
}

// place appends the numbers of the process and of a row.
func (f *rankFile) place(b []byte, row int) []byte {
	b = append(b, `,"pid":`...)
	b = strconv.AppendInt(b, int64(f.rank), 10)
	b = append(b, `,"tid":`...)
	return strconv.AppendInt(b, int64(row), 10)
}

// mark buffers an event without a duration.
func (f *rankFile) mark(at int64, name, args string) {
	b := append(f.buffer, `{"name":`...)
	b = append(appendString(b, name), `,"ph":"i","s":"p","ts":`...)
	b = f.place(appendMicros(b, at+f.offset), 0)
	f.buffer = append(append(append(b, `,"args":{`...), args...), "}},\n"...)
}

// world writes the buffer with a mark for the beginning of a world.
func (f *rankFile) world(at int64, g *collective.Group) error {
	f.mark(at, fmt.Sprintf("world %d", g.Generation()), fmt.Sprintf(`"generation":%d,"size":%d,"host":%s,"clock_offset_us":%s`,
		g.Generation(), g.Size(), appendString(nil, f.host), appendMicros(nil, f.offset)))
	return f.flush()
}

// lost buffers a mark for n spans that were dropped.
func (f *rankFile) lost(at int64, n int) {
	f.mark(at, "spans lost", `"spans":`+strconv.Itoa(n))
}

// appendMicros appends nanoseconds as microseconds.
func appendMicros(b []byte, nanos int64) []byte {
	if nanos < 0 {
		b, nanos = append(b, '-'), -nanos
	}
	b = strconv.AppendInt(b, nanos/1000, 10)
	return append(b, '.', byte('0'+nanos/100%10), byte('0'+nanos/10%10), byte('0'+nanos%10))
}
