package agent

import (
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
)

// speaker is a script with the environment of a worker. The test observes its lines and its steps.
type speaker struct {
	*launch.Spec
	steps chan string // started, lines, ended
	hold  chan struct{}

	mu    sync.Mutex
	noted []func() // of lines, if hold is not nil
}

// newSpeaker returns a speaker whose descriptor 3 is its line. authority can be nil.
func newSpeaker(t *testing.T, authority *identity.Authority, i int, text string) *speaker {
	t.Helper()
	p := &speaker{steps: make(chan string, 10_000)}
	credentials := "none"
	if authority != nil {
		own, err := authority.Issue(identity.Subject{Role: identity.Worker, Host: "a", Index: i, Incarnation: "speaker"})
		if err != nil {
			t.Fatal(err)
		}
		credentials = own.ForWorker().Encode()
	}
	env := plan.Worker{
		RunID: "r", Incarnation: rand.Text(), Size: 1, Credentials: credentials,
		Slot: plan.Slot{SlotID: plan.SlotID{Host: "a", Index: i}, LocalSize: 1, CrossSize: 1},
	}
	p.Spec = &launch.Spec{
		Incarnation: env.Incarnation, Slot: env.Slot.SlotID, Command: []string{"bash", "-c", text},
		Env: append(env.Environ(), "PATH="+os.Getenv("PATH"), plan.EnvNoPythonPath+"=1"),
		Line: func(text []byte, noted func()) {
			if strings.Contains(string(text), "fetching") || strings.Contains(string(text), "pulse") {
				noted()
				return
			}
			if p.hold == nil {
				noted()
			} else {
				p.mu.Lock()
				p.noted = append(p.noted, noted)
				p.mu.Unlock()
			}
			p.steps <- string(text)
		},
		Ended: func(err error) { p.steps <- fmt.Sprint("ended ", err) },
	}
	return p
}

// run starts the script.
func (p *speaker) run(t *testing.T, l *client.Agents) *running {
	t.Helper()
	spec := *p.Spec
	r := &running{t: t, cancel: func() {}, pid: make(chan int, 1), ended: make(chan error, 1), stdout: &watched{news: wake.New()}}
	spec.Stdout, spec.Stderr = r.stdout, r.stdout
	go func() {
		r.ended <- l.Run(t.Context(), &spec, func(pid int) {
			p.steps <- "started"
			r.pid <- pid
		})
	}()
	return r
}

// besideScript is the script of a speaker for runBeside.
const besideScript = `echo "at $HVD_LAUNCHER_ADDR."; exec sleep 1000`

// runBeside starts besideScript, and returns the credentials and the address with which the test
// connects to the agent in its place.
func (p *speaker) runBeside(t *testing.T, l *client.Agents) (r *running, own *identity.Credentials, at string) {
	t.Helper()
	r = p.run(t, l)
	r.awaitOutput(".\n")
	_, at, _ = strings.Cut(strings.TrimSuffix(r.stdout.String(), ".\n"), "at ")
	i := slices.IndexFunc(p.Env, func(entry string) bool { return strings.HasPrefix(entry, plan.EnvCredentials+"=") })
	own, err := identity.Decode(strings.TrimPrefix(p.Env[i], plan.EnvCredentials+"="))
	if err != nil {
		t.Fatal(err)
	}
	return r, own, at
}

// expect waits for steps with these beginnings, in this order.
func (p *speaker) expect(t *testing.T, steps ...string) {
	t.Helper()
	for _, want := range steps {
		if got := <-p.steps; !strings.HasPrefix(got, want) {
			t.Fatalf("%s; want %s", got, want)
		}
	}
}

const hello = `echo '{"do":"hello","version":1}' >&3; read -r answer <&3; `

