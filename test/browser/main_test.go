package browser

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"github.com/hvdrun/hvdrun/internal/dashboard"
	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

var (
	shots    = flag.String("shots", "", "folder for the screenshots of the documentation")
	programs follow.Programs
	chromium string // the path of chromium
)

func TestMain(m *testing.M) {
	flag.Parse()
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			chromium = path
			break
		}
	}
	if chromium == "" {
		fmt.Println("the page is NOT tested in a browser: there is no chromium (make check-page brings it)")
		os.Exit(0)
	}
	os.Exit(sandbox.Run(m, func(dir string) error {
		build := exec.Command("go", "-C", "../..", "build", "-o", dir+"/", "./cmd/hvdrun", "./test/trainer")
		if out, err := build.CombinedOutput(); err != nil {
			return fmt.Errorf("%w\n%s", err, out)
		}
		programs = follow.Programs{Hvdrun: filepath.Join(dir, "hvdrun"), Trainer: filepath.Join(dir, "trainer")}
		return nil
	}))
}

// patience bounds a single wait for the browser, which takes a fraction of a second when the
// machine is idle.
const patience = time.Minute

// open starts a browser with an empty profile and opens a page in it.
func open(t *testing.T, width, height int, url string, more ...chromedp.ExecAllocatorOption) context.Context {
	t.Helper()
	options := append([]chromedp.ExecAllocatorOption{
		chromedp.ExecPath(chromium), chromedp.UserDataDir(t.TempDir()), chromedp.Headless, chromedp.NoSandbox, chromedp.DisableGPU, chromedp.NoFirstRun,
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-background-networking", true), chromedp.Flag("disable-component-update", true),
		chromedp.Flag("disable-sync", true), chromedp.Flag("hide-scrollbars", true), chromedp.Flag("ignore-certificate-errors", true),
		chromedp.WindowSize(width, height), chromedp.WSURLReadTimeout(patience),
	}, more...)
	ctx, cancel := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	if err := chromedp.Do(ctx); err != nil { // the browser lives as long as ctx
		t.Fatal(err)
	}
	problems(t, ctx)
	do(t, ctx, chromedp.EmulateViewport(int64(width), int64(height)), chromedp.Navigate(url))
	return ctx
}

type action = chromedp.Action[chromedp.Void]

// css selects an element.
type css = chromedp.CSS

// try performs actions and allows them the time patience.
func try(ctx context.Context, actions ...action) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return chromedp.Do(ctx, actions...)
}

func do(t *testing.T, ctx context.Context, actions ...action) {
	t.Helper()
	if err := try(ctx, actions...); err != nil {
		text, _ := chromedp.Run(ctx, chromedp.Evaluate[string](`document.body ? document.body.innerText.slice(0, 2000) : ""`))
		t.Fatalf("%v\nthe page:\n%s", err, text)
	}
}

// evaluate returns the value of a JavaScript expression on the page.
func evaluate[T any](t *testing.T, ctx context.Context, expression string) T {
	t.Helper()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// holds waits until a JavaScript expression on the page is true.
func holds(expression string) action {
	return chromedp.Poll[chromedp.Void]("!!("+expression+")", chromedp.WithPollingInterval(50*time.Millisecond), chromedp.WithPollingTimeout(patience))
}

// serve serves a dashboard from this process until the test ends.
func serve(t *testing.T, cfg dashboard.Config) (*dashboard.Server, dashboard.Tokens) {
	t.Helper()
	cfg.Tokens, cfg.Listen = dashboard.NewTokens(), "127.0.0.1:0"
	server, err := dashboard.Listen(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- server.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	return server, cfg.Tokens
}
