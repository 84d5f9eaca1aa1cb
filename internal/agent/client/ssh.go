package client

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/proc"
)

const (
	// answerTimeout bounds the time until a host that ssh has reached, or an agent of this machine,
	// answers.
	answerTimeout = time.Minute
	// copyTimeout bounds the copy of the program to a host.
	copyTimeout = 10 * time.Minute
	// endTimeout bounds the time from the answer until ssh ends.
	endTimeout = 5 * time.Second
)

// The marks that begin the answers of our scripts on a host, besides readyMark. The scripts join
// each mark from two parts, so that a shell that echoes its command does not seem to answer.
const (
	lacksMark  = "hvdrun-lacks "
	copiedMark = "hvdrun-copied"
	failedMark = "hvdrun-failed "
)

// startScript runs the program $1 of the cache if its checksum is $2. Otherwise it reports that the
// program is missing, and the host's system and architecture. Like everything that the remote
// user's login shell passes on, it is one line without single quotes. It also searches the system's
// usual directories for programs, since the user's start-up files may leave PATH empty; the agent
// gets PATH unchanged.
const startScript = `m=hvdrun-; p=$PATH; PATH="$p:/usr/local/bin:/usr/bin:/bin"; f="${XDG_CACHE_HOME:-$HOME/.cache}/hvdrun/$1"; ` +
	`if [ -x "$f" ] && s=$(sha256sum "$f") && [ "${s%% *}" = "$2" ]; then PATH=$p exec "$f" agent --job; fi; ` +
	`echo "${m}lacks $(uname -s) $(uname -m)"`

// installedScript runs the program $1, which is installed on the host.
const installedScript = `exec "$1" agent --job`

// copyScript copies stdin into the cache as $1 if its checksum is $2. It removes programs that were
// copied more than a month ago.
const copyScript = `m=hvdrun-; PATH="$PATH:/usr/local/bin:/usr/bin:/bin"; umask 077; d="${XDG_CACHE_HOME:-$HOME/.cache}/hvdrun"; ` +
	`mkdir -p "$d" || { echo "${m}failed directory"; exit; }; ` +
	`t="$d/.$1.$$"; trap "rm -f \"$t\"" EXIT; trap "exit 1" HUP INT TERM; ` +
	`{ cat >"$t" && chmod 700 "$t"; } || { echo "${m}failed copy"; exit; }; ` +
	`s=$(sha256sum "$t") || { echo "${m}failed copy"; exit; }; s="${s%% *}"; ` +
	`[ "$s" = "$2" ] || { echo "its checksum is $s" >&2; echo "${m}failed copy"; exit; }; ` +
	`mv -f "$t" "$d/$1" || { echo "${m}failed copy"; exit; }; ` +
	`[ -x "$d/$1" ] || { echo "nothing can be run in $d" >&2; echo "${m}failed directory"; exit; }; ` +
	`find "$d" -type f -name "hvdrun-*" -mtime +30 -exec rm -f {} + ; echo "${m}copied"`

// SSH starts job agents on other machines with the system's ssh, its configuration, its agent and
// its known hosts. It never prompts. The agents outlive the connection, which ends once they have
// answered. The zero value is ready to use; the fields must not change after the first use.
type SSH struct {
	// Command replaces ssh, with its first arguments. Empty: ssh.
	Command []string
	// Port and IdentityFile are ssh's -p and -i. 0 and empty: ssh's defaults.
	Port         int
	IdentityFile string
	// Hvdrun is the program on the hosts. Empty: Program is copied to hosts that lack it.
	Hvdrun string
	// Program is the path on this machine of the program to copy. Empty: the program of this
	// process.
	Program string
	// Audit is called with a record when the program has been copied to a host, or could not be
	// copied. It must not block. Nil: not called.
	Audit func(audit.Record)

	own build
}

var _ Starter = (*SSH)(nil)

// Start implements Starter. Its errors are *HostError.
func (s *SSH) Start(ctx context.Context, host string, hello Hello) (Ready, error) {
	if host == "" || strings.HasPrefix(host, "-") || strings.ContainsAny(host, " \t\r\n'\"\\") {
		return Ready{}, &HostError{host, stageLookup, errors.New("this is not the name of a host")}
	}
	hello.Detach = true
	line, err := hello.line()
	if err != nil {
		return Ready{}, &HostError{host, stageCommand, err}
	}
	ready, err := s.start(ctx, host, line)
	if err != nil {
		return Ready{}, err
	}
	ready.seek = []string{s.hostName(ctx, host)}
	return ready, nil
}

