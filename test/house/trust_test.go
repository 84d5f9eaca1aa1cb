package house

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/hvdrun/hvdrun/internal/wire/notifypb"
	"github.com/hvdrun/hvdrun/internal/wire/rendezvouspb"
)

// TestTrust: docs/design/trust.md has, for each message that a worker can send, the effect of a
// false one, and a test.
func TestTrust(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("docs", "design", "trust.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, part, _ := strings.Cut(string(text), "<!-- messages:")
	table, rest, ended := strings.Cut(part, "<!-- end of messages -->")
	if !ended {
		t.Fatal("docs/design/trust.md has no table of messages")
	}
	var told []string
	for line := range strings.Lines(table + rest) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		name := strings.TrimSpace(cells[0])
		if len(cells) != 4 || strings.HasPrefix(name, "-") || name == "message" {
			continue
		}
		if strings.Contains(table, line) {
			told = append(told, strings.Trim(name, "`"))
		}
		for i, cell := range cells {
			if strings.TrimSpace(cell) == "" {
				t.Errorf("%s: column %d is empty", name, i+1)
			}
		}
		if checkShown(t, cells[3]) == 0 {
			t.Errorf("%s: no test is named", name)
		}
	}
	sent := fromWorkers()
	for _, name := range sent {
		if !slices.Contains(told, name) {
			t.Errorf("docs/design/trust.md does not tell what happens if %s is a lie", name)
		}
	}
	for _, name := range told {
		if !slices.Contains(sent, name) {
			t.Errorf("docs/design/trust.md tells of %s, which no worker sends", name)
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