// TestLines: a worker's lines arrive after its start and before its end, whatever its output does;
// the worker gets what the driver sends it.
func TestLines(t *testing.T) {
	l, _ := jobAgents(t, nil)
	p := newSpeaker(t, nil, 0, hello+`echo '{"do":"join","commits":3}' >&3; read -r line <&3; echo "$line";
		for i in {1..20}; do printf '%010000d\n' $i; done; echo '{"do":"report","what":"done","commits":4}' >&3; exit 3`)
	r := p.run(t, l)
	p.expect(t, "started", `{"do":"heard","again":true}`, `{"do":"join","commits":3,"program":"unnamed"}`)
	l.Tell([]string{"stranger", p.Incarnation}, nil, line.Dismissed(line.ErrRemoved), nil)
	p.expect(t, `{"do":"report","what":"done","commits":4}`, "ended exited with code 3")
	r.wait()
	if !strings.Contains(r.stdout.String(), `{"is":"dismissed","why":"removed","last":false}`) {
		t.Errorf("it prints %.200s", r.stdout)
	}
}

// TestLinesOfNextDriver: a driver that takes over gets the reports that the previous one has not
// recorded again, and learns what its workers wait for.
func TestLinesOfNextDriver(t *testing.T) {
	h := newHost(t, 1)
	driver, die, heir := mortal(t, h, "heard")
	p := newSpeaker(t, nil, 0, hello+`echo '{"do":"report","what":"leaving"}' >&3; echo '{"do":"join","commits":3}' >&3; read -r line <&3; echo "$line"`)
	p.hold = make(chan struct{})
	p.run(t, driver)
	p.expect(t, "started", `{"do":"heard"`, `{"do":"report","what":"leaving"}`, `{"do":"join"`)
	die()
	next := &speaker{steps: make(chan string, 100)}
	spec := *p.Spec
	spec.Resumed = true
	spec.Line = func(text []byte, noted func()) {
		noted()
		if !strings.Contains(string(text), "fetching") {
			next.steps <- string(text)
		}
	}
	spec.Ended = func(err error) { next.steps <- fmt.Sprint("ended ", err) }
	next.Spec = &spec
	l := heir(p.Incarnation)
	r := next.run(t, l)
	seen := map[string]int{}
	for seen[`{"do":"report","what":"leaving"}`] < 1 || seen[`{"do":"join","commits":3,"program":"unnamed"}`] < 1 || seen[`{"do":"heard","again":true}`] < 1 {
		seen[<-next.steps]++
	}
	l.Tell([]string{p.Incarnation}, nil, line.Dismissed(line.ErrFinished), nil)
	if err := r.wait(); err != nil || !strings.Contains(r.stdout.String(), `"finished"`) {
		t.Errorf("%v, %s", err, r.stdout)
	}
}

// TestTellWithoutStream: a line to a worker that is sent while no stream is attached is lost, and
// the next stream asks for it again.
func TestTellWithoutStream(t *testing.T) {
	h := newHost(t, 1)
	c := newCable(t, h.addr)
	l := agents(t, driverOf(t, "cut"), c.addr, longLease)
	p := newSpeaker(t, nil, 0, hello+`echo '{"do":"join"}' >&3; read -r line <&3; echo "$line"`)
	r := p.run(t, l)
	p.expect(t, "started", `{"do":"heard"`, `{"do":"join"`)
	c.cut()
	for said := range p.steps {
		if strings.HasPrefix(said, `{"do":"join"`) {
			break
		}
	}
	l.Tell([]string{p.Incarnation}, nil, line.Dismissed(line.ErrFinished), nil)
	if err := r.wait(); err != nil || !strings.Contains(r.stdout.String(), `"finished"`) {
		t.Errorf("%v, %s", err, r.stdout)
	}
}

