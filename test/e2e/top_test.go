package e2e

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/charmbracelet/x/ansi"
	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/test/follow"
)

// terminal is a pseudo-terminal in which a program runs.
type terminal struct {
	t      *testing.T
	master *os.File
	cmd    *exec.Cmd
	modes  unix.Termios // before the program
	ended  chan struct{}
	width  int

	mu   sync.Mutex
	text []byte // everything that was written to it
}

// inTerminal starts a program in a terminal of 80 columns and 24 rows.
func inTerminal(t *testing.T, cmd *exec.Cmd) *terminal {
	t.Helper()
	master, slave, err := openTerminal()
	if err != nil {
		t.Fatal(err)
	}
	term := &terminal{t: t, master: master, cmd: cmd, ended: make(chan struct{}), width: 80}
	term.resize()
	modes, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	term.modes = *modes
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var reading sync.WaitGroup
	reading.Go(func() {
		b := make([]byte, 64<<10)
		for {
			n, err := master.Read(b)
			term.mu.Lock()
			term.text = append(term.text, b[:n]...)
			term.mu.Unlock()
			if err != nil {
				return
			}
		}
	})
	go func() {
		_ = cmd.Wait() // ProcessState has the status
		close(term.ended)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		<-term.ended
		slave.Close()
		reading.Wait()
		master.Close()
	})
	return term
}

// openTerminal returns both ends of a new pseudo-terminal.
func openTerminal() (master, slave *os.File, err error) {
	if master, err = os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0); err != nil {
		return nil, nil, err
	}
	n := 0
	err = unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0)
	if err == nil {
		n, err = unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	}
	if err == nil {
		slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	}
	if err != nil {
		return nil, nil, errors.Join(err, master.Close())
	}
	return master, slave, nil
}

// resize applies the width to the terminal and informs the program.
func (term *terminal) resize() {
	term.t.Helper()
	size := &unix.Winsize{Row: 24, Col: uint16(term.width)}
	if err := unix.IoctlSetWinsize(int(term.master.Fd()), unix.TIOCSWINSZ, size); err != nil {
		term.t.Fatal(err)
	}
}

// written returns what was written from an offset on, without escape sequences, and the offset of
// the end.
func (term *terminal) written(from int) (string, int) {
	term.mu.Lock()
	defer term.mu.Unlock()
	return ansi.Strip(string(term.text[from:])), len(term.text)
}

// sees blocks until the screen shows all words. The program redraws the whole screen only when the
// size changes, so sees changes the size again and again.
func (term *terminal) sees(words ...string) {
	term.t.Helper()
	last, from := "", 0
	looks := 0
	if follow.Await(term.t, func() bool {
		if looks++; looks%50 == 1 {
			_, from = term.written(0)
			term.width = 80 + (term.width+1)%2
			term.resize()
		}
		last, _ = term.written(from)
		return !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(last, w) })
	}) {
		return
	}
	term.t.Fatalf("the screen lacks some of %q:\n%s", words, last)
}

// press types keys.
func (term *terminal) press(keys string) {
	term.t.Helper()
	if _, err := io.WriteString(term.master, keys); err != nil {
		term.t.Fatal(err)
	}
}

// leaves waits for the program's end, and checks its status and that the terminal has its earlier
// modes.
func (term *terminal) leaves(status int) {
	term.t.Helper()
	<-term.ended
	if got := term.cmd.ProcessState.ExitCode(); got != status {
		text, _ := term.written(0)
		term.t.Errorf("status %d, want %d:\n%s", got, status, text[max(0, len(text)-2000):])
	}
	modes, err := unix.IoctlGetTermios(int(term.master.Fd()), unix.TCGETS)
	if err != nil || *modes != term.modes {
		term.t.Errorf("the terminal's modes are %+v, %v; before they were %+v", modes, err, term.modes)
	}
	if !follow.Await(term.t, func() bool {
		term.mu.Lock()
		defer term.mu.Unlock()
		all := string(term.text)
		return strings.LastIndex(all, "\x1b[?1049l") > strings.LastIndex(all, "\x1b[?1049h") && strings.LastIndex(all, "\x1b[?25h") > strings.LastIndex(all, "\x1b[?25l")
	}) {
		term.t.Error("the screen is not as before")
	}
}

