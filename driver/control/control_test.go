package control_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/driver/control"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/controlpb"
	"github.com/hvdrun/hvdrun/job"
)

// strangerSocket is set in a copy of this program that connects to that socket as another user.
const strangerSocket = "CONTROL_TEST_STRANGER"

func TestMain(m *testing.M) {
	if path := os.Getenv(strangerSocket); path != "" {
		fmt.Print(visit(path))
		return
	}
	goleak.VerifyTestMain(m)
}

// visit calls the driver at the socket and describes the result.
func visit(path string) string {
	c, err := control.Dial(path)
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	s, err := c.Status(context.Background())
	return fmt.Sprintf("job %q, %v", s.Job, err)
}

// fake is a driver that records commands.
type fake struct {
	mu  sync.Mutex
	got []job.Command
	err error
}

func (f *fake) Status(context.Context) ([]byte, error) {
	return json.Marshal(job.Status{Job: "fake", State: job.Running})
}

func (f *fake) Stacks(_ context.Context, ranks []int, all bool) ([]byte, error) {
	if slices.Contains(ranks, 9) {
		return nil, &job.RefusedError{Reason: "there is no rank 9 now"}
	}
	s := []control.Stacks{{Rank: len(ranks), Host: fmt.Sprint(ranks, all)}}
	return json.Marshal(s)
}

func (f *fake) Command(_ context.Context, c job.Command) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.got = append(f.got, c)
	return "so be it", f.err
}

// serve serves h at the path until the test ends.
func serve(t *testing.T, path string, h control.Handler) { serveRecorded(t, path, h, nil) }

func serveRecorded(t *testing.T, path string, h control.Handler, record func(audit.Record)) {
	t.Helper()
	ln, err := control.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- control.Serve(ctx, ln, h, record) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func dial(t *testing.T, path string) *control.Client {
	t.Helper()
	c, err := control.Dial(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// TestCommands: each command arrives unchanged, and the answer is returned. The path of the socket
// exceeds the size of an address.
func TestCommands(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 100), strings.Repeat("e", 100))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, control.SocketName)
	f := &fake{}
	serve(t, path, f)
	if fi, err := os.Stat(path); err != nil || fi.Mode() != os.ModeSocket|0o600 {
		t.Errorf("the socket has mode %v, %v", fi.Mode(), err)
	}
	c := dial(t, path)
	if s, err := c.Status(t.Context()); err != nil || s.Job != "fake" || s.State != job.Running {
		t.Errorf("%+v, %v", s, err)
	}
	for _, want := range []job.Command{
		{Verb: job.Stop, Now: true},
		{Verb: job.Drain, Host: "a"},
		{Verb: job.Exclude, Host: "::1", Slot: new(0), For: 90 * time.Second},
		{Verb: job.Readmit, Host: "a", Slot: new(7)},
		{Verb: job.Scale, MinNP: new(3), MaxNP: new(0)},
		{Verb: job.Scale, MinNP: new(3)},
	} {
		done, err := c.Command(t.Context(), want)
		if err != nil || done != "so be it" {
			t.Errorf("%v: %q, %v", want, done, err)
		}
		want.By = audit.Who{UID: strconv.Itoa(os.Getuid()), PID: os.Getpid()} // the kernel reports them
		is, _ := json.Marshal(f.got[len(f.got)-1])
		if should, _ := json.Marshal(want); string(is) != string(should) {
			t.Errorf("%s arrives as %s", should, is)
		}
	}
	f.err = &job.RefusedError{Reason: "never"}
	refused, ok := errors.AsType[*job.RefusedError](func() error {
		_, err := c.Command(t.Context(), job.Command{Verb: job.Drain, Host: "a"})
		return err
	}())
	if !ok || refused.Reason != "never" {
		t.Errorf("a refusal arrives as %v", refused)
	}
}

// TestCheck: commands that are invalid for any job are refused by both client and server.
func TestCheck(t *testing.T) {
	for _, c := range []job.Command{
		{},
		{Verb: "dance"},
		{Verb: job.Drain},
		{Verb: job.Readmit, Host: "a", Slot: new(-1)},
		{Verb: job.Exclude, Host: "a", Slot: new(1 << 20)},
		{Verb: job.Exclude, Host: "a", For: -1},
		{Verb: job.Scale},
		{Verb: job.Scale, MinNP: new(0)},
		{Verb: job.Scale, MaxNP: new(-1)},
		{Verb: job.Scale, MaxNP: new(1<<32 + 2)}, // it would arrive truncated to 32 bits
		{Verb: job.Scale, MinNP: new(1 << 31), MaxNP: new(0)},
	} {
		if err := c.Check(); err == nil {
			t.Errorf("%+v is let through", c)
		}
	}
}

