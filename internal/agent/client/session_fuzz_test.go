package client

import (
	"encoding/binary"
	"io"
	"testing"

	"github.com/sirupsen/logrus"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
)

// FuzzAgentEvents: whatever an agent sends, each event counts once, in order, and events of unknown
// workers have no effect.
func FuzzAgentEvents(f *testing.F) {
	words := func(events ...*agentpb.FromAgent) (all []byte) {
		for i, e := range events {
			e.Number = uint64(i + 1)
			b, err := proto.Marshal(e)
			if err != nil {
				f.Fatal(err)
			}
			all = append(binary.BigEndian.AppendUint16(all, uint16(len(b))), b...)
		}
		return all
	}
	started := &agentpb.FromAgent{What: &agentpb.FromAgent_Started{Started: &agentpb.Started{Incarnation: "i", Pid: 7}}}
	output := &agentpb.FromAgent{What: &agentpb.FromAgent_Output{Output: &agentpb.Output{Incarnation: "i", Stream: 2, Text: []byte("t")}}}
	exited := &agentpb.FromAgent{What: &agentpb.FromAgent_Exited{Exited: &agentpb.Exited{Incarnation: "i", Signal: 9}}}
	f.Add(words(started, output, exited))
	dying := &agentpb.FromAgent{What: &agentpb.FromAgent_Dying{Dying: &agentpb.Dying{Incarnation: "i", What: "dumps its core"}}}
	f.Add(words(started, dying, exited))
	f.Add(words(output, started))
	f.Add([]byte{0, 1, 0})
	log := logrus.New()
	log.SetOutput(io.Discard)
	f.Fuzz(func(t *testing.T, said []byte) {
		s := newSession(New(Config{Log: log}), place{host: "a", addr: "127.0.0.1:1"})
		spec := &launch.Spec{Incarnation: "i", Slot: plan.SlotID{Host: "a"}, Command: []string{"c"}}
		w, err := newWorker(spec)
		if err != nil || !s.add(w) {
			t.Fatal(err)
		}
		for len(said) >= 2 {
			n := min(int(binary.BigEndian.Uint16(said)), len(said)-2)
			m := new(agentpb.FromAgent)
			if proto.Unmarshal(said[2:2+n], m) == nil {
				before := s.heard
				if _, err := s.hear(m); err == nil && s.heard > before && m.GetNumber() != before+1 {
					t.Errorf("event %d was taken after %d", m.GetNumber(), before)
				}
			}
			said = said[2+n:]
		}
		last := uint64(0)
		for e, _, _ := s.take(w); e != nil; e, _, _ = s.take(w) {
			if e.GetNumber() <= last {
				t.Errorf("event %d after %d", e.GetNumber(), last)
			}
			last = e.GetNumber()
			switch {
			case e.GetStarted() != nil, e.GetDying() != nil, e.GetOutput().GetStream() == 1, e.GetOutput().GetStream() == 2:
			case e.GetExited() != nil:
				_ = exitOfEvent(spec, e.GetExited())
			default:
				t.Errorf("an event that nobody understands: %v", e)
			}
		}
		s.due(true)
	})
}
