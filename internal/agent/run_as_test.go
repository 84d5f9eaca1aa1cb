package agent

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/internal/agent/runas"
	"github.com/hvdrun/hvdrun/internal/identity"
)

// driverNamed returns the credentials of a driver that a user has started.
func driverNamed(t *testing.T, run, name string) *identity.Credentials {
	t.Helper()
	return credentials(t, testKey, "blue", identity.Subject{RunID: run, Role: identity.Driver, User: name, UID: "1000"})
}

func policyOf(t *testing.T, text string) *runas.Policy {
	t.Helper()
	p, err := runas.Parse("policy", text)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// nobody returns a user other than root, if this process can start programs as that user; otherwise
// it skips the test.
func nobody(t *testing.T) *user.User {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can start processes as another user")
	}
	u, err := user.Lookup("nobody")
	if err != nil {
		t.Skipf("there is no other user: %v", err)
	}
	return u
}

// reachable gives everybody search permission for the folders above a path.
func reachable(t *testing.T, path string) {
	t.Helper()
	for path = filepath.Dir(path); path != "/"; path = filepath.Dir(path) {
		if fi, err := os.Stat(path); err == nil && fi.Mode().Perm()&0o001 != 0 {
			continue
		}
		if err := os.Chmod(path, 0o711); err != nil {
			t.Fatal(err)
		}
	}
}

// TestWorkersOfAnotherUser: a worker that runs as another user can do its work, but cannot read
// anything that only the agent must know. It is ended together with all processes that it started.
func TestWorkersOfAnotherUser(t *testing.T) {
	other := nobody(t)
	state := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(state, 0o700); err != nil {
		t.Fatal(err)
	}
	reachable(t, state)
	secret := filepath.Join(state, "agent.pem")
	if err := os.WriteFile(secret, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	held, err := os.Open(secret)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	h := newHost(t, 1)
	h.runAs = policyOf(t, "user=alice as=nobody")
	l := agents(t, driverNamed(t, "as", "alice"), h.addr, longLease)
	text := `
echo "ids $(id -u) $(id -g) groups $(id -G)"
echo "home $HOME user $USER $LOGNAME"
for f in /proc/$PPID/environ /proc/$PPID/mem ` + secret + `; do
	if cat $f >/dev/null 2>&1; then echo "READ it"; else echo "refused"; fi
done
ls /proc/$PPID/fd >/dev/null 2>&1 && echo "READ descriptors"
kill -0 $PPID 2>/dev/null && echo "SIGNALLED"
ls -l /proc/$$/fd
echo reopened >/proc/self/fd/1
setsid sleep 1000 </dev/null >/dev/null 2>&1 9>"$1" &
echo ready
trap '' TERM
while :; do sleep 1000; done`
	s, pipe := script(t, 0, text)
	path := s.Command[len(s.Command)-1]
	reachable(t, path)
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	s.Dir = "/"
	s.Env = append(s.Env, "HOME=/root", "USER=root")
	r := start(t, l, s)
	r.awaitOutput("ready")
	said := r.stdout.String()
	for _, want := range []string{
		fmt.Sprintf("ids %s %s groups %[2]s\n", other.Uid, other.Gid), "home " + other.HomeDir + " user nobody nobody\n",
		"refused\nrefused\nrefused\n", "reopened\n",
	} {
		if !strings.Contains(said, want) {
			t.Errorf("it does not say %q, but:\n%s", want, said)
		}
	}
	for _, bad := range []string{"READ", "SIGNALLED", "agent.pem"} {
		if strings.Contains(said, bad) {
			t.Errorf("it says:\n%s", said)
		}
	}
	r.cancel()
	if err := r.wait(); err == nil {
		t.Error("it ended well")
	}
	gone(t, pipe)
}

// TestRunAsRefuses: if a worker cannot be started as another user, the error gives the reason.
func TestRunAsRefuses(t *testing.T) {
	h := newHost(t, 1)
	h.runAs = policyOf(t, "user=alice as=root")
	s, _ := script(t, 0, "exit 0")
	wantRefused(t, agents(t, driverNamed(t, "x", "mallory"), h.addr, longLease).Run(t.Context(), s, nil),
		`no line of policy lets user "mallory" (uid 1000), run x, start workers`)

	nobody(t)
	h = newHost(t, 1)
	h.runAs = policyOf(t, "user=alice as=nobody\nuser=bob as=nobody cgroup=/nowhere")
	closed := filepath.Join(t.TempDir(), "closed")
	if err := os.Mkdir(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	s, _ = script(t, 0, "exit 0")
	s.Dir = closed
	wantRefused(t, agents(t, driverNamed(t, "dir", "alice"), h.addr, longLease).Run(t.Context(), s, nil),
		"user nobody may not enter the working directory "+closed, "because of the mode of /")
	s, _ = script(t, 0, "exit 0")
	wantRefused(t, agents(t, driverNamed(t, "cgroup", "bob"), h.addr, time.Second).Run(t.Context(), s, nil), "/nowhere")
}

// slowNames is a policy with a directory service that does not answer about the run slow.
type slowNames struct{ asked, answer chan struct{} }

func (n slowNames) For(driver identity.Subject) (runas.Rule, error) {
	if driver.RunID == "slow" {
		select {
		case n.asked <- struct{}{}:
			<-n.answer
		case <-n.answer:
		}
	}
	return runas.Rule{}, errors.New("no user of that name")
}

// TestSlowNamesHoldUpOneDriver: while a directory service does not answer about one driver, the
// agent serves the others.
func TestSlowNamesHoldUpOneDriver(t *testing.T) {
	h := newHost(t, 2)
	names := slowNames{make(chan struct{}), make(chan struct{})}
	h.runAs = names
	slow, _ := script(t, 0, "exit 0")
	r := start(t, agents(t, driverOf(t, "slow"), h.addr, longLease), slow)
	<-names.asked
	other, _ := script(t, 1, "exit 0")
	wantRefused(t, agents(t, driverOf(t, "other"), h.addr, longLease).Run(t.Context(), other, nil), "no user of that name")
	close(names.answer)
	wantRefused(t, r.wait(), "no user of that name")
}

// TestRunsBelongToTheirUsers: a user cannot take over the run of another user.
func TestRunsBelongToTheirUsers(t *testing.T) {
	h := newHost(t, 1)
	s, pipe := script(t, 0, sleeper)
	r := start(t, agents(t, driverNamed(t, "mine", "alice"), h.addr, longLease), s)
	r.awaitOutput("ready")
	other, _ := script(t, 0, "exit 0")
	err := agents(t, driverNamed(t, "mine", "mallory"), h.addr, time.Second).Run(t.Context(), other, nil)
	wantRefused(t, err, `the run is of user "alice", and not of "mallory"`)
	if n, _, _ := h.busy(); n != 1 {
		t.Error("the worker was ended")
	}
	r.cancel()
	r.wait()
	gone(t, pipe)
}
