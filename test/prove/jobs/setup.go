package main

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"reflect"
	"regexp"
	"strings"
	"time"
)

// setup is a case: its job and its disturbances. The seed determines it; flags with the names of
// fields replace them. The tag is describes a field.
type setup struct {
	Seed    uint64
	Kind    string
	Workers int `is:"number of workers"`
	// Hosts are addresses 127.0.0.1, 127.0.0.2 …, among which workers are distributed.
	Hosts        int           `is:"number of hosts"`
	Spares       int           `is:"workers that wait for the end of another, besides"`
	State        int64         `is:"bytes of each worker's state"`
	Ballast      int           `is:"further MB of state"`
	Change       string        `is:"what a step changes of those: none, few (numbers) or all"`
	Steps        int           `is:"steps of training; 0: endless"`
	StepTime     time.Duration `is:"time of a step besides communication; negative: a step computes for so long"`
	Microbatches int           `is:"train by elastic.Steps of so many microbatches, a power of two"`
	Async        bool          `is:"commit by CommitAsync"`
	Print        int           `is:"MB of output of each worker"`
	Listed       int           `is:"further listed hosts, which are unusable"`
	How          string        `is:"variant of the kind"`
	Times        int           `is:"number of repetitions"`
	After        time.Duration `is:"time of the disturbance, from the job's start or its first step"`

	Pause    time.Duration `is:"mean time between two kills"`
	Ask      float64       `is:"share of workers that are asked to leave by SIGTERM instead of killed"`
	Drivers  int           `is:"kills of hvdrun itself in a job"`
	Commits  int           `is:"kills of one or two workers during commits, in as many jobs as needed"`
	Kills    int           `is:"workers to kill, one after the other"`
	Joins    int           `is:"times to add a host"`
	Arrivals int           `is:"times to start an agent on another host"`
	Beside   time.Duration `is:"with spares: kill as many again in jobs whose spares run tasks that take so long, in turns with the others; negative: that compute for so long"`
	Ratio    float64       `is:"with -beside: fail if a median step takes more than so many times as long"`

	DiscoveryInterval time.Duration `is:"pause between two runs of the discovery script"`

	Sizes   string `is:"numbers of simulated workers, as 100,1000"`
	Rounds  int    `is:"how often each of those is measured"`
	Each    int    `is:"most of them on a host, which is a process"`
	Profile string `is:"file for a profile of the driver of simulated workers, of the last job"`
	Heap    string `is:"file for a profile of its memory, when it has formed three worlds"`
	Verbose bool   `is:"print the log of that driver"`
}

// fields calls f with the name of each field, the description of its flag, empty if it has none,
// and its value.
func (s *setup) fields(f func(name, is string, v reflect.Value)) {
	v := reflect.ValueOf(s).Elem()
	for i := range v.NumField() {
		field := v.Type().Field(i)
		f(strings.ToLower(inner.ReplaceAllString(field.Name, "$1-$2")), field.Tag.Get("is"), v.Field(i))
	}
}

var inner = regexp.MustCompile(`([a-z])([A-Z])`)

// define defines the flags that set fields of s.
func (s *setup) define(f *flag.FlagSet) {
	s.fields(func(name, is string, v reflect.Value) {
		if is = "in place of what the seed says: " + is; v.Kind() == reflect.Uint64 || name == "kind" {
			return
		}
		switch to := v.Addr().Interface().(type) {
		case *int:
			f.IntVar(to, name, 0, is)
		case *int64:
			f.Int64Var(to, name, 0, is)
		case *bool:
			f.BoolVar(to, name, false, is)
		case *string:
			f.StringVar(to, name, "", is)
		case *float64:
			f.Float64Var(to, name, 0, is)
		case *time.Duration:
			f.DurationVar(to, name, 0, is)
		}
	})
}

// replace sets the fields whose flags are given, and returns these flags as words of a command
// line.
func (s *setup) replace(f *flag.FlagSet) (given []string) {
	f.Visit(func(set *flag.Flag) {
		s.fields(func(name, is string, v reflect.Value) {
			if is != "" && name == set.Name {
				v.Set(reflect.ValueOf(set.Value.(flag.Getter).Get()))
				given = append(given, "-"+name+"="+set.Value.String())
			}
		})
	})
	return given
}

// String lists the fields that are not zero.
func (s setup) String() string {
	var words []string
	s.fields(func(name, _ string, v reflect.Value) {
		switch {
		case v.IsZero(), name == "seed", name == "kind":
		case name == "state":
			words = append(words, "state="+size(v.Int()))
		default:
			words = append(words, fmt.Sprintf("%s=%v", name, v.Interface()))
		}
	})
	return strings.Join(words, " ")
}

func size(n int64) string {
	for _, u := range []struct {
		unit int64
		name string
	}{{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n >= u.unit && n%u.unit == 0 {
			return fmt.Sprintf("%d%s", n/u.unit, u.name)
		}
	}
	return fmt.Sprintf("%dB", n)
}

const (
	// memoryBound bounds the states of all workers of a case, in bytes. A worker has its state
	// twice: live and committed.
	memoryBound = 10 << 30
	// Cases above one of these are not small.
	smallWorkers, smallState, smallPrint, smallListed = 16, 16 << 20, 4, 200
)

// memory returns the size of the states in bytes.
func (s setup) memory() int64 { return 2 * int64(s.Workers) * (s.State + int64(s.Ballast)*1e6) }

// small reports whether the case is cheap.
func (s setup) small() bool {
	workers := s.Workers
	if s.Kind == "scale" {
		workers /= 8 // they are goroutines
	}
	return workers <= smallWorkers && s.State <= smallState && s.Print <= smallPrint && s.Listed <= smallListed
}

// draw returns the case of a seed. Kinds take turns, so consecutive seeds cover all kinds; sizes
// grow with the turn, because large ones are rarely drawn.
func draw(seed uint64) (setup, kind) {
	k := kinds[seed%uint64(len(kinds))]
	d := rand.New(rand.NewPCG(seed, 0x6a6f6273))
	s := setup{
		Seed: seed, Kind: k.name, Workers: 2 + d.IntN(5), Hosts: 1 + d.IntN(3), State: 1 << 10 << d.IntN(15),
		Steps: 40 + d.IntN(80), StepTime: time.Duration(2+d.IntN(8)) * time.Millisecond, Async: d.IntN(3) == 0,
		After: time.Duration(d.IntN(300)) * time.Millisecond,
	}
	if k.draw != nil {
		k.draw(d, int(seed/uint64(len(kinds))), &s)
	}
	s.Hosts = min(s.Hosts, s.Workers)
	for s.memory() > memoryBound {
		s.State /= 2
	}
	return s, k
}

// pick returns a random element.
func pick[T any](d *rand.Rand, from ...T) T { return from[d.IntN(len(from))] }

// hostList returns the hosts with their slots in the format of -H.
func (s setup) hostList() string {
	var words []string
	left := s.Workers + s.Spares
	for i := range s.Hosts {
		n := (left + s.Hosts - i - 1) / (s.Hosts - i)
		left -= n
		words = append(words, fmt.Sprintf("127.0.0.%d:%d", i+1, n))
	}
	return strings.Join(words, ",")
}

// slot returns the i-th slot in the format of a trainer's fault: rank i of an undisturbed world.
func (s setup) slot(i int) string {
	left := s.Workers + s.Spares
	for h := range s.Hosts {
		n := (left + s.Hosts - h - 1) / (s.Hosts - h)
		if i < n {
			return fmt.Sprintf("127.0.0.%d:%d", h+1, i)
		}
		i, left = i-n, left-n
	}
	return ""
}
