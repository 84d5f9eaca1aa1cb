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

// detachedEnv is set for a hvdrun that another hvdrun starts in the background. Its value is the
// descriptor to which the new process writes the job's run id.
const detachedEnv = "HVDRUN_DETACHED_FD"

// mostSaid bounds, in bytes, the output kept of a background hvdrun before its job has a folder.
const mostSaid = 64 << 10

// detach starts the same hvdrun in the background, in a new session, and blocks until that process
// has a job folder, to which it then writes its output. If input is true, the new process inherits
// the standard input.
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
	// Until the process has ended, or writes to the job's folder.
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

// inBackground returns the file to which this hvdrun writes its run id; nil: it runs in the
// foreground. It removes the variable from p.Env.
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

// settle makes this hvdrun write its output to the job's folder from now on, and reports to the
// process that started it that the job has begun.
func settle(told *os.File, d *jobdir.Dir) error {
	if d == nil {
		return errors.New("--detach: the job has no folder for its output")
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
