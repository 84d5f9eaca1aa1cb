package docs_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

// root is the path of the repository from here.
const root = ".."

var temp string // the folder of the built programs

func TestMain(m *testing.M) {
	os.Exit(sandbox.Run(m, func(dir string) error { temp = dir; return nil }))
}

// page is a file of Markdown.
type page struct {
	name string // path from the root
	text string
}

// pages reads the pages that match the patterns.
func pages(t *testing.T, patterns ...string) (all []page) {
	t.Helper()
	for _, pattern := range patterns {
		names, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil || len(names) == 0 {
			t.Fatalf("%s: %v, %v", pattern, names, err)
		}
		for _, name := range names {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, page{strings.TrimPrefix(name, root+"/"), string(text)})
		}
	}
	return all
}

// userPages returns the pages whose commands are run.
func userPages(t *testing.T) []page { return pages(t, "README.md", "docs/*.md", "discovery/README.md") }

// block is the text between two fences.
type block struct {
	line int    // number of its first line
	info string // the text after the opening fence
	text string
}

// shells returns the page's blocks of commands: sh, sh job or sh REASON.
func (p page) shells() []block {
	return p.find(func(info string) bool { return info == "sh" || strings.HasPrefix(info, "sh ") })
}

// blocks returns the page's blocks with one of these infos.
func (p page) blocks(infos ...string) []block {
	return p.find(func(info string) bool { return slices.Contains(infos, info) })
}

func (p page) find(wanted func(info string) bool) (found []block) {
	var open *block
	for i, line := range strings.Split(p.text, "\n") {
		info, fence := strings.CutPrefix(line, "```")
		switch {
		case fence && open == nil:
			open = &block{line: i + 2, info: info}
		case fence:
			if wanted(open.info) {
				found = append(found, *open)
			}
			open = nil
		case open != nil:
			open.text += line + "\n"
		}
	}
	return found
}

// prose returns the lines of the page, with those of blocks replaced by empty ones.
func (p page) prose() []string {
	lines, inside := strings.Split(p.text, "\n"), false
	for i, line := range lines {
		fence := strings.HasPrefix(line, "```")
		if inside || fence {
			lines[i] = ""
		}
		inside = inside != fence
	}
	return lines
}

// bin builds the programs of the pages: hvdrun, three examples, and the README's loop as train.
var bin = sync.OnceValues(func() (string, error) {
	readme, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		return "", err
	}
	loops := page{"README.md", string(readme)}.blocks("go")
	if len(loops) != 1 {
		return "", fmt.Errorf("README.md has %d blocks of Go, not its training loop alone", len(loops))
	}
	dir := filepath.Join(temp, "bin")
	var programs []string
	for _, name := range []string{"cmd/hvdrun", "examples/hello", "examples/digits", "examples/evaluate"} {
		programs = append(programs, "github.com/hvdrun/hvdrun/"+name)
	}
	if err := sandbox.Build(dir, programs...); err != nil {
		return "", err
	}
	source := filepath.Join(temp, "train.go")
	if err := os.WriteFile(source, []byte(loops[0].text), 0o600); err != nil {
		return "", err
	}
	cmd := exec.Command("go", "build", "-ldflags=-w", "-o", filepath.Join(temp, "train"), source)
	cmd.Dir, cmd.Env = root, append(os.Environ(), "GOFLAGS=-trimpath", "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%v: %w\n%s", cmd.Args, err, out)
	}
	return dir, nil
})

// folder is the folder in which the commands of a page run, with the files that they name.
type folder struct {
	dir string
	env []string
}

