package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/discoverytest"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

func configured(t *testing.T, settings ...string) *source {
	t.Helper()
	values := map[string]string{"rescan": "0"} // so that only inotify finds changes
	for _, s := range settings {
		key, value, _ := strings.Cut(s, "=")
		values[key] = value
	}
	s := &source{}
	if err := s.Configure(values); err != nil {
		t.Fatal(err)
	}
	return s
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// replace replaces a file by one with this text, atomically.
func replace(t *testing.T, path, text string) {
	t.Helper()
	fresh := filepath.Join(filepath.Dir(path), ".fresh")
	write(t, fresh, text)
	must(t, os.Rename(fresh, path))
}

func toText(hosts []plan.Host) string {
	var items []string
	for _, h := range hosts {
		items = append(items, h.String())
	}
	return strings.Join(items, " ")
}

// watching is a running Watch.
type watching struct {
	t     *testing.T
	lists chan string
	ended chan error
	stop  context.CancelFunc
}

func watch(t *testing.T, s *source) *watching {
	ctx, cancel := context.WithCancel(context.Background())
	w := &watching{t, make(chan string, 100), make(chan error, 1), cancel}
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.ended <- s.Watch(ctx, func(hosts []plan.Host) { w.lists <- toText(hosts) })
	}()
	t.Cleanup(func() { cancel(); <-done })
	return w
}

// next checks that the next list is this one.
func (w *watching) next(want string) {
	w.t.Helper()
	select {
	case got := <-w.lists:
		if got != want {
			w.t.Fatalf("found %q, want %q", got, want)
		}
	case err := <-w.ended:
		w.t.Fatalf("ended with %v, want %q", err, want)
	case <-sandbox.Expired():
		w.t.Fatalf("no list; want %q", want)
	}
}

// fails returns the error with which the watch ends, and checks that no list comes before.
func (w *watching) fails() error {
	w.t.Helper()
	select {
	case got := <-w.lists:
		w.t.Fatalf("found %q, want an error", got)
	case err := <-w.ended:
		return err
	case <-sandbox.Expired():
		w.t.Fatal("no error")
	}
	return nil
}

func discover(t *testing.T, s *source) string {
	t.Helper()
	hosts, err := s.Discover(t.Context())
	must(t, err)
	return toText(hosts)
}

func lines(hosts []plan.Host) string {
	var b strings.Builder
	for _, h := range hosts {
		fmt.Fprintf(&b, "%v\n", h)
	}
	return b.String()
}

func TestKitFile(t *testing.T) {
	discoverytest.Run(t, func(t *testing.T, hosts []plan.Host) discovery.Discoverer {
		path := filepath.Join(t.TempDir(), "hosts")
		write(t, path, lines(hosts))
		return configured(t, "path="+path)
	})
}

func TestKitDirectory(t *testing.T) {
	discoverytest.Run(t, func(t *testing.T, hosts []plan.Host) discovery.Discoverer {
		dir, i := t.TempDir(), 0
		for part := range slices.Chunk(hosts, 100) {
			write(t, filepath.Join(dir, fmt.Sprintf("%02d.hosts", i)), lines(part))
			i++
		}
		return configured(t, "path="+dir, "pattern=*.hosts")
	})
}

// TestKitWithoutLeases: the kit passes on file systems without leases.
func TestKitWithoutLeases(t *testing.T) {
	discoverytest.Run(t, func(t *testing.T, hosts []plan.Host) discovery.Discoverer {
		path := filepath.Join(t.TempDir(), "hosts")
		write(t, path, lines(hosts))
		must(t, os.Chtimes(path, time.Time{}, time.Now().Add(-time.Hour)))
		s := configured(t, "path="+path)
		s.cfg.Load().lease = noLease
		return s
	})
}

func noLease(*os.File) leaseState { return leaseUnknown }

func TestConfigure(t *testing.T) {
	for _, c := range []struct {
		values map[string]string
		want   string
	}{
		{nil, "file: setting path: must be given"},
		{map[string]string{"path": "x", "file": "y"}, `file: unknown setting "file"; the settings are: default_slots, path, pattern, rescan, settle`},
		{map[string]string{"path": "x", "default_slots": "-1"}, "file: setting default_slots: "},
		{map[string]string{"path": "x", "pattern": "[a"}, "file: setting pattern: "},
		{map[string]string{"path": "x", "settle": "soon"}, "file: setting settle: "},
	} {
		if err := (&source{}).Configure(c.values); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v, want %s", c.values, err, c.want)
		}
	}
	if _, err := (&source{}).Discover(t.Context()); !errors.Is(err, errNotConfigured) {
		t.Error(err)
	}
	if err := (&source{}).Watch(t.Context(), nil); !errors.Is(err, errNotConfigured) {
		t.Error(err)
	}
}

func TestReadsFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hosts")
	write(t, path, "# rack 1\nb slots=2\r\na\n[fe80::1]:4")
	if got := discover(t, configured(t, "path="+path, "default_slots=8")); got != "b:2 a:8 [fe80::1]:4" {
		t.Errorf("found %s", got)
	}
}

func TestReadsDirectory(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"2": "a:1\nb:2\n", "10": "c:1\nb:2\n", ".hidden": "x", "2~": "x", "#2#": "x"} {
		write(t, filepath.Join(dir, name), text)
	}
	must(t, os.Mkdir(filepath.Join(dir, "3"), 0o755))
	must(t, os.Symlink("3", filepath.Join(dir, "4")))
	must(t, os.Symlink("2", filepath.Join(dir, "5")))
	s := configured(t, "path="+dir)
	if got := discover(t, s); got != "c:1 b:2 a:1" {
		t.Errorf("found %s", got)
	}
	write(t, filepath.Join(dir, "6"), "b:3\n")
	_, err := s.Discover(t.Context())
	if want := "host b has 3 slots here but 2 in " + filepath.Join(dir, "10"); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
}

func TestReadErrors(t *testing.T) {
	dir := t.TempDir()
	faulty, large, dangling := filepath.Join(dir, "faulty"), filepath.Join(dir, "large"), filepath.Join(dir, "d")
	write(t, faulty, "a:1\nb:x\n")
	write(t, large, strings.Repeat("#\n", maxBytes/2+1))
	must(t, os.Mkdir(dangling, 0o755))
	must(t, os.Symlink("nowhere", filepath.Join(dangling, "hosts")))
	for path, want := range map[string]string{
		faulty: "line 2", large: "longer than 1048576 bytes", dangling: "no such file", filepath.Join(dir, "none"): "no such file",
		os.DevNull: "neither a file nor a directory",
	} {
		hosts, err := configured(t, "path="+path, "settle=1ms").Discover(t.Context())
		if err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "file: ") || len(hosts) > 0 {
			t.Errorf("%s: %v, %v; want %s", path, hosts, err, want)
		}
	}
}

// TestHalfWritten: a file that is open for writing is not read until it is closed, because more can
// follow.
func TestHalfWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hosts")
	write(t, path, "a:1\nb:1\n")
	if probe(t, path) == leaseUnknown {
		t.Log("no leases here: only what is written in one go is told from half a file")
		return
	}
	watched := configured(t, "path="+path)
	met, closed := make(chan struct{}), make(chan struct{})
	meet, release := sync.OnceFunc(func() { close(met) }), sync.OnceFunc(func() { close(closed) })
	watched.cfg.Load().lease = func(f *os.File) leaseState { // the watch meets the writer, and looks again when the file is closed
		state := readLease(f)
		if state == leaseRefused {
			meet()
			<-closed
		}
		return state
	}
	w := watch(t, watched)
	t.Cleanup(release) // before the watch is stopped
	w.next("a:1 b:1")
	f, err := os.Create(path)
	must(t, err)
	defer f.Close()
	select {
	case <-met:
	case <-sandbox.Expired():
		t.Fatal("the watch does not read the file")
	}
	s := configured(t, "path="+path)
	for _, part := range []string{"", "a:1\n", "c:"} {
		_, err := f.WriteString(part)
		must(t, err)
		synctest.Test(t, func(t *testing.T) {
			hosts, err := s.Discover(t.Context())
			if !errors.Is(err, errBusy) || len(hosts) > 0 {
				t.Fatalf("%v, %v in the middle of writing", hosts, err)
			}
		})
	}
	_, err = f.WriteString("2\n")
	must(t, err)
	must(t, f.Close())
	release()
	w.next("a:1 c:2")
}

func probe(t *testing.T, path string) leaseState {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	return readLease(f)
}

// TestHalfWrittenWithoutLeases: without leases, a file that keeps changing is not read.
func TestHalfWrittenWithoutLeases(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hosts")
	f, err := os.Create(path)
	must(t, err)
	defer f.Close()
	s := configured(t, "path="+path)
	synctest.Test(t, func(t *testing.T) { // the file's modification time stays in the future
		length := 0
		s.cfg.Load().lease = func(*os.File) leaseState { // it grows between any two looks
			length++
			_, err := fmt.Fprintf(f, "host-%d\n", length)
			must(t, err)
			return leaseUnknown
		}
		if hosts, err := s.Discover(t.Context()); !errors.Is(err, errBusy) {
			t.Errorf("found %v of a file that grows, %v", hosts, err)
		}
		s.cfg.Load().lease = noLease
		hosts, err := s.Discover(t.Context())
		if err != nil || len(hosts) != length {
			t.Errorf("%d hosts of %d, %v", len(hosts), length, err)
		}
	})
}

