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
	// MaxLog is how many bytes of the log may wait for a reader; lines beyond that are dropped and
	// counted.
	MaxLog = 1 << 20
	// MaxEvents is how many bytes of events may wait for their file.
	MaxEvents = 16 << 20
	// FlushPatience is how long the end of the program waits for a writer that takes nothing,
	// HurriedFlush where a person has asked twice to stop.
	FlushPatience = 5 * time.Second
	// HurriedFlush is much shorter.
	HurriedFlush = 200 * time.Millisecond
	// RetryPause is the pause between two writes of what cannot be written.
	RetryPause = time.Second
)

// Queue keeps text for a writer that may block or fail for a while, so that those who write to the
// queue never wait. Its methods may be called by many goroutines.
type Queue struct {
	To   io.Writer
	Most int
	// dropped returns the text that stands for so many lines that found no room. Nil: nothing
	// stands for them.
	dropped func(lines int) []byte
	// failed, if not nil, is told of each error of the writer, and what could not be written is
	// tried again after a pause. Nil: it is lost.
	Failed func(error)

	mu     sync.Mutex
	text   []byte
	now    []byte // what the writer has been given, some of which it may have taken
	lost   int
	passed uint64        // calls of Write that have returned
	idle   chan struct{} // closed when all is written; nil: it is
	ending chan struct{} // closed by flush: failures are final
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
		go q.run(q.idle) // flush waits for it
	}
	return len(b), nil
}

// Waiting returns what may not have been written yet.
func (q *Queue) Waiting() []byte {
	q.mu.Lock()
	defer q.mu.Unlock()
	return slices.Concat(q.now, q.text)
}

// OnDropped sets dropped.
func (q *Queue) OnDropped(dropped func(lines int) []byte) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.dropped = dropped
}

// run writes until there is nothing to write.
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

// pause waits before the next try, which is the last where flush has been called.
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

// errNotTaken reports that a writer has not taken what was left.
var errNotTaken = errors.New("it takes nothing")

// Flush blocks until all is written, or the writer has taken nothing for the patience, or has
// failed. It is the last call.
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