// TestFloodOfLines: a worker that sends more lines than the driver handles waits, and another
// worker does not.
func TestFloodOfLines(t *testing.T) {
	l, _ := jobAgents(t, nil)
	flood := newSpeaker(t, nil, 0, hello+`for i in {1..100000}; do echo '{"do":"report","what":"leaving"}'; done >&3; exit 9`)
	flood.hold = make(chan struct{})
	r := flood.run(t, l)
	for range mostLines + 1 { // and the start
		<-flood.steps
	}
	other := newSpeaker(t, nil, 1, hello+`echo '{"do":"join"}' >&3; read -r line <&3`)
	o := other.run(t, l)
	other.expect(t, "started", `{"do":"heard"`, `{"do":"join"`)
	l.Tell([]string{other.Incarnation}, nil, line.Dismissed(line.ErrRemoved), nil)
	if err := o.wait(); err != nil {
		t.Error(err)
	}
	select {
	case said := <-flood.steps:
		t.Errorf("the driver has noted nothing, and hears %s", said)
	default:
	}
	note := func() { // the driver continues
		flood.mu.Lock()
		defer flood.mu.Unlock()
		for _, f := range flood.noted {
			f()
		}
		flood.noted = nil
	}
	for range 10 * mostLines {
		note()
		<-flood.steps
	}
	l.Kill()
	for len(r.ended) == 0 {
		note()
		select {
		case <-flood.steps:
		case err := <-r.ended:
			r.ended <- err
		}
	}
}

// TestConnections: a worker reaches the driver through its agent's listener, for protocols other
// than lines, with a certificate of the job and its own ticket, and may send much before it is
// answered; another ticket is refused.
func TestConnections(t *testing.T) {
	var authority *identity.Authority
	l, _ := jobAgents(t, func(cfg *client.Config, _ *inside) { authority = cfg.Authority })
	p := newSpeaker(t, authority, 0, besideScript)
	much := make([]byte, 1<<20)
	p.Stream = func(protocol string, conn net.Conn) {
		defer conn.Close()
		_, _ = io.ReadFull(conn, make([]byte, len(much)))
		fmt.Fprintf(conn, "%s of the driver\n", protocol)
		_, _ = io.Copy(conn, conn)
	}
	r, own, at := p.runBeside(t, l)
	conn, err := own.DialDoor(t.Context(), at, line.TasksProtocol)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write(append(much, "echo"...)); err != nil {
		t.Fatal(err)
	}
	want := line.TasksProtocol + " of the driver\necho"
	got := make([]byte, len(want))
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != want {
		t.Errorf("%q, %v", got, err)
	}
	none, err := own.ForWorker().DialDoor(t.Context(), at, line.TasksProtocol)
	if err == nil {
		if n, err := none.Read(got); n > 0 || err == nil {
			t.Errorf("a worker that is not there gets %q, %v", got[:n], err)
		}
		none.Close()
	}
	l.Kill()
	<-r.ended
}

// TestLastWords: what a worker has sent before it ended reaches the driver, although the driver is
// sending to it.
func TestLastWords(t *testing.T) {
	var authority *identity.Authority
	l, _ := jobAgents(t, func(cfg *client.Config, _ *inside) { authority = cfg.Authority })
	p := newSpeaker(t, authority, 0, besideScript)
	read := make(chan string, 1)
	p.Stream = func(_ string, conn net.Conn) {
		defer conn.Close()
		var sending sync.WaitGroup
		sending.Go(func() {
			for err := error(nil); err == nil; _, err = conn.Write(make([]byte, 1<<10)) {
			}
		})
		text, _ := io.ReadAll(conn)
		conn.Close()
		sending.Wait()
		read <- string(text)
	}
	r, own, at := p.runBeside(t, l)
	for range 20 {
		conn, err := own.DialDoor(t.Context(), at, line.TasksProtocol)
		if err == nil {
			_, err = io.ReadFull(conn, make([]byte, 1<<10)) // the driver has taken it over
		}
		if err == nil {
			_, err = conn.Write([]byte("last words"))
		}
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
		if got := <-read; got != "last words" {
			t.Fatalf("the driver has read %q", got)
		}
	}
	l.Kill()
	<-r.ended
}

// TestVersionsOfLines: a driver with another version of the worker protocol is refused, with an
// error that names both versions.
func TestVersionsOfLines(t *testing.T) {
	h := newHost(t, 1)
	d := newDriver(t, h, identity.Subject{RunID: "old", Role: identity.Driver})
	first := attach()
	first.GetAttach().Lines = 0
	d.say(first)
	_, err := d.stream.Recv()
	want := fmt.Sprintf("the driver speaks version 0 of the lines of workers, and this agent version %d", line.Version)
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), want) {
		t.Error(err)
	}
}
