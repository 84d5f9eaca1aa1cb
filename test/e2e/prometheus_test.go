package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
)

// prometheus is a real Prometheus that scrapes one address repeatedly.
type prometheus struct {
	t   *testing.T
	url string
}

// startPrometheus starts Debian's Prometheus with the rules in deploy, and stops it with the test.
func startPrometheus(t *testing.T, path, target string) *prometheus {
	t.Helper()
	rules, err := filepath.Abs("../../deploy/prometheus/hvdrun.rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	config := fmt.Sprintf(`
global: {scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms}
rule_files: [%q]
scrape_configs:
- job_name: hvdrun
  static_configs: [{targets: [%q]}]
`, rules, target)
	if err := os.WriteFile(filepath.Join(dir, "prometheus.yml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(path, "--config.file", filepath.Join(dir, "prometheus.yml"), "--storage.tsdb.path", filepath.Join(dir, "data"),
		"--web.listen-address", "127.0.0.1:0", "--enable-feature", "native-histograms")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
		if text, err := os.ReadFile(log.Name()); t.Failed() {
			t.Logf("%v: %s", err, text)
		}
	})
	p := &prometheus{t: t}
	if !follow.Await(t, func() bool {
		for _, addr := range follow.Listening(cmd.Process.Pid) {
			p.url = "http://" + addr.String()
		}
		return p.url != "" && p.get("/-/ready") != ""
	}) {
		t.Fatal("prometheus does not listen")
	}
	return p
}

// get returns the body of an answer, or "" if the request failed.
func (p *prometheus) get(path string) string {
	answer, err := http.Get(p.url + path)
	if err != nil {
		return ""
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		return ""
	}
	return string(text)
}

// query returns the value of an expression; found is false unless it has exactly one.
func (p *prometheus) query(expression string) (value float64, found bool) {
	var answer struct {
		Data struct{ Result []struct{ Value [2]any } }
	}
	text := p.get("/api/v1/query?query=" + url.QueryEscape(expression))
	if json.Unmarshal([]byte(text), &answer) != nil || len(answer.Data.Result) != 1 {
		return 0, false
	}
	number, _ := answer.Data.Result[0].Value[1].(string)
	value, err := strconv.ParseFloat(number, 64)
	return value, err == nil
}

// await blocks until an expression has a value for which holds returns true.
func (p *prometheus) await(expression string, holds func(float64) bool) {
	p.t.Helper()
	value, found := 0.0, false
	if !follow.Await(p.t, func() bool {
		value, found = p.query(expression)
		return found && holds(value)
	}) {
		p.t.Errorf("%s is %g, %v", expression, value, found)
	}
}

// TestPrometheus: a real Prometheus scrapes the driver of a real job, gets the metrics of
// everything that happened to the job, stores histograms as native histograms, and accepts the
// rules.
func TestPrometheus(t *testing.T) {
	path, err := exec.LookPath("prometheus")
	if err != nil || testing.Short() {
		t.Skip("a scrape by Prometheus is NOT tested: make check-metrics does, and brings it")
	}
	t.Parallel()
	r := controlled(t, "--metrics-listen", "127.0.0.1:0")
	log, err := os.ReadFile(r.OutputPath())
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`metrics are served.*url="?https?://([0-9.:]+)`).FindSubmatch(log)
	if found == nil {
		t.Fatalf("the log does not say where metrics are served:\n%s", log)
	}
	p := startPrometheus(t, path, string(found[1]))
	is := func(want float64) func(float64) bool { return func(v float64) bool { return v == want } }
	more := func(than float64) func(float64) bool { return func(v float64) bool { return v > than } }
	p.await("up", is(1))
	p.await("hvdrun_world_size", is(4))
	p.await("hvdrun_world_generation", is(1))
	order(t, r, "its worker leaves", "drain", hostB+":1")
	g := awaitWorld(t, r, 1, 3)
	order(t, r, "may be used again", "readmit", hostB+":1")
	g = awaitWorld(t, r, g, 4)
	if err := syscall.Kill(r.World.Slots[3].PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	awaitWorld(t, r, g, 3)
	p.await("hvdrun_world_size", is(3))
	p.await(`hvdrun_resets_total{cause="death"}`, is(1))
	p.await(`hvdrun_resets_total{cause="growth"}`, is(1))
	p.await(`sum(hvdrun_resets_total)`, is(3))
	p.await(`hvdrun_worker_exits_total{cause="failed"}`, is(1))
	p.await(`hvdrun_job_slots{state="excluded"}`, is(1))
	p.await(`sum(hvdrun_job_seconds_total) - (time() - sum(hvdrun_job_start_time_seconds))`, func(v float64) bool { return v > -30 && v < 1 })
	p.await(`hvdrun_job_seconds_total{part="training"}`, more(0.5))
	p.await(`increase(hvdrun_worker_commits_total[5s])`, more(0))
	p.await(`sum(hvdrun_collective_operations_total{kind="AllReduce"})`, more(10))
	p.await(`count(hvdrun_rank_late_seconds)`, is(3))
	p.await(`histogram_count(hvdrun_recovery_seconds{cause="death"})`, is(1)) // a native histogram
	p.await(`histogram_quantile(0.5, hvdrun_recovery_seconds{cause="death"})`, more(0))
	if s := statusOf(t, r); s.Resets != 3 {
		t.Errorf("status tells %d resets", s.Resets)
	}
	var rules struct {
		Data struct {
			Groups []struct {
				Rules []struct{ Name, Health, LastError string }
			}
		}
	}
	healthy := 0
	follow.Await(t, func() bool {
		healthy = 0
		if json.Unmarshal([]byte(p.get("/api/v1/rules")), &rules) != nil {
			return false
		}
		all := 0
		for _, group := range rules.Data.Groups {
			for _, rule := range group.Rules {
				if all++; rule.Health == "ok" {
					healthy++
				}
			}
		}
		return healthy > 0 && healthy == all
	})
	if want := strings.Count(readFile(t, "../../deploy/prometheus/hvdrun.rules.yml"), "alert: "); healthy != want {
		t.Errorf("%d of %d rules are evaluated: %+v", healthy, want, rules)
	}
	order(t, r, "being stopped", "stop")
	finish(t, r, 128+15, controlledSteps)
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
