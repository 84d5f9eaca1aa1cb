package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/discoverytest"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

func configured(t *testing.T, values ...string) *source {
	t.Helper()
	m := map[string]string{}
	for _, v := range values {
		key, value, _ := strings.Cut(v, "=")
		m[key] = value
	}
	s := &source{}
	if err := s.Configure(m); err != nil {
		t.Fatal(err)
	}
	return s
}

func toText(hosts []plan.Host) string {
	var items []string
	for _, h := range hosts {
		items = append(items, h.String())
	}
	return strings.Join(items, " ")
}

func finds(t *testing.T, s *source, want string) {
	t.Helper()
	hosts, err := s.Discover(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got := toText(hosts); got != want {
		t.Errorf("found %q, want %q", got, want)
	}
}

func fails(t *testing.T, s *source, want ...string) {
	t.Helper()
	hosts, err := s.Discover(t.Context())
	if err == nil || len(hosts) > 0 {
		t.Fatalf("found %v, %v; want an error", hosts, err)
	}
	for _, w := range append(want, "dns: ") {
		if strings.Count(err.Error(), w) != 1 {
			t.Errorf("%v; want %q in it, once", err, w)
		}
	}
}

// TestKit runs the kit with service records. The answer with 500 hosts does not fit into a
// datagram.
func TestKit(t *testing.T) {
	discoverytest.Run(t, func(t *testing.T, hosts []plan.Host) discovery.Discoverer {
		srv := serve(t)
		var rrs []dns.RR
		for i, h := range hosts {
			rrs = append(rrs, &dns.SRV{
				Hdr:      dns.RR_Header{Name: "_hvd._tcp.example.", Rrtype: dns.TypeSRV, Class: dns.ClassINET, Ttl: 60},
				Priority: uint16(i), Weight: uint16(h.Slots), Port: 1, Target: h.Name + ".",
			})
		}
		srv.put("_hvd._tcp.example SRV", rrs)
		return configured(t, "names=_hvd._tcp.example", "servers="+srv.addr, "slots_from=weight", "slots=0", "allow_empty=true")
	})
}

func TestConfigure(t *testing.T) {
	for _, c := range []struct{ values, want string }{
		{"", "dns: setting names: must be given"},
		{"names=a name=b", `dns: unknown setting "name"; the settings are: allow_empty, host, max_ttl, min_ttl, names, `},
		{"names=a..b", `dns: setting names: "a..b" is not a name`},
		{"names=10.0.0.1", `dns: setting names: "10.0.0.1" is an address`},
		{"names=a type=MX", `dns: setting type: "MX" is not one of: auto, A+AAAA, A, AAAA, SRV`},
		{"names=a servers=ns.example", `dns: setting servers: "ns.example" is not an address`},
		{"names=a servers=::1 resolv_conf=/x", `dns: setting resolv_conf: has no effect`},
		{"names=a min_ttl=10s max_ttl=5s", `dns: setting min_ttl: 10s is more than max_ttl, 5s`},
		{"names=a min_ttl=500ms", `dns: setting min_ttl: "500ms"`},
		{"names=a slots=-1", `dns: setting slots: `},
		{"names=a allow_empty=yes", `dns: setting allow_empty: `},
	} {
		values := map[string]string{}
		for v := range strings.FieldsSeq(c.values) {
			key, value, _ := strings.Cut(v, "=")
			values[key] = value
		}
		if err := (&source{}).Configure(values); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", c.values, err, c.want)
		}
	}
	s := configured(t, "names=A.Example,b.", "servers=10.0.0.1, ::1, [fe80::1%eth0]:5353")
	c := s.cfg.Load()
	if !slices.Equal(c.names, []string{"a.example.", "b."}) ||
		!slices.Equal(c.servers, []string{"10.0.0.1:53", "[::1]:53", "[fe80::1%eth0]:5353"}) {
		t.Errorf("names %v, servers %v", c.names, c.servers)
	}
	fails(t, &source{}, "before it got its settings")
	if err := (&source{}).Watch(t.Context(), nil); !errors.Is(err, errNotConfigured) {
		t.Error(err)
	}
}

