package scaler

import (
	"bytes"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// sampler measures what this process uses between two calls of look.
type sampler struct {
	last time.Time
	cpu  time.Duration
}

// look reads /proc. Values that it cannot determine are 0.
func (s *sampler) look(now time.Time) usage {
	u := usage{pid: uint32(os.Getpid())}
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err == nil {
		cpu := time.Duration(r.Utime.Nano() + r.Stime.Nano())
		if passed := now.Sub(s.last); !s.last.IsZero() && passed > 0 {
			u.cpu = float64(cpu-s.cpu) / float64(passed)
		}
		s.last, s.cpu = now, cpu
	}
	if text, err := os.ReadFile("/proc/self/statm"); err == nil {
		if fields := bytes.Fields(text); len(fields) > 1 {
			u.rss = number(fields[1]) * uint64(os.Getpagesize())
		}
	}
	if text, err := os.ReadFile("/proc/meminfo"); err == nil {
		for line := range bytes.Lines(text) {
			if fields := bytes.Fields(line); len(fields) > 1 && string(fields[0]) == "MemAvailable:" {
				u.free = number(fields[1]) << 10
			}
		}
	}
	return u
}

func number(text []byte) uint64 {
	n, _ := strconv.ParseUint(string(text), 10, 64)
	return n
}
