package proc

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"sync"
)

// guardScript waits for the end of its input and kills all processes that carry the entry $1, until
// two looks in a row find none: one look can miss a process that is just being started. Where the
// input ends without a line, its writer has died: then all cgroups whose paths begin with one of
// the other arguments are emptied too.
const guardScript = `
told=
while read -r line; do told=$line; done
mark=$1
shift
[ -z "$told" ] || set --
for prefix; do
	for c in "$prefix"*; do [ ! -d "$c" ] || echo 1 >"$c/cgroup.kill"; done
done 2>/dev/null
leave() {
	status=$1
	shift
	for prefix; do rmdir "$prefix"*; done 2>/dev/null
	exit "$status"
}
quiet=0 look=0
while :; do
	found=$(grep -lszxF -e "$mark" /proc/[0-9]*/environ)
	if [ -z "$found" ]; then
		quiet=$((quiet + 1))
		[ "$quiet" -lt 2 ] || leave 0 "$@"
	else
		quiet=0
		for f in $found; do
			f=${f#/proc/}
			kill -KILL "${f%/environ}"
		done
	fi
	look=$((look + 1))
	[ "$look" -lt 200 ] || leave 1 "$@"
	sleep 0.01
done
`

var markPattern = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)

// Guard kills every process that carries a mark in its environment once the process that started
// the guard is gone, however it ended: a small shell, in a session of its own, that reads from a
// pipe held by that process alone.
type Guard struct {
	mark  string
	shell *exec.Cmd
	pipe  io.WriteCloser
	close func() error
}

// StartGuard starts the guard of the processes with that variable, such as HVD_RUN_ID and a run's
// id. Both are made of letters, digits, "_" and "-". It needs /bin/sh and grep. The caller must
// call Close, and must not carry the mark itself. Cgroups that begin with one of the prefixes (see
// CgroupsBelow) are emptied as well, and so are those that this process makes without being told
// where.
func StartGuard(variable, value string, prefixes ...string) (*Guard, error) {
	mark := variable + "=" + value
	if !markPattern.MatchString(variable) || !markPattern.MatchString(value) {
		return nil, fmt.Errorf("proc: guard: %q has other characters than letters, digits, _ and -", mark)
	}
	if carried, _ := carries(os.Getpid(), mark); carried {
		return nil, fmt.Errorf("proc: guard: this process itself was started with %s", mark)
	}
	if _, err := exec.LookPath("grep"); err != nil {
		return nil, fmt.Errorf("proc: guard: %w", err)
	}
	args := append([]string{"-c", guardScript, "hvdrun-guard", mark}, prefixes...)
	if own := cgroupPrefix(); own != "" {
		args = append(args, own)
	}
	g := &Guard{mark: mark, shell: exec.Command("/bin/sh", args...)}
	g.shell.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C"}
	g.shell.Dir = "/"
	pipe, err := g.shell.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("proc: guard: %w", err)
	}
	if err := StartSession(g.shell); err != nil {
		return nil, fmt.Errorf("proc: guard: %w", err)
	}
	g.pipe = pipe
	g.close = sync.OnceValue(g.finish)
	return g, nil
}

// Close has the guard do its work now and blocks until it is done: some 20 ms where nothing is
// left, and a few seconds at most. It returns an error where something could not be killed. Later
// calls return the same.
func (g *Guard) Close() error { return g.close() }

func (g *Guard) finish() error {
	_, _ = io.WriteString(g.pipe, "close\n") // fails where the guard itself is gone
	_ = g.pipe.Close()
	err := WaitSession(g.shell)
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.ExitCode() == 1:
		return fmt.Errorf("proc: guard: processes with %s are left", g.mark)
	case err != nil:
		return fmt.Errorf("proc: guard: %w", err)
	}
	return nil
}
