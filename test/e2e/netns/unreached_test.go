//go:build netns

package netns

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

// TestDriverOutOfReach: a job has workers on a host that cannot connect to the driver's machine, as
// behind a firewall. The driver connects to the agent and does not listen.
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
		args := append([]string{"-np", "1", "-H", "b:1", "--ssh-command", ssh, "--remote-hvdrun", binaries.Hvdrun, "--port-range", "21000-21099", "--start-timeout", "5m"}, command...)
		out, err := exec.CommandContext(t.Context(), n.hvdrun("driver"), args...).CombinedOutput()
		return string(out), err
	}
	dir := t.TempDir()
	out, err := run(binaries.Trainer, "-log", filepath.Join(dir, "steplog"), "-dir", dir, "-steps", "3")
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
