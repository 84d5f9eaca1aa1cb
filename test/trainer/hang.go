package main

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// hangs are the faults for which tests expect hvdrun to name the line; a comment on the line has
// the fault's name.
var hangs = map[string]func(dir string) error{
	"mutex": func(string) error { return lockTwice() },
	"spin":  func(string) error { return spin() },
	"sleep": func(string) error { return nap() },
	"fifo":  readFIFO,
}

var held sync.Mutex

func lockTwice() error {
	held.Lock()
	held.Lock() // mutex
	return nil
}

// ready is what spin waits for; it is never set.
var ready atomic.Bool

func spin() error { // spin
	for !ready.Load() { // spin
		continue // spin
	}
	return nil
}

func nap() error {
	time.Sleep(24 * time.Hour) // sleep
	return nil
}

// readFIFO blocks in open(2): nobody writes to the FIFO.
func readFIFO(dir string) error {
	path := filepath.Join(dir, fmt.Sprintf("fifo.%d", os.Getpid()))
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		return err
	}
	f, err := os.Open(path) // fifo
	if err != nil {
		return err
	}
	return f.Close()
}
