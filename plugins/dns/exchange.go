package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"
)

const (
	rounds = 2 // number of requests to each server, unless one answers

	// udpSize is the size, in bytes, up to which a datagram is not fragmented on the usual paths.
	udpSize = 1232
)

// serverList returns the servers to ask. It reads resolv.conf on each call, since networks change.
func (c *config) serverList() ([]string, error) {
	if len(c.servers) > 0 {
		return c.servers, nil
	}
	conf, err := dns.ClientConfigFromFile(c.resolvConf)
	if err != nil {
		return nil, fmt.Errorf("dns: %w", err)
	}
	var servers []string
	for _, server := range conf.Servers {
		if addr, err := serverAddr(server); err == nil {
			servers = append(servers, addr)
		}
	}
	if len(servers) == 0 {
		return nil, fmt.Errorf("dns: %s names no server", c.resolvConf)
	}
	return servers, nil
}

// exchange asks one server after the other until one answers; an answer without records counts. The
// error lists the result of each server.
func exchange(ctx context.Context, servers []string, name string, qtype uint16, timeout time.Duration) (*dns.Msg, error) {
	var faults []string
	for range rounds {
		for _, server := range servers {
			reply, err := askServer(ctx, server, name, qtype, timeout)
			if err == nil {
				return reply, nil
			}
			if ctx.Err() != nil {
				return nil, ended(ctx)
			}
			if fault := server + ": " + err.Error(); !slices.Contains(faults, fault) {
				faults = append(faults, fault)
			}
		}
	}
	return nil, fmt.Errorf("dns: %s of %s: %s", dns.TypeToString[qtype], name, strings.Join(faults, "; "))
}

var (
	errSilent   = errors.New("no answer in time")
	errReferral = errors.New("it refers to other servers; one that resolves names is needed")
	errStrange  = errors.New("it answers another question")
)

// askServer asks one server: by UDP with EDNS, without EDNS if the server does not support it, and
// by TCP if the answer is too long for UDP.
func askServer(ctx context.Context, server, name string, qtype uint16, timeout time.Duration) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, errSilent)
	defer cancel()
	q := new(dns.Msg).SetQuestion(name, qtype)
	q.SetEdns0(udpSize, false)
	reply, err := send(ctx, "udp", server, q)
	if err == nil && (reply.Rcode == dns.RcodeFormatError || reply.Rcode == dns.RcodeNotImplemented) {
		q.Extra = nil
		reply, err = send(ctx, "udp", server, q)
	}
	if err == nil && reply.Truncated {
		reply, err = send(ctx, "tcp", server, q)
	}
	switch {
	case err != nil:
		return nil, err
	case reply.Rcode != dns.RcodeSuccess && reply.Rcode != dns.RcodeNameError:
		return nil, fmt.Errorf("it says %s", rcodeText(reply.Rcode))
	case reply.Truncated:
		return nil, errors.New("its answer is cut off even over TCP")
	case isReferral(reply):
		return nil, errReferral
	}
	return reply, nil
}

func rcodeText(rcode int) string {
	if text, ok := dns.RcodeToString[rcode]; ok {
		return text
	}
	return fmt.Sprintf("code %d", rcode)
}

// send sends the question over a new connection, or from a new port, and returns the reply. It ends
// with ctx.
func send(ctx context.Context, network, server string, q *dns.Msg) (*dns.Msg, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, network, server)
	if err != nil {
		return nil, because(ctx, err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	client := dns.Client{Timeout: time.Hour} // ctx limits the time
	reply, _, err := client.ExchangeWithConnContext(ctx, q, &dns.Conn{Conn: conn})
	if err != nil {
		return nil, because(ctx, err)
	}
	if err := isReply(q, reply); err != nil {
		return nil, err
	}
	return reply, nil
}

// because returns the cause of ctx if ctx has ended, else err.
func because(ctx context.Context, err error) error {
	if deadline, ok := ctx.Deadline(); ctx.Err() != nil || ok && !time.Now().Before(deadline) {
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		return errSilent
	}
	return err
}

// isReply returns an error if the reply is to another question. A server that does not understand
// the question may leave it out.
func isReply(q, reply *dns.Msg) error {
	switch {
	case !reply.Response:
		return errStrange
	case len(reply.Question) == 0 && reply.Rcode != dns.RcodeSuccess && reply.Rcode != dns.RcodeNameError:
		return nil
	case len(reply.Question) != 1:
		return errStrange
	}
	asked, got := q.Question[0], reply.Question[0]
	if asked.Qtype != got.Qtype || asked.Qclass != got.Qclass || dns.CanonicalName(asked.Name) != dns.CanonicalName(got.Name) {
		return errStrange
	}
	return nil
}

// isReferral returns whether the reply names other servers, and is not a reply without records.
func isReferral(reply *dns.Msg) bool {
	if reply.Rcode != dns.RcodeSuccess || reply.Authoritative || len(reply.Answer) > 0 {
		return false
	}
	has := func(rrtype uint16) bool {
		return slices.ContainsFunc(reply.Ns, func(rr dns.RR) bool { return rr.Header().Rrtype == rrtype })
	}
	return has(dns.TypeNS) && !has(dns.TypeSOA)
}
