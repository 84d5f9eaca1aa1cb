package proc

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
)

// FuzzStat: a process that names itself as it likes has the fields that the kernel gives it.
func FuzzStat(f *testing.F) {
	f.Add("sh")
	f.Add(") Z 1 1 1 (")
	f.Add("a\n1 (b) R 7")
	f.Fuzz(func(t *testing.T, name string) {
		rest := strings.Fields(strings.Repeat("8 ", statExitCode-statState))
		rest[statParent-statState-1] = "4711"
		fields := parseStat(fmt.Appendf(nil, "12 (%s) S %s\n", name, strings.Join(rest, " ")))
		if len(fields) != statExitCode+1 || fields[statState] != "S" || fields[statParent] != "4711" || fields[statStartTime] != "8" {
			t.Errorf("%q", fields)
		}
	})
}

// FuzzCgroupDir: whatever the names of cgroups and of places are, the folder is below the place
// where a hierarchy is mounted.
func FuzzCgroupDir(f *testing.F) {
	f.Add("0::/user.slice/a", "/", "/sys/fs/cgroup")
	f.Add("0::/../x", "/..", "/sys/fs/cgroup")
	f.Add("1:name=systemd:/\n0::/a/../../b\n", "/a", `/sys/fs\040x`)
	f.Fuzz(func(t *testing.T, own, root, point string) {
		if strings.ContainsAny(root+point, " \t\n") || root == "" || !strings.HasPrefix(point, "/") {
			return // the kernel escapes these
		}
		dir := cgroupDir(own, "30 23 0:26 "+root+" "+point+" rw shared:4 - cgroup2 cgroup rw\n")
		if place := strings.TrimSuffix(filepath.Clean(unescape.Replace(point)), "/"); dir != "" && dir != filepath.Clean(place+"/") && !strings.HasPrefix(dir, place+"/") {
			t.Errorf("%q is not below %q", dir, place)
		}
	})
}
