package launch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Local runs workers on this machine. The zero value is ready.
//
// A worker leads a process group of its own and is killed by the kernel when the driver dies. Its
// children are not, which is what Guard is for. Where cgroups of version 2 can be made, a worker
// has one of its own, and all that is in it ends with the worker. Elsewhere, after an exit that
// nobody asked for, children that left the process group are sought only where they keep the output
// open; that search reads all of /proc and would delay the news of the exit.
type Local struct{}

var _ Launcher = Local{}

// Run implements Launcher.
func (Local) Run(ctx context.Context, s Spec, started func(pid int)) error {
	if err := context.Cause(ctx); err != nil {
		return startError(s, err)
	}
	path, err := lookUp(s)
	if err != nil {
		return startError(s, err)
	}
	out, err := newPipes(s.Stdout, s.Stderr)
	if err != nil {
		return startError(s, err)
	}
	g := newCgroup()
	defer func() { g.remove() }()
	p, err := fork(path, s, out.child, g)
	if err != nil && g != nil { // it may be the cgroup that the kernel refuses
		if p, err = fork(path, s, out.child, nil); err == nil {
			noCgroups.Store(true)
			g.remove()
			g = nil
		}
	}
	out.closeChild()
	if err != nil {
		out.closeOurs()
		return startError(s, err)
	}
	if started != nil {
		started(p.pid) // before it is heard of by its output
	}
	out.start()
	k := newKin(s.Incarnation, p.pid)
	defer k.release()
	dump := watchDump(p.pid, s.CoreLimit)
	defer dump.close()
	stopped := p.await(ctx, s, k, g, dump)
	if !p.hasEnded() {
		p.abandon()
		end := newUnkillable(p.pid)
		if s.Ended != nil {
			s.Ended(end)
		}
		out.abandon()
		return end
	}
	p.signalGroup(syscall.SIGKILL)
	status := p.reap()
	k.root = 0
	g.empty()
	if stopped || adopting.Load() && len(relatives.strays()) > 0 {
		k.kill()
	}
	end := exitError(status)
	if s.Ended != nil {
		s.Ended(end)
	}
	out.drain(k.kill)
	return end
}

// process is a child that the goroutine of Run owns. It alone sends signals, and only before it
// calls reap: until then the dead child keeps its id and the group's, so that no signal can meet a
// stranger who got the id next.
type process struct {
	pid    int
	dead   chan struct{} // closed when the child has ended
	mayEnd chan struct{} // closed by reap
	status chan syscall.WaitStatus
}

// fork starts the child from a thread that stays until the child is reaped: the kernel sends the
// parent-death signal when the thread that forked ends, not the process.
func fork(path string, s Spec, files []uintptr, g *cgroup) (*process, error) {
	p := &process{
		dead:   make(chan struct{}),
		mayEnd: make(chan struct{}),
		status: make(chan syscall.WaitStatus, 1),
	}
	attr := &syscall.ProcAttr{
		Dir:   s.Dir,
		Env:   lastOfEach(s.Env),
		Files: files,
		Sys:   &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL},
	}
	g.enter(attr.Sys)
	forked := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := relatives.fork(true, func() (int, error) {
			var err error
			p.pid, err = forkWithCore(path, s, attr)
			return p.pid, err
		})
		forked <- err
		if err == nil {
			p.status <- p.wait()
		}
	}()
	if err := <-forked; err != nil {
		if _, statErr := os.Stat(inDir(s.Dir, path)); errors.Is(err, syscall.ENOENT) && statErr == nil {
			err = fmt.Errorf("its interpreter is missing: %w", err)
		}
		return nil, err
	}
	return p, nil
}

