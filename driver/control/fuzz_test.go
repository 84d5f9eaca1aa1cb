package control

import (
	"context"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/internal/wire/controlpb"
	"github.com/hvdrun/hvdrun/job"
)

// obeyed is a handler that keeps the last command.
type obeyed struct{ last *job.Command }

func (o *obeyed) Status(context.Context) ([]byte, error) { return nil, nil }

func (o *obeyed) Stacks(context.Context, []int, bool) ([]byte, error) { return nil, nil }

func (o *obeyed) Command(_ context.Context, c job.Command) (string, error) {
	o.last = &c
	return "done", nil
}

// FuzzCommand: whatever arrives over the socket, a driver gets only commands that it can carry out.
func FuzzCommand(f *testing.F) {
	slot := uint32(1 << 31)
	for _, m := range []*controlpb.CommandRequest{
		{Verb: string(job.Stop), Now: true},
		{Verb: string(job.Exclude), Host: "a", Slot: &slot, ForNanoseconds: -1},
		{Verb: string(job.Scale), MinNp: &slot},
		{Verb: "\x1b[2J"},
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var m controlpb.CommandRequest
		if proto.Unmarshal(b, &m) != nil {
			return
		}
		o := &obeyed{}
		reply, err := (&server{h: o, record: func(audit.Record) {}}).Command(t.Context(), &m)
		if (err == nil) != (o.last != nil) || (reply == nil) != (err != nil) {
			t.Fatalf("%v, %v, heard: %+v", reply, err, o.last)
		}
		if o.last == nil {
			return
		}
		for _, n := range []*int{o.last.Slot, o.last.MinNP, o.last.MaxNP} {
			if n != nil && *n < 0 {
				t.Errorf("heard: %+v", o.last)
			}
		}
		if err := o.last.Check(); err != nil {
			t.Error(err)
		}
	})
}
