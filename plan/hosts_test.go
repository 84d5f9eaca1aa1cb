package plan_test

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/hvdrun/hvdrun/plan"
)

type hosts = []plan.Host

func TestParseHosts(t *testing.T) {
	const def = 4
	for _, c := range []struct {
		name, text string
		want       hosts
	}{
		{"nothing", "", nil},
		{"blank lines and comments only", "\n \t\r\n# a:1\n  # b\n", nil},
		{"name", "a", hosts{{Name: "a", Slots: def}}},
		{"name and slots", "a:2\n", hosts{{Name: "a", Slots: 2}}},
		{"no slots now", "a:0", hosts{{Name: "a", Slots: 0}}},
		{"leading zeros", "a:007", hosts{{Name: "a", Slots: 7}}},
		{"order as printed", "c:1\na:2\nb:3", hosts{{Name: "c", Slots: 1}, {Name: "a", Slots: 2}, {Name: "b", Slots: 3}}},
		{"CRLF", "a:1\r\nb\r\n\r\n", hosts{{Name: "a", Slots: 1}, {Name: "b", Slots: def}}},
		{"byte order mark", "\ufeffa:1\n", hosts{{Name: "a", Slots: 1}}},
		{"spaces around", " \ta:1 \t\n", hosts{{Name: "a", Slots: 1}}},
		{"comment behind", "a:1 # the first\nb:2\t#c:3\n", hosts{{Name: "a", Slots: 1}, {Name: "b", Slots: 2}}},
		{"CRLF before a comment", "a:1\r#\n", hosts{{Name: "a", Slots: 1}}},
		{"IPv4", "172.31.32.7:8", hosts{{Name: "172.31.32.7", Slots: 8}}},
		{"IPv6 in brackets", "[fe80::1%eth0.7]:2\n[::1]", hosts{{Name: "fe80::1%eth0.7", Slots: 2}, {Name: "::1", Slots: def}}},
		{"bare IPv6", "2001:db8::5\n1:2:3:4:5:6:7:8\n2001:db8::1:a\n1::\n::", hosts{
			{Name: "2001:db8::5", Slots: def}, {Name: "1:2:3:4:5:6:7:8", Slots: def}, {Name: "2001:db8::1:a", Slots: def}, {Name: "1::", Slots: def}, {Name: "::", Slots: def}}},
		{"IPv6 slots=", "2001:db8::5 slots=3\n[::1] slots=2", hosts{{Name: "2001:db8::5", Slots: 3}, {Name: "::1", Slots: 2}}},
		{"HF-01 hostfile", "172.31.32.7 slots=8\n172.31.33.9  slots=8\n", hosts{{Name: "172.31.32.7", Slots: 8}, {Name: "172.31.33.9", Slots: 8}}},
		{"twice the same", "a:2\nb:1\na:2\n", hosts{{Name: "a", Slots: 2}, {Name: "b", Slots: 1}}},
		{"twice the same by default", "a\na:4\na slots=4\n", hosts{{Name: "a", Slots: 4}}},
		{"case", "Node1:2\nb:1\nnode1:2\n", hosts{{Name: "Node1", Slots: 2}, {Name: "b", Slots: 1}}},
		{"all characters", "_Node-7.rack_2:1", hosts{{Name: "_Node-7.rack_2", Slots: 1}}},
		{"most slots", "a:65536", hosts{{Name: "a", Slots: plan.MaxSlots}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := plan.ParseHosts(c.text, def)
			if err != nil || !slices.Equal(got, c.want) {
				t.Errorf("ParseHosts(%q) = %v, %v; want %v", c.text, got, err, c.want)
			}
			if err := plan.CheckHosts(got); err != nil {
				t.Errorf("CheckHosts(%v) = %v", got, err)
			}
		})
	}
}