// wait blocks in the kernel until the child has ended, and again until Run has no more signals to
// send.
func (p *process) wait() (ws syscall.WaitStatus) {
	for unix.Waitid(unix.P_PID, p.pid, nil, unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR {
		continue
	}
	close(p.dead)
	<-p.mayEnd
	for {
		if _, err := syscall.Wait4(p.pid, &ws, 0, nil); err != syscall.EINTR {
			relatives.reaped(p.pid)
			return ws
		}
	}
}

func (p *process) reap() syscall.WaitStatus {
	close(p.mayEnd)
	return <-p.status
}

// abandon leaves a child to itself that cannot be killed. Its end is taken note of whenever it
// comes.
func (p *process) abandon() { close(p.mayEnd) }

func (p *process) hasEnded() bool {
	select {
	case <-p.dead:
		return true
	default:
		return false
	}
}

// await blocks until the child has ended, or SIGKILL has not ended it in time. It ends the child
// once ctx has ended, and says whether it had to.
func (p *process) await(ctx context.Context, s Spec, k *kin, g *cgroup, dump *dumpWatch) (stopped bool) {
	if p.alone(ctx, s, dump) {
		return false
	}
	if s.Grace > 0 && !closed(s.Hurry) {
		if !adopting.Load() {
			k.find() // now: those whose parent obeys cannot be found by their parent later
		}
		p.signalGroup(syscall.SIGTERM)
		p.signalGroup(syscall.SIGCONT) // a stopped process cannot obey
		if p.within(s.Grace, s.Hurry, s.More) {
			return true
		}
	}
	for bound := time.Now().Add(dumpBound); dump.dumping() && !closed(s.Hurry) && time.Now().Before(bound); {
		if p.within(dumpLook, s.Hurry, nil) { // somebody wants the core file, whole
			return true
		}
	}
	if g.kill() != nil {
		k.freeze(time.Now().Add(killBound))
	}
	p.signalGroup(syscall.SIGKILL)
	p.within(killPatience, nil, nil)
	return true
}

// alone blocks until the child has ended by itself, which it tells, or ctx has.
func (p *process) alone(ctx context.Context, s Spec, dump *dumpWatch) bool {
	look := time.NewTimer(dump.every())
	defer look.Stop()
	for {
		select {
		case <-p.dead:
			return true
		case <-ctx.Done():
			return false
		case <-look.C:
		}
		if !dump.dumping() {
			look.Reset(dump.every())
		} else if s.Dying != nil {
			s.Dying(dump.what())
		}
	}
}

// within tells whether the child ends before the time is over, which begins anew with each value of
// more, or somebody is in a hurry.
func (p *process) within(d time.Duration, hurry, more <-chan struct{}) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		select {
		case <-p.dead:
			return true
		case <-more:
			timer.Reset(d)
			continue
		case <-timer.C:
		case <-hurry:
		}
		return false
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func (p *process) signalGroup(sig syscall.Signal) {
	err := syscall.Kill(-p.pid, sig)
	if err == syscall.ESRCH || sig == syscall.SIGKILL {
		_ = syscall.Kill(p.pid, sig) // it may have moved to another group
	}
}

// lookUp finds the program as a shell with the worker's environment would and, where PATH lacks it,
// as mpirun does, in the working directory.
func lookUp(s Spec) (string, error) {
	if len(s.Command) == 0 || s.Command[0] == "" {
		return "", errors.New("no command")
	}
	if s.Dir != "" {
		if fi, err := os.Stat(s.Dir); err != nil {
			return "", fmt.Errorf("working directory: %w", err)
		} else if !fi.IsDir() {
			return "", fmt.Errorf("working directory: %s is not a directory", s.Dir)
		}
	}
	name := s.Command[0]
	if strings.Contains(name, "/") {
		return name, nil
	}
	search := "/usr/local/bin:/usr/bin:/bin"
	for _, entry := range s.Env {
		if value, ok := strings.CutPrefix(entry, "PATH="); ok {
			search = value
		}
	}
	cause := errors.New("neither found in PATH nor in its working directory")
	for _, dir := range filepath.SplitList(search) {
		path := filepath.Join(dir, name)
		if !filepath.IsAbs(path) {
			path = "./" + path // relative to Dir, where the child looks
		}
		at := inDir(s.Dir, path)
		fi, err := os.Stat(at)
		if err != nil || fi.IsDir() {
			continue
		}
		if unix.Access(at, unix.X_OK) == nil {
			return path, nil
		}
		cause = fmt.Errorf("%s: %w", path, os.ErrPermission)
	}
	here := "./" + name
	if fi, err := os.Stat(inDir(s.Dir, here)); err == nil && !fi.IsDir() && unix.Access(inDir(s.Dir, here), unix.X_OK) == nil {
		return here, nil
	}
	return "", cause
}

// inDir returns where a path leads that the child looks up in its working directory.
func inDir(dir, path string) string {
	if filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(dir, path)
}

// lastOfEach keeps the last entry of each name: programs differ in which of two they take.
func lastOfEach(env []string) []string {
	last := make(map[string]int, len(env))
	for i, entry := range env {
		name, _, _ := strings.Cut(entry, "=")
		last[name] = i
	}
	kept := make([]string, 0, len(last))
	for i, entry := range env {
		if name, _, _ := strings.Cut(entry, "="); last[name] == i {
			kept = append(kept, entry)
		}
	}
	return kept
}
