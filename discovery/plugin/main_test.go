package plugin_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	goplugin "github.com/hashicorp/go-plugin"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/plugin"
	"github.com/hvdrun/hvdrun/internal/wire/discoverypb"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

const (
	modeVariable = "PLUGIN_TEST_MODE" // the part that this binary plays instead of running tests
	heldVariable = "PLUGIN_TEST_HELD" // a named pipe that the binary holds open for writing as long as it lives
	stopWord     = "stop"             // in the feed, in place of a list: the plugin stops itself by SIGSTOP
)

// TestMain plays a plugin or its host if a test has started this binary as one.
func TestMain(m *testing.M) {
	mode := os.Getenv(modeVariable)
	if mode == "" {
		goleak.VerifyTestMain(sandbox.Tests{M: m})
		return
	}
	if path := os.Getenv(heldVariable); path != "" {
		held, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			panic(err)
		}
		defer held.Close()
	}
	play(mode)
}

func play(mode string) {
	switch mode {
	case "good":
		plugin.Serve(&source{})
	case "quiet":
		plugin.Serve(quiet{&source{}})
	case "deaf":
		signal.Ignore(syscall.SIGTERM)
		plugin.Serve(&source{})
		select {}
	case "family":
		child := exec.Command("sleep", "1000")
		held, err := os.OpenFile(os.Getenv(heldVariable), os.O_WRONLY, 0)
		if err != nil {
			panic(err)
		}
		child.ExtraFiles = []*os.File{held}
		if err := child.Start(); err != nil {
			panic(err)
		}
		plugin.Serve(&source{})
		select {}
	case "hang":
		plugin.Serve(hanging{})
	case "version":
		serveAs(plugin.CookieName, plugin.CookieValue, 2)
	case "cookie":
		serveAs("OTHER_PRODUCT", "x", plugin.ProtocolVersion)
	case "garbage":
		fmt.Println("localhost:2")
	case "flood":
		for {
			fmt.Println(strings.Repeat("x", 100000))
		}
	case "silent":
		fmt.Fprintln(os.Stderr, "waiting for a licence")
		forever()
	case "exit":
		fmt.Fprintln(os.Stderr, "no such cluster")
		os.Exit(3)
	case "empty":
	case "plain":
		fmt.Println("1|1|tcp|127.0.0.1:1|grpc|")
	case "far":
		fmt.Println("1|1|tcp|192.0.2.1:1|grpc|" + strings.Repeat("x", 500))
	case "netrpc":
		fmt.Println("1|1|unix|/tmp/x|netrpc|")
	case "nobody":
		fmt.Println("1|1|unix|/nowhere|grpc|" + certificateOnly())
		forever()
	case "raw":
		serveRaw(&raw{})
	case "host":
		playHost()
	default:
		panic(mode)
	}
}

// forever waits for a signal that never arrives. A select without cases would end a program that
// has no other goroutine and no cgo.
func forever() {
	never := make(chan os.Signal, 1)
	signal.Notify(never, syscall.SIGUSR1)
	<-never
}

// source finds the hosts of its settings.
type source struct {
	hosts []plan.Host
	feed  string // a named pipe with lists to push, one per line
	fault string
	crash string // a file: while it exists, Discover panics, and so does Configure if it is not empty
}

func (s *source) Configure(settings map[string]string) error {
	if err := plugin.CheckSettings(settings, "hosts", "feed", "fault", "crash"); err != nil {
		return err
	}
	s.feed, s.fault, s.crash = settings["feed"], settings["fault"], settings["crash"]
	if s.fault == "print" {
		fmt.Println("a line on stdout")
		fmt.Fprintln(os.Stderr, "a line on stderr")
	}
	if text, _ := os.ReadFile(s.crash); len(text) > 0 {
		panic("no start today")
	}
	var err error
	if s.hosts, err = parse(settings["hosts"]); err != nil {
		return &plugin.SettingError{Key: "hosts", Err: err}
	}
	return nil
}

// parse reads words of the form host:slots, with a ! at the end if the host is draining.
func parse(text string) ([]plan.Host, error) {
	hosts := []plan.Host{}
	for _, word := range strings.Fields(text) {
		word, draining := strings.CutSuffix(word, "!")
		list, err := plan.ParseHostList(word, -1)
		if err != nil {
			return nil, err
		}
		list[0].Draining = draining
		hosts = append(hosts, list...)
	}
	return hosts, nil
}

func (s *source) Discover(ctx context.Context) ([]plan.Host, error) {
	if _, err := os.Stat(s.crash); err == nil {
		panic("boom")
	}
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case s.fault == "error":
		return nil, errors.New("the racks cannot be counted")
	case s.fault == "twice":
		return []plan.Host{{Name: "a"}, {Name: "a"}}, nil
	}
	return s.hosts, nil
}