func (s *SSH) start(ctx context.Context, host string, hello []byte) (Ready, error) {
	if s.Hvdrun != "" {
		answer, err := s.run(ctx, answerTimeout, host, bytes.NewReader(hello), installedScript, s.Hvdrun)
		if err != nil {
			return Ready{}, err
		}
		return parseReady(host, answer)
	}
	own := &s.own
	if err := own.read(cmp.Or(s.Program, "/proc/self/exe")); err != nil {
		return Ready{}, &HostError{host, stageCopy, err}
	}
	for brought := false; ; brought = true {
		answer, err := s.run(ctx, answerTimeout, host, bytes.NewReader(hello), startScript, own.name(), own.sum)
		if err != nil {
			return Ready{}, misfit(err, own.name())
		}
		machine, lacks := strings.CutPrefix(answer, lacksMark)
		switch {
		case !lacks:
			return parseReady(host, answer)
		case brought:
			return Ready{}, &HostError{host, stageCopy, errors.New("it was copied there, but does not exist")}
		}
		if err := fits(machine); err != nil {
			return Ready{}, &HostError{host, stageCommand, err}
		}
		if err := s.bring(ctx, host, own); err != nil {
			return Ready{}, err
		}
	}
}

func parseReady(host, answer string) (Ready, error) {
	ready, err := decodeReady(answer)
	if err != nil {
		return Ready{}, &HostError{host, stageCommand, err}
	}
	return ready, nil
}

// fits returns nil if this program runs on a machine with the given output of uname -s and -m.
func fits(machine string) error {
	system, processor, _ := strings.Cut(strings.TrimSpace(machine), " ")
	arch := map[string]string{"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}[processor]
	switch {
	case strings.ToLower(system) == runtime.GOOS && arch == runtime.GOARCH:
		return nil
	case processor == "":
		return errors.New("its shell finds no program uname: install hvdrun there, and say where (--remote-hvdrun PATH)")
	}
	return fmt.Errorf("the host is a %s %s, and this hvdrun is for %s/%s: install hvdrun there, and say where (--remote-hvdrun PATH)",
		system, processor, runtime.GOOS, runtime.GOARCH)
}

// misfit adds the remedy to the error of a host on which the program was found but cannot be run.
func misfit(err error, name string) error {
	var at *HostError
	if !errors.As(err, &at) || at.Stage != stageCommand {
		return err
	}
	said := at.Err.Error()
	for _, words := range []string{"not found", "No such file", "no such file", "annot execute", "Exec format", "ermission denied"} {
		if strings.Contains(said, words) && (strings.Contains(said, name) || strings.Contains(said, "GLIBC")) {
			return &HostError{at.Host, at.Stage, fmt.Errorf("%w: this hvdrun, which was copied there, does not run with the host's C library: "+
				"build it with -tags static, which needs none (and sees no GPUs), or install a hvdrun there, and say where (--remote-hvdrun PATH)", at.Err)}
		}
	}
	return err
}

// bring copies this program to the host's cache.
func (s *SSH) bring(ctx context.Context, host string, own *build) error {
	f, err := os.Open(own.path)
	if err != nil {
		return &HostError{host, stageCopy, err}
	}
	defer f.Close()
	// Not f itself: ssh would share its position with this process.
	_, err = s.run(ctx, copyTimeout, host, io.LimitReader(f, own.size), copyScript, own.name(), own.sum)
	if s.Audit != nil {
		s.Audit(audit.Record{
			Who: audit.Self(string(identity.Driver), ""), What: "upload", How: "sha256 " + own.sum, Host: host, Program: own.name(),
			Outcome: audit.Of(err),
		})
	}
	return err
}

// arguments returns the arguments of ssh before the host.
func (s *SSH) arguments() []string {
	args := []string{
		"-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", // seconds
		"-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
	}
	if s.Port != 0 {
		args = append(args, "-p", strconv.Itoa(s.Port))
	}
	if s.IdentityFile != "" {
		args = append(args, "-i", s.IdentityFile)
	}
	return args
}

// Words returns the command that runs another command on a host, as Start runs it. The caller
// appends the host's name and the other command, as one line for the shell there.
func (s *SSH) Words() []string { return s.words(s.arguments()...) }

func (s *SSH) words(more ...string) []string {
	words := s.Command
	if len(words) == 0 {
		words = []string{"ssh"}
	}
	return append(words[:len(words):len(words)], more...)
}

func (s *SSH) command(more ...string) *exec.Cmd {
	words := s.words(more...)
	cmd := exec.Command(words[0], words[1:]...)
	cmd.Env = append(os.Environ(), "LC_ALL=C") // its messages are parsed
	return cmd
}

// hostName returns the name or address to which ssh connects for the host.
func (s *SSH) hostName(ctx context.Context, host string) string {
	_, plain, found := strings.Cut(host, "@")
	if !found {
		plain = host
	}
	cmd := s.command(append(s.arguments(), "-G", host)...)
	var out bytes.Buffer
	cmd.Stdout = &out
	cmd.WaitDelay = time.Second
	if proc.StartSession(cmd) != nil {
		return plain
	}
	late := time.AfterFunc(endTimeout, func() { proc.KillSession(cmd) })
	defer late.Stop()
	defer context.AfterFunc(ctx, func() { proc.KillSession(cmd) })()
	if proc.WaitSession(cmd) != nil {
		return plain
	}
	for line := range strings.Lines(out.String()) {
		if name, ok := strings.CutPrefix(line, "hostname "); ok {
			return strings.TrimSpace(name)
		}
	}
	return plain
}

// run runs a script on the host and returns the line of its answer, which may come before the
// script ends.
func (s *SSH) run(ctx context.Context, limit time.Duration, host string, in io.Reader, script string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("no answer came within %v", limit))
	defer cancel()
	remote := "exec /bin/sh -c '" + script + "' hvdrun"
	for _, a := range args {
		remote += " '" + strings.ReplaceAll(a, "'", `'\''`) + "'"
	}
	cmd := s.command(append(s.arguments(), host, remote)...)
	stderr := &tail{}
	cmd.Stdin, cmd.Stderr = in, stderr
	cmd.WaitDelay = time.Second // other processes, such as a connection master, may hold its stderr
	stdout, err := cmd.StdoutPipe()
	if err == nil {
		err = proc.StartSession(cmd)
	}
	if err != nil {
		return "", &HostError{host, stageCommand, err}
	}
	stop := context.AfterFunc(ctx, func() {
		proc.KillSession(cmd)
		_ = stdout.Close() // other processes may hold the other end
	})
	defer stop()
	answer, noise, readErr := readAnswer(stdout)
	late := time.AfterFunc(endTimeout, func() { proc.KillSession(cmd) })
	waitErr := proc.WaitSession(cmd)
	late.Stop()
	if answer != "" {
		return answer, failedAnswer(host, answer, stderr)
	}
	if ctx.Err() != nil {
		return "", &HostError{host, stageCommand, context.Cause(ctx)}
	}
	return "", s.advise(diagnose(host, stderr, noise, waitErr, readErr))
}

