// Package prestart starts a Python interpreter before its worker is needed. The Interpreter that
// New returns does slow imports while another program trains; its Run then gives it the arguments
// and the environment of a worker.
package prestart

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// bootstrap runs the code $2, waits at the FIFO $1 for a message, and becomes the program that the
// message describes. A message is a length in decimal, a line feed, and that many bytes of JSON.
const bootstrap = `import sys
def _become():
    import json, os, runpy
    fifo, code = sys.argv[1:3]
    exec(code, {"__name__": "prestart"})
    with open(fifo, "rb", buffering=0) as f:
        size = b""
        while not size.endswith(b"\n"):
            size += f.read(1)
        told = b""
        while len(told) < int(size):
            told += f.read(int(size) - len(told))
    told = json.loads(told)
    text = lambda s: os.fsdecode(s.encode("latin-1"))
    os.environ.clear()
    os.environ.update({text(n): text(v) for n, v in told["env"].items()})
    sys.argv[:] = map(text, told["args"])
    return told, os, runpy
_told, _os, _runpy = _become()
if _told["module"]:
    sys.path[0] = _os.getcwd()
    _runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path[0] = _os.path.dirname(_os.path.realpath(sys.argv[0]))
    with open(sys.argv[0], "rb") as _f:
        _code = compile(_f.read(), sys.argv[0], "exec")
    __file__ = sys.argv[0]
    del _become, _told, _os, _runpy, _f
    exec(_code)
`

// writeBound is how long an interpreter may take to read the message.
const writeBound = 10 * time.Second

// Program is a Python program.
type Program struct {
	// Interpreter is the interpreter with its options.
	Interpreter []string
	// Module means that Args[0] is a module (python -m); otherwise it is a file.
	Module bool
	// Args are the program's module or file, and its arguments.
	Args []string
}

// Parse returns the program that a command line runs. It recognises python, python3 and the like by
// name, with options that take no value, and either a file or -m and a module. For other command
// lines it returns an error, whose text can follow a colon.
func Parse(command []string) (Program, error) {
	if len(command) == 0 || !strings.HasPrefix(filepath.Base(command[0]), "python") {
		return Program{}, errors.New("the command is not python with a file or a module")
	}
	for i, arg := range command[1:] {
		at := i + 1
		switch {
		case arg == "-m" && at+1 < len(command):
			return Program{Interpreter: slices.Clone(command[:at]), Module: true, Args: slices.Clone(command[at+1:])}, nil
		case arg == "-" || arg == "-c" || arg == "-m" || arg == "-X" || arg == "-W":
			return Program{}, fmt.Errorf("the option %s of %s is not understood before the program", arg, command[0])
		case !strings.HasPrefix(arg, "-"):
			return Program{Interpreter: slices.Clone(command[:at]), Args: slices.Clone(command[at:])}, nil
		}
	}
	return Program{}, fmt.Errorf("%s has no program", command[0])
}

// Interpreter is an interpreter that waits for its program, or will wait once Command runs. It is
// not safe for concurrent use.
type Interpreter struct {
	program Program
	code    string
	dir     string
	fifo    *os.File
}

// New prepares an interpreter for the program. The interpreter runs code (such as "import torch")
// before it waits. New starts nothing. The caller must call Close.
func New(program Program, code string) (*Interpreter, error) {
	dir, err := os.MkdirTemp("", "hvdrun-prestart")
	if err != nil {
		return nil, fmt.Errorf("prestart: %w", err)
	}
	i := &Interpreter{program: program, code: code, dir: dir}
	if err := unix.Mkfifo(i.path(), 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("prestart: %s: %w", i.path(), err), i.Close())
	}
	// Opening for reading and writing never blocks, and what is written stays until the interpreter
	// reads it.
	if i.fifo, err = os.OpenFile(i.path(), os.O_RDWR|unix.O_NONBLOCK, 0); err != nil {
		return nil, errors.Join(fmt.Errorf("prestart: %w", err), i.Close())
	}
	return i, nil
}

func (i *Interpreter) path() string { return filepath.Join(i.dir, "fifo") }

// Command returns the command line that starts the interpreter.
func (i *Interpreter) Command() []string {
	return append(slices.Clone(i.program.Interpreter), "-c", bootstrap, i.path(), i.code)
}

// Run makes the interpreter, whose process must have been started, run its program with the given
// arguments (first the name or file of the program) and environment (NAME=value; the later of two
// entries with the same name counts). Code that has already run has seen the earlier environment.
// Run blocks until everything is written, for at most ten seconds.
func (i *Interpreter) Run(args, env []string) error {
	told := struct {
		Module bool              `json:"module"`
		Args   []string          `json:"args"`
		Env    map[string]string `json:"env"`
	}{Module: i.program.Module, Env: make(map[string]string, len(env))}
	for _, arg := range args {
		told.Args = append(told.Args, latin1(arg))
	}
	for _, entry := range env {
		if name, value, found := strings.Cut(entry, "="); found {
			told.Env[latin1(name)] = latin1(value)
		}
	}
	text, err := json.Marshal(told)
	if err == nil {
		err = i.fifo.SetWriteDeadline(time.Now().Add(writeBound))
	}
	if err == nil {
		_, err = i.fifo.Write(append([]byte(strconv.Itoa(len(text))+"\n"), text...))
	}
	if err != nil {
		return fmt.Errorf("prestart: %w", err)
	}
	return nil
}

// latin1 returns a text in which each character stands for a byte of s, because JSON cannot
// represent bytes.
func latin1(s string) string {
	runes := make([]rune, len(s))
	for i := range len(s) {
		runes[i] = rune(s[i])
	}
	return string(runes)
}

// Close removes the interpreter's files. It must not be called before the process has ended or has
// read what Run has written.
func (i *Interpreter) Close() error {
	var err error
	if i.fifo != nil {
		err = i.fifo.Close()
	}
	return errors.Join(err, os.RemoveAll(i.dir))
}