func TestAddresses(t *testing.T) {
	srv := serve(t)
	srv.set("w.example A", "w.example. 60 A 10.0.0.10", "w.example. 60 A 10.0.0.9", "w.example. 60 A 10.0.0.9")
	srv.set("w.example AAAA", "w.example. 60 AAAA 2001:db8::1")
	srv.set("v.example A", "v.example. 60 A 10.0.0.1", "v.example. 60 A 10.0.0.9")
	at := "servers=" + srv.addr
	finds(t, configured(t, at, "names=w.example", "slots=8"), "10.0.0.9:8 10.0.0.10:8 [2001:db8::1]:8")
	finds(t, configured(t, at, "names=W.EXAMPLE."), "10.0.0.9:1 10.0.0.10:1 [2001:db8::1]:1")
	finds(t, configured(t, at, "names=w.example,v.example", "type=A"), "10.0.0.9:1 10.0.0.10:1 10.0.0.1:1")
	finds(t, configured(t, at, "names=w.example,v.example", "host=name", "slots=4"), "w.example:4 v.example:4")
	srv.questions()
	finds(t, configured(t, at, "names=w.example", "type=AAAA"), "[2001:db8::1]:1")
	if got := srv.questions(); got != "udp w.example AAAA" {
		t.Errorf("asked %s", got)
	}
}

func TestServices(t *testing.T) {
	srv := serve(t)
	srv.set("_hvd._tcp.example SRV",
		"_hvd._tcp.example. 60 SRV 20 8 1 a.example.", "_hvd._tcp.example. 60 SRV 10 2 1 C.example.",
		"_hvd._tcp.example. 60 SRV 10 0 1 b.example.", "_hvd._tcp.example. 60 SRV 10 2 2 c.example.")
	srv.set("plain.example SRV", "plain.example. 60 SRV 1 1 1 x.example.")
	srv.set("none.example SRV", "none.example. 60 SRV 0 0 0 .")
	at := "servers=" + srv.addr
	finds(t, configured(t, at, "names=_hvd._tcp.example", "slots=4"), "b.example:4 c.example:4 a.example:4")
	finds(t, configured(t, at, "names=_hvd._tcp.example", "slots=4", "slots_from=weight"), "b.example:4 c.example:2 a.example:8")
	finds(t, configured(t, at, "names=plain.example", "type=SRV"), "x.example:1")
	fails(t, configured(t, at, "names=none.example", "type=SRV"), "none.example. has no SRV records (NOERROR)")
	srv.set("_two._tcp.example SRV", "_two._tcp.example. 60 SRV 1 2 1 a.", "_two._tcp.example. 60 SRV 1 3 1 a.")
	fails(t, configured(t, at, "names=_two._tcp.example", "slots_from=weight"), "host a has 2 slots and also 3")
}

// TestOrderIsKept: hosts that were listed before keep their places, whatever their priorities
// become.
func TestOrderIsKept(t *testing.T) {
	srv := serve(t)
	s := configured(t, "names=_s.example", "servers="+srv.addr)
	set := func(targets ...string) {
		var texts []string
		for i, target := range targets {
			texts = append(texts, fmt.Sprintf("_s.example. 60 SRV %d 0 1 %s.", i, target))
		}
		srv.set("_s.example SRV", texts...)
	}
	set("b", "c")
	finds(t, s, "b:1 c:1")
	set("a", "c", "b", "d")
	finds(t, s, "b:1 c:1 a:1 d:1")
	set("b", "a")
	finds(t, s, "b:1 a:1")
	set("b", "c", "a") // c counts as new
	finds(t, s, "b:1 a:1 c:1")
}

func TestAliases(t *testing.T) {
	srv := serve(t)
	at := "servers=" + srv.addr
	srv.set("w.example A", "w.example. 60 CNAME x.example.", "X.example. 60 CNAME y.example.", "y.example. 60 A 10.0.0.1", "z.example. 60 A 10.0.0.2")
	finds(t, configured(t, at, "names=w.example", "type=A"), "10.0.0.1:1")
	// A server that does not follow aliases.
	srv.set("p.example A", "p.example. 60 CNAME q.example.")
	srv.set("q.example A", "q.example. 60 A 10.0.0.3")
	finds(t, configured(t, at, "names=p.example", "type=A"), "10.0.0.3:1")
	srv.set("l.example A", "l.example. 60 CNAME m.example.")
	srv.set("m.example A", "m.example. 60 CNAME l.example.")
	fails(t, configured(t, at, "names=l.example", "type=A"), "l.example. leads through more than 8 aliases")
}

func TestNothing(t *testing.T) {
	srv := serve(t)
	srv.set("w.example A", "w.example. 60 A 10.0.0.1")
	srv.set("t.example TXT", `t.example. 60 TXT "x"`)
	at := "servers=" + srv.addr
	fails(t, configured(t, at, "names=n.example"), "n.example. has no A or AAAA records (NXDOMAIN)")
	fails(t, configured(t, at, "names=t.example"), "t.example. has no A or AAAA records (NOERROR)")
	fails(t, configured(t, at, "names=w.example,n.example"), "n.example. has no A or AAAA records (NXDOMAIN)")
	finds(t, configured(t, at, "names=n.example,t.example", "allow_empty=true"), "")
	finds(t, configured(t, at, "names=w.example,n.example", "allow_empty=true"), "10.0.0.1:1")
	finds(t, configured(t, at, "names=w.example"), "10.0.0.1:1")
	srv.fail("w.example AAAA", dns.RcodeServerFailure) // half an answer does not count
	fails(t, configured(t, at, "names=w.example", "allow_empty=true"), "AAAA of w.example.: "+srv.addr+": it says SERVFAIL")
}

