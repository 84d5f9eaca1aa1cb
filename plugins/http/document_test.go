package main

import (
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/plan"
)

func toText(hosts []plan.Host) string {
	var items []string
	for _, h := range hosts {
		text := h.String()
		if h.Draining {
			text += " draining"
		}
		items = append(items, text)
	}
	return strings.Join(items, ", ")
}

func TestDecode(t *testing.T) {
	for document, want := range map[string]string{
		`{"hosts": []}`: "",
		`[]`:            "",
		` {"version": 2, "hosts": [{"name": "b", "slots": 2, "draining": true}, {"name": "a", "rack": 7}]} `: "b:2 draining, a:4",
		"[{\"name\":\"fe80::1%eth0\",\"slots\":0,\"draining\":false}]\n":                                     "[fe80::1%eth0]:0",
		`[{"name":"a\u002db"}]`: "a-b:4",
	} {
		hosts, err := decode([]byte(document), 4)
		if got := toText(hosts); err != nil || got != want {
			t.Errorf("%s: %q, %v; want %q", document, got, err, want)
		}
	}
}

func TestDecodeFaults(t *testing.T) {
	for document, want := range map[string]string{
		"":                             "the hosts must be a list, not nothing",
		"<html>":                       "the hosts must be a list, not something else than JSON",
		"null":                         "the hosts must be a list, not null",
		`{"Hosts":[]}`:                 `the document has no field "hosts"`,
		`{"hosts":null}`:               "the hosts must be a list, not null",
		`{"hosts":{}}`:                 "the hosts must be a list, not an object",
		`{"hosts":[]`:                  "not JSON, at byte 11: unexpected end of JSON input",
		`{"hosts":[]} {}`:              "not JSON, at byte 14: ",
		`["a"]`:                        "hosts[0]: a host must be an object, not a text",
		`[{"name":"a"},{}]`:            "hosts[1]: name must be a text, not nothing",
		`[{"name":3}]`:                 "hosts[0]: name must be a text, not a number",
		`[{"name":"a","slots":null}]`:  "hosts[0]: slots must be a whole number from 0 to 65536",
		`[{"name":"a","slots":"2"}]`:   "hosts[0]: slots must be a whole number",
		`[{"name":"a","slots":-1}]`:    "hosts[0]: slots must be a whole number",
		`[{"name":"a","slots":1.5}]`:   "hosts[0]: slots must be a whole number",
		`[{"name":"a","slots":65537}]`: "hosts[0]: slots must be a whole number",
		`[{"name":"a","draining":1}]`:  "hosts[0]: draining must be true or false, not a number",
		`[{"name":""}]`:                "host 1: no name",
		`[{"name":"a b"}]`:             `' ' is not allowed in a host name`,
		`[{"name":"a"},{"name":"a"}]`:  "listed before",
		strings.Repeat("[", 100_000):   "not JSON",
		"[{\"name\":\"\xff\"}]":        "is not allowed in a host name",
	} {
		hosts, err := decode([]byte(document), 1)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40s: %v, %v; want %s", document, hosts, err, want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, seed := range []string{`{"hosts":[{"name":"a","slots":2,"draining":true}]}`, `[{"name":"b"}]`, `[1]`, `{"hosts":"x"}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, document []byte) {
		hosts, err := decode(document, 1)
		if err != nil {
			return
		}
		if err := plan.CheckHosts(hosts); err != nil {
			t.Error(err)
		}
	})
}

// splitText returns the documents of a stream and the error at its end.
func splitText(text string, events bool) ([]string, error) {
	var documents []string
	err := split(strings.NewReader(text), events, func() {}, func(d []byte) error {
		documents = append(documents, string(d))
		return nil
	})
	return documents, err
}

func TestSplit(t *testing.T) {
	long := strings.Repeat("x", maxDocument)
	for _, c := range []struct {
		name, text string
		events     bool
		want       string
		err        error
	}{
		{"lines", "a\n\nb\r\n \nc", false, "a|b|c", nil},
		{"events", ": hello\n\ndata: a\n\nevent: ping\ndata: x\n\nid: 7\nevent: hosts\ndata:b\ndata: c\n\n\nevent: message\ndata: d\n\n" +
			"event: hosts\n\ndata: e\nretry: 5\n\ndata: cut", true, "a|b\nc|d|e", nil},
		{"CRLF", "data: a\r\n\r\n", true, "a", nil},
		{"longest line", long + "\n", false, long, nil},
		{"longer line", long + "x\n", false, "", errTooLong},
		{"much longer line", long + long, false, "", errTooLong},
		{"longest event", "data: " + long + "\n\n", true, long, nil},
		{"longer event", "data: " + long[1:] + "\ndata: x\n\n", true, "", errTooLong},
	} {
		documents, err := splitText(c.text, c.events)
		if got := strings.Join(documents, "|"); got != c.want || err != c.err {
			t.Errorf("%s: %.80q, %v; want %.80q, %v", c.name, got, err, c.want, c.err)
		}
	}
}
