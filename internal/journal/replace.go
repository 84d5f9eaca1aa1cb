package journal

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

// Replace atomically replaces all records of the journal: a reader, and a process that opens the
// journal after this process's death, finds either all old or all new records. With sync this also
// holds for the death of the machine, and the new records are on disk when Replace returns. After
// an error the journal is unchanged, unless the disk itself fails: then all further calls fail.
//
// Within the space reserved by Reserve it needs no more disk space.
func (j *Journal) Replace(records iter.Seq[[]byte], sync bool) error {
	if err := j.openNext(); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	end, seed, err := j.write(records)
	now := mark{end: end}
	if sync {
		now.synced = end // it counts once the file has the journal's name, and is on disk then
	}
	if err == nil {
		_, err = j.next.WriteAt(now.appendTo(nil, seed), j.markAt())
	}
	if err == nil && sync {
		err = safefile.SyncData(j.next)
	}
	if err != nil {
		return fmt.Errorf("journal: writing the replacement: %w", err)
	}
	if err := j.swap(); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	j.mark, j.seed, j.broken = now, seed, nil
	if _, err = j.file.Seek(end, io.SeekStart); err == nil && sync {
		err = safefile.SyncDir(filepath.Dir(j.path))
	}
	if err != nil {
		j.broken = fmt.Errorf("journal: %w", err)
	}
	return j.broken
}

// write writes the records to the next file, overwriting its contents.
func (j *Journal) write(records iter.Seq[[]byte]) (end int64, seed uint32, err error) {
	head, seed := newHead(j.run)
	w := bufio.NewWriterSize(io.NewOffsetWriter(j.next, 0), 256<<10)
	_, _ = w.Write(head) // Flush returns the error
	end = int64(len(head))
	for payload := range records {
		if len(payload) == 0 || len(payload) > MaxRecord {
			return 0, 0, fmt.Errorf("a record cannot have %d bytes", len(payload))
		}
		j.buf = appendFrame(j.buf[:0], payload, seed)
		_, _ = w.Write(j.buf)
		_, _ = w.Write(payload) // it may be large
		end += int64(len(j.buf) + len(payload))
	}
	return end, seed, w.Flush()
}

// swap gives the next file the journal's name. If the file system can exchange names, the old file
// becomes the next one and keeps its reserved space.
func (j *Journal) swap() error {
	exchanged, err := safefile.Exchange(j.path+spare, j.path)
	switch {
	case err != nil:
		return err
	case exchanged:
		j.file, j.room, j.next, j.nextRoom = j.next, j.nextRoom, j.file, j.room
		return nil
	}
	_ = j.file.Close() // it no longer has a name and is unused
	j.file, j.room, j.next, j.nextRoom = j.next, j.nextRoom, nil, 0
	return nil
}

// openNext opens and locks the next file.
func (j *Journal) openNext() error {
	if j.next != nil {
		return nil
	}
	f, err := safefile.Update(j.path+spare, safefile.Private, true)
	if err != nil {
		return err
	}
	if err := lock(f); err != nil {
		return errors.Join(err, f.Close())
	}
	j.next = f
	return nil
}

// Reserve reserves disk space for a journal of that many bytes and for its replacement. Then
// neither Append, up to that size, nor Replace fails because the disk is full, provided that the
// file system writes in place.
func (j *Journal) Reserve(bytes int64) error {
	err := j.openNext()
	if err == nil {
		err = reserve(j.file, &j.room, max(bytes, j.mark.end))
	}
	if err == nil {
		err = reserve(j.next, &j.nextRoom, bytes)
	}
	if err != nil {
		return fmt.Errorf("journal: reserving disk space: %w", err)
	}
	return nil
}

func reserve(f *os.File, room *int64, bytes int64) error {
	if *room >= bytes {
		return nil
	}
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if err := unix.Fallocate(int(f.Fd()), 0, 0, bytes); err != nil {
		return errors.Join(err, f.Truncate(fi.Size())) // part of it may have been allocated
	}
	*room = bytes
	return nil
}

// Room returns the number of bytes reserved.
func (j *Journal) Room() int64 { return min(j.room, j.nextRoom) }

// Release frees the reserved space. All further calls fail.
func (j *Journal) Release() error {
	j.broken = errors.New("journal: the journal was released")
	err := j.file.Truncate(j.mark.end)
	if j.next != nil {
		err = errors.Join(err, os.Remove(j.path+spare))
	}
	return err
}

// sameFile reports whether the open file is the one at path.
func sameFile(f *os.File, path string) (bool, error) {
	open, err := f.Stat()
	if err != nil {
		return false, err
	}
	named, err := os.Stat(path)
	if err != nil {
		return false, err
	}
	return os.SameFile(open, named), nil
}
