package browser

import (
	"bytes"
	"context"
	"image/png"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"

	"github.com/hvdrun/hvdrun/internal/dashboard"
	"github.com/hvdrun/hvdrun/internal/dashboard/dashboardtest"
)

// mostShot bounds the size of a screenshot of the documentation, in bytes.
const mostShot = 150 << 10

// TestScreenshots: the page looks as in the documentation: light and dark, on a large screen and on
// a phone.
func TestScreenshots(t *testing.T) {
	now := dashboardtest.Begun.Add(102 * time.Minute)
	for _, c := range []struct {
		name          string
		width, height int
		dark, phone   bool
		job           func() *dashboardtest.Job
		act           []action
	}{
		{name: "light", width: 1280, height: 1060, job: dashboardtest.Story, act: []action{chromedp.Click(css(`[title^="gpu-a4:6"]`))}},
		{name: "dark", width: 1280, height: 1060, dark: true, job: dashboardtest.Story, act: []action{chromedp.Click(css(`[title^="gpu-a4:6"]`))}},
		{name: "phone", width: 390, height: 844, phone: true, job: dashboardtest.Story},
		{name: "phone-dark", width: 390, height: 844, phone: true, dark: true, job: dashboardtest.Story, act: []action{
			chromedp.Click(css(`[title^="gpu-b1:2"]`)), chromedp.Click(css(`[data-verb="drain"]`)), chromedp.WaitVisible(css(`#ask[open]`))}},
		{name: "death", width: 1280, height: 620, job: func() *dashboardtest.Job {
			j := dashboardtest.Story()
			j.Death(now)
			return j
		}, act: []action{chromedp.Click(css(`[title^="gpu-a2:3"]`))}},
		{name: "growth", width: 1280, height: 620, job: func() *dashboardtest.Job {
			j := dashboardtest.Story()
			j.Growth(now)
			return j
		}, act: []action{chromedp.Click(css(`[title^="gpu-b3:5"]`))}},
		{name: "hang", width: 1280, height: 620, job: func() *dashboardtest.Job {
			j := dashboardtest.Story()
			j.Hang(now)
			return j
		}, act: []action{
			chromedp.Click(css(`[title^="gpu-b1:2"]`)),
			holds(`document.querySelector("#banners").textContent.includes("it will be stopped in") && document.querySelector("#banners button").textContent === "Exclude…"`),
		}},
		{name: "thousand", width: 1280, height: 900, dark: true, job: func() *dashboardtest.Job {
			j := dashboardtest.Large(dashboardtest.Begun, 125, 8)
			j.Stir(40)
			return j
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := c.job()
			server, tokens := serve(t, dashboard.Config{Job: dashboard.Job{
				Source: j, Recorded: j.Events, Command: []string{"./train", "--model", "resnet50", "--epochs", "90"}, Output: t.TempDir(),
			}})
			ctx := open(t, c.width, c.height, "about:blank")
			scheme := map[bool]string{false: "light", true: "dark"}[c.dark]
			if _, err := chromedp.Call(ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{
				{Name: "prefers-color-scheme", Value: scheme}, {Name: "prefers-reduced-motion", Value: "reduce"},
			}}); err != nil {
				t.Fatal(err)
			}
			if _, err := chromedp.Call(ctx, emulation.SetTimezoneOverride, emulation.SetTimezoneOverrideParams{TimezoneID: "UTC"}); err != nil {
				t.Fatal(err)
			}
			if c.phone {
				do(t, ctx, chromedp.EmulateViewport(int64(c.width), int64(c.height), chromedp.EmulateScale(2), chromedp.EmulateMobile))
			}
			do(t, ctx, chromedp.Navigate(dashboard.WithToken(server.URL(), tokens.Write)), chromedp.WaitVisible(css(".slot")),
				holds(`document.querySelector("#chart-size svg") && document.querySelector("#link.live")`))
			do(t, ctx, c.act...)
			shot, err := chromedp.Run(ctx, chromedp.CaptureScreenshot())
			if err != nil {
				t.Fatal(err)
			}
			look(t, ctx, c.width)
			keep(t, c.name, shot)
		})
	}
}

// look fails the test if an element is wider than the screen.
func look(t *testing.T, ctx context.Context, width int) {
	t.Helper()
	wide := evaluate[[]string](t, ctx, `[...document.querySelectorAll("main *, header *")].filter((e) => {
		const r = e.getBoundingClientRect();
		return r.width > 0 && r.right > innerWidth + 1 && !e.closest(".scroll, pre, .hosts, svg");
	}).slice(0, 5).map((e) => e.tagName + "." + e.className + " " + Math.round(e.getBoundingClientRect().right))`)
	if len(wide) > 0 {
		t.Errorf("wider than %d: %q", width, wide)
	}
}

// keep writes a screenshot to the folder of the documentation, with few colours so that the file is
// small.
func keep(t *testing.T, name string, shot []byte) {
	t.Helper()
	img, err := png.Decode(bytes.NewReader(shot))
	if err != nil {
		t.Fatal(err)
	}
	if *shots == "" {
		return
	}
	var out bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&out, fewColours(img)); err != nil {
		t.Fatal(err)
	}
	if out.Len() > mostShot {
		t.Errorf("%s has %d bytes, %d at most", name, out.Len(), mostShot)
	}
	if err := os.WriteFile(filepath.Join(*shots, "dashboard-"+name+".png"), out.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}