// TestOverwrittenInPlace: lists that are written over each other in place never mix.
func TestOverwrittenInPlace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hosts")
	long := strings.Repeat("# a long list\n", 1000)
	texts := []string{long + "a:1\nb:1\n", long + "c:1\nd:1\n" + long + "e:1\n"}
	write(t, path, texts[0])
	if probe(t, path) == leaseUnknown {
		t.Log("no leases here: writers are told by the time of the file alone")
		return
	}
	s := configured(t, "path="+path)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				if err := os.WriteFile(path, []byte(texts[i%2]), 0o644); err != nil {
					t.Error(err)
					return
				}
			}
		}
	}()
	defer func() { close(stop); <-stopped }()
	for range 30 {
		hosts, err := s.Discover(t.Context())
		if errors.Is(err, errBusy) {
			continue // the writer leaves no gap
		}
		if got := toText(hosts); err != nil || got != "a:1 b:1" && got != "c:1 d:1 e:1" {
			t.Fatalf("%q, %v", got, err)
		}
	}
}

func TestWatchFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hosts")
	write(t, path, "a:1\n")
	w := watch(t, configured(t, "path="+path, "settle=10s"))
	w.next("a:1")
	t.Run("written in place", func(*testing.T) {
		write(t, path, "a:1\nb:1\n")
		w.next("a:1 b:1")
	})
	t.Run("renamed into its place", func(*testing.T) {
		replace(t, path, "b:1\n")
		w.next("b:1")
		replace(t, path, "c:1\n")
		w.next("c:1")
	})
	t.Run("an editor's way", func(*testing.T) {
		must(t, os.Rename(path, path+"~"))
		write(t, path, "d:1\n")
		w.next("d:1")
	})
	t.Run("removed and made again", func(*testing.T) {
		must(t, os.Remove(path))
		write(t, path, "e:1\n")
		w.next("e:1")
	})
	t.Run("a fault that is mended", func(*testing.T) {
		write(t, path, "e:x\n")
		write(t, path, "f:1\n")
		w.next("f:1")
	})
	t.Run("no news", func(*testing.T) {
		write(t, path, "# only words\nf:1\n")
		write(t, path, "f:2\n")
		w.next("f:2")
	})
	t.Run("through another name", func(*testing.T) {
		other := filepath.Join(t.TempDir(), "other")
		must(t, os.Link(path, other))
		write(t, other, "g:1\n")
		w.next("g:1")
	})
	t.Run("empty", func(*testing.T) {
		write(t, path, "")
		w.next("")
	})
	w.stop()
	if err := w.fails(); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestWatchFails(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hosts")
	s := configured(t, "path="+path, "settle=10ms")
	if err := watch(t, s).fails(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	write(t, path, "a:1\n") // the file appears later
	w := watch(t, s)
	w.next("a:1")
	must(t, os.Remove(path))
	if err := w.fails(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("removed: %v", err)
	}
	write(t, path, "b:1\n")
	w = watch(t, s)
	w.next("b:1")
	write(t, path, "b:1\nc:c:c\n")
	var parse *plan.ParseError
	if err := w.fails(); !errors.As(err, &parse) || parse.Line != 2 {
		t.Errorf("faulty: %v", err)
	}
}

// TestWatchAppears: a file that does not exist yet is noticed when it appears, even if its folder
// does not exist either.
func TestWatchAppears(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a", "b", "hosts")
	w := watch(t, configured(t, "path="+path, "settle=10s"))
	must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	write(t, path, "a:1\n")
	w.next("a:1")
	// Another folder replaces one above the file.
	must(t, os.MkdirAll(filepath.Join(dir, "new", "b"), 0o755))
	write(t, filepath.Join(dir, "new", "b", "hosts"), "b:1\n")
	must(t, os.Rename(filepath.Join(dir, "a"), filepath.Join(dir, "old")))
	must(t, os.Rename(filepath.Join(dir, "new"), filepath.Join(dir, "a")))
	w.next("b:1")
	replace(t, path, "c:1\n")
	w.next("c:1")
}

func TestWatchLinks(t *testing.T) {
	dir := t.TempDir()
	one, two, path := filepath.Join(dir, "one"), filepath.Join(dir, "two"), filepath.Join(t.TempDir(), "hosts")
	write(t, one, "a:1\n")
	write(t, two, "b:1\n")
	must(t, os.Symlink(one, path))
	w := watch(t, configured(t, "path="+path, "settle=10s"))
	w.next("a:1")
	replace(t, one, "a:2\n") // behind the link
	w.next("a:2")
	must(t, os.Symlink(two, path+".fresh"))
	must(t, os.Rename(path+".fresh", path))
	w.next("b:1")
	write(t, two, "b:2\n")
	w.next("b:2")
}

// configMap lays out a volume as the kubelet does.
type configMap struct {
	t    *testing.T
	dir  string
	next int
}

func (m *configMap) update(files map[string]string) {
	m.t.Helper()
	m.next++
	data := fmt.Sprintf("..2026_%d", m.next)
	must(m.t, os.Mkdir(filepath.Join(m.dir, data), 0o755))
	for name, text := range files {
		write(m.t, filepath.Join(m.dir, data, name), text)
	}
	old, _ := os.Readlink(filepath.Join(m.dir, "..data"))
	must(m.t, os.Symlink(data, filepath.Join(m.dir, "..data_tmp")))
	must(m.t, os.Rename(filepath.Join(m.dir, "..data_tmp"), filepath.Join(m.dir, "..data")))
	for name := range files {
		if err := os.Symlink("..data/"+name, filepath.Join(m.dir, name)); err != nil && !errors.Is(err, fs.ErrExist) {
			m.t.Fatal(err)
		}
	}
	if old != "" {
		must(m.t, os.RemoveAll(filepath.Join(m.dir, old)))
	}
}

func TestWatchConfigMap(t *testing.T) {
	for _, name := range []string{"hosts", ""} { // the file, and its folder
		t.Run(name, func(t *testing.T) {
			m := &configMap{t: t, dir: t.TempDir()}
			m.update(map[string]string{"hosts": "a:1\n"})
			w := watch(t, configured(t, "path="+filepath.Join(m.dir, name), "settle=10s"))
			w.next("a:1")
			for i := range 5 {
				m.update(map[string]string{"hosts": fmt.Sprintf("a:1\nb:%d\n", i)})
				w.next(fmt.Sprintf("a:1 b:%d", i))
			}
		})
	}
}

func TestWatchDirectory(t *testing.T) {
	dir := t.TempDir()
	one, two := filepath.Join(dir, "1.hosts"), filepath.Join(dir, "2.hosts")
	write(t, two, "b:1\n")
	s := configured(t, "path="+dir, "pattern=*.hosts", "settle=20ms")
	w := watch(t, s)
	w.next("b:1")
	write(t, filepath.Join(dir, "notes"), "x:1\n")
	write(t, one, "a:1\n")
	w.next("a:1 b:1")
	replace(t, two, "c:1\n")
	w.next("a:1 c:1")
	must(t, os.Remove(one))
	w.next("c:1")
	must(t, os.Remove(two))
	w.next("")
	must(t, os.Remove(filepath.Join(dir, "notes")))
	must(t, os.Remove(dir))
	if err := w.fails(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("removed: %v", err)
	}
}

// TestWatchDirectoryEditor: a file that is missing from a folder for a moment, as with some
// editors, does not remove its hosts.
func TestWatchDirectoryEditor(t *testing.T) {
	dir := t.TempDir()
	one, two := filepath.Join(dir, "1"), filepath.Join(dir, "2")
	write(t, one, "a:1\n")
	write(t, two, "b:1\n")
	w := watch(t, configured(t, "path="+dir, "settle=10s"))
	w.next("a:1 b:1")
	must(t, os.Rename(one, one+"~"))
	write(t, two, "b:2\n")
	write(t, one, "a:2\n")
	w.next("a:2 b:2")
}

// TestRescan: rescan finds changes that inotify does not report, such as those by another machine.
func TestRescan(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hosts")
	write(t, path, "a:1\n")
	s := configured(t, "path="+path, "rescan=5ms")
	s.cfg.Load().watch = func(*fsnotify.Watcher, string) error { return errors.New("deaf") }
	w := watch(t, s)
	w.next("a:1")
	write(t, path, "b:1\n")
	w.next("b:1")
}

// TestNoWatch: if the system allows no more watches, the source has to be polled.
func TestNoWatch(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hosts")
	write(t, path, "a:1\n")
	s := configured(t, "path="+path)
	s.cfg.Load().watch = func(*fsnotify.Watcher, string) error {
		return &os.PathError{Op: "add", Path: path, Err: syscall.ENOSPC}
	}
	if err := watch(t, s).fails(); !errors.Is(err, discovery.ErrNoWatch) {
		t.Error(err)
	}
}
