package browser

import (
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"

	"github.com/hvdrun/hvdrun/internal/dashboard"
	"github.com/hvdrun/hvdrun/internal/dashboard/dashboardtest"
)

// frames is a script that measures a page from its start: the times between frames, and the tasks
// of the main thread that take more than 50 ms, all in milliseconds.
const frames = `
	window.frames_ = [];
	window.tasks_ = [];
	let before = 0;
	requestAnimationFrame(function frame(t) {
		if (before) window.frames_.push(t - before);
		before = t;
		requestAnimationFrame(frame);
	});
	new PerformanceObserver((list) => { for (const e of list.getEntries()) window.tasks_.push(e.duration); }).observe({ type: "longtask", buffered: true });
`

// scroll scrolls the page down and up again, a few pixels in each frame.
const scroll = `new Promise((done) => {
	let n = 0;
	requestAnimationFrame(function step() {
		window.scrollBy(0, n++ < 30 ? 20 : -20);
		if (n < 60) requestAnimationFrame(step);
		else done(true);
	});
})`

// TestThousand scrolls and uses a page of 1,000 workers. Forty of them change twice a second, and
// all of them commit. It prints how smoothly the page moves.
func TestThousand(t *testing.T) {
	const hosts, slots, watched = 125, 8, 20 * time.Second
	job := dashboardtest.Large(dashboardtest.Begun, hosts, slots)
	server, tokens := serve(t, dashboard.Config{Job: dashboard.Job{Source: job, Recorded: job.Events}, Interval: 500 * time.Millisecond})
	ctx := open(t, 1280, 900, "about:blank")
	if _, err := chromedp.Call(ctx, page.AddScriptToEvaluateOnNewDocument, page.AddScriptToEvaluateOnNewDocumentParams{Source: frames}); err != nil {
		t.Fatal(err)
	}
	do(t, ctx, chromedp.Navigate(dashboard.WithToken(server.URL(), tokens.Write)), chromedp.WaitVisible(css(".slot")), holds(`document.querySelectorAll(".slot").length === 1000 && document.querySelector("#link.live")`))
	load := evaluate[float64](t, ctx, `Math.max(0, ...window.tasks_)`)
	stop := make(chan struct{})
	var stirring sync.WaitGroup
	stirring.Go(func() {
		tick := time.NewTicker(500 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				job.Stir(40)
				job.Pass(500*time.Millisecond, 7)
			case <-stop:
				return
			}
		}
	})
	defer stirring.Wait()
	defer close(stop)
	do(t, ctx, chromedp.Evaluate[chromedp.Void](`window.frames_.length = 0; window.tasks_.length = 0;`))
	begun := time.Now()
	for i := 0; time.Since(begun) < watched; i++ {
		place := []string{"node001:0", "node125:7", "node063:3"}[i%3]
		do(t, ctx, chromedp.Click(css(slotOf(place))), holds(`document.querySelector("#selected-title").textContent === "Slot `+place+`"`))
		evaluate[bool](t, ctx, scroll)
	}
	type figures struct {
		Frames int
		Median float64
		P95    float64
		P99    float64
		Most   float64
		Long   int
		Task   float64
	}
	f := evaluate[figures](t, ctx, `(() => {
		const all = [...window.frames_].sort((a, b) => a - b), at = (q) => all[Math.min(all.length - 1, Math.floor(q * all.length))];
		return { Frames: all.length, Median: at(0.5), P95: at(0.95), P99: at(0.99), Most: all[all.length - 1], Long: window.tasks_.length, Task: Math.max(0, ...window.tasks_) };
	})()`)
	t.Logf("1,000 workers: the longest task at the start took %.0f ms; then %d frames in %v: median %.1f ms, 95 %% within %.1f, 99 %% within %.1f, longest %.1f; %d tasks of more than 50 ms, the longest %.0f ms",
		load, f.Frames, time.Since(begun).Round(time.Second), f.Median, f.P95, f.P99, f.Most, f.Long, f.Task)
	if n := evaluate[int](t, ctx, `document.querySelectorAll(".slot").length`); n != hosts*slots {
		t.Errorf("%d slots", n)
	}
}
