package calls

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/report"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

var (
	whole    = flag.Bool("whole", false, "refuse each call by each of its errors, and print the table")
	programs follow.Programs
)

func TestMain(m *testing.M) {
	if err := become(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(sandbox.Run(m, func(dir string) (err error) {
		programs, err = follow.Build(context.Background(), dir)
		return err
	}))
}

// job returns a job with checkpoints, a folder, shared memory, sockets, and a worker that is
// killed. hvdrun and worker are the commands that run hvdrun and each worker.
func job(hvdrun, worker []string) follow.Job {
	trainer := []string{programs.Trainer, "-log", "steplog", "-dir", ".", "-steps", "10", "-checkpoints", "checkpoints",
		"-exit", "127.0.0.2:0@step=4:kill"}
	return follow.Job{
		Wrap: hvdrun,
		Flags: []string{"-np", "3", "--min-np", "1", "-H", "localhost:2,127.0.0.2:1", "--job-dir", "job",
			"--start-timeout", "20s", "--elastic-timeout", "20s"},
		Command: append(worker, trainer...),
	}
}

// outcome is the result of a job.
type outcome struct {
	status     int
	hung       bool
	output     string
	result     string   // rank 0's line of the last step
	warnings   []string // from the driver and each rank, without those about the killed worker
	twice      bool     // whether one of them repeats a warning
	checkpoint bool     // whether the last commit is on disk
}

var (
	result   = regexp.MustCompile(`step=10 (chain=\w+ weights=\w+)`)
	warning  = regexp.MustCompile(`^(\[\d+\])?.*(?:WARN +|ERROR +|level=(?:warning|error) msg=)"?(.*?)"?$`)
	expected = regexp.MustCompile(`was killed by signal 9|is excluded for`)
)

func run(t *testing.T, j follow.Job) outcome {
	t.Helper()
	r := programs.Test(t, j)
	if _, err := r.Wait(); err != nil {
		t.Log(err)
	}
	o := outcome{status: r.Status(), hung: r.Hung()}
	text, err := os.ReadFile(r.OutputPath())
	if err != nil {
		t.Fatal(err)
	}
	o.output = string(text)
	if found := result.FindSubmatch(text); found != nil {
		o.result = string(found[1])
	}
	var by []string
	for _, line := range strings.Split(o.output, "\n") {
		found := warning.FindStringSubmatch(line)
		if found == nil || expected.MatchString(line) {
			continue
		}
		text, _, _ := strings.Cut(found[2], " error=")
		if said := found[1] + text; slices.Contains(by, said) {
			o.twice = true
		} else {
			by = append(by, said)
		}
		if !slices.Contains(o.warnings, found[2]) {
			o.warnings = append(o.warnings, found[2])
		}
	}
	_, err = os.Stat(filepath.Join(r.Dir, "checkpoints", fmt.Sprintf("commit-%020d.safetensors", 10)))
	o.checkpoint = err == nil
	return o
}

// judge returns what is wrong with the outcome of a job for which the kernel refused call c, or "".
// plain is the outcome of a job without a refusal.
func (o outcome) judge(c call, plain outcome) string {
	switch {
	case o.hung:
		return "it hangs"
	case c.refused == "" && o.status != 0:
		return fmt.Sprintf("status %d", o.status)
	case c.refused != "" && o.status == 0:
		return "it ends well"
	case c.refused != "" && !strings.Contains(o.output, c.refused):
		return "the error does not say " + c.refused
	case o.status == 0 && o.result != plain.result:
		return fmt.Sprintf("the result is %q", o.result)
	case o.status == 0 && !o.checkpoint:
		return "the last commit is not on disk"
	case o.status == 0 && o.twice:
		return "a process repeats a warning"
	}
	return ""
}

// text returns the outcome as a cell of the table.
func (o outcome) text(c call) string {
	if o.status == 0 && len(o.warnings) == 0 {
		return "well"
	} else if o.status == 0 {
		return "well; warns: " + strings.Join(o.warnings, "; ")
	}
	lines := strings.Split(strings.TrimSpace(o.output), "\n")
	told := lines[len(lines)-1]
	if i := slices.IndexFunc(lines, func(line string) bool { return c.refused != "" && strings.Contains(line, c.refused) }); i >= 0 {
		told = lines[i]
	}
	return fmt.Sprintf("status %d: %s", o.status, told)
}

// TestRefusedCalls: a job for which the kernel refuses a system call succeeds, possibly with a
// warning, or fails at once with an error that names what is missing.
func TestRefusedCalls(t *testing.T) {
	plain := run(t, job(nil, nil))
	if why := plain.judge(call{}, plain); why != "" || plain.result == "" || len(plain.warnings) > 0 {
		t.Fatalf("without a refusal: %s; %+v", why, plain)
	}
	table := report.Table{{"call", "errors", "outcome"}}
	for _, c := range all {
		var texts []string
		errnos := map[string][]string{} // by text
		for _, errno := range c.errs {
			name := unix.ErrnoName(errno)
			if !*whole && !slices.Contains(few, c.name+" "+name) {
				continue
			}
			t.Run(c.name+" "+name, func(t *testing.T) {
				wrap, j := Refusal{Call: c.nr, If: c.of, Errno: errno}.Wrap(), follow.Job{}
				if c.workers {
					j = job(nil, wrap)
				} else {
					j = job(wrap, nil)
				}
				o := run(t, j)
				text := o.text(c)
				if why := o.judge(c, plain); why != "" {
					t.Errorf("%s: %s", why, text)
				}
				text = changing.ReplaceAllString(text, "…")
				if !slices.Contains(texts, text) {
					texts = append(texts, text)
				}
				errnos[text] = append(errnos[text], name)
			})
		}
		for _, text := range texts {
			table.Add(c.name, strings.Join(errnos[text], " "), text)
		}
	}
	if *whole {
		fmt.Println(table.Text())
	}
}

// changing matches what differs between two equal outcomes: paths, times and the text of the error.
var changing = regexp.MustCompile(`/tmp/\S+/|\d\d:\d\d:\d\d\S*|/proc/\d+/fd/\d+|\((?:operation|function|no locks|invalid|illegal|too many|no space)[a-z ]*\)`)

// few are the cases that run in every check of a change.
var few = []string{"flock ENOSYS", "fsync EINVAL", "fallocate EOPNOTSUPP", "pidfd_open ENOSYS", "clone3 ENOSYS", "memfd_create ENOSYS", "socketpair EPERM"}
