package follow

import "github.com/hvdrun/hvdrun/job"

// Event is an event of a job.
type Event = job.Entry

// Slot is a member of a published world.
type Slot = job.PublishedSlot

// Count returns the number of events with the name.
func Count(events []Event, name job.EventName) int {
	n := 0
	for _, e := range events {
		if e.Name == name {
			n++
		}
	}
	return n
}
