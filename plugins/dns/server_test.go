package main

import (
	"context"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/miekg/dns"
)

// server is a DNS server on loopback, over UDP and TCP on the same port, that answers from a table.
type server struct {
	t    *testing.T
	addr string

	mu      sync.Mutex
	records map[string][]dns.RR // "name type" → answer
	rcodes  map[string]int      // by the same key: response code
	soa     dns.RR              // sent with answers without records
	behave  func(w dns.ResponseWriter, q *dns.Msg) (handled bool)
	asked   []string // "udp name type"
}

// serve starts a server that ends with the test. It must be called outside bubbles.
func serve(t *testing.T) *server {
	t.Helper()
	s := &server{t: t, records: map[string][]dns.RR{}, rcodes: map[string]int{}}
	s.soa = record(t, "example. 60 IN SOA ns.example. root.example. 1 2 3 4 30")
	var packets net.PacketConn
	var stream net.Listener
	for try := 0; ; try++ { // the port of one protocol can be in use for the other
		var err error
		if packets, err = net.ListenPacket("udp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		if stream, err = net.Listen("tcp", packets.LocalAddr().String()); err == nil {
			break
		}
		packets.Close()
		if try == 20 {
			t.Fatal(err)
		}
	}
	s.addr = packets.LocalAddr().String()
	for _, srv := range []*dns.Server{{PacketConn: packets, Handler: s}, {Listener: stream, Handler: s}} {
		started, ended := make(chan struct{}), make(chan struct{})
		srv.NotifyStartedFunc = func() { close(started) }
		go func() {
			defer close(ended)
			srv.ActivateAndServe()
		}()
		<-started
		t.Cleanup(func() { srv.ShutdownContext(context.Background()); <-ended })
	}
	return s
}

func record(t *testing.T, text string) dns.RR {
	t.Helper()
	rr, err := dns.NewRR(text)
	if err != nil {
		t.Fatal(err)
	}
	return rr
}

// set sets the records of a name and type, such as "a.example A", and clears its response code.
func (s *server) set(key string, texts ...string) {
	s.t.Helper()
	var rrs []dns.RR
	for _, text := range texts {
		rrs = append(rrs, record(s.t, text))
	}
	s.put(key, rrs)
}

func (s *server) put(key string, rrs []dns.RR) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.records[key] = rrs
	delete(s.rcodes, key)
}

func (s *server) fail(key string, rcode int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rcodes[key] = rcode
}

func (s *server) behaves(f func(w dns.ResponseWriter, q *dns.Msg) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.behave = f
}

// questions returns the questions since the last call, sorted.
func (s *server) questions() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.Sort(s.asked)
	text := strings.Join(s.asked, ", ")
	s.asked = nil
	return text
}

func (s *server) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	key := strings.TrimSuffix(q.Question[0].Name, ".") + " " + dns.TypeToString[q.Question[0].Qtype]
	network := w.RemoteAddr().Network()
	s.mu.Lock()
	s.asked = append(s.asked, network+" "+key)
	behave, rrs, known := s.behave, s.records[key], false
	rcode, failing := s.rcodes[key]
	for k := range s.records {
		known = known || strings.HasPrefix(k, strings.Fields(key)[0]+" ")
	}
	s.mu.Unlock()
	if behave != nil && behave(w, q) {
		return
	}
	m := new(dns.Msg).SetReply(q)
	m.Authoritative, m.Compress, m.Answer = true, true, rrs
	switch {
	case failing:
		m.Rcode, m.Answer = rcode, nil
	case !known:
		m.Rcode = dns.RcodeNameError
	}
	if len(m.Answer) == 0 && !failing {
		m.Ns = []dns.RR{s.soa}
	}
	size := dns.MinMsgSize
	if opt := q.IsEdns0(); opt != nil {
		size = int(opt.UDPSize())
		m.SetEdns0(opt.UDPSize(), false)
	}
	if network == "udp" {
		m.Truncate(size)
	}
	w.WriteMsg(m)
}
