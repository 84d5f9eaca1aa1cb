package journal

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
)

// keeping returns a keeper of a journal that does not exist yet, and its log.
func keeping(t *testing.T, r Rules) (*Keeper, *bytes.Buffer) {
	t.Helper()
	said := &bytes.Buffer{}
	log := logrus.New()
	log.SetOutput(said)
	r.Path, r.Run, r.Log, r.Level = filepath.Join(t.TempDir(), "journal"), "run", log, logrus.ErrorLevel
	r.Name, r.Follows = "the journal", "the test goes on"
	k := &Keeper{Rules: r}
	t.Cleanup(k.Close)
	return k, said
}

// kept returns the records that a reader finds.
func kept(t *testing.T, k *Keeper) ([]string, error) {
	t.Helper()
	records, _, err := readAll(content(t, k.Path))
	return records, err
}

func snapshotOf(records ...string) func(func([]byte) bool) {
	return func(yield func([]byte) bool) {
		for _, r := range records {
			if !yield([]byte(r)) {
				return
			}
		}
	}
}

var errDisk = errors.New("the disk is broken")

// TestUpkeep: the times when a snapshot is due, and when a failed one is tried again.
func TestUpkeep(t *testing.T) {
	now := time.Unix(1000, 0)
	u := upkeep{bound: 100}
	for _, c := range []struct {
		size  int64
		quiet bool
		due   bool
	}{{100, false, false}, {101, false, true}, {75, true, false}, {76, true, true}} {
		if got := u.due(now, c.size, c.quiet); got != c.due {
			t.Errorf("%d bytes, quiet %v: due %v", c.size, c.quiet, got)
		}
	}
	if tell := u.failed(now, errDisk, true); tell || !u.next.Equal(now) {
		t.Errorf("a failure after which something else is tried at once: told %v, next %v", tell, u.next)
	}
	if u.due(now, 1000, false) {
		t.Error("a journal that cannot be written is compacted")
	}
	u.lacking = true
	if !u.due(now, 0, false) {
		t.Error("no snapshot is due where records were dropped")
	}
	for i := range 3 {
		if tell := u.failed(now, errDisk, false); tell != (i == 0) {
			t.Errorf("failure %d is told: %v", i, tell)
		}
		if u.due(now.Add(retryPause-1), 0, false) || !u.due(now.Add(retryPause), 0, false) {
			t.Error("an attempt is not due when the pause is over")
		}
		now = now.Add(retryPause)
	}
	if tell, after := u.complete(now); !tell || after != 3*retryPause || u.failures != 4 {
		t.Errorf("complete: told %v, after %v, %d failures", tell, after, u.failures)
	}
	if tell, _ := u.complete(now); tell || u.due(now, 100, false) {
		t.Error("what was complete is complete again")
	}
}

// TestKeeperWaits: if the disk does not accept records, they wait, up to a bound, and are written
// in their order when it does.
func TestKeeperWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k, said := keeping(t, Rules{Least: 1 << 20, Keep: 10})
		path := k.Path
		k.Path = filepath.Join(path, "none") // this folder does not exist
		for i := range 10 {
			if err := k.Append(time.Now(), fmt.Append(nil, i)); err == nil {
				t.Fatal("a record is written into nothing")
			}
		}
		if k.Sync(time.Now()) == nil || k.Lacking() || k.Waiting() != 10 || k.Failures() != 1 {
			t.Errorf("lacking %v, %d bytes wait, %d failures", k.Lacking(), k.Waiting(), k.Failures())
		}
		k.Path = path
		if k.Sync(time.Now()) == nil {
			t.Error("it was tried again before the pause was over")
		}
		at, ok := k.Next()
		if !ok {
			t.Fatal("no attempt follows")
		}
		<-time.After(time.Until(at))
		if err := k.Sync(time.Now()); err != nil || k.Waiting() != 0 || k.Err() != nil {
			t.Errorf("after the pause: %v, %d bytes wait", err, k.Waiting())
		}
		if got, err := kept(t, k); err != nil || strings.Join(got, "") != "0123456789" {
			t.Errorf("%q, %v", got, err)
		}
		if n := strings.Count(said.String(), "\n"); n != 2 || !strings.Contains(said.String(), "complete again, after 1s") {
			t.Errorf("%d lines are logged: %s", n, said)
		}
	})
}

// TestKeeperMends: a record that was written in part is written again, and so are those that a
// failed sync leaves in doubt.
func TestKeeperMends(t *testing.T) {
	k, _ := keeping(t, Rules{Least: 1 << 20, Keep: 100})
	now := time.Unix(1000, 0)
	for _, r := range []string{"a", "b"} {
		if err := k.Append(now, []byte(r)); err != nil {
			t.Fatal(err)
		}
	}
	if err := k.Sync(now); err != nil {
		t.Fatal(err)
	}
	if err := k.Append(now, []byte("c")); err != nil {
		t.Fatal(err)
	}
	if _, err := k.j.file.Write([]byte{9, 0, 0}); err != nil { // the beginning of the next record
		t.Fatal(err)
	}
	k.j.broken = errDisk
	if err := k.Sync(now); !errors.Is(err, errDisk) {
		t.Errorf("a sync that fails: %v", err)
	}
	now = now.Add(retryPause)
	if err := k.Append(now, []byte("d")); err != nil {
		t.Fatal(err)
	}
	if err := k.Sync(now); err != nil {
		t.Fatal(err)
	}
	if got, err := kept(t, k); err != nil || !slices.Equal(got, []string{"a", "b", "c", "c", "d"}) {
		t.Errorf("%q, %v", got, err)
	}
}

