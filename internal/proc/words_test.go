package proc

import (
	"strings"
	"testing"
)

// TestLastWords: the reason of a failure is the line that states it, however the output is divided.
func TestLastWords(t *testing.T) {
	stack := "\n\ngoroutine 1 [running]:\nmain.main()\n\t/src/main.go:7 +0x1d\nexit status 2\n"
	for _, c := range []struct{ said, why string }{
		{"", ""},
		{"\n \r\n", ""},
		{"warning: old\nno such host\n\n", "no such host"},
		{"progress 1\rprogress 2", "progress 2"},
		{"starting\npanic: assignment to entry in nil map" + stack, "panic: assignment to entry in nil map"},
		{"panic: first\n\tpanic: second" + stack, "panic: first"},
		{"runtime: program exceeds 10000-thread limit\nfatal error: thread exhaustion" + stack + strings.Repeat("r8 0x0\n", 9999),
			"fatal error: thread exhaustion"},
		{"fakecgo: pthread_create failed: 11\nSIGABRT: abort\nPC=0x7f98 m=0 sigcode=18446744073709551610\n",
			"fakecgo: pthread_create failed: 11: there are too many processes and threads: raise the limit (ulimit -u, pids.max of the cgroup)"},
		{"runtime: failed to create new OS thread (have 5 already; errno=11)\nruntime: may need to increase max user processes (ulimit -u)\n" +
			"fatal error: newosproc" + stack, "runtime: failed to create new OS thread (have 5 already; errno=11): there are too many processes and " +
			"threads: raise the limit (ulimit -u, pids.max of the cgroup)"},
		{"SIGQUIT: quit\nPC=0x46e2a1 m=0 sigcode=0\n\ngoroutine 0 gp=0x5d m=0 [idle]:\n\nrax    0xca\nfs     0x0\ngs     0x0\n", "SIGQUIT: quit"},
		{"SIGSEGV: segmentation violation\nPC=0x0 m=4 sigcode=1\nsignal arrived during cgo execution\ngs     0x0\n", "SIGSEGV: segmentation violation"},
		{"SIGNED: yes\nSIG: no\nend", "end"},
		{"\nthread 'main' (7) panicked at src/main.rs:2:5:\nno host\nnote: run with `RUST_BACKTRACE=1` environment variable to display a backtrace\n",
			"thread 'main' (7) panicked at src/main.rs:2:5: no host"},
		{"thread 'main' panicked at 'no host', src/main.rs:2:5\nnote: run", "thread 'main' panicked at 'no host', src/main.rs:2:5"},
		{"terminate called after throwing an instance of 'std::runtime_error'\n  what():  no host\nAborted (core dumped)\n",
			"terminate called after throwing an instance of 'std::runtime_error' what():  no host"},
		{"Traceback (most recent call last):\n  File \"x.py\", line 1, in <module>\n    f()\nKeyError: 'a'\n\nDuring handling of the above " +
			"exception, another exception occurred:\n\nTraceback (most recent call last):\n  File \"x.py\", line 3\nValueError: no a\ncleaning up\n",
			"ValueError: no a (x.py:3)"},
		{"Traceback (most recent call last):\n  File \"x.py\", line 1, in <module>\n  File \"/usr/lib/python3.13/json/__init__.py\", line 9, in load\n" +
			"  File \"<frozen io>\", line 2, in open\nOSError: no\n", "OSError: no (x.py:1)"},
		{"[rank0]: Traceback (most recent call last):\n[rank0]:   File \"x.py\", line 5, in <module>\n[rank0]:     f()\n[rank0]: RuntimeError: no\n" +
			"[rank0]: Exception raised from f at f.cpp:1\n", "RuntimeError: no (x.py:5)"},
		{"  File \"/src/x.py\", line 4\n    def f(:\n          ^\nSyntaxError: invalid syntax\n", "SyntaxError: invalid syntax (/src/x.py:4)"},
		{"Traceback (most recent call last):\n  File \"x.py\", line 1, in f\nKeyError: 1\n" + strings.Repeat("goes on\n", mostAfter) + "disk full\n", "disk full"},
		{"  File \"x\", line one\nno", "no"},
		{"mpirun: no\n--------\n", "mpirun: no"},
		{"do not panic: it is fine\nno memory", "no memory"},
		{strings.Repeat("x", 3*mostWords) + "\nend", "end"},
	} {
		for _, size := range []int{1, 7, len(c.said) + 1} {
			var w LastWords
			for rest := c.said; rest != ""; {
				n := min(size, len(rest))
				w.Write([]byte(rest[:n]))
				rest = rest[n:]
			}
			if w.Why() != c.why {
				t.Errorf("%.60q in pieces of %d: %q, not %q", c.said, size, w.Why(), c.why)
			}
		}
	}
}
