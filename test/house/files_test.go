package house

import (
	"go/ast"
	"strings"
	"testing"
)

// opening are the functions by which a program opens or creates files or folders whose names others
// may have taken before. os.CreateTemp and os.MkdirTemp choose unused names.
var opening = map[string][]string{
	"os":                    {"Create", "Open", "OpenFile", "ReadFile", "WriteFile", "Mkdir", "MkdirAll"},
	"io/ioutil":             {"ReadFile", "WriteFile"},
	"crypto/tls":            {"LoadX509KeyPair"},
	"golang.org/x/sys/unix": {"Open", "Openat", "Creat", "Mkdir"},
	"syscall":               {"Open", "Openat", "Creat", "Mkdir"},
}

// openers are the files that may use them, and why. Examples, testbeds, test kits and generators
// may too; everything else opens files with internal/safefile.
var openers = map[string]string{
	"internal/safefile/safefile.go":      "the judged way",
	"internal/safefile/folder.go":        "the judged way",
	"internal/safefile/pipe.go":          "the judged way",
	"internal/safefile/sync.go":          "a folder, to have it on the disk",
	"internal/wire/local.go":             "a folder, below which a socket is named",
	"internal/proc/cgroup.go":            "the kernel's files of cgroups",
	"internal/proc/usage.go":             "the kernel's files of cgroups",
	"internal/proc/memory.go":            "the kernel's files of cgroups",
	"internal/proc/explain.go":           "a program that the kernel has just refused to run, for its first line; it must be a regular file",
	"collective/internal/shm/segment.go": "a descriptor of a peer, by the kernel; what it leads to is checked",
	"internal/blob/clean.go":             "below a descriptor, without following links; the folders must belong to the user whose they should be",
	"internal/agent/client/build.go":     "this program, by the kernel's link to it",
	"internal/agent/client/ssh.go":       "this program, by the kernel's link to it",
	"torchrun/prestart/prestart.go":      "a FIFO in a folder that it has just made",
	"torchrun/timer.go":                  "a FIFO that it has just made",
	"internal/netif/cards.go":            "the kernel's files of network interfaces",
	"internal/probe/probe.go":            "the kernel's files of processes",
	"plugins/file/read.go":               "hosts are listed by whomever a person has named; it must be a regular file",
}

// TestFilesAreJudged: only the listed files open files without internal/safefile, because other
// users may have created something at the path first.
func TestFilesAreJudged(t *testing.T) {
	found := map[string]bool{}
	for _, s := range sources(t) {
		if s.test() || isKit(s.dir()) || strings.HasSuffix(s.dir(), "/gen") || under(s.dir(), "test") ||
			under(s.dir(), "internal/look") || under(s.dir(), "examples") {
			continue
		}
		for _, use := range uses(s.file, opening) {
			if kernels(s.file, use.node) {
				continue
			}
			found[s.path] = true
			if openers[s.path] == "" {
				t.Errorf("%s: %s: open it by internal/safefile", s.where(use.node), use.what)
			}
		}
	}
	for path := range openers {
		if !found[path] {
			t.Errorf("%s opens nothing so: it needs no exception", path)
		}
	}
}

// lacking are calls that some file systems do not support. Package safefile knows which of their
// errors report that, and what to do then. The method Sync of a file is one of them too; this list
// cannot name it.
var lacking = map[string][]string{
	"golang.org/x/sys/unix": {"Flock", "FcntlFlock", "Fsync", "Fdatasync", "Renameat2"},
	"syscall":               {"Flock", "FcntlFlock", "Fsync", "Fdatasync"},
}

// TestOnePackageLocksAndSyncs: only safefile uses calls that a file system may not support.
func TestOnePackageLocksAndSyncs(t *testing.T) {
	found := false
	for _, s := range sources(t) {
		inside := s.dir() == "internal/safefile"
		if s.test() || under(s.dir(), "test") {
			continue
		}
		for _, use := range uses(s.file, lacking) {
			if found = found || inside; !inside {
				t.Errorf("%s: %s: call it by internal/safefile", s.where(use.node), use.what)
			}
		}
	}
	if !found {
		t.Error("internal/safefile calls none of them: this test looks for the wrong names")
	}
}

// kernels reports whether function is called with a name below /proc, or with /dev/null.
func kernels(file *ast.File, function ast.Node) (is bool) {
	ast.Inspect(file, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok || call.Fun != function || len(call.Args) == 0 {
			return true
		}
		ast.Inspect(call.Args[0], func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.BasicLit:
				is = is || strings.HasPrefix(n.Value, `"/proc`)
			case *ast.SelectorExpr:
				is = is || n.Sel.Name == "DevNull"
			}
			return true
		})
		return false
	})
	return is
}