// refused are invalid lines, each with a part of its error.
var refused = []struct{ line, reason string }{
	{"a:-1", "negative slots"},
	{"a slots=-1", "negative slots"},
	{"a:x", "not a number"},
	{"a:", "not a number"},
	{"a:+2", "not a number"},
	{"a:2.5", "not a number"},
	{"a:--1", "not a number"},
	{"a slots=", "not a number"},
	{"a:65537", "more than 65536 slots"},
	{"a:99999999999999999999", "more than 65536 slots"},
	{":3", "no name"},
	{"a:1:2", "two colons"},
	{"node1:2222:4", "--ssh-port"},
	{"localhost:server2:2", "two colons"},
	{"node1:2,node2:2", "a host on each line"},
	{"fe80::1:4", "[address]:slots"},
	{"1:2:3:4:5:6:7:8:4", "[address]:slots"},
	{"[::1]4", "[address]:slots"},
	{"[::1", "bracket"},
	{"[a]:2", "not an IPv6 address"},
	{"[127.0.0.1]:2", "not an IPv6 address"},
	{"[]:2", "not an IPv6 address"},
	{"[::1]:", "not a number"},
	{"[::1]:x", "not a number"},
	{"a b", `"b"`},
	{"a : 2", `":"`},
	{"a slots=2 max_slots=4", `"max_slots" is not known; leave it out`},
	{"a slots=2 max-slots=4", `"max-slots" is not known; leave it out`},
	{"a slots=2 cpus=4", "leave it out"},
	{"a slots = 2", "leave them out"},
	{"a slots =2", "leave them out"},
	{"a slots= 2", "leave them out"},
	{"a:2 b:2", "a comma (-H)"},
	{"node01 4 all.q@node01 UNDEFINED", "$PE_HOSTFILE"},
	{"node[01-04]", "scontrol show hostnames"},
	{"node[01-04]:8", "scontrol show hostnames"},
	{"a slots=2 slots=2", "twice"},
	{"a:2 slots=2", "twice"},
	{"-oProxyCommand", `'-'`},
	{".", `'.'`},
	{"user@a:2", `'@' is not allowed in a host name; the user is given by User in ssh's configuration`},
	{"alice@192.0.2.10 slots=2", "ssh"},
	{"a#1:2", `'#'`},
	{"a/b", `'/'`},
	{"a\x00b", `'\x00'`},
	{"a\x00:\x001\x00", "UTF-16"},
	{"bücher", `'ü'`},
	{"\xff", "name"},
	{"a,b", `','`},
	{strings.Repeat("a", 256), "longer"},
}

func TestParseHostsRefuses(t *testing.T) {
	for _, c := range refused {
		t.Run(c.line, func(t *testing.T) {
			got, err := plan.ParseHosts("\nok:1\n"+c.line+"\r\nother:1\n", 1)
			var parse *plan.ParseError
			if !errors.As(err, &parse) {
				t.Fatalf("got %v, %v, not a *ParseError", got, err)
			}
			if parse.Line != 3 || parse.Item != 0 || !strings.HasPrefix(err.Error(), "plan: line 3: ") {
				t.Errorf("%v does not name line 3", err)
			}
			if !strings.Contains(parse.Reason, c.reason) {
				t.Errorf("%v does not say %q", err, c.reason)
			}
			if len(err.Error()) > 400 {
				t.Errorf("an error of %d bytes", len(err.Error()))
			}
		})
	}
}

func TestParseHostsContradictionNamesBothLines(t *testing.T) {
	_, err := plan.ParseHosts("# hosts\na:2\nb:1\na:3\n", 1)
	var parse *plan.ParseError
	if !errors.As(err, &parse) || parse.Line != 4 || !strings.Contains(parse.Reason, "line 2") {
		t.Errorf("got %v; want an error at line 4 that names line 2", err)
	}
}

