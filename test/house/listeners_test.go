package house

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"strings"
	"testing"
)

// listening are the functions and types with which a program listens.
var listening = map[string][]string{
	"net": {
		"Listen", "ListenTCP", "ListenUDP", "ListenUnix", "ListenUnixgram", "ListenIP", "ListenPacket", "ListenMulticastUDP",
		"ListenConfig", "FileListener", "FilePacketConn",
	},
	"crypto/tls":                      {"Listen", "NewListener"},
	"net/http":                        {"ListenAndServe", "ListenAndServeTLS", "Serve", "ServeTLS", "Server"},
	"golang.org/x/sys/unix":           {"Listen"},
	"syscall":                         {"Listen"},
	"google.golang.org/grpc":          {"NewServer"},
	"github.com/hashicorp/memberlist": {"NewNetTransport"},
}

// listeners lists the files, except tests and testbeds, that may use them, and why.
var listeners = map[string]string{
	"internal/identity/ports.go":    "the guarded way",
	"internal/identity/loopback.go": "looks which loopback address there is, or which port is free, and closes the listener at once",
	"internal/wire/local.go":        "a unix socket, of which driver/control makes an identity.Listener",
	"internal/wire/serve.go":        "serves identity.Listeners",
	"torchrun/health.go":            "serves an identity.Listener",
	"internal/dashboard/server.go":  "serves an identity.Listener",
	"internal/metrics/server.go":    "serves an identity.Listener",
	"discovery/gossip/transport.go": "memberlist opens its sockets itself; what comes is bounded by an identity.Pending",
}

// TestListeners: only the listed files listen without package identity, and each of its limits is
// used.
func TestListeners(t *testing.T) {
	bounds := map[string]bool{}
	found := map[string]bool{}
	for _, s := range sources(t) {
		if s.test() || strings.HasPrefix(s.path, "test/") || isKit(s.dir()) {
			continue
		}
		for _, use := range uses(s.file, listening) {
			found[s.path] = true
			if listeners[s.path] == "" {
				t.Errorf("%s: %s: listen by identity.Bounds", s.where(use.node), use.what)
			}
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			if sel, ok := n.(*ast.SelectorExpr); ok {
				if x, ok := sel.X.(*ast.Ident); ok && x.Name == "identity" {
					bounds[sel.Sel.Name] = true
				}
			}
			return true
		})
	}
	for path := range listeners {
		if !found[path] {
			t.Errorf("%s does not listen: it needs no exception", path)
		}
	}
	for _, name := range []string{"Control", "Drivers", "Door", "Gossip", "Data", "WorkerStore", "TorchWorkers", "TorchPeers", "TorchHealth", "Metrics", "Dashboard"} {
		if !bounds[name] {
			t.Errorf("identity.%s is not used: no listener has these bounds", name)
		}
	}
}

// TestListenersAreFound: uses finds the functions also if their package is imported under another
// name.
func TestListenersAreFound(t *testing.T) {
	const text = `package p
import ("net"; web "net/http")
func f() { net.Listen("tcp", ":0"); (&net.ListenConfig{}).Listen(); web.ListenAndServe("", nil); net.Dial("", "") }`
	file, err := parser.ParseFile(token.NewFileSet(), "f.go", strings.Replace(text, ``, "", 1), 0)
	if err != nil {
		t.Fatal(err)
	}
	var what []string
	for _, use := range uses(file, listening) {
		what = append(what, use.what)
	}
	if fmt.Sprint(what) != "[net.Listen net.ListenConfig net/http.ListenAndServe]" {
		t.Errorf("found %v", what)
	}
}

type use struct {
	node ast.Node
	what string
}

// uses returns where a file uses one of these functions or types.
func uses(file *ast.File, of map[string][]string) (found []use) {
	names := map[string]string{}
	for _, i := range file.Imports {
		path := strings.Trim(i.Path.Value, `"`)
		name := path[strings.LastIndex(path, "/")+1:]
		if i.Name != nil {
			name = i.Name.Name
		}
		names[name] = path
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if sel, ok := n.(*ast.SelectorExpr); ok {
			if x, ok := sel.X.(*ast.Ident); ok && slices.Contains(of[names[x.Name]], sel.Sel.Name) {
				found = append(found, use{sel, names[x.Name] + "." + sel.Sel.Name})
			}
		}
		return true
	})
	return found
}
