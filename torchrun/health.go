package torchrun

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// health answers every HTTP request with "alive". It reads only the path of a request. The zero
// value answers no requests.
type health struct {
	ln     *identity.Listener
	server *http.Server
	wg     sync.WaitGroup
}

func (h *health) open(addr string) error {
	ln, err := identity.TorchHealth.Listen(addr)
	if err != nil {
		return fmt.Errorf("torchrun: health checks: %w", err)
	}
	h.ln = ln
	h.server = &http.Server{ReadTimeout: identity.TorchHealth.Deadline, WriteTimeout: 5 * time.Second, MaxHeaderBytes: 4 << 10,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Connection", "close")
			_, _ = io.WriteString(w, "alive\n")
		})}
	h.wg.Go(func() { _ = h.server.Serve(ln) }) // ends with close
	return nil
}

func (h *health) addr() string { return h.ln.Addr().String() }

func (h *health) close() error {
	if h.server == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	err := h.server.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = h.server.Close()
	}
	h.wg.Wait()
	return err
}