// advise adds the remedy to the error of a host that refuses access or whose key is unknown.
func (s *SSH) advise(err error) error {
	at, is := errors.AsType[*HostError](err)
	if !is || at.Stage != stageHostKey && at.Stage != stageAuth {
		return err
	}
	where := at.Host
	if s.Port != 0 {
		where = fmt.Sprintf("-p %d %s", s.Port, at.Host)
	}
	said, advice := strings.TrimRight(at.Err.Error(), "."), ""
	switch {
	case at.Err == errOtherHostKey && s.Port != 0:
		advice = fmt.Sprintf("if that is right, `ssh-keygen -R [%s]:%d` forgets the old one", at.Host, s.Port)
	case at.Err == errOtherHostKey:
		advice = fmt.Sprintf("if that is right, `ssh-keygen -R %s` forgets the old one", at.Host)
	case at.Stage == stageHostKey:
		advice = fmt.Sprintf("`%s %s` asks once whether to trust it", strings.Join(s.words(), " "), where)
	case strings.Contains(said, "Permission denied"):
		advice = fmt.Sprintf("`ssh-copy-id %s` brings a key there, and --ssh-identity-file (-i) names another", where)
	case strings.Contains(said, "Too many authentication failures"):
		advice = "--ssh-identity-file (-i) names the key"
	case strings.Contains(said, "UNPROTECTED"):
		advice = "chmod 600 it"
	default:
		return err
	}
	return &HostError{at.Host, at.Stage, fmt.Errorf("%s; %s", said, advice)}
}

// failedAnswer returns the failure that an answer reports.
func failedAnswer(host, answer string, stderr *tail) error {
	stage, failed := strings.CutPrefix(answer, failedMark)
	if !failed {
		return nil
	}
	why := stderr.why()
	if why == "" {
		why = "its shell does not say why"
	}
	return &HostError{host, Stage(strings.TrimSpace(stage)), errors.New(why)}
}

var marks = []string{readyMark, lacksMark, copiedMark, failedMark}

// errTooMuchNoise: the remote shell printed more than maxNoise without running our command.
var errTooMuchNoise = fmt.Errorf("its shell has printed more than %d MiB before an answer", maxNoise>>20)