func TestServers(t *testing.T) {
	bad, good := serve(t), serve(t)
	good.set("w.example A", "w.example. 60 A 10.0.0.1")
	bad.fail("w.example A", dns.RcodeRefused)
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	closed, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	others := []string{closed.LocalAddr().String(), silent.LocalAddr().String(), bad.addr}
	finds(t, configured(t, "names=w.example", "type=A", "timeout=500ms", "servers="+strings.Join(append(others, good.addr), ",")), "10.0.0.1:1")
	fails(t, configured(t, "names=w.example", "type=A", "timeout=500ms", "servers="+strings.Join(others, ",")),
		"A of w.example.: "+others[0], others[1]+": no answer in time", others[2]+": it says REFUSED")
	if got := bad.questions(); got != "udp w.example A, udp w.example A, udp w.example A" {
		t.Errorf("asked %s", got)
	}
}

func TestResolvConf(t *testing.T) {
	conf := filepath.Join(t.TempDir(), "resolv.conf")
	s := configured(t, "names=w.example", "resolv_conf="+conf)
	fails(t, s, "no such file")
	if err := os.WriteFile(conf, []byte("search example\nnameserver 192.0.2.1\nnameserver ::1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got, err := s.cfg.Load().serverList(); err != nil || !slices.Equal(got, []string{"192.0.2.1:53", "[::1]:53"}) {
		t.Errorf("%v, %v", got, err)
	}
	if err := os.WriteFile(conf, []byte("search example\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	fails(t, s, "names no server")
}

// reply answers with a message that f has changed.
func reply(w dns.ResponseWriter, q *dns.Msg, f func(m *dns.Msg)) bool {
	m := new(dns.Msg).SetReply(q)
	f(m)
	w.WriteMsg(m)
	return true
}

func TestStrangeServers(t *testing.T) {
	for _, c := range []struct {
		name, want string
		behave     func(w dns.ResponseWriter, q *dns.Msg) bool
	}{
		{"another question", "it answers another question", func(w dns.ResponseWriter, q *dns.Msg) bool {
			return reply(w, q, func(m *dns.Msg) { m.Question[0].Name = "other.example." })
		}},
		{"no question", "it answers another question", func(w dns.ResponseWriter, q *dns.Msg) bool {
			return reply(w, q, func(m *dns.Msg) { m.Question = nil })
		}},
		{"a question back", "it answers another question", func(w dns.ResponseWriter, q *dns.Msg) bool {
			return reply(w, q, func(m *dns.Msg) { m.Response = false })
		}},
		{"a referral", "it refers to other servers", func(w dns.ResponseWriter, q *dns.Msg) bool {
			return reply(w, q, func(m *dns.Msg) { m.Ns = []dns.RR{record(t, "example. 60 NS ns.example.")} })
		}},
		{"garbage", ":", func(w dns.ResponseWriter, q *dns.Msg) bool {
			w.Write([]byte{byte(q.Id >> 8), byte(q.Id), 0x81, 0x80, 0, 9})
			return true
		}},
		{"cut off", "its answer is cut off even over TCP", func(w dns.ResponseWriter, q *dns.Msg) bool {
			return reply(w, q, func(m *dns.Msg) { m.Truncated = true })
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			srv := serve(t)
			srv.behaves(c.behave)
			hosts, err := configured(t, "names=w.example", "type=A", "allow_empty=true", "servers="+srv.addr).Discover(t.Context())
			if err == nil || len(hosts) > 0 || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, %v; want %s", hosts, err, c.want)
			}
		})
	}
}

// TestNoEDNS: a server from before EDNS is asked again without it.
func TestNoEDNS(t *testing.T) {
	srv := serve(t)
	srv.set("w.example A", "w.example. 60 A 10.0.0.1")
	srv.behaves(func(w dns.ResponseWriter, q *dns.Msg) bool {
		if q.IsEdns0() == nil {
			return false
		}
		return reply(w, q, func(m *dns.Msg) { m.Rcode = dns.RcodeFormatError; m.Question = nil })
	})
	finds(t, configured(t, "names=w.example", "type=A", "servers="+srv.addr), "10.0.0.1:1")
}

func TestTCPOnlyWhereNeeded(t *testing.T) {
	srv := serve(t)
	s := configured(t, "names=w.example", "type=A", "servers="+srv.addr)
	var texts []string
	for i := range 200 {
		texts = append(texts, fmt.Sprintf("w.example. 60 A 10.0.0.%d", i))
		if i != 70 && i != 199 { // the most that fit into 1232 bytes, and all
			continue
		}
		srv.set("w.example A", texts...)
		hosts, err := s.Discover(t.Context())
		if err != nil || len(hosts) != i+1 {
			t.Errorf("%d of %d hosts, %v", len(hosts), i+1, err)
		}
		want := "udp w.example A"
		if i == 199 {
			want = "tcp w.example A, " + want
		}
		if got := srv.questions(); got != want {
			t.Errorf("%d: asked %s, want %s", i+1, got, want)
		}
	}
}

func TestEndsWithContext(t *testing.T) {
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	s := configured(t, "names=w.example", "timeout=25s", "servers="+silent.LocalAddr().String())
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := s.Discover(ctx)
		ended <- err
	}()
	if _, _, err := silent.ReadFrom(make([]byte, 512)); err != nil { // the question has arrived
		t.Fatal(err)
	}
	cancel()
	select {
	case err := <-ended:
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	case <-sandbox.Expired():
		t.Error("still waiting for the answer")
	}
}

// watched runs Watch in virtual time against a real server. Each step changes the server's answers
// at its time.
func watched(t *testing.T, s *source, length time.Duration, steps map[time.Duration]func()) (lists []string, result error) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), length)
		defer cancel()
		for at, step := range steps {
			timer := time.AfterFunc(at, step)
			defer timer.Stop()
		}
		result = s.Watch(ctx, func(hosts []plan.Host) {
			lists = append(lists, fmt.Sprintf("%v %s", time.Since(start), toText(hosts)))
			clear(hosts) // the callee owns the list
		})
		lists = append(lists, fmt.Sprintf("%v end", time.Since(start)))
	})
	return lists, result
}

