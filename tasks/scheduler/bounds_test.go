package scheduler

import (
	"errors"
	"math"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
	"github.com/hvdrun/hvdrun/tasks/internal/transfer"
)

const (
	hash = 32
	// several marks lists whose elements need not be in one message or record: the link begins
	// another message, and the journal another record.
	several = -1
	maxKill = 200 // workers that were lost with a task: deaths of queue.Config.Poison
)

// largest has the bound of each text, in bytes, and of each list, in elements.
var largest = map[protoreflect.FullName]int{
	"ToTasks.groups": several, "ToTasks.puts": several, "ToTasks.submits": several, "ToTasks.ends": several,
	"ToTasks.cancels": several, "ToTasks.releases": several, "ToTasks.unputs": several,
	"ToTasks.dones": several, "ToTasks.returned": several, "ToTasks.kept": several, "ToTasks.leases": several,
	"ToTasks.stored": several, "ToTasks.missing": several, "ToTasks.explain": several, "ToTasks.begun": several,
	"ToTasks.waits": several, "ToTasks.waited": several,

	"FromTasks.told": several, "FromTasks.asks": several, "FromTasks.pushes": several,
	"FromTasks.take_back": several, "FromTasks.stops": several, "FromTasks.drops": several,
	"FromTasks.explained": several, "FromTasks.results": several, "FromTasks.warnings": several,
	"FromTasks.status": link.MaxStatus, "FromTasks.refused": link.MaxWhy,

	"TasksHello.host": link.MaxName, "TasksHello.functions": link.MaxFunctions, "TasksHello.offers": link.MaxAmounts,
	"TasksHello.held": link.MaxHeld, "TasksHello.values": link.MaxName, "TasksHello.stored": link.MaxHeld, "TasksHello.name": link.MaxName,
	"TasksWelcome.run":  255,
	"TaskFunction.name": link.MaxName, "TaskFunction.hash": hash,
	"Amount.name":      link.MaxName,
	"TaskGroup.demand": link.MaxAmounts,

	"SubmitTask.args": link.MaxSubmit, "TaskOptions.prefer": link.MaxName, "TaskOptions.needs": 0, "TaskOptions.values": 0, // among whole
	"TaskResult.text": link.MaxText, "TaskResult.inlined": link.MaxInlined, "TaskResult.value": hash,
	"PutValue.value": hash, "MissingValue.value": hash, "MissingValue.host": link.MaxName,
	"ValueAt.value": hash, "ValueAt.at": 1,
	"LeaseAnswer.why": link.MaxWhy,
	"PushTask.args":   link.MaxSubmit, "PushTask.results": 0, "PushTask.values": link.MaxNeeds,

	"ValueRequest.value": hash, "ValueRequest.data": transfer.Chunk,
	"ValueReply.data": transfer.Chunk, "ValueReply.value": hash, "ValueReply.failed": link.MaxWhy,

	"TasksRecord.clients": several, "TasksRecord.groups": several, "TasksRecord.uses": several, "TasksRecord.submits": several,
	"TasksRecord.losses": several, "TasksRecord.overs": several, "TasksRecord.releases": several, "TasksRecord.gone": several,
	"TaskClient.host": link.MaxName, "TaskClient.run_id": 255, "TaskClient.role": 255, "TaskClient.from_host": 255,
	"TaskClient.incarnation": 255, "TaskClient.user": 255, "TaskClient.uid": 255,
	"TaskUse.value": hash, "TaskLoss.killers": maxKill,
}

// whole has the messages whose size is bounded as a whole.
var whole = map[protoreflect.FullName]int{"SubmitTask": link.MaxSubmit}

// more has the additional bytes of a message: PushTask bounds its results together.
var more = map[protoreflect.FullName]int{"PushTask": link.MaxResults}

// within has the messages that are encoded into a field of another one, which bounds them.
var within = map[protoreflect.Name]protoreflect.FullName{"TaskArgs": "SubmitTask.args", "TaskArg": "SubmitTask.args"}

// measured has the messages whose size was computed.
var measured = map[protoreflect.Name]bool{}

// sizes returns the largest size of a message by the table: of the message without its lists of
// several, and of the largest element of these lists.
func sizes(t *testing.T, m protoreflect.MessageDescriptor) (all, part int) {
	t.Helper()
	measured[m.Name()] = true
	name := protoreflect.FullName(strings.TrimPrefix(string(m.FullName()), "hvdrun.v1."))
	for i := range m.Fields().Len() {
		f := m.Fields().Get(i)
		tag := protowire.SizeTag(f.Number())
		one := protowire.SizeVarint(math.MaxUint64)
		switch f.Kind() {
		case protoreflect.MessageKind:
			one, _ = sizes(t, f.Message())
			one = protowire.SizeBytes(one)
		case protoreflect.StringKind, protoreflect.BytesKind:
			one = 0
		}
		field := protoreflect.FullName(string(name) + "." + string(f.Name()))
		most, known := largest[field]
		text := f.Kind() == protoreflect.StringKind || f.Kind() == protoreflect.BytesKind
		switch {
		case !known && (text || f.IsList()):
			t.Errorf("%s has no bound in the table: what sends it must have one", field)
		case most == several:
			if text {
				one = protowire.SizeBytes(link.MaxStatus)
			}
			part = max(part, tag+one)
		case text && f.IsList():
			all += most * (tag + protowire.SizeBytes(link.MaxName))
		case text:
			all += tag + protowire.SizeBytes(most)
		case f.IsList():
			all += most * (tag + one)
		default:
			all += tag + one
		}
	}
	if most, ok := whole[name]; ok {
		return most, part
	}
	return all + more[name], part
}

