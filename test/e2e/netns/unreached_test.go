//go:build netns

package netns

import (
	"bytes"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

// TestDriverOutOfReach: workers start on a host that cannot connect to the driver's machine, as
// behind a firewall. In a job that is not elastic, --start-timeout bounds this, and the error names
// the worker and the address; a command that does not call the driver runs to its end.
func TestDriverOutOfReach(t *testing.T) {
	n := newNetwork(t)
	driver := n.add("driver")
	n.add("b")
	n.ip("-n", n.space("b"), "rule", "add", "to", driver, "dport", "21000-21099", "prohibit")
	ssh := filepath.Join(t.TempDir(), "ssh")
	text := fmt.Sprintf(`#!/bin/sh
[ "$1" != -G ] || { echo hostname 10.77.0.2; exit; }
while :; do
	case $1 in
	-[opilFJ]) shift 2 ;;
	-*) shift ;;
	*) break ;;
	esac
done
shift
exec ip netns exec %s sh -c "$*"
`, n.space("b"))
	if err := sandbox.WriteProgram(ssh, []byte(text)); err != nil {
		t.Fatal(err)
	}
	run := func(command ...string) (string, error) {
		args := append([]string{"-np", "1", "-H", "b:1", "--ssh-command", ssh, "--port-range", "21000-21099", "--start-timeout", "2"}, command...)
		out, err := exec.CommandContext(t.Context(), n.hvdrun("driver"), args...).CombinedOutput()
		return string(out), err
	}
	dir := t.TempDir()
	out, err := run(binaries.Trainer, "-log", filepath.Join(dir, "steplog"), "-dir", dir, "-steps", "3")
	exit, failed := errors.AsType[*exec.ExitError](err)
	lines := bytes.Split(bytes.TrimSpace([]byte(out)), []byte("\n"))
	last := string(lines[len(lines)-1])
	var pid, port int
	if _, scanned := fmt.Sscanf(last, "hvdrun: one or more processes exited with non-zero status: host b slot 0 rank 0 does not reach the driver: "+
		"process %d has not joined within 2s (--start-timeout), its host cannot connect: dial tcp "+driver+":%d: ", &pid, &port); scanned != nil ||
		!failed || exit.ExitCode() != 1 || pid == 0 || port < 21000 || port > 21099 {
		t.Errorf("%v, %v\n%s", err, scanned, out)
	}
	if out, err := run("sh", "-c", "sleep 4; echo slept"); err != nil || !bytes.Contains([]byte(out), []byte("slept")) {
		t.Errorf("a command that does not call: %v\n%s", err, out)
	}
}