func TestParseHostsDefaults(t *testing.T) {
	if got, err := plan.ParseHosts("a", 0); err != nil || !slices.Equal(got, hosts{{Name: "a", Slots: 0}}) {
		t.Errorf("default 0: got %v, %v", got, err)
	}
	for _, def := range []int{-1, plan.MaxSlots + 1} {
		if got, err := plan.ParseHosts("a", def); err == nil || !strings.Contains(err.Error(), "no slots given") {
			t.Errorf("default %d: got %v, %v; want an error", def, got, err)
		}
		if _, err := plan.ParseHosts("a:1", def); err != nil {
			t.Errorf("default %d is not needed, but: %v", def, err)
		}
	}
}

func TestParseHostsBoundsTheTotal(t *testing.T) {
	var text strings.Builder
	for i := range 16 {
		text.WriteString(plan.Host{Name: "h" + string(rune('a'+i)), Slots: plan.MaxSlots}.String() + "\n")
	}
	if _, err := plan.ParseHosts(text.String(), 1); err != nil {
		t.Errorf("2^20 slots: %v", err)
	}
	text.WriteString("more:1\n")
	var parse *plan.ParseError
	if _, err := plan.ParseHosts(text.String(), 1); !errors.As(err, &parse) || parse.Line != 17 {
		t.Errorf("2^20 + 1 slots: got %v; want an error at line 17", err)
	}
}

func TestParseErrorQuotesLittle(t *testing.T) {
	_, err := plan.ParseHosts(strings.Repeat("é", 1000), 1)
	var parse *plan.ParseError
	if !errors.As(err, &parse) || len(parse.Text) > 90 || !utf8.ValidString(parse.Text) {
		t.Errorf("got %v; want a short quote of whole characters", err)
	}
}

func TestParseHostList(t *testing.T) {
	got, err := plan.ParseHostList("a:2, b ,[::1]:3,c slots=5,A:2", 4)
	if want := (hosts{{Name: "a", Slots: 4}, {Name: "b", Slots: 4}, {Name: "::1", Slots: 3}, {Name: "c", Slots: 5}}); err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v; want %v", got, err, want)
	}
	for _, c := range []struct {
		list   string
		item   int
		reason string
	}{
		{"", 1, "missing host"},
		{",", 1, "missing host"},
		{",a", 1, "missing host"},
		{"a:2,,", 2, "missing host"},
		{"a:2,,b", 2, "missing host"},
		{"a:2,b:x", 2, "not a number"},
		{"a:65536,b:1,a:1", 3, "more than 65536 slots together"},
		{"node[01-04,07]", 1, "scontrol show hostnames"},
		{"a:2 b:2", 1, "a comma (-H)"},
		{"a #b", 1, `"#b"`},
		{"a\n,b", 2, "missing host"},
		{"a:2;b:1", 1, "commas, not by semicolons"},
	} {
		_, err := plan.ParseHostList(c.list, 1)
		var parse *plan.ParseError
		if !errors.As(err, &parse) || parse.Item != c.item || parse.Line != 0 || !strings.Contains(parse.Reason, c.reason) {
			t.Errorf("ParseHostList(%q): got %v; want item %d, %q", c.list, err, c.item, c.reason)
		}
		if err != nil && !strings.Contains(err.Error(), "item ") {
			t.Errorf("%v names no item", err)
		}
	}
}

// TestParseHostListTakesLinesAndACommaAtItsEnd: a list that a program has joined may end with a
// comma.
func TestParseHostListTakesLinesAndACommaAtItsEnd(t *testing.T) {
	for _, list := range []string{"a:2,b:1,", "a:2,b:1, ", "a:2\nb:1\n", "\na:2,\r\n\n b slots=1 ,\n"} {
		got, err := plan.ParseHostList(list, 1)
		if want := (hosts{{Name: "a", Slots: 2}, {Name: "b", Slots: 1}}); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %v, %v; want %v", list, got, err, want)
		}
	}
}