// Watch pushes the hosts of the settings, then the lists of the feed.
func (s *source) Watch(ctx context.Context, found func([]plan.Host)) error {
	if s.fault == "error" {
		return errors.New("the racks cannot be watched")
	}
	if s.feed != "" {
		return s.follow(ctx, found)
	}
	found(s.hosts)
	switch s.fault {
	case "twice":
		found([]plan.Host{{Name: "a"}, {Name: "a"}})
	case "end":
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}

// follow opens the feed before it passes on the first list, because no list that is pushed after
// that may be lost.
func (s *source) follow(ctx context.Context, found func([]plan.Host)) error {
	feed, err := os.OpenFile(s.feed, os.O_RDWR, 0) // for both, so that it never ends
	if err != nil {
		return err
	}
	defer feed.Close()
	stop := context.AfterFunc(ctx, func() { feed.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	found(s.hosts)
	var line []byte
	for {
		var b [1]byte
		if _, err := feed.Read(b[:]); err != nil {
			return err
		}
		if line = append(line, b[0]); b[0] != '\n' {
			continue
		}
		if string(line) == stopWord+"\n" {
			if err := syscall.Kill(os.Getpid(), syscall.SIGSTOP); err != nil {
				return err
			}
			select {} // for a moment, threads can still run
		}
		hosts, err := parse(string(line))
		if err != nil {
			return err
		}
		line = nil
		found(hosts)
	}
}

// quiet cannot push.
type quiet struct{ *source }

func (quiet) Watch() {}

// hanging never answers, even when nobody waits any more.
type hanging struct{}

func (hanging) Discover(context.Context) ([]plan.Host, error)  { select {} }
func (hanging) Watch(context.Context, func([]plan.Host)) error { select {} }

// serveAs serves no source, like a plugin of another product or another version.
func serveAs(cookie, value string, version int) {
	goplugin.Serve(&goplugin.ServeConfig{
		HandshakeConfig:  goplugin.HandshakeConfig{MagicCookieKey: cookie, MagicCookieValue: value},
		VersionedPlugins: map[int]goplugin.PluginSet{version: {"discovery": nothing{}}},
		GRPCServer:       goplugin.DefaultGRPCServer,
	})
}

type nothing struct {
	goplugin.NetRPCUnsupportedPlugin
}

func (nothing) GRPCServer(*goplugin.GRPCBroker, *grpc.Server) error { return nil }
func (nothing) GRPCClient(context.Context, *goplugin.GRPCBroker, *grpc.ClientConn) (any, error) {
	return nil, nil
}

// raw is a plugin written without go-plugin, from the text of discovery.proto: it cannot be asked
// to end, but ends at SIGTERM, and has no settings.
type raw struct {
	discoverypb.UnimplementedDiscoveryServer
}

func (*raw) Discover(context.Context, *discoverypb.DiscoverRequest) (*discoverypb.HostList, error) {
	switch list := os.Getenv("PLUGIN_TEST_LIST"); list {
	case "":
		return &discoverypb.HostList{Hosts: []*discoverypb.Host{{Name: "raw", Slots: 2}}}, nil
	case "large":
		return &discoverypb.HostList{Hosts: []*discoverypb.Host{{Name: strings.Repeat("x", 5<<20)}}}, nil
	case "long":
		return &discoverypb.HostList{Hosts: make([]*discoverypb.Host, 1<<16+1)}, nil
	default:
		return &discoverypb.HostList{Hosts: []*discoverypb.Host{{Name: list, Slots: 1 << 31}}}, nil
	}
}

func serveRaw(d discoverypb.DiscoveryServer) {
	if os.Getenv(plugin.CookieName) != plugin.CookieValue {
		os.Exit(1)
	}
	clients := x509.NewCertPool()
	if !clients.AppendCertsFromPEM([]byte(os.Getenv("PLUGIN_CLIENT_CERT"))) {
		panic("no certificate")
	}
	cert, encoded := newCertificate()
	ln, err := net.Listen("unix", filepath.Join(os.Getenv("PLUGIN_UNIX_SOCKET_DIR"), "raw"))
	if err != nil {
		panic(err)
	}
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{
		Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients,
	})))
	discoverypb.RegisterDiscoveryServer(server, d)
	healthy := health.NewServer()
	healthy.SetServingStatus("plugin", grpc_health_v1.HealthCheckResponse_SERVING)
	grpc_health_v1.RegisterHealthServer(server, healthy)
	fmt.Printf("1|1|unix|%s|grpc|%s\n", ln.Addr(), encoded)
	panic(server.Serve(ln))
}

func newCertificate() (tls.Certificate, string) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{"localhost"},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		panic(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, base64.RawStdEncoding.EncodeToString(der)
}

func certificateOnly() string {
	_, encoded := newCertificate()
	return encoded
}

// playHost watches a plugin until it is killed.
func playHost() {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	p := plugin.New(plugin.Config{
		Path: self, Settings: map[string]string{"hosts": "a:1"},
		Env: []string{modeVariable + "=" + os.Getenv("PLUGIN_TEST_CHILD")},
	})
	defer p.Close()
	err = p.Watch(context.Background(), func([]plan.Host) { fmt.Println("watching") })
	panic(err)
}

var _ discovery.Watcher = (*source)(nil)