// TestKeeperDrops: beyond the bound records are dropped, and a snapshot that includes them replaces
// all as soon as the disk accepts one.
func TestKeeperDrops(t *testing.T) {
	for _, strict := range []bool{false, true} {
		t.Run(fmt.Sprint("strict ", strict), func(t *testing.T) {
			k, said := keeping(t, Rules{Least: 1 << 20, Strict: strict})
			now := time.Unix(1000, 0)
			if err := errors.Join(k.Append(now, []byte("a")), k.Sync(now)); err != nil {
				t.Fatal(err)
			}
			k.j.broken = errDisk
			if err := k.Append(now, []byte("b")); !errors.Is(err, errDisk) || !k.Lacking() || said.Len() > 0 {
				t.Fatalf("%v, lacking %v, logged %q", err, k.Lacking(), said)
			}
			if got, err := kept(t, k); errors.Is(err, ErrBehind) != strict || !strict && !slices.Equal(got, []string{"a"}) {
				t.Errorf("without a record: %q, %v", got, err)
			}
			if err := os.Mkdir(k.Path+spare, 0o700); err != nil {
				t.Fatal(err)
			}
			if !k.Due(now, false) {
				t.Error("no snapshot is tried at once")
			}
			for i := range 3 {
				if k.Compact(now, snapshotOf("a", "b")) == nil || k.Due(now, false) || strings.Count(said.String(), "\n") != 1 {
					t.Errorf("failure %d: due %v, logged %s", i, k.Due(now, false), said)
				}
				now = now.Add(retryPause)
			}
			if !errors.Is(k.Append(now, []byte("c")), k.Err()) || !strings.Contains(k.State(now), "not written for 3s") {
				t.Errorf("the state is %q", k.State(now))
			}
			if err := os.Remove(k.Path + spare); err != nil {
				t.Fatal(err)
			}
			if err := k.Compact(now, snapshotOf("abc")); err != nil || k.Lacking() || k.State(now) != "" {
				t.Errorf("with room: %v, %q", err, k.State(now))
			}
			if err := k.Append(now, []byte("d")); err != nil {
				t.Error(err)
			}
			if got, err := kept(t, k); err != nil || !slices.Equal(got, []string{"abc", "d"}) {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
}

// TestKeeperIsBounded: the size stays within four times that of a snapshot. A journal that cannot
// be compacted grows, and compaction is tried again at twice its size.
func TestKeeperIsBounded(t *testing.T) {
	k, said := keeping(t, Rules{Least: 1000, Reserve: true})
	now := time.Unix(1000, 0)
	record := make([]byte, 92) // 100 with its frame
	compacted := 0
	fill := func(until int64) {
		t.Helper()
		for k.Size() <= until {
			if err := k.Append(now, slices.Clone(record)); err != nil {
				t.Fatal(err)
			}
			if k.Due(now, false) {
				if compacted++; k.Compact(now, snapshotOf(strings.Repeat("s", 492))) == nil {
					return
				}
			}
		}
	}
	for range 5 {
		if fill(10_000); k.Size() < 500 || k.Size() > 600 {
			t.Fatalf("%d bytes after a snapshot", k.Size())
		}
	}
	// The next snapshot cannot be written, because a record of zero bytes is refused.
	for k.Append(now, slices.Clone(record)) == nil && !k.Due(now, false) {
	}
	size := k.Size()
	if k.Compact(now, snapshotOf("")) == nil || k.Lacking() || k.Err() != nil || k.Due(now, false) {
		t.Errorf("not compacted: lacking %v, due %v, %v", k.Lacking(), k.Due(now, false), k.Err())
	}
	if !strings.Contains(said.String(), "cannot be compacted and grows") {
		t.Errorf("logged: %s", said)
	}
	before := compacted
	if fill(2*size - 200); compacted != before {
		t.Error("tried again before it had twice its size")
	}
	if fill(10_000); compacted != before+1 || k.Size() > 600 {
		t.Errorf("%d snapshots, %d bytes", compacted-before, k.Size())
	}
}

// TestKeeperGivesUp: a strict journal that can neither be written nor marked is removed.
func TestKeeperGivesUp(t *testing.T) {
	k, said := keeping(t, Rules{Least: 1 << 20, Strict: true})
	now := time.Unix(1000, 0)
	if err := k.Create(); err != nil {
		t.Fatal(err)
	}
	k.j.file.Close()
	if k.Append(now, []byte("a")) == nil || k.Append(now, []byte("b")) == nil || k.Due(now, false) {
		t.Error("a journal that was given up is written")
	}
	if _, ok := k.Next(); ok || !strings.HasPrefix(k.State(now), "given up: ") || !strings.Contains(said.String(), "cannot be resumed") {
		t.Errorf("the state is %q, logged: %s", k.State(now), said)
	}
	if _, err := os.Stat(k.Path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file: %v", err)
	}
	if k.Compact(now, snapshotOf("a")) == nil || k.Sync(now) == nil {
		t.Error("a journal that was given up is compacted")
	}
}