// readAnswer returns the first answer: a mark, anywhere in a line, and the rest of that line. All
// other output is noise, which may end without a newline; readAnswer returns its last line.
func readAnswer(r io.Reader) (answer, noise string, err error) {
	limited := &io.LimitedReader{R: r, N: maxNoise}
	in := bufio.NewReader(limited)
	var line []byte // the current line, or its last part
	answers := false
	for {
		b, err := in.ReadByte()
		ends := err != nil || b == '\n'
		if ends && answers && err == nil {
			return strings.TrimRight(string(line), "\r"), noise, nil
		}
		if ends || len(line) == maxHello { // a longer line is not an answer
			if text := bytes.TrimSpace(line); len(text) > 0 {
				noise = string(text[:min(len(text), 200)])
			}
			line, answers = line[:copy(line, line[max(0, len(line)-len(readyMark)):])], false
		}
		switch {
		case err == io.EOF && limited.N <= 0:
			return "", noise, errTooMuchNoise
		case err != nil:
			return "", noise, err
		case ends:
			line = line[:0]
			continue
		}
		line = append(line, b)
		for _, mark := range marks {
			if !answers && b == mark[len(mark)-1] && bytes.HasSuffix(line, []byte(mark)) {
				line, answers = append(line[:0], mark...), true
			}
		}
	}
}

// sshMessages maps messages of ssh to the stage that failed. The first entry found counts.
var sshMessages = []struct {
	words string
	stage Stage
}{
	{"Could not resolve hostname", stageLookup},
	{"Name or service not known", stageLookup},
	{"REMOTE HOST IDENTIFICATION HAS CHANGED", stageHostKey},
	{"Host key verification failed", stageHostKey},
	{"No matching host key", stageHostKey},
	{"Permission denied (", stageAuth},
	{"Too many authentication failures", stageAuth},
	{"No more authentication methods", stageAuth},
	{"UNPROTECTED PRIVATE KEY FILE", stageAuth},
	{"Connection refused", stageConnect},
	{"Connection timed out", stageConnect},
	{"Operation timed out", stageConnect},
	{"timed out", stageConnect},
	{"No route to host", stageConnect},
	{"Network is unreachable", stageConnect},
	{"kex_exchange_identification", stageConnect},
	{"Connection closed by", stageConnect},
	{"Connection reset by", stageConnect},
	{"Broken pipe", stageConnect},
	{"not responding", stageConnect},
}

// dropWords are the sshMessages of a connection that was dropped before authentication.
var dropWords = []string{"kex_exchange_identification", "Connection closed by", "Connection reset by"}

// diagnose returns the error of an ssh that ended without an answer.
func diagnose(host string, written *tail, noise string, waitErr, readErr error) error {
	stderr, last := written.String(), written.why()
	var exit *exec.ExitError
	if errors.As(waitErr, &exit) && exit.ExitCode() == 255 {
		for _, say := range sshMessages {
			for line := range strings.Lines(stderr) {
				if strings.Contains(line, say.words) {
					if say.stage == stageHostKey {
						line = hostKeyLine(stderr, line)
					}
					err := errors.New(strings.Trim(line, "@ \t\r\n"))
					if line == errOtherHostKey.Error() {
						err = errOtherHostKey
					}
					if slices.Contains(dropWords, say.words) {
						err = droppedError{err}
					}
					return &HostError{host, say.stage, err}
				}
			}
		}
		if last == "" {
			last = "ssh failed without a message"
		}
		return &HostError{host, stageConnect, errors.New(last)}
	}
	switch {
	case readErr == errTooMuchNoise:
		return &HostError{host, stageCommand, fmt.Errorf("%w: %q; its start-up files must print nothing for commands", readErr, noise)}
	case last != "":
		return &HostError{host, stageCommand, errors.New(last)}
	case noise != "":
		return &HostError{host, stageCommand, fmt.Errorf("no answer came, only %q", noise)}
	case waitErr != nil:
		return &HostError{host, stageCommand, fmt.Errorf("no answer came: %w", waitErr)}
	}
	return &HostError{host, stageCommand, fmt.Errorf("no answer came: %w", readErr)}
}

var errOtherHostKey = errors.New("the host's key differs from the known one")

// hostKeyLine returns the most useful line of stderr about a refused host key.
func hostKeyLine(stderr, line string) string {
	for l := range strings.Lines(stderr) {
		if strings.HasPrefix(l, "No ") && strings.Contains(l, "host key is known for") {
			return l
		}
		if strings.Contains(l, "REMOTE HOST IDENTIFICATION HAS CHANGED") {
			return errOtherHostKey.Error()
		}
	}
	return line
}
