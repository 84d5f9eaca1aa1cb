package plugin

import (
	"bufio"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/wire/discoverypb"
	"github.com/hvdrun/hvdrun/plan"
)

// FuzzHandshake: a first line that is passed to go-plugin names a socket of this machine and a
// certificate.
func FuzzHandshake(f *testing.F) {
	f.Add("1|1|unix|/tmp/plugin1|grpc|" + strings.Repeat("A", 600))
	f.Add("1|1|tcp|127.0.0.1:9|grpc|" + strings.Repeat("A", 600))
	f.Add("1|1|tcp|10.0.0.1:9|grpc|" + strings.Repeat("A", 600))
	f.Add("1|2|unix|x|netrpc|")
	f.Fuzz(func(t *testing.T, line string) {
		err := checkHandshake(line)
		if err != nil {
			if len(err.Error()) > 1000 {
				t.Errorf("an error of %d bytes", len(err.Error()))
			}
			return
		}
		fields := strings.Split(strings.TrimSpace(line), "|")
		if fields[2] == "tcp" && !strings.HasPrefix(fields[3], "127.") && !strings.HasPrefix(fields[3], "[") || len(fields[5]) < shortestCert {
			t.Errorf("taken: %q", line)
		}
	})
}

// FuzzLines: the output of a plugin is split into lines of bounded length, without repetition.
func FuzzLines(f *testing.F) {
	f.Add("a\n\r\nb", 3)
	f.Add(strings.Repeat("x", 40), 2000)
	f.Fuzz(func(t *testing.T, text string, times int) {
		text = strings.Repeat(text, max(1, min(times, 5000, 1<<20/max(1, len(text)))))
		total := 0
		readLines(bufio.NewReader(strings.NewReader(text)), func(line string) {
			if total += len(line); len(line) > maxLine || strings.Contains(line, "\n") {
				t.Errorf("a line of %d bytes", len(line))
			}
		})
		if total > len(text) {
			t.Errorf("%d bytes of %d", total, len(text))
		}
	})
}

// FuzzHostList: a plugin's list of hosts is valid or refused.
func FuzzHostList(f *testing.F) {
	for _, list := range []*discoverypb.HostList{
		{Hosts: []*discoverypb.Host{{Name: "a", Slots: 2}, {Name: "b", Draining: true}}},
		{Hosts: []*discoverypb.Host{{Name: "a"}, {Name: "a"}, {Name: ""}}},
		{Hosts: []*discoverypb.Host{{Name: "a", Slots: 1<<32 - 1}, nil}},
	} {
		b, err := proto.Marshal(list)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var list discoverypb.HostList
		if proto.Unmarshal(b, &list) != nil {
			return
		}
		hosts, err := fromWire(&list)
		if err == nil && (len(hosts) > maxHosts || plan.CheckHosts(hosts) != nil) {
			t.Errorf("taken: %v", hosts)
		}
	})
}
