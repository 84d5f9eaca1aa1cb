package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
)

// hvdrun must log at most mostLines lines in any window while hosts come and go: two per second.
const (
	window    = 10 * time.Second
	mostLines = 20
)

// playFlapping makes a tenth of the hosts leave each second, and those of the previous second
// return, and checks how much hvdrun logs.
func playFlapping(ctx context.Context, t *trial) error {
	t.Steps = 0
	j, err := t.job()
	if err != nil {
		return err
	}
	all, list := strings.Split(t.hostList(), ","), filepath.Join(t.dir, "hosts")
	if err := os.WriteFile(list, []byte(strings.Join(all, "\n")), 0o666); err != nil {
		return err
	}
	j.source("--host-discovery-script", "cat '"+list+"'", "--discovery-interval", "0.2s", "--start-timeout", "120s", "--join-timeout", "120s")
	if err := j.start(); err != nil {
		return err
	}
	if err := j.full(ctx, 0); err != nil {
		return err
	}
	away := max(1, len(all)/10)
	for i := range t.Times {
		from := 1 + i*away%(len(all)-away)
		now := strings.Join(append(append([]string(nil), all[:from]...), all[from+away:]...), "\n")
		next := list + ".next"
		found := j.Count("hosts_found")
		if err := errors.Join(os.WriteFile(next, []byte(now), 0o666), os.Rename(next, list), follow.Sleep(ctx, time.Second)); err != nil {
			return err
		}
		if err := j.Until(ctx, "another list of hosts", func() bool { return j.Count("hosts_found") > found }); err != nil {
			return err
		}
	}
	if err := j.trained(ctx, 3); err != nil {
		return err
	}
	worlds, lists := j.Generation, j.Count("hosts_found")
	if err := j.stop(ctx); err != nil {
		return err
	}
	text, err := os.ReadFile(j.plan.OutputPath())
	if err != nil {
		return err
	}
	lines, err := logged(string(text))
	t.note("%d lists of hosts, %d worlds, %d lines of the log", lists, worlds, lines)
	return err
}

// stamped is a line of hvdrun's log.
var stamped = regexp.MustCompile(`^(\d\d:\d\d:\d\d\.\d{3}) [A-Z]+ +(.*)`)

// logged returns the number of lines that hvdrun logged before it was stopped, and an error if
// there are more than mostLines in any window.
func logged(text string) (n int, err error) {
	var last [mostLines]time.Time
	for line := range strings.Lines(text) {
		of := stamped.FindStringSubmatch(line)
		if of == nil {
			continue
		}
		if strings.HasPrefix(of[2], "stopped by ") {
			break
		}
		at, perr := time.Parse("15:04:05.000", of[1])
		if perr != nil {
			return n, perr
		}
		if since := at.Sub(last[n%mostLines]); n >= mostLines && since >= 0 && since < window && err == nil {
			err = fmt.Errorf("hvdrun logs more than %d lines within %v: %s", mostLines, window, of[0])
		}
		last[n%mostLines] = at
		n++
	}
	return n, err
}