// TestParseHostfileAddsUp: some batch systems write one line per slot, as in $PBS_NODEFILE.
func TestParseHostfileAddsUp(t *testing.T) {
	for _, text := range []string{"a\na\nb\nb\n", "a\nb\na\nb\n", "a:1\nb\nA slots=1\nB:1 # again\n"} {
		got, err := plan.ParseHostfile(text, 1)
		if want := (hosts{{Name: "a", Slots: 2}, {Name: "b", Slots: 2}}); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %v, %v; want %v", text, got, err, want)
		}
	}
	var parse *plan.ParseError
	if _, err := plan.ParseHostfile("a:65535\na\na\n", 1); !errors.As(err, &parse) || parse.Line != 3 {
		t.Errorf("65537 slots: got %v; want an error at line 3", err)
	}
	if _, err := plan.ParseHostfile("\xff\xfea\x00\n\x00", 1); !errors.As(err, &parse) || !strings.Contains(parse.Reason, "UTF-16") {
		t.Errorf("got %v; want an error that names UTF-16", err)
	}
}

func TestSameButCase(t *testing.T) {
	for _, c := range []struct {
		hosts         hosts
		first, second string
	}{
		{nil, "", ""},
		{hosts{{Name: "a"}, {Name: "b"}}, "", ""},
		{hosts{{Name: "gpu02"}, {Name: "b"}, {Name: "GPU02"}}, "gpu02", "GPU02"},
	} {
		if first, second := plan.SameButCase(c.hosts); first != c.first || second != c.second {
			t.Errorf("%v: %q, %q; want %q, %q", c.hosts, first, second, c.first, c.second)
		}
	}
}

func TestHasSlots(t *testing.T) {
	for word, want := range map[string]bool{
		"127.0.0.3:1": true, "node2:2": true, "[::1]:2": true,
		"node2": false, "./train": false, "a:b": false, "python3": false, "::1": false, "C:\\x": false, "": false,
	} {
		if got := plan.HasSlots(word); got != want {
			t.Errorf("HasSlots(%q) = %v", word, got)
		}
	}
}

func TestCheckHostsRefuses(t *testing.T) {
	for _, c := range []struct {
		hosts  hosts
		reason string
	}{
		{hosts{{Name: "", Slots: 1}}, "no name"},
		{hosts{{Name: "a b", Slots: 1}}, "name"},
		{hosts{{Name: "a:1", Slots: 1}}, "name"},
		{hosts{{Name: "a", Slots: -1}}, "negative"},
		{hosts{{Name: "a", Slots: plan.MaxSlots + 1}}, "more than"},
		{hosts{{Name: "a", Slots: 1}, {Name: "b", Slots: 1}, {Name: "a", Slots: 1}}, "host 3: listed before, as host 1"},
		{hosts{{Name: "a", Slots: 1}, {Name: "a", Slots: 2}}, "host 2: host a has 2 slots here but 1 as host 1"},
	} {
		if err := plan.CheckHosts(c.hosts); err == nil || !strings.Contains(err.Error(), c.reason) {
			t.Errorf("CheckHosts(%v) = %v; want %q", c.hosts, err, c.reason)
		}
	}
}

func FuzzParseHosts(f *testing.F) {
	f.Add("a:2\nb\n# c\n\n[::1]:3\r\nd slots=4 # five\n")
	for _, c := range refused {
		f.Add("ok:1\n" + c.line)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got, err := plan.ParseHosts(text, 3)
		if err != nil {
			var parse *plan.ParseError
			if !errors.As(err, &parse) {
				t.Fatalf("%v is no *ParseError", err)
			}
			if parse.Line < 1 || parse.Line > strings.Count(text, "\n")+1 {
				t.Fatalf("%v names line %d of %q", err, parse.Line, text)
			}
			return
		}
		if err := plan.CheckHosts(got); err != nil {
			t.Fatalf("ParseHosts(%q) = %v: %v", text, got, err)
		}
		// The result in its plainest form parses to the same hosts.
		var lines []string
		for _, h := range got {
			lines = append(lines, h.String())
		}
		again, err := plan.ParseHosts(strings.Join(lines, "\n"), -1)
		if err != nil || !reflect.DeepEqual(again, got) {
			t.Fatalf("ParseHosts(%q) = %v, but read back %v, %v", text, got, again, err)
		}
	})
}
