package etcd

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// TestQuote: the error of a request that timed out gives the reason why etcd is not reached.
func TestQuote(t *testing.T) {
	pipe := func(serve func(net.Conn)) func() (net.Conn, error) {
		return func() (net.Conn, error) {
			ours, theirs := net.Pipe()
			go serve(theirs)
			return ours, nil
		}
	}
	asks := map[string]func(context.Context, *clientv3.Client) error{
		"get": func(ctx context.Context, c *clientv3.Client) error { _, err := c.Get(ctx, "k"); return err },
		"put": func(ctx context.Context, c *clientv3.Client) error { _, err := c.Put(ctx, "k", "v"); return err },
		"delete": func(ctx context.Context, c *clientv3.Client) error {
			_, err := c.Delete(ctx, "k")
			return err
		},
		"txn": func(ctx context.Context, c *clientv3.Client) error {
			_, err := c.Txn(ctx).Then(clientv3.OpGet("k")).Commit()
			return err
		},
		"grant":  func(ctx context.Context, c *clientv3.Client) error { _, err := c.Grant(ctx, 10); return err },
		"revoke": func(ctx context.Context, c *clientv3.Client) error { _, err := c.Revoke(ctx, 1); return err },
	}
	for name, story := range map[string]struct {
		tls     bool
		connect func() (net.Conn, error)
		want    string
	}{
		"not reached": {false, func() (net.Conn, error) { return nil, errors.New("no route to it") }, "no route to it"},
		"no TLS": {true, pipe(func(c net.Conn) {
			go func() { _, _ = io.Copy(io.Discard, c) }()
			_, _ = io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n")
			_ = c.Close()
		}), "first record does not look like a TLS handshake"},
		"silent": {false, pipe(func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }), errSilent.Error()},
	} {
		for method, ask := range asks {
			t.Run(name+"/"+method, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					client, err := open(Config{Endpoints: []string{"etcd:2379"}, TLS: story.tls}, func(context.Context, string, string) (net.Conn, error) { return story.connect() })
					if err != nil {
						t.Fatal(err)
					}
					defer client.Close()
					ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
					defer cancel()
					err = ask(ctx, client)
					if err == nil || !strings.Contains(err.Error(), story.want) {
						t.Errorf("%v, want %q in it", err, story.want)
					}
					if ctx.Err() != nil && !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("%v is no context.DeadlineExceeded", err)
					}
				})
			})
		}
	}
}