func newFolder(t *testing.T) folder {
	t.Helper()
	programs, err := bin()
	if err != nil {
		t.Fatal(err)
	}
	s := folder{dir: t.TempDir()}
	for name, to := range map[string]string{"bin": programs, "train": filepath.Join(temp, "train")} {
		if err := os.Symlink(to, filepath.Join(s.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	script := "#!/bin/sh\necho localhost:2\n"
	if err := sandbox.WriteProgram(filepath.Join(s.dir, "discover.sh"), []byte(script)); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(s.dir, "run"), 0o700); err != nil {
		t.Fatal(err)
	}
	s.env = append(os.Environ(), "PATH="+programs+":"+os.Getenv("PATH"), "HOME="+s.dir,
		"XDG_STATE_HOME="+filepath.Join(s.dir, "state"), "XDG_RUNTIME_DIR="+filepath.Join(s.dir, "run"))
	return s
}

// command returns a command that runs in the folder. The end of the test kills it and all processes
// that it has started.
func (s folder) command(t *testing.T, name string, args ...string) *exec.Cmd {
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env = s.dir, s.env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	return cmd
}

// unrun has the reasons of blocks "sh REASON" that are not run, but whose flags are checked: what
// such a block needs, and what runs similar commands.
var unrun = map[string]string{
	"hosts":      "other machines: test/e2e/netns has some, which are network namespaces; or more slots than a test may use",
	"stays":      "does not end by itself, or needs a person at a terminal: test/e2e, test/browser",
	"died":       "a job whose hvdrun was killed: make chaos-drivers",
	"plugin":     "a plugin of the reader's: test/e2e",
	"torch":      "Python with torch: make check-torch",
	"gpu":        "a GPU: make gpu-check",
	"root":       "an agent of root, with users: make check-deb, make check-systemd",
	"kubernetes": "a cluster of Kubernetes: make check-kubernetes",
	"slurm":      "a cluster of Slurm: make check-slurm",
	"module":     "a module proxy, or a clone beside the working directory: make check-release, TestOutside",
	"release":    "the files of a release: make check-release",
	"cgo":        "a C compiler: cmd/libhvdrun",
}

// TestCommands runs the commands of each page, block by block.
func TestCommands(t *testing.T) {
	n := 0
	for _, p := range userPages(t) {
		all := p.shells()
		if len(all) == 0 {
			continue
		}
		n += len(all)
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			s := newFolder(t)
			for _, b := range all {
				at := fmt.Sprintf("%s:%d", p.name, b.line)
				switch b.info {
				case "sh":
					s.run(t, at, b.text)
				case "sh job":
					s.runWithJob(t, at, b.text)
				default:
					if reason := strings.TrimPrefix(b.info, "sh "); unrun[reason] == "" {
						t.Errorf("%s: %q is no reason for which commands are not run: see unrun", at, reason)
					}
					s.checkFlags(t, at, b.text)
				}
			}
		})
	}
	if n < 20 {
		t.Errorf("the pages have %d blocks of commands", n)
	}
}

// run runs a block by bash. Of a make command, only the target is checked.
func (s folder) run(t *testing.T, at, text string) {
	t.Helper()
	var script strings.Builder
	for line := range strings.Lines(text) {
		if !checkTarget(t, at, line) {
			script.WriteString(line)
		}
	}
	cmd := s.command(t, "bash", "-ec", script.String())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%s: %v\n%s", at, err, out)
	}
}

// checkTarget reports whether the line is a make command, and checks that the Makefile has its
// target.
func checkTarget(t *testing.T, at, line string) bool {
	t.Helper()
	words := strings.Fields(line)
	if len(words) < 2 || words[0] != "make" {
		return false
	}
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(words[1]) + `:.*##`).Match(makefile) {
		t.Errorf("%s: the Makefile has no documented target %s", at, words[1])
	}
	return true
}

// runWithJob runs a block while a job trains, and stops the job if the block does not.
func (s folder) runWithJob(t *testing.T, at, text string) {
	t.Helper()
	events, theirs, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer events.Close()
	job := s.command(t, "bin/hvdrun", "-np", "3", "--min-np", "1", "-H", "localhost:2,127.0.0.1:1", "--events-file", "/dev/fd/3",
		"bin/digits", "-epochs", "1000000", "-step-time", "10ms")
	job.ExtraFiles = []*os.File{theirs}
	var out bytes.Buffer
	job.Stderr = &out
	if err := errors.Join(job.Start(), theirs.Close()); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(events)
	for lines.Scan() && !strings.Contains(lines.Text(), `"first_commit"`) {
	}
	if !strings.Contains(text, "hvdrun stop") {
		text += "hvdrun stop\n"
	}
	if s.run(t, at, text); t.Failed() {
		_ = job.Cancel()
	}
	_, _ = io.Copy(io.Discard, events) // the driver writes until it ends
	err = job.Wait()
	if code := job.ProcessState.ExitCode(); code != 128+int(syscall.SIGTERM) {
		t.Errorf("%s: the job ended with %v\n%s", at, err, &out)
	}
}

// checkFlags makes hvdrun parse each of its commands in a block, by adding --help.
func (s folder) checkFlags(t *testing.T, at, text string) {
	t.Helper()
	for line := range strings.Lines(text) {
		if checkTarget(t, at, line) {
			continue
		}
		line, _, _ = strings.Cut(line, " # ")
		words := strings.Fields(line)
		if i := slices.Index(words, "hvdrun"); i >= 0 {
			if out, err := s.command(t, "bin/hvdrun", withHelp(words[i+1:])...).CombinedOutput(); err != nil {
				t.Errorf("%s: hvdrun %v: %v\n%s", at, words[i+1:], err, out)
			}
		}
	}
}

// withHelp adds --help before all flags.
func withHelp(words []string) []string {
	if len(words) > 0 && !strings.HasPrefix(words[0], "-") {
		behind := 1
		switch words[0] { // these have subcommands
		case "cluster", "submit":
			behind = 2
		case "tasks":
			if len(words) > 1 && !strings.HasPrefix(words[1], "-") {
				behind = 2
			}
		}
		return slices.Insert(slices.Clone(words), behind, "--help")
	}
	return slices.Insert(slices.Clone(words), 0, "--help")
}

