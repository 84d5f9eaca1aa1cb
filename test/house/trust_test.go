package house

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/hvdrun/hvdrun/internal/wire/notifypb"
	"github.com/hvdrun/hvdrun/internal/wire/rendezvouspb"
)

// TestTrust: for each message that a worker can send, testdata/trust.txt has the effect of a false
// one, and a test.
func TestTrust(t *testing.T) {
	rows := readTable(t, "trust.txt")
	for name, row := range rows {
		cells := strings.Split(row, " | ")
		if len(cells) != 3 || slices.Contains(cells, "") {
			t.Errorf("%s: %d columns follow; write the conclusion, the effect and the tests", name, len(cells))
		} else if checkShown(t, cells[2]) == 0 {
			t.Errorf("%s: no test is named", name)
		}
	}
	sent := fromWorkers()
	for _, name := range sent {
		if rows[name] == "" {
			t.Errorf("testdata/trust.txt does not tell what happens if %s is a lie", name)
		}
	}
	for name := range rows {
		if !slices.Contains(sent, name) && !strings.HasPrefix(name, "peer: ") {
			t.Errorf("testdata/trust.txt tells of %s, which no worker sends", name)
		}
	}
}

// fromWorkers returns what workers send: the methods that they call, with the fields of the
// requests, the methods that they answer, with the fields of the answers, and the reports.
func fromWorkers() (names []string) {
	seen := map[protoreflect.FullName]bool{}
	var fields func(m protoreflect.MessageDescriptor)
	fields = func(m protoreflect.MessageDescriptor) {
		if seen[m.FullName()] {
			return
		}
		seen[m.FullName()] = true
		for i := range m.Fields().Len() {
			f := m.Fields().Get(i)
			names = append(names, string(m.Name())+"."+string(f.Name()))
			if f.Message() != nil {
				fields(f.Message())
			}
		}
	}
	methods := func(s protoreflect.ServiceDescriptor, sends func(protoreflect.MethodDescriptor) protoreflect.MessageDescriptor) {
		for i := range s.Methods().Len() {
			m := s.Methods().Get(i)
			names = append(names, string(s.Name())+"."+string(m.Name()))
			fields(sends(m))
		}
	}
	methods(rendezvouspb.File_rendezvous_proto.Services().ByName("Rendezvous"), protoreflect.MethodDescriptor.Input)
	methods(notifypb.File_notify_proto.Services().ByName("Hearing"), protoreflect.MethodDescriptor.Input)
	methods(notifypb.File_notify_proto.Services().ByName("Notification"), protoreflect.MethodDescriptor.Output)
	reports := rendezvouspb.Report(0).Descriptor().Values()
	for i := range reports.Len() {
		if r := reports.Get(i); r.Number() != 0 {
			names = append(names, string(r.Name()))
		}
	}
	return names
}
