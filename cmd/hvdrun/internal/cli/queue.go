package cli

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"
)

const (
	// MaxLog is the largest number of bytes of the log that may wait for a reader; further lines
	// are dropped and counted.
	MaxLog = 1 << 20
	// MaxEvents is the largest number of bytes of events that may wait for their file.
	MaxEvents = 16 << 20
	// FlushPatience is how long the end of the program waits for a writer that accepts nothing.
	FlushPatience = 5 * time.Second
	// HurriedFlush replaces FlushPatience after the user has asked twice to stop.
	HurriedFlush = 200 * time.Millisecond
	// RetryPause is the pause before a failed write is retried.
	RetryPause = time.Second
)

// Queue keeps text for a writer that may block or fail for a while, so that a Write to the queue
// never blocks. Many goroutines may call its methods.
type Queue struct {
	To   io.Writer
	Most int
	// dropped returns the text that replaces the given number of dropped lines. Nil: nothing
	// replaces them.
	dropped func(lines int) []byte
	// Failed, if not nil, is called with each error of the writer, and the write is retried after
	// RetryPause. Nil: text that cannot be written is lost.
	Failed func(error)

	mu     sync.Mutex
	text   []byte
	now    []byte // the text being written; a part of it may be written already
	lost   int
	passed uint64        // calls of Write that have returned
	idle   chan struct{} // closed when everything is written; nil: everything is written
	ending chan struct{} // closed by Flush: failures are final
}

// Write takes whole lines. It keeps nothing of b, never blocks and never fails.
func (q *Queue) Write(b []byte) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.text)+len(b) > q.Most {
		q.lost++
		return len(b), nil
	}
	q.text = append(q.text, b...)
	if q.ending == nil {
		q.ending = make(chan struct{})
	}
	if q.idle == nil {
		q.idle = make(chan struct{})
		go q.run(q.idle) // Flush waits for it
	}
	return len(b), nil
}

// Waiting returns a copy of the text that may not have been written yet.
func (q *Queue) Waiting() []byte {
	q.mu.Lock()
	defer q.mu.Unlock()
	return slices.Concat(q.now, q.text)
}

// OnDropped sets the function that returns the text in place of dropped lines.
func (q *Queue) OnDropped(dropped func(lines int) []byte) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.dropped = dropped
}

// run writes until the queue is empty.
func (q *Queue) run(idle chan struct{}) {
	for {
		q.mu.Lock()
		text := q.text
		q.text, q.now = nil, nil
		if lost := q.lost; lost > 0 && q.dropped != nil && len(text) < q.Most/2 {
			text = append(text, q.dropped(lost)...)
			q.lost = 0
		}
		if len(text) == 0 {
			q.idle = nil
			close(idle)
			q.mu.Unlock()
			return
		}
		q.now = text
		q.mu.Unlock()
		last := q.isEnding()
		n, err := q.To.Write(text)
		q.mu.Lock()
		q.passed++
		again := err != nil && q.Failed != nil
		q.now = nil
		if again {
			q.text = append(text[n:len(text):len(text)], q.text...)
		}
		q.mu.Unlock()
		if again {
			q.Failed(err)
			if last {
				q.mu.Lock()
				defer q.mu.Unlock()
				q.idle = nil
				close(idle)
				return
			}
			q.pause()
		}
	}
}

// pause waits before the next try, which is the last if Flush has been called.
func (q *Queue) pause() {
	timer := time.NewTimer(RetryPause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-q.ending:
	}
}

func (q *Queue) isEnding() bool {
	select {
	case <-q.ending:
		return true
	default:
		return false
	}
}

// errNotTaken reports that the writer did not accept the rest.
var errNotTaken = errors.New("the reader accepts nothing, and the rest was not written")

// Flush blocks until everything is written, until the writer has accepted nothing for the patience,
// or until it fails. It must be the last call.
func (q *Queue) Flush(patience time.Duration) error {
	q.mu.Lock()
	if q.ending != nil {
		close(q.ending)
	}
	idle := q.idle
	q.mu.Unlock()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for before := uint64(0); idle != nil; timer.Reset(patience) {
		select {
		case <-idle:
			idle = nil
			continue
		case <-timer.C:
		}
		q.mu.Lock()
		passed := q.passed
		q.mu.Unlock()
		if passed == before {
			return errNotTaken
		}
		before = passed
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if left := len(q.text); left > 0 || q.lost > 0 {
		return fmt.Errorf("%d bytes were not written, and %d lines dropped", left, q.lost)
	}
	return nil
}
