// Demo demonstrates hvdrun on one machine in less than a minute. It trains the digits example once
// undisturbed, and once while a host is added, a worker is killed and replaced, and the first host
// is removed. Then it prints, from the events file, how long each change took, and compares the
// results.
//
// make demo builds the two programs that it starts, and runs it. Each change is made when training
// has reached a certain point, not after a certain time. The exit status is 1 if a check fails.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const stepTime = 10 * time.Millisecond // of the disturbed run, so that a viewer can follow

func main() {
	// startJob ties hvdrun's life to the thread that starts it. The main thread lives as long as
	// the demo.
	runtime.LockOSThread()
	hvdrun := flag.String("hvdrun", "bin/hvdrun", "the launcher")
	digits := flag.String("digits", "bin/digits", "the training program")
	epochs := flag.Int("epochs", 32, "epochs of each run")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *hvdrun, *digits, *epochs)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, hvdrun, digits string, epochs int) (err error) {
	dir, err := os.MkdirTemp("", "hvdrun-demo-")
	if err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	t := &teller{began: time.Now()}
	train := []string{digits, "-digest", "-epochs", strconv.Itoa(epochs)}

	t.did("first, two workers train undisturbed")
	calm, err := undisturbed(ctx, t, hvdrun, train)
	if err != nil {
		return err
	}
	t.did("the same again, %v a step, on hosts that come and go", stepTime)
	s, err := disturbed(ctx, t, dir, hvdrun, append(train, "-step-time", stepTime.String()))
	if err != nil {
		return err
	}
	rows := table(s.events)
	fmt.Println()
	if err := writeTable(os.Stdout, rows); err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	fmt.Printf("\nThe times include the step itself, %v, and what was left of the one before. A new worker starts up while\n"+
		"the others train. A cause is timed from when the driver learned of it: it asks for hosts every %v.\n",
		stepTime, discoveryInterval)
	fmt.Printf("\nheld-out accuracy: %.4f undisturbed, %.4f disturbed\n", calm.accuracy, s.accuracy)
	if wrong := verify(rows, &calm, &s.view); len(wrong) > 0 {
		return errors.New("demo: the results are wrong:\n  " + strings.Join(wrong, "\n  "))
	}
	fmt.Println("The weights of all workers of both runs are equal to the last bit.")
	return nil
}

// discoveryInterval is short because the whole demo is.
const discoveryInterval = 200 * time.Millisecond

// undisturbed runs the job on two workers at full speed.
func undisturbed(ctx context.Context, t *teller, hvdrun string, train []string) (view, error) {
	j, err := startJob(ctx, "", hvdrun, append([]string{"-np", "2", "--"}, train...)...)
	if err != nil {
		return view{}, err
	}
	defer j.end()
	s := &story{teller: t, job: j, quiet: true}
	err = s.finish(ctx)
	return s.view, err
}

// disturbed runs the job with all disturbances.
func disturbed(ctx context.Context, t *teller, dir, hvdrun string, train []string) (*story, error) {
	hostsFile, eventsFile := filepath.Join(dir, "hosts"), filepath.Join(dir, "events")
	if err := writeHosts(hostsFile, firstHost); err != nil {
		return nil, err
	}
	script, err := writeScript(dir, hostsFile)
	if err != nil {
		return nil, err
	}
	args := []string{"-np", "2", "--host-discovery-script", script, "--discovery-interval", discoveryInterval.String(),
		"--events-file", eventsFile, "--"}
	j, err := startJob(ctx, eventsFile, hvdrun, append(args, train...)...)
	if err != nil {
		return nil, err
	}
	defer j.end()
	s := &story{teller: t, job: j, hostsFile: hostsFile}
	return s, s.tell(ctx)
}

// verify returns the failed checks.
func verify(rows []row, calm, stormy *view) []string {
	var wrong []string
	want := []row{{size: 2, cause: "start"}, {size: 4, cause: "host added"}, {size: 3, cause: "worker killed"},
		{size: 4, cause: "slot returned"}, {size: 2, cause: "host removed"}}
	if !slices.EqualFunc(rows, want, func(a, b row) bool { return a.size == b.size && a.cause == b.cause }) {
		wrong = append(wrong, "the generations came about in another way than the demo's")
	}
	for _, r := range rows {
		if r.toStep <= 0 {
			wrong = append(wrong, fmt.Sprintf("generation %d completed no step", r.generation))
		}
	}
	if calm.accuracy == 0 || stormy.accuracy != calm.accuracy {
		wrong = append(wrong, "the accuracies differ")
	}
	for _, v := range []*view{calm, stormy} {
		if len(v.digests) != 2 || v.digests[0] != v.digests[1] {
			wrong = append(wrong, fmt.Sprintf("two workers with equal weights should have been left, the digests are %q", v.digests))
		}
	}
	if len(stormy.digests) == 2 && stormy.digests[0] == stormy.digests[1] && !slices.Equal(calm.digests, stormy.digests) {
		wrong = append(wrong, fmt.Sprintf("the weights of the two runs differ: digests %q and %q", calm.digests, stormy.digests))
	}
	for _, e := range stormy.events {
		if e.Name == "worker_started" && !gone(e.PID) {
			wrong = append(wrong, fmt.Sprintf("worker process %d is left", e.PID))
		}
	}
	return wrong
}

// quote quotes s as one word of a shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