// colour matches an escape sequence that sets a colour.
var colour = regexp.MustCompile(`\x1b\[([0-9;]*;)?(3[0-8]|9[0-7]|4[0-8])[;m]`)

func (term *terminal) colours() bool {
	term.mu.Lock()
	defer term.mu.Unlock()
	return colour.Match(term.text)
}

const rightKey = "\x1b[C"

// TestTop: top shows and steers a job in a terminal while the job's driver dies and is replaced; at
// the end the terminal is as before.
func TestTop(t *testing.T) {
	t.Parallel()
	r := controlled(t)
	folder, err := r.Folder()
	if err != nil {
		t.Fatal(err)
	}
	cmd := r.Subcommand(t.Context(), "top", folder)
	cmd.Env = append(cmd.Env, "TERM=xterm-256color")
	term := inTerminal(t, cmd)
	term.sees("running", "4 workers", "generation 1", "# 4 training")
	if !term.colours() {
		t.Error("there are no colours")
	}
	term.press(rightKey)
	term.sees("localhost:0  training  rank 0")
	term.press("d")
	term.sees("Drain localhost:0?", "no step is lost")
	if n := r.Count("drain_asked"); n != 0 {
		t.Error("a drain that was not confirmed")
	}
	term.press("y")
	g := awaitWorld(t, r, 1, 3)
	term.sees("3 workers", "D 1 drained")
	r.KillDriver()
	term.sees("no driver", "takes the job over")
	next, err := r.Resume("")
	if err != nil {
		t.Fatal(err)
	}
	term.sees("running", "3 workers")
	term.press("r")
	term.sees("Use localhost:0 again?")
	term.press("y")
	awaitWorld(t, next, g, 4)
	term.sees("4 workers", "# 4 training")
	term.press("5")
	term.sees("another driver has taken over")
	term.press("S")
	term.sees("Stop job")
	term.press("y")
	finish(t, next, 128+15, controlledSteps)
	term.sees("The job was stopped")
	term.press("q")
	term.leaves(0)
}

// TestTopEnds: Ctrl-C and signals end top, not the job, and the terminal is as before; with
// NO_COLOR, top uses no colours.
func TestTopEnds(t *testing.T) {
	t.Parallel()
	r := controlled(t)
	folder, err := r.Folder()
	if err != nil {
		t.Fatal(err)
	}
	for _, end := range []struct {
		how    func(*terminal)
		status int
	}{
		{func(term *terminal) { term.press("\x03") }, 0},
		{func(term *terminal) { term.cmd.Process.Signal(syscall.SIGTERM) }, 128 + 15},
		{func(term *terminal) { term.cmd.Process.Signal(syscall.SIGINT) }, 128 + 2},
		{func(term *terminal) { term.cmd.Process.Signal(syscall.SIGQUIT) }, 128 + 3},
	} {
		cmd := r.Subcommand(t.Context(), "top", folder)
		cmd.Env = append(cmd.Env, "TERM=xterm-256color", "NO_COLOR=1")
		term := inTerminal(t, cmd)
		term.sees("4 workers", "# 4 training")
		end.how(term)
		term.leaves(end.status)
		if term.colours() {
			t.Error("there are colours in spite of NO_COLOR")
		}
	}
	if out, err := r.Subcommand(t.Context(), "top", folder).CombinedOutput(); err == nil || !strings.Contains(string(out), "`hvdrun status --watch` needs none") {
		t.Errorf("without a terminal: %v, %s", err, out)
	}
	end(t, r)
}

// TestTopOverSSH: top works in the terminal of an ssh connection.
func TestTopOverSSH(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("an sshd of an ordinary user cannot give a terminal away")
	}
	t.Parallel()
	r := controlled(t)
	folder, err := r.Folder()
	if err != nil {
		t.Fatal(err)
	}
	words := strings.Fields(client(t, Host{Name: "far", Server: server(t)}))
	cmd := exec.CommandContext(t.Context(), words[0], append(words[1:], "-t", "far", binaries.Hvdrun, "top", folder)...)
	cmd.Env = append(os.Environ(), "TERM=xterm-256color")
	term := inTerminal(t, cmd)
	term.sees("4 workers", "# 4 training")
	term.press(rightKey + "2")
	term.sees("RANK", "localhost:1")
	term.press("q")
	term.leaves(0)
	end(t, r)
}
