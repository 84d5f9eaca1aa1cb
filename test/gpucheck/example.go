package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
)

var (
	accuracyLine = regexp.MustCompile(`held-out accuracy ([0-9.]+)`)
	digestLine   = regexp.MustCompile(`digest ([0-9a-f]{16})`)
)

// checkExample trains examples/gpu with two workers on one device.
func checkExample(ctx context.Context, o *options) ([]figure, error) {
	args, least := []string{"-epochs", "20"}, 0.93
	if o.Quick {
		args, least = []string{"-epochs", "3", "-hidden", "12", "-batch", "16", "-lr", "0.05"}, 0.8
	}
	dir, err := os.MkdirTemp(o.Temp, "example")
	if err != nil {
		return nil, err
	}
	began := time.Now()
	job, err := follow.Programs{Hvdrun: filepath.Join(o.Bin, "hvdrun")}.Start(follow.Job{Dir: dir, Still: 80 * time.Second,
		Flags:   []string{"-np", "2", "--orphan-timeout", "20s"},
		Command: append([]string{filepath.Join(o.Bin, "gpu"), "-driver", o.Driver, "-digest"}, args...)})
	if err != nil {
		return nil, err
	}
	res, err := job.Wait()
	if err != nil {
		return nil, err
	}
	all := []figure{{Name: "whole job", Value: time.Since(began).Seconds(), Unit: "s"}}
	digests := digestLine.FindAllStringSubmatch(res.Output, -1)
	found := accuracyLine.FindStringSubmatch(res.Output)
	if res.Status != 0 || found == nil || len(digests) != 2 {
		return all, fmt.Errorf("the job ended with status %d: %s", res.Status, tail(res.Output))
	}
	accuracy, err := strconv.ParseFloat(found[1], 64)
	if err != nil {
		return all, err
	}
	all = append(all, figure{Name: "accuracy on images held out", Value: accuracy})
	if accuracy < least {
		return all, fmt.Errorf("the accuracy is below %v", least)
	}
	if digests[0][1] != digests[1][1] {
		return all, fmt.Errorf("the workers' networks differ: %s and %s", digests[0][1], digests[1][1])
	}
	return all, nil
}