func TestWatchHonoursTTL(t *testing.T) {
	srv := serve(t)
	a := func(ttl int, last ...int) func() {
		return func() {
			var texts []string
			for _, n := range last {
				texts = append(texts, fmt.Sprintf("w.example. %d A 10.0.0.%d", ttl, n))
			}
			srv.set("w.example A", texts...)
		}
	}
	s := configured(t, "names=w.example", "type=A", "servers="+srv.addr, "max_ttl=1m", "allow_empty=true")
	a(10, 1)()
	lists, err := watched(t, s, 300*time.Second, map[time.Duration]func(){
		time.Second:              a(20, 1, 2), // seen at 10 s
		11 * time.Second:         a(0, 2),     // seen at 30 s; a TTL of 0 counts as 1 s
		30500 * time.Millisecond: a(3600, 3),  // seen at 31 s; an hour counts as a minute
		32 * time.Second:         a(5),        // seen at 91 s: no records, for the 30 s of the SOA record
		92 * time.Second:         a(40, 4),    // seen at 121 s
	})
	want := []string{"0s 10.0.0.1:1", "10s 10.0.0.1:1 10.0.0.2:1", "30s 10.0.0.2:1", "31s 10.0.0.3:1", "1m31s ", "2m1s 10.0.0.4:1", "5m0s end"}
	if !slices.Equal(lists, want) {
		t.Errorf("found %q\nwant  %q", lists, want)
	}
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if got := strings.Count(srv.questions(), "w.example A"); got != 10 { // 0 10 30 31 91 121 161 201 241 281
		t.Errorf("asked %d times", got)
	}
}

// TestWatchSmallestTTL: the smallest time to live of all names and types counts, including that of
// aliases.
func TestWatchSmallestTTL(t *testing.T) {
	srv := serve(t)
	srv.set("w.example A", "w.example. 7 CNAME x.example.", "x.example. 50 A 10.0.0.1")
	srv.set("v.example A", "v.example. 40 A 10.0.0.2")
	s := configured(t, "names=v.example,w.example", "type=A", "servers="+srv.addr)
	watched(t, s, 20*time.Second, nil)
	if got := strings.Count(srv.questions(), "v.example A"); got != 3 { // 0 7 14
		t.Errorf("asked %d times", got)
	}
}

func TestWatchFails(t *testing.T) {
	srv := serve(t)
	srv.set("w.example A", "w.example. 10 A 10.0.0.1")
	s := configured(t, "names=w.example", "type=A", "servers="+srv.addr)
	lists, err := watched(t, s, time.Hour, map[time.Duration]func(){
		15 * time.Second: func() { srv.fail("w.example A", dns.RcodeServerFailure) },
	})
	if want := []string{"0s 10.0.0.1:1", "20s end"}; !slices.Equal(lists, want) || err == nil || !strings.Contains(err.Error(), "SERVFAIL") {
		t.Errorf("found %q, %v; want %q", lists, err, want)
	}
}