func TestFlagsAreChecked(t *testing.T) {
	t.Parallel()
	s := newFolder(t)
	for _, line := range []string{"-np 2 --min-npp 1 ./train", "check -H a:1 --nothing", "drain --force a", "resume --all", "cluster serve c --nothing", "submit kubernetes --nothing"} {
		if out, err := s.command(t, "bin/hvdrun", withHelp(strings.Fields(line))...).CombinedOutput(); err == nil {
			t.Errorf("hvdrun %s is accepted:\n%s", line, out)
		}
	}
}

// TestOutside: the README's loop builds in a separate module that requires a clone of this one.
func TestOutside(t *testing.T) {
	if testing.Short() {
		t.Skip("the loop is built inside of this module as well; make test builds it outside")
	}
	dir, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile(filepath.Join(dir, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	sums, err := os.ReadFile(filepath.Join(dir, "go.sum"))
	if err != nil {
		t.Fatal(err)
	}
	own := t.TempDir()
	for name, text := range map[string][]byte{"main.go": []byte(page{"README.md", string(readme)}.blocks("go")[0].text), "go.sum": sums} {
		if err := os.WriteFile(filepath.Join(own, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, words := range []string{"mod init example.com/train",
		"mod edit -require github.com/hvdrun/hvdrun@v0.0.0 -replace github.com/hvdrun/hvdrun=" + dir, "build -mod=mod -o train ."} {
		cmd := exec.CommandContext(t.Context(), "go", strings.Fields(words)...)
		cmd.Dir, cmd.Env = own, append(os.Environ(), "GOFLAGS=-trimpath", "GOPROXY=off", "CGO_ENABLED=0", "GOWORK=off")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go %s: %v\n%s", words, err, out)
		}
	}
}

// TestLoop: the training loop of the README trains.
func TestLoop(t *testing.T) {
	t.Parallel()
	out, err := newFolder(t).command(t, "./train").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "y = 1.00 + 3.00 x") {
		t.Errorf("%v\n%s", err, out)
	}
}

var (
	inlineCode = regexp.MustCompile("`[^`]+`")
	flagName   = regexp.MustCompile(`(^|[\s\[(|])(--[a-z][a-z-]+)`)
	helpFlag   = regexp.MustCompile(`(?m)^\s+(?:-\w, )?(--[a-z][a-z-]+)`)
	helpName   = regexp.MustCompile(`(?m)^  ([a-z-]+) +[A-Z]`)
)

// foreign has the flags of other programs.
var foreign = []string{"--no-kill", "--worker-names", "--partition", "--gres", "--time", "--name"}

// TestFlags: each flag that a page names is hvdrun's, or one of horovodrun's that hvdrun refuses.
func TestFlags(t *testing.T) {
	t.Parallel()
	s := newFolder(t)
	help := func(args ...string) string {
		out, err := s.command(t, "bin/hvdrun", append(args, "--help")...).Output()
		if err != nil {
			t.Fatalf("hvdrun %v --help: %v", args, err)
		}
		return string(out)
	}
	known := make(map[string]bool)
	take := func(text string) {
		for _, m := range helpFlag.FindAllStringSubmatch(text, -1) {
			known[m[1]] = true
		}
	}
	var takeAll func(path ...string)
	takeAll = func(path ...string) {
		text := help(path...)
		if len(path) == 0 {
			for _, topic := range []string{"flags", "commands"} {
				out, err := s.command(t, "bin/hvdrun", "help", topic).Output()
				if err != nil {
					t.Fatalf("hvdrun help %s: %v", topic, err)
				}
				text += string(out)
			}
		}
		take(text)
		for _, m := range helpName.FindAllStringSubmatch(text, -1) {
			takeAll(append(slices.Clone(path), m[1])...)
		}
	}
	takeAll()
	if len(known) < 60 {
		t.Fatalf("the help lists %d flags", len(known))
	}
	for _, p := range pages(t, "README.md", "docs/*.md", "docs/design/*.md", "docs/reference/*.md", "discovery/README.md", "ARCHITECTURE.md") {
		for _, code := range inlineCode.FindAllString(strings.Join(p.prose(), "\n"), -1) {
			for _, m := range flagName.FindAllStringSubmatch(strings.Trim(code, "`"), -1) {
				flag := strings.TrimSuffix(m[2], "-")
				if known[flag] || slices.Contains(foreign, flag) || s.takes(t, flag) {
					continue
				}
				t.Errorf("%s: %s: hvdrun has no such flag", p.name, code)
			}
		}
	}
}

// takes reports whether hvdrun accepts a flag under another name, or refuses it as horovodrun's.
func (s folder) takes(t *testing.T, flag string) bool {
	out, err := s.command(t, "bin/hvdrun", flag+"=1", "--help").CombinedOutput()
	return err == nil || strings.Contains(string(out), "of horovodrun is not taken")
}
