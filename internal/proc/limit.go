package proc

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// processLimit returns which limit on the number of processes this process has reached, and how to
// raise it.
func processLimit() string {
	own, _ := os.ReadFile("/proc/self/cgroup")
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	dir, is := groupOf("pids", string(own), string(mounts))
	if !is {
		dir = cgroupDir(string(own), string(mounts))
	}
	if dir, most := fullGroup(dir); most != 0 {
		return fmt.Sprintf("the cgroup %s may have %d processes and threads: raise its pids.max (TasksMax= of systemd, --pids-limit of a container)", dir, most)
	}
	limit := "as many as it may"
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NPROC, &l) == nil && l.Cur != unix.RLIM_INFINITY {
		limit = "at most " + strconv.FormatUint(l.Cur, 10)
	}
	return fmt.Sprintf("user %d has %s processes and threads on this machine: end some, or raise the limit (ulimit -u, sysctl kernel.threads-max)", os.Geteuid(), limit)
}

// fullGroup returns the folder of the control group, dir or one above it, that has nearly reached
// its limit of processes, and that limit: some processes may have ended since it was reached. most
// is 0 if no group is near its limit.
func fullGroup(dir string) (full string, most uint64) {
	for ; dir != "" && isGroup(dir); dir = filepath.Dir(dir) {
		if most := number(dir, "pids.max"); most != 0 && number(dir, "pids.current") >= most-most/10 {
			return dir, most
		}
	}
	return "", 0
}