// TestLargestOfEachField: within the bounds of their fields, all messages and records fit.
func TestLargestOfEachField(t *testing.T) {
	for _, c := range []struct {
		m    proto.Message
		most int
	}{
		{&taskspb.ToTasks{}, link.MaxFrame},
		{&taskspb.FromTasks{}, link.MaxFrame},
		{&taskspb.ValueRequest{}, link.MaxFrame},
		{&taskspb.ValueReply{}, link.MaxFrame},
		{&taskspb.TasksRecord{}, journal.MaxRecord},
	} {
		all, part := sizes(t, c.m.ProtoReflect().Descriptor())
		name := c.m.ProtoReflect().Descriptor().Name()
		t.Logf("%s: %d bytes at most, and with one part of several %d more, of %d", name, all, part, c.most)
		if all > c.most || part+64 > c.most {
			t.Errorf("%s may have %d bytes, or a part of %d; at most %d", name, all, part, c.most)
		}
	}
	messages := taskspb.File_tasks_proto.Messages()
	for i := range messages.Len() {
		if name := messages.Get(i).Name(); !measured[name] && within[name] == "" {
			t.Errorf("%s is in no message of the table", name)
		}
	}
	for field := range largest {
		name, _, _ := strings.Cut(string(field), ".")
		d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName("hvdrun.v1." + string(field)))
		if err != nil || d == nil {
			t.Errorf("the table has %s, which %s has not", field, name)
		}
	}
	j, err := journal.Create(t.TempDir()+"/j", "run")
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	_, part := sizes(t, (&taskspb.TasksRecord{}).ProtoReflect().Descriptor())
	if err := j.Append(make([]byte, part+64)); err != nil {
		t.Errorf("the journal does not take the largest record: %v", err)
	}
}

// TestTooLarge: a text of any size arrives, cut; a task or result that is too large is refused
// once, and the connection remains.
func TestTooLarge(t *testing.T) {
	s := New(Config{Run: "r", Log: silent()})
	defer s.Close()
	w, c := connectTo(t, s, aWorker), connectTo(t, s, aClient)
	submit := func(n uint64, args []byte) {
		sub := &taskspb.SubmitTask{N: n, Args: args}
		if err := c.l.Send(sub, func(m *taskspb.ToTasks) { m.Submits = append(m.Submits, sub) }); err != nil {
			t.Error(err)
		}
	}
	told := func(n uint64) (r *taskspb.TaskResult) {
		c.until(func(m *taskspb.FromTasks) bool {
			for _, told := range m.GetTold() {
				if told.GetN() == n {
					r = told.GetResult()
				}
			}
			return r != nil
		})
		return r
	}
	c.say(func(m *taskspb.ToTasks) { m.Groups = append(m.Groups, oneGroup) })
	submit(1, make([]byte, link.MaxSubmit+1))
	if r := told(1); queue.State(r.GetState()) != queue.Failed || !strings.Contains(r.GetText(), "at most 12582912 may be sent") {
		t.Errorf("a task that is too large has become %v", r)
	}
	for n, c := range []struct {
		result *taskspb.TaskResult
		want   string
	}{
		{&taskspb.TaskResult{State: 4, Failure: 1, Text: strings.Repeat("x", 13<<20)}, "bytes more)"},
		{&taskspb.TaskResult{State: 3, Inlined: make([]byte, 13<<20)}, "its result of 13631488 bytes was not stored"},
	} {
		submit(uint64(n+2), nil)
		w.answer(c.result)
		if r := told(uint64(n + 2)); !strings.Contains(r.GetText(), c.want) || len(r.GetText()) > link.MaxText {
			t.Errorf("a result of %d bytes has become one of %d with %.100q", proto.Size(c.result), proto.Size(r), r.GetText())
		}
	}
	var large *link.TooLargeError
	done := &taskspb.TaskDone{Result: &taskspb.TaskResult{Inlined: make([]byte, link.MaxFrame)}}
	if err := w.l.Send(done, func(*taskspb.ToTasks) { t.Error("it is sent") }); !errors.As(err, &large) {
		t.Errorf("what fits into no message is sent: %v", err)
	}
}

// answer gives this result to a worker's next task.
func (w *wired) answer(r *taskspb.TaskResult) {
	w.t.Helper()
	w.until(func(m *taskspb.FromTasks) bool {
		for _, a := range m.GetAsks() {
			w.say(func(m *taskspb.ToTasks) {
				m.Leases = append(m.Leases, &taskspb.LeaseAnswer{Group: a.GetGroup(), Granted: true})
			})
		}
		if len(m.GetPushes()) == 0 {
			return false
		}
		d := &taskspb.TaskDone{Of: m.GetPushes()[0].GetOf(), Result: r}
		if err := w.l.Send(d, func(m *taskspb.ToTasks) { m.Dones = append(m.Dones, d) }); err != nil {
			w.t.Error(err)
		}
		return true
	})
}
