package main

import (
	"testing"

	"github.com/miekg/dns"

	"github.com/hvdrun/hvdrun/plan"
)

// FuzzReply: whatever a name server answers, the result is a valid list of hosts or an error.
func FuzzReply(f *testing.F) {
	for _, texts := range [][]string{
		{"workers.example. 60 IN CNAME w.example.", "w.example. 30 IN A 10.0.0.1", "w.example. 30 IN AAAA ::ffff:10.0.0.1"},
		{"workers.example. 60 IN SRV 1 4 22 node1.example.", "workers.example. 60 IN SRV 0 0 22 ."},
		{"workers.example. 60 IN CNAME workers.example."},
	} {
		m := new(dns.Msg).SetQuestion("workers.example.", dns.TypeA)
		m.Response = true
		for _, text := range texts {
			rr, err := dns.NewRR(text)
			if err != nil {
				f.Fatal(err)
			}
			m.Answer = append(m.Answer, rr)
		}
		b, err := m.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var reply dns.Msg
		if reply.Unpack(b) != nil {
			return
		}
		q := new(dns.Msg).SetQuestion("workers.example.", dns.TypeA)
		_ = isReply(q, &reply)
		_ = isReferral(&reply)
		_ = negativeTTL(&reply)
		c := &config{slots: 2, fromWeight: true}
		for _, qtype := range []uint16{dns.TypeA, dns.TypeAAAA} {
			records, end, _ := chase(reply.Answer, "workers.example.", qtype)
			if hosts := c.addresses("workers.example.", records); plan.CheckHosts(hosts) != nil || end == "" {
				t.Errorf("%v at %q", hosts, end)
			}
		}
		records, _, _ := chase(reply.Answer, "workers.example.", dns.TypeSRV)
		hosts, err := c.services(records)
		if err != nil {
			return
		}
		for i, h := range hosts {
			if h.Slots < 0 || i > 0 && h.Name == hosts[i-1].Name {
				t.Errorf("%v", hosts)
			}
		}
	})
}
