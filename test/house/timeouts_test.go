package house

import (
	"go/ast"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// timeouts lists all times that are passed to a library, which can raise, lower or round them, and
// what the library does with them according to its source of that version.
var timeouts = []struct{ where, field, module, version, does string }{
	{"internal/etcd/etcd.go", "DialKeepAliveTime", "go.etcd.io/etcd/client/v3", "v3.7.3", "is gRPC's keepalive.ClientParameters.Time: dialoptions.go raises less than 10 s to 10 s"},
	{"internal/etcd/etcd.go", "DialKeepAliveTimeout", "go.etcd.io/etcd/client/v3", "v3.7.3", "is gRPC's keepalive.ClientParameters.Timeout, which is taken as it is"},
	{"internal/etcd/etcd.go", "BaseDelay", "google.golang.org/grpc", "v1.85.0", "as it is; internal/backoff: ±Jitter"},
	{"internal/etcd/etcd.go", "MaxDelay", "google.golang.org/grpc", "v1.85.0", "as it is; internal/backoff: ±Jitter"},
	{"internal/etcd/etcd.go", "MinConnectTimeout", "google.golang.org/grpc", "v1.85.0", "clientconn.go: the longest of it and the backoff"},
	{"internal/journal/etcd/claim.go", "Grant", "go.etcd.io/etcd/client/v3", "v3.7.3", "whole seconds; the server raises it to 1.5 election time-outs, 2 s by default (lease/lessor.go), which only delays another driver"},
	{"internal/wire/serve.go", "BaseDelay", "google.golang.org/grpc", "v1.85.0", "as it is; internal/backoff: ±Jitter"},
	{"internal/wire/serve.go", "MaxDelay", "google.golang.org/grpc", "v1.85.0", "as it is; internal/backoff: ±Jitter"},
	{"internal/wire/serve.go", "MinConnectTimeout", "google.golang.org/grpc", "v1.85.0", "clientconn.go: the longest of it and the backoff"},
	{"internal/wire/serve.go", "Time", "google.golang.org/grpc", "v1.85.0", "a client's is 10 s at least (dialoptions.go), a server's 1 s (server.go); ours is 10 s"},
	{"internal/wire/serve.go", "Timeout", "google.golang.org/grpc", "v1.85.0", "as it is"},
	{"internal/wire/serve.go", "MinTime", "google.golang.org/grpc", "v1.85.0", "as it is: a client that pings more often is disconnected"},
	{"internal/wire/serve.go", "ConnectionTimeout", "google.golang.org/grpc", "v1.85.0", "as it is"},
	{"internal/wire/serve.go", "WithIdleTimeout", "google.golang.org/grpc", "v1.85.0", "as it is; 0: never idle"},
	{"discovery/plugin/session.go", "StartTimeout", "github.com/hashicorp/go-plugin", "v1.8.0", "as it is; 0 is a minute. It starts twice, for the process and for its first line"},
	{"discovery/gossip/config.go", "ProbeInterval", "github.com/hashicorp/memberlist", "v0.7.0", "state.go: multiplied by 1 to AwarenessMaxMultiplier while this member is slow"},
	{"discovery/gossip/config.go", "ProbeTimeout", "github.com/hashicorp/memberlist", "v0.7.0", "as it is (state.go)"},
	{"discovery/gossip/config.go", "GossipInterval", "github.com/hashicorp/memberlist", "v0.7.0", "as it is, after a random part of it"},
	{"discovery/gossip/config.go", "GossipToTheDeadTime", "github.com/hashicorp/memberlist", "v0.7.0", "as it is"},
	{"discovery/gossip/config.go", "PushPullInterval", "github.com/hashicorp/memberlist", "v0.7.0", "util.go, pushPullScale: multiplied by 2 above 32 members, 3 above 64, 4 above 128"},
	{"discovery/gossip/config.go", "TCPTimeout", "github.com/hashicorp/memberlist", "v0.7.0", "as it is"},
	{"cmd/hvdrun/internal/jobrun/otlp.go", "WithBatchTimeout", "go.opentelemetry.io/otel/sdk", "v1.47.0", "as it is (batch_span_processor.go)"},
	{"internal/metrics/server.go", "Timeout", "github.com/prometheus/client_golang", "v1.25.0", "promhttp: as it is, by http.TimeoutHandler"},
	{"plugins/dns/exchange.go", "Timeout", "github.com/miekg/dns", "v1.1.73", "client.go: of dialing, reading and writing each; an hour leaves them to ctx"},
}

// handedTime matches the names by which third-party packages take times: fields of structs, and
// functions.
var handedTime = regexp.MustCompile(`^(\w*(Timeout|Interval|Delay|KeepAliveTime|MinTime|DeadTime)|Time|Grant)$`)

// TestTimeoutsOfLibraries: the list has each time that is passed to a library, with the version
// whose source was read.
func TestTimeoutsOfLibraries(t *testing.T) {
	mods, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	found := make(map[[2]string]bool)
	for _, s := range sources(t) {
		if s.test() || under(s.dir(), "test") || under(s.dir(), "internal/testbed") || under(s.dir(), "examples") || isKit(s.dir()) ||
			under(s.dir(), "plugins/kubernetes") || under(s.dir(), "frameworks") {
			continue
		}
		foreign := make(map[string]bool)
		for _, i := range s.file.Imports {
			path := strings.Trim(i.Path.Value, `"`)
			if !strings.Contains(path, ".") || strings.HasPrefix(path, "github.com/hvdrun/") || strings.HasPrefix(path, "golang.org/x/sys") ||
				path == "github.com/sirupsen/logrus" { // its times are those of log lines
				continue
			}
			name := regexp.MustCompile(`/v\d+$`).ReplaceAllString(path, "")
			name = strings.TrimPrefix(name[strings.LastIndex(name, "/")+1:], "go-")
			if i.Name != nil {
				name = i.Name.Name
			}
			foreign[name] = true
		}
		if len(foreign) == 0 {
			continue
		}
		note := func(field string) {
			if handedTime.MatchString(field) {
				found[[2]string{s.path, field}] = true
			}
		}
		of := func(e ast.Expr) bool { // whether it is a name of such a package
			sel, ok := e.(*ast.SelectorExpr)
			if !ok {
				return false
			}
			x, ok := sel.X.(*ast.Ident)
			return ok && foreign[x.Name]
		}
		library := make(map[string]bool) // variables that hold a value made by such a package
		ast.Inspect(s.file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CompositeLit:
				for _, e := range n.Elts {
					if kv, ok := e.(*ast.KeyValueExpr); ok && of(n.Type) {
						if key, ok := kv.Key.(*ast.Ident); ok {
							note(key.Name)
						}
					}
				}
			case *ast.CallExpr:
				if sel, ok := n.Fun.(*ast.SelectorExpr); ok && (of(sel) || sel.Sel.Name == "Grant") {
					note(sel.Sel.Name)
				}
			case *ast.AssignStmt:
				if call, ok := n.Rhs[0].(*ast.CallExpr); ok && of(call.Fun) {
					if x, ok := n.Lhs[0].(*ast.Ident); ok {
						library[x.Name] = true
					}
				}
				for _, l := range n.Lhs {
					if sel, ok := l.(*ast.SelectorExpr); ok {
						if x, ok := sel.X.(*ast.Ident); ok && library[x.Name] {
							note(sel.Sel.Name)
						}
					}
				}
			}
			return true
		})
	}
	for _, e := range timeouts {
		key := [2]string{e.where, e.field}
		if !found[key] {
			t.Errorf("%s hands no %s to a library: remove it from the list", e.where, e.field)
		}
		delete(found, key)
		if !regexp.MustCompile(`(?m)^\s+` + regexp.QuoteMeta(e.module) + ` ` + regexp.QuoteMeta(e.version) + `\b`).Match(mods) {
			t.Errorf("go.mod does not have %s %s: look again what it does with %s of %s, and say so here", e.module, e.version, e.field, e.where)
		}
	}
	var missing []string
	for key := range found {
		missing = append(missing, key[0]+" "+key[1])
	}
	slices.Sort(missing)
	for _, m := range missing {
		t.Errorf("%s is handed to a library, and not in the list: find out what it does with it", m)
	}
}
