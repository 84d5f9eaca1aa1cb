package browser

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// policy allows a site nothing but its own files.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'"

// makeSite writes the site of the repository into a folder.
func makeSite(t *testing.T) string {
	t.Helper()
	folder := filepath.Join(t.TempDir(), "site")
	if out, err := exec.Command("go", "-C", "../../..", "run", "./internal/site/gen", ".", folder).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return folder
}

// TestSite: a person finds a word by the keyboard, whether the site is opened from files or served
// with a strict policy, copies a block, and reads each page on a phone without scrolling sideways.
func TestSite(t *testing.T) {
	folder := makeSite(t)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Security-Policy", policy)
		http.FileServer(http.Dir(folder)).ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	for name, base := range map[string]string{"files": "file://" + folder + "/", "served": server.URL + "/"} {
		t.Run(name, func(t *testing.T) {
			ctx := open(t, 1280, 900, base+"docs/state.html")
			searchSite(t, ctx)
			copyBlock(t, ctx, base)
		})
	}
	t.Run("phone", func(t *testing.T) {
		ctx := open(t, 360, 740, server.URL+"/")
		for _, page := range []string{"", "docs/operating.html", "ARCHITECTURE.html", "BENCHMARKS.html", "examples/digits/", "docs/trust.html"} {
			do(t, ctx, chromedp.Navigate(server.URL+"/"+page))
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
	do(t, ctx, holds(`!document.querySelector(".search").hidden`),
		chromedp.KeyEvent("/"), holds(`document.activeElement.id === "search"`),
		chromedp.KeyEvent("perfetto"), holds(`document.querySelectorAll("#hits a").length > 0`),
		chromedp.KeyEvent(kb.ArrowDown), holds(`document.activeElement.closest("#hits")`),
		chromedp.KeyEvent(kb.Escape), holds(`document.activeElement.id === "search" && document.getElementById("hits").hidden`),
		chromedp.KeyEvent(" timelines"), holds(`/Timelines/.test(document.querySelector("#hits a")?.textContent)`),
		chromedp.KeyEvent(kb.Enter), holds(`location.pathname.endsWith("/docs/collectives.html") && location.hash === "#timelines"`),
		holds(`document.getElementById("timelines").getBoundingClientRect().top < innerHeight`))
	do(t, ctx, chromedp.KeyEvent("/"), chromedp.KeyEvent("qqqzzz"), holds(`document.getElementById("found").textContent === "Nothing found"`))
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
