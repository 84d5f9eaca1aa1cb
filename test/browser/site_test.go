package browser

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/hvdrun/hvdrun/test/follow"
)

// policy allows a site nothing but its own files.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'"

// makeSite writes the site of the repository into a folder.
func makeSite(t *testing.T) string {
	t.Helper()
	folder := filepath.Join(t.TempDir(), "site")
	if out, err := exec.Command("go", "-C", "../..", "run", "./internal/site/gen", ".", folder).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return folder
}

// serveSite serves a site with the policy. The index of the search waits until ready is closed.
func serveSite(t *testing.T, folder string, ready <-chan struct{}) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/search-index.js" {
			select {
			case <-ready:
			case <-r.Context().Done():
				return
			}
		}
		w.Header().Set("Content-Security-Policy", policy)
		http.FileServer(http.Dir(folder)).ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	return server.URL + "/"
}

// press presses keys as a keyboard does: a page that takes a key keeps its character from the
// input. chromedp.KeyEvent sends the character in any case.
func press(keys string) action {
	return chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
		for _, r := range keys {
			events := kb.Encode(r)
			down, up := *events[0], *events[len(events)-1]
			if len(events) == 3 {
				down.Text, down.UnmodifiedText = events[1].Text, events[1].UnmodifiedText
			}
			for _, e := range []input.DispatchKeyEventParams{down, up} {
				if _, err := cdp.Call(ctx, target, input.DispatchKeyEvent, e); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// TestSite: a person finds a word by the keyboard, whether the site is opened from files or served
// with a strict policy, copies a block, and reads each page on a phone without scrolling sideways.
func TestSite(t *testing.T) {
	folder := makeSite(t)
	ready := make(chan struct{})
	close(ready)
	served := serveSite(t, folder, ready)
	for name, base := range map[string]string{"files": "file://" + folder + "/", "served": served} {
		t.Run(name, func(t *testing.T) {
			ctx := open(t, 1280, 900, base+"docs/state.html")
			searchSite(t, ctx)
			copyBlock(t, ctx, base)
		})
	}
	t.Run("slow", func(t *testing.T) { // Enter is pressed before the index is there
		ready := make(chan struct{})
		ctx := open(t, 1280, 900, serveSite(t, folder, ready)+"docs/state.html")
		do(t, ctx, holds(`!document.querySelector(".search").hidden`), press("/perfetto timelines\r"),
			holds(`document.getElementById("search").value === "perfetto timelines"`), holds(`location.pathname === "/docs/state.html"`))
		close(ready)
		arrives(t, ctx, "/docs/collectives.html#timelines")
	})
	t.Run("phone", func(t *testing.T) {
		ctx := open(t, 360, 740, served)
		for _, page := range []string{"", "docs/operating.html", "ARCHITECTURE.html", "BENCHMARKS.html", "examples/digits/", "docs/design/trust.html"} {
			do(t, ctx, chromedp.Navigate(served+page))
			if w := evaluate[int](t, ctx, `document.documentElement.scrollWidth`); w > 360 {
				t.Errorf("page %q is %d pixels wide on a phone of 360", page, w)
			}
		}
		do(t, ctx, chromedp.Click(css(".menu")), holds(`location.hash === "#pages"`))
	})
}

// searchSite types a word that one page has, and follows the first hit, with keys alone.
func searchSite(t *testing.T, ctx context.Context) {
	t.Helper()
	for _, step := range []struct {
		keys, then string
	}{
		{"", `!document.querySelector(".search").hidden`},
		{"/", `document.activeElement.id === "search"`},
		{"perfetto", `document.querySelectorAll("#hits a").length > 0`},
		{kb.ArrowDown, `document.activeElement.closest("#hits")`},
		{kb.Escape, `document.activeElement.id === "search" && document.getElementById("hits").hidden`},
		{" timelines", `/Timelines/.test(document.querySelector("#hits a")?.textContent)`},
	} {
		do(t, ctx, press(step.keys))
		if err := try(ctx, holds(step.then)); err != nil {
			t.Fatalf("after the keys %q: %v: %s", step.keys, err, evaluate[string](t, ctx, `document.querySelector(".search").outerHTML`))
		}
	}
	do(t, ctx, press(kb.Enter))
	arrives(t, ctx, "/docs/collectives.html#timelines")
	do(t, ctx, holds(`document.getElementById("timelines").getBoundingClientRect().top < innerHeight`))
	do(t, ctx, press("/"), press("qqqzzz"), holds(`document.getElementById("found").textContent === "Nothing found"`))
}

// arrives waits until the browser shows a page. An expression that waits within a page does not
// survive that the browser leaves it.
func arrives(t *testing.T, ctx context.Context, to string) {
	t.Helper()
	var at string
	if !follow.Poll(func() bool {
		var err error
		at, err = chromedp.Run(ctx, chromedp.Evaluate[string](`document.readyState === "complete" ? location.href : ""`))
		return err == nil && strings.HasSuffix(at, to)
	}) {
		t.Fatalf("the browser shows %q, not %s", at, to)
	}
}

// copyBlock copies the first block of a page, and looks at its colours by day and at night.
func copyBlock(t *testing.T, ctx context.Context, base string) {
	t.Helper()
	do(t, ctx, chromedp.Navigate(base+"index.html"), holds(`document.querySelector(".copy")`), chromedp.Click(css(".copy")),
		holds(`document.querySelector(".copy").textContent === "Copied"`))
	for _, c := range []struct{ scheme, background string }{{"light", "rgb(255, 255, 255)"}, {"dark", "rgb(14, 17, 22)"}} {
		media := emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: c.scheme}}}
		if _, err := chromedp.Call(ctx, emulation.SetEmulatedMedia, media); err != nil {
			t.Fatal(err)
		}
		do(t, ctx, holds(fmt.Sprintf(`getComputedStyle(document.body).backgroundColor === %q`, c.background)))
	}
}
