package main

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"time"
)

// setup is a case: its job and its disturbances. It depends on the seed only.
type setup struct {
	Seed    uint64
	Kind    string
	Workers int
	Hosts   int           // addresses 127.0.0.1, 127.0.0.2 …, among which workers are distributed
	State   int64         // bytes of each worker's state
	Steps   int           // of training; 0: endless
	Pause   time.Duration // of each step
	Print   int           // MB of output of each worker
	Listed  int           // further listed hosts, which are unusable
	How     string        // variant of the kind
	Times   int           // number of repetitions
	After   time.Duration // time of the disturbance, from the job's start or its first step
	Async   bool          // CommitAsync
}

// String lists the fields that are not zero.
func (s setup) String() string {
	var words []string
	v := reflect.ValueOf(s)
	for i := range v.NumField() {
		name, f := v.Type().Field(i).Name, v.Field(i)
		switch {
		case f.IsZero(), name == "Seed", name == "Kind":
		case name == "State":
			words = append(words, "state="+size(f.Int()))
		default:
			words = append(words, fmt.Sprintf("%s=%v", strings.ToLower(name), f.Interface()))
		}
	}
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
	// memoryBound bounds the states of all workers of a case in bytes. A worker has its state
	// twice: live and committed.
	memoryBound = 10 << 30
	// Cases above this are not small.
	smallWorkers, smallState, smallPrint, smallListed = 16, 16 << 20, 4, 200
)

// memory returns the size of the states in bytes.
func (s setup) memory() int64 { return 2 * int64(s.Workers) * s.State }

// small reports whether the case is cheap.
func (s setup) small() bool {
	return s.Workers <= smallWorkers && s.State <= smallState && s.Print <= smallPrint && s.Listed <= smallListed
}

// draw returns the case of a seed. Kinds take turns, so that consecutive seeds cover all kinds;
// sizes grow with the turn, because large ones are rarely drawn.
func draw(seed uint64) (setup, kind) {
	k := kinds[seed%uint64(len(kinds))]
	d := rand.New(rand.NewPCG(seed, 0x6a6f6273))
	s := setup{
		Seed: seed, Kind: k.name, Workers: 2 + d.IntN(5), Hosts: 1 + d.IntN(3), State: 1 << 10 << d.IntN(15),
		Steps: 40 + d.IntN(80), Pause: time.Duration(2+d.IntN(8)) * time.Millisecond, Async: d.IntN(3) == 0,
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
	left := s.Workers
	for i := range s.Hosts {
		n := (left + s.Hosts - i - 1) / (s.Hosts - i)
		left -= n
		words = append(words, fmt.Sprintf("127.0.0.%d:%d", i+1, n))
	}
	return strings.Join(words, ",")
}

// slot returns the i-th slot in the format of a trainer's fault: rank i of an undisturbed world.
func (s setup) slot(i int) string {
	left := s.Workers
	for h := range s.Hosts {
		n := (left + s.Hosts - h - 1) / (s.Hosts - h)
		if i < n {
			return fmt.Sprintf("127.0.0.%d:%d", h+1, i)
		}
		i, left = i-n, left-n
	}
	return ""
}
