package jobrun

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

// detachedEnv tells a hvdrun that another one has started it in the background, which reads the
// job's run id from it at this descriptor.
const detachedEnv = "HVDRUN_DETACHED_FD"

// mostSaid bounds what is kept of what a hvdrun in the background says before its job has a folder.
const mostSaid = 64 << 10

// detach starts the same hvdrun in the background, in a session of its own, and returns once its
// job has a folder, to which its output goes from then on. With input the other hvdrun has the
// standard input of this one.
func detach(ctx context.Context, p *cli.Program, input bool) error {
	program, err := os.Executable()
	if err != nil {
		return cli.Failed(err)
	}
	run, runEnd, err := os.Pipe()
	if err != nil {
		return cli.Failed(err)
	}
	defer run.Close()
	var text bytes.Buffer
	cmd := exec.CommandContext(ctx, program, p.Args...)
	cmd.Env = append(slices.Clone(p.Env), detachedEnv+"=3")
	if input {
		cmd.Stdin = os.Stdin
	}
	cmd.ExtraFiles = []*os.File{runEnd} // 3
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	output, outputEnd, err := os.Pipe()
	if err != nil {
		return cli.Failed(errors.Join(err, runEnd.Close()))
	}
	defer output.Close()
	cmd.Stdout, cmd.Stderr = outputEnd, outputEnd
	err = cmd.Start()
	if err = errors.Join(err, runEnd.Close(), outputEnd.Close()); err != nil {
		return cli.Failed(err)
	}
	// Until it has ended, or writes to the job's folder.
	_, _ = io.Copy(&text, io.LimitReader(output, mostSaid))
	_, _ = io.Copy(io.Discard, output)
	id, err := bufio.NewReader(io.LimitReader(run, 1<<10)).ReadString('\n')
	if err == nil {
		_, _ = p.Stderr.Write(text.Bytes())
		id = strings.TrimSpace(id)
		_, err = fmt.Fprintf(p.Stdout, "%s\n", id)
		return errors.Join(err, cmd.Process.Release())
	}
	err = cmd.Wait()
	if ctx.Err() != nil {
		return cli.Failed(context.Cause(ctx))
	}
	why := strings.TrimPrefix(strings.TrimSpace(text.String()), "hvdrun: ")
	if why == "" {
		why = fmt.Sprintf("the hvdrun in the background has ended: %v", err)
	}
	return cli.ExitWith(cli.Failed(errors.New(why)), max(1, cmd.ProcessState.ExitCode()))
}

// inBackground returns where this hvdrun tells its run id; nil: it is in the foreground. The
// variable that says so is gone then.
func inBackground(p *cli.Program) *os.File {
	i := slices.IndexFunc(p.Env, func(v string) bool { return strings.HasPrefix(v, detachedEnv+"=") })
	if i < 0 {
		return nil
	}
	fd, err := strconv.Atoi(strings.TrimPrefix(p.Env[i], detachedEnv+"="))
	p.Env = slices.Delete(slices.Clone(p.Env), i, i+1)
	if err != nil || fd < 3 {
		return nil
	}
	unix.CloseOnExec(fd)
	return os.NewFile(uintptr(fd), "run id")
}

// settle makes this hvdrun write to its job's folder from now on, and tells the one that has
// started it that the job has begun.
func settle(told *os.File, d *jobdir.Dir) error {
	if d == nil {
		return errors.New("--detach: the job has no folder, where its output would be")
	}
	f, err := safefile.Append(d.OutputPath(), os.O_WRONLY|os.O_CREATE, safefile.Private)
	if err != nil {
		return err
	}
	for _, fd := range []int{1, 2} {
		if err := unix.Dup3(int(f.Fd()), fd, 0); err != nil {
			return errors.Join(err, f.Close())
		}
	}
	_, err = fmt.Fprintf(told, "%s\n", d.About.RunID)
	return errors.Join(err, told.Close(), f.Close())
}