// over is a context whose deadline has passed.
type over struct{ context.Context }

func (over) Deadline() (time.Time, bool) { return time.Unix(0, 0), true }
func (over) Err() error                  { return context.DeadlineExceeded }

// TestNoAnswer: the error says how long the answer can take, which differs between calls.
func TestNoAnswer(t *testing.T) {
	c := dial(t, filepath.Join(t.TempDir(), control.SocketName))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	ctx = over{ctx}
	if _, err := c.Status(ctx); !errors.Is(err, control.ErrNoDriver) || !strings.Contains(err.Error(), "within 10s") {
		t.Errorf("the status: %v", err)
	}
	if _, err := c.Stacks(ctx, nil, false); !errors.Is(err, control.ErrNoDriver) || !strings.Contains(err.Error(), "within 30s") {
		t.Errorf("the stacks: %v", err)
	}
}

// TestStaleSocket: the socket of a dead driver is replaced; a file that is not a socket is not.
func TestStaleSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), control.SocketName)
	for range 2 {
		ln, err := control.Listen(path)
		if err != nil {
			t.Fatal(err)
		}
		ln.Close()
		if _, err := dial(t, path).Status(t.Context()); !errors.Is(err, control.ErrNoDriver) {
			t.Errorf("where nobody listens: %v", err)
		}
	}
	serve(t, path, &fake{})
	if _, err := dial(t, path).Status(t.Context()); err != nil {
		t.Error(err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if ln, err := control.Listen(file); err == nil {
		ln.Close()
		t.Error("a file was taken for a socket")
	}
	if _, err := dial(t, path+".not").Status(t.Context()); !errors.Is(err, control.ErrNoDriver) {
		t.Errorf("where nothing is: %v", err)
	}
}

// TestStrangers: another user is refused even if the directory's mode permits access.
func TestStrangers(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can be somebody else")
	}
	dir, err := os.MkdirTemp("/tmp", "control-") // a folder that others may enter
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, control.SocketName)
	records := make(chan audit.Record, 16)
	serveRecorded(t, path, &fake{}, func(r audit.Record) { records <- r })
	program := filepath.Join(dir, "stranger")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(program, text, 0o755), os.Chmod(dir, 0o755), os.Chmod(program, 0o755), os.Chmod(path, 0o777)); err != nil {
		t.Fatal(err)
	}
	if got := visit(path); got != `job "fake", <nil>` {
		t.Errorf("we: %s", got)
	}
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), strangerSocket+"="+path)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.HasPrefix(string(out), `job "", `+control.ErrNoDriver.Error()) {
		t.Errorf("a stranger: %v, %s", err, out)
	}
	if r := <-records; r.Who.UID != "65534" || r.Who.PID != cmd.Process.Pid || r.What != "connect" || !r.IsRefusal() {
		t.Errorf("the record of the stranger is %v", r)
	}
	if conn, err := net.Dial("unix", path); err != nil { // connecting must fail
		t.Error(err)
	} else {
		conn.Close()
	}
}

// TestCallsAreRecorded: each method of the service leaves a record, or passes its caller to the
// handler, which records it, or only reads.
func TestCallsAreRecorded(t *testing.T) {
	readOnly := map[protoreflect.Name]bool{"Status": true, "Stacks": true}
	path := filepath.Join(t.TempDir(), control.SocketName)
	f := &fake{}
	records := make(chan audit.Record, 16)
	serveRecorded(t, path, f, func(r audit.Record) { records <- r })
	conn, err := wire.NewLocalClient(path)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	calls := map[protoreflect.Name]func(verb string) error{
		"Command": func(verb string) error {
			_, err := controlpb.NewControlClient(conn).Command(t.Context(), &controlpb.CommandRequest{Verb: verb, Host: "a"})
			return err
		},
	}
	methods := controlpb.File_control_proto.Services().ByName("Control").Methods()
	for i := range methods.Len() {
		name := methods.Get(i).Name()
		call := calls[name]
		switch {
		case readOnly[name]:
			continue
		case call == nil:
			t.Errorf("%s has no record, and is not on the list of methods that only read", name)
			continue
		}
		if err := call("dance"); err == nil {
			t.Errorf("%s: nonsense is accepted", name)
		}
		if r := <-records; r.What != "dance" || !r.IsRefusal() || r.Who.PID != os.Getpid() {
			t.Errorf("%s: the record is %v", name, r)
		}
		if err := call(string(job.Drain)); err != nil {
			t.Error(err)
		}
		if c := f.got[len(f.got)-1]; c.By.PID != os.Getpid() || c.By.UID != strconv.Itoa(os.Getuid()) {
			t.Errorf("%s: the handler is told that %+v calls", name, c.By)
		}
	}
}
