package browser

import (
	"bufio"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/chromedp/chromedp"
)

// replay replays the events of the README's picture and returns the URL of the page.
func replay(t *testing.T, speed string) string {
	t.Helper()
	cmd := exec.Command(programs.Hvdrun, "replay", "../../internal/replay/testdata/faults.jsonl", "--speed", speed, "--listen", "127.0.0.1:0")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it is killed above
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	_, url, found := strings.Cut(strings.TrimSpace(line), " at ")
	if err != nil || !found {
		t.Fatalf("%v: %q", err, line)
	}
	return url
}

// TestReplay shows a past job while it trains and at its end; the page offers no way to steer it.
func TestReplay(t *testing.T) {
	t.Parallel()
	ctx := open(t, 1280, 900, replay(t, "0.2"))
	do(t, ctx, chromedp.WaitVisible(css(".slot")), holds(`document.querySelector("#link.live") && document.querySelectorAll(".slot.s-training").length === 16`),
		holds(`!document.querySelector("#readonly").hidden && document.querySelector("#steer").hidden`))

	ctx = open(t, 1280, 900, replay(t, "1000"))
	do(t, ctx, chromedp.WaitVisible(css(".slot")), holds(`document.querySelector("#state").innerText === "stopped"`),
		holds(`document.querySelectorAll("#worlds tr").length > 8`),
		holds(`document.querySelector("#worlds").innerText.includes("killed by signal 9")`),
		holds(`document.querySelector("#chart-size").innerHTML.length > 1000`))
}
