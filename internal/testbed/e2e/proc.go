package e2e

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Processes returns the living processes with one of the entries in their environment or arguments.
func Processes(entries ...string) []int {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	var pids []int
	for _, dir := range dirs {
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil || pid == os.Getpid() {
			continue
		}
		if alive(dir) && (holds(dir+"/environ", entries) || holds(dir+"/cmdline", entries)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

func holds(path string, entries []string) bool {
	b, err := os.ReadFile(path)
	if err != nil {
		return false
	}
	for word := range bytes.SplitSeq(b, []byte{0}) {
		for _, e := range entries {
			if string(word) == e {
				return true
			}
		}
	}
	return false
}

// alive returns false for processes that do not exist and for zombies.
func alive(dir string) bool {
	stat, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return false
	}
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	return len(fields) > 0 && !bytes.ContainsAny(fields[0], "ZX")
}

func commandLine(pid int) string {
	b, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
	return strings.TrimSpace(string(bytes.ReplaceAll(b, []byte{0}, []byte{' '})))
}
