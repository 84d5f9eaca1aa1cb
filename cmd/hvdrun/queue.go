package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"
)

const (
	// maxLog is how many bytes of the log may wait for a reader; lines beyond that are dropped and
	// counted.
	maxLog = 1 << 20
	// maxEvents is how many bytes of events may wait for their file.
	maxEvents = 16 << 20
	// flushPatience is how long the end of the program waits for a writer that takes nothing,
	// hurriedFlush where a person has asked twice to stop.
	flushPatience = 5 * time.Second
	hurriedFlush  = 200 * time.Millisecond
	// retryPause is the pause between two writes of what cannot be written.
	retryPause = time.Second
)

// queue keeps text for a writer that may block or fail for a while, so that those who write to the
// queue never wait. Its methods may be called by many goroutines.
type queue struct {
	to   io.Writer
	most int
	// dropped returns the text that stands for so many lines that found no room. Nil: nothing
	// stands for them.
	dropped func(lines int) []byte
	// failed, if not nil, is told of each error of the writer, and what could not be written is
	// tried again after a pause. Nil: it is lost.
	failed func(error)

	mu     sync.Mutex
	text   []byte
	now    []byte // what the writer has been given, some of which it may have taken
	lost   int
	passed uint64        // calls of Write that have returned
	idle   chan struct{} // closed when all is written; nil: it is
	ending chan struct{} // closed by flush: failures are final
}

// Write takes whole lines. It keeps nothing of b, never blocks and never fails.
func (q *queue) Write(b []byte) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.text)+len(b) > q.most {
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

// waiting returns what may not have been written yet.
func (q *queue) waiting() []byte {
	q.mu.Lock()
	defer q.mu.Unlock()
	return slices.Concat(q.now, q.text)
}

// onDropped sets dropped.
func (q *queue) onDropped(dropped func(lines int) []byte) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.dropped = dropped
}

// run writes until there is nothing to write.
func (q *queue) run(idle chan struct{}) {
	for {
		q.mu.Lock()
		text := q.text
		q.text, q.now = nil, nil
		if lost := q.lost; lost > 0 && q.dropped != nil && len(text) < q.most/2 {
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
		n, err := q.to.Write(text)
		q.mu.Lock()
		q.passed++
		again := err != nil && q.failed != nil
		q.now = nil
		if again {
			q.text = append(text[n:len(text):len(text)], q.text...)
		}
		q.mu.Unlock()
		if again {
			q.failed(err)
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
func (q *queue) pause() {
	timer := time.NewTimer(retryPause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-q.ending:
	}
}

func (q *queue) isEnding() bool {
	select {
	case <-q.ending:
		return true
	default:
		return false
	}
}

// errNotTaken reports that a writer has not taken what was left.
var errNotTaken = errors.New("it takes nothing")

// flush blocks until all is written, or the writer has taken nothing for the patience, or has
// failed. It is the last call.
func (q *queue) flush(patience time.Duration) error {
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
