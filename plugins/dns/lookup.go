package main

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/hvdrun/hvdrun/plan"
)

// lookup asks for all records of a name that the settings select. A name without any is an error,
// unless the settings allow it.
func (c *config) lookup(ctx context.Context, servers []string, name string) (part, error) {
	types := []uint16{dns.TypeA, dns.TypeAAAA}
	switch {
	case c.kind == "A":
		types = types[:1]
	case c.kind == "AAAA":
		types = types[1:]
	case c.kind == "SRV" || c.kind == "auto" && strings.HasPrefix(name, "_"):
		types = []uint16{dns.TypeSRV}
	}
	answers := make([]answer, len(types))
	errs := make([]error, len(types))
	var all sync.WaitGroup
	for i, qtype := range types {
		all.Go(func() { answers[i], errs[i] = resolve(ctx, servers, name, qtype, c.timeout) })
	}
	all.Wait()
	for _, err := range errs {
		if err != nil {
			return part{}, err
		}
	}
	p := part{ttl: answers[0].ttl}
	var records []dns.RR
	for _, a := range answers {
		p.ttl = min(p.ttl, a.ttl)
		records = append(records, a.records...)
	}
	var err error
	if types[0] == dns.TypeSRV {
		p.hosts, err = c.services(records)
	} else {
		p.hosts = c.addresses(name, records)
	}
	if err == nil && len(p.hosts) == 0 && !c.allowEmpty {
		err = fmt.Errorf("dns: %s has no %s (%s)", name, kinds(types), dns.RcodeToString[answers[0].rcode])
	}
	return p, err
}

func kinds(types []uint16) string {
	var names []string
	for _, t := range types {
		names = append(names, dns.TypeToString[t])
	}
	return strings.Join(names, " or ") + " records"
}

// addresses returns the hosts of A and AAAA records, in the order of the addresses.
func (c *config) addresses(name string, records []dns.RR) []plan.Host {
	var addrs []netip.Addr
	for _, rr := range records {
		var ip []byte
		switch r := rr.(type) {
		case *dns.A:
			ip = r.A
		case *dns.AAAA:
			ip = r.AAAA
		}
		if addr, ok := netip.AddrFromSlice(ip); ok {
			addrs = append(addrs, addr.Unmap())
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	var hosts []plan.Host
	for _, addr := range slices.Compact(addrs) {
		if c.byName {
			return []plan.Host{{Name: hostName(name), Slots: c.slots}}
		}
		hosts = append(hosts, plan.Host{Name: addr.String(), Slots: c.slots})
	}
	return hosts
}

// services returns the hosts of the targets of SRV records, in the order of priority and name. A
// target with several records, for several ports, is one host.
func (c *config) services(records []dns.RR) ([]plan.Host, error) {
	var srvs []*dns.SRV
	for _, rr := range records {
		if srv, ok := rr.(*dns.SRV); ok && srv.Target != "." { // a dot means that the service is not available
			srvs = append(srvs, srv)
		}
	}
	slices.SortFunc(srvs, func(a, b *dns.SRV) int {
		return cmp.Or(cmp.Compare(a.Priority, b.Priority), cmp.Compare(hostName(a.Target), hostName(b.Target)))
	})
	hosts := make([]plan.Host, len(srvs))
	for i, srv := range srvs {
		hosts[i] = plan.Host{Name: hostName(srv.Target), Slots: c.slots}
		if c.fromWeight && srv.Weight > 0 {
			hosts[i].Slots = int(srv.Weight)
		}
	}
	return merge(nil, hosts)
}

// hostName returns the name of a host: in lower case, however the server wrote it, without the
// final dot.
func hostName(fqdn string) string { return strings.TrimSuffix(dns.CanonicalName(fqdn), ".") }

// answer is the answer for a name and type.
type answer struct {
	records []dns.RR
	ttl     time.Duration
	rcode   int // success or name error
}

const maxAliases = 8

// resolve asks for the records of one type, and follows aliases if the server does not.
func resolve(ctx context.Context, servers []string, name string, qtype uint16, timeout time.Duration) (answer, error) {
	ttl := uint32(1<<32 - 1)
	asked := name
	for range maxAliases {
		reply, err := exchange(ctx, servers, asked, qtype, timeout)
		if err != nil {
			return answer{}, err
		}
		records, end, least := chase(reply.Answer, asked, qtype)
		ttl = min(ttl, least)
		if len(records) > 0 || end == asked || reply.Rcode == dns.RcodeNameError {
			if len(records) == 0 {
				ttl = min(ttl, negativeTTL(reply))
			}
			return answer{records, time.Duration(ttl) * time.Second, reply.Rcode}, nil
		}
		asked = end
	}
	return answer{}, fmt.Errorf("dns: %s leads through more than %d aliases", name, maxAliases)
}

// chase follows the aliases in an answer, and returns the records at their end, the name there, and
// the shortest time to live of all records used.
func chase(rrs []dns.RR, name string, qtype uint16) (records []dns.RR, end string, ttl uint32) {
	ttl = 1<<32 - 1
	end = dns.CanonicalName(name)
	for range rrs { // each alias is followed at most once
		i := slices.IndexFunc(rrs, func(rr dns.RR) bool {
			return rr.Header().Rrtype == dns.TypeCNAME && dns.CanonicalName(rr.Header().Name) == end
		})
		if i < 0 {
			break
		}
		alias, ok := rrs[i].(*dns.CNAME)
		if !ok {
			break
		}
		ttl = min(ttl, alias.Hdr.Ttl)
		end = dns.CanonicalName(alias.Target)
	}
	for _, rr := range rrs {
		if h := rr.Header(); h.Rrtype == qtype && dns.CanonicalName(h.Name) == end {
			ttl = min(ttl, h.Ttl)
			records = append(records, rr)
		}
	}
	return records, end, ttl
}

// negativeTTL returns how long a negative answer is valid, in seconds (RFC 2308).
func negativeTTL(reply *dns.Msg) uint32 {
	for _, rr := range reply.Ns {
		if soa, ok := rr.(*dns.SOA); ok {
			return min(soa.Hdr.Ttl, soa.Minttl)
		}
	}
	return 0
}
