package browser

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/hvdrun/hvdrun/test/follow"
)

// real is a real job with its own page, and a browser that shows it.
type real struct {
	t *testing.T
	*follow.Running
	ctx context.Context // the browser's
}

// train runs a job of two workers on each of two hosts until it is stopped, and opens its page.
func train(t *testing.T, width, height int) *real {
	t.Helper()
	r, err := programs.Start(follow.Job{
		Dir: t.TempDir(),
		Flags: []string{
			"-np", "4", "--min-np", "1", "-H", "localhost:2,127.0.0.1:2", "--orphan-timeout", "60s", "--dashboard-listen", "127.0.0.1:0",
			"--output-filename", "logs",
		},
		Trainer: []string{"-steps", "1000000", "-step-time", "10ms"},
	})
	if err != nil {
		t.Fatal(err)
	}
	j := &real{t: t, Running: r}
	t.Cleanup(func() { // another process can be the driver by then
		j.Kill()
		if t.Failed() {
			if res, err := j.Wait(); err == nil {
				t.Log(res.Output)
			}
		}
	})
	j.trains(0, 4)
	j.ctx = open(t, width, height, j.url())
	j.do(chromedp.WaitVisible(css(".slot")), holds(`document.querySelector("#link.live") && document.querySelectorAll(".slot.s-training").length === 4`))
	return j
}

// url returns the URL of the job's page, with the token that permits steering.
func (j *real) url() string {
	j.t.Helper()
	folder, err := j.Folder()
	if err != nil {
		j.t.Fatal(err)
	}
	out, err := j.Subcommand(j.t.Context(), "dashboard", folder, "--url").Output()
	_, rest, found := strings.Cut(string(out), "to watch and steer: ")
	if err != nil || !found {
		j.t.Fatalf("%v: %s", err, out)
	}
	url, _, _ := strings.Cut(rest, "\n")
	return url
}

func (j *real) do(actions ...action) {
	j.t.Helper()
	do(j.t, j.ctx, actions...)
}

// trains waits until a world of size workers with a generation above after has committed, and
// returns its generation.
func (j *real) trains(after uint64, size int) (generation uint64) {
	j.t.Helper()
	if err := j.AwaitEvents(j.t.Context(), func(events []follow.Event) bool {
		sizes := map[uint64]int{}
		for _, e := range events {
			switch e.Name {
			case "world_published":
				sizes[e.Generation] = e.Size
			case "first_commit":
				if e.Generation > after && sizes[e.Generation] == size {
					generation = e.Generation
				}
			}
		}
		return generation > 0
	}); err != nil {
		j.t.Fatal(err)
	}
	return generation
}

// commands returns the number of commands that the job has recorded.
func (j *real) commands() int {
	j.t.Helper()
	if err := j.Look(); err != nil {
		j.t.Fatal(err)
	}
	n := 0
	for _, e := range j.Events {
		if e.Name == "audit" && slices.Contains([]string{"drain", "exclude", "readmit", "scale", "stop"}, e.What) {
			n++
		}
	}
	return n
}

// asked clicks elements that open the dialog with the title. It checks that nothing is done before
// the dialog is confirmed, and that the command is then carried out once.
func (j *real) asked(title string, click []string, fill ...action) {
	j.t.Helper()
	before := j.commands()
	j.opens(title, click)
	j.click("#ask-no")
	j.do(holds(`!document.querySelector("#ask[open]")`))
	j.opens(title, click)
	j.do(fill...)
	if n := j.commands(); n != before {
		j.t.Fatalf("%s: %d commands before one was confirmed", title, n-before)
	}
	j.click("#ask-yes")
	j.do(holds(`!document.querySelector("#ask[open]") && document.querySelector(".toast")`))
	ctx, cancel := context.WithTimeout(j.t.Context(), patience)
	defer cancel()
	if err := j.AwaitEvents(ctx, func([]follow.Event) bool { return j.commands() > before }); err != nil {
		j.t.Fatalf("%s: nothing has come of it: %v", title, err)
	}
	if n := j.commands(); n != before+1 {
		j.t.Errorf("%s: %d commands, want one", title, n-before)
	}
}

// opens clicks until the dialog with the title is open. Like a person, it clicks again if the page
// moved under the mouse.
func (j *real) opens(title string, click []string) {
	j.t.Helper()
	const clicks, moment = 5, 5 * time.Second
	for range clicks {
		j.click(click...)
		ctx, cancel := context.WithTimeout(j.ctx, moment)
		err := chromedp.Do(ctx, holds(fmt.Sprintf(`document.querySelector("#ask[open]") && document.querySelector("#ask-title").textContent === %q`, title)))
		cancel()
		if err == nil {
			return
		}
		// If the page did not draw the first choice before the second click, that click applied to
		// the previous choice, and the dialog that is open shows that.
		if evaluate[bool](j.t, j.ctx, `!!document.querySelector("#ask[open]")`) {
			j.click("#ask-no")
			j.do(holds(`!document.querySelector("#ask[open]")`))
		}
	}
	j.t.Fatalf("%s: %d clicks on %q open no dialog", title, clicks, click)
}

// click clicks the centres of elements with the mouse, one after the other. It looks each element
// up again, because the page can redraw it at any time.
func (j *real) click(selectors ...string) {
	j.t.Helper()
	type point struct{ X, Y float64 }
	for _, sel := range selectors {
		j.do(holds(fmt.Sprintf(`document.querySelector(%q)`, sel)))
		p := evaluate[point](j.t, j.ctx, fmt.Sprintf(`(() => {
			const e = document.querySelector(%q);
			e.scrollIntoView({ block: "center", behavior: "instant" });
			const r = e.getBoundingClientRect();
			return { X: r.x + r.width / 2, Y: r.y + r.height / 2 };
		})()`, sel))
		j.do(chromedp.MouseClickXY(p.X, p.Y))
	}
}

// slotOf returns the selector of the slot at a place.
func slotOf(place string) string { return `.slot[title^="` + place + ` "]` }

// TestButtons: each button asks first; then the job does what the dialog says, and the page shows
// it.
func TestButtons(t *testing.T) {
	j := train(t, 1280, 1000)
	slot := slotOf("127.0.0.1:1")
	j.asked("Drain 127.0.0.1:1?", []string{slot, `[data-verb="drain"]`})
	g := j.trains(1, 3)
	j.do(holds(`document.querySelector(".slot.s-drained")?.title.startsWith("127.0.0.1:1 ") && document.querySelectorAll(".slot.s-training").length >= 3`))

	j.asked("Use 127.0.0.1:1 again?", []string{slot, `[data-verb="readmit"]`})
	g = j.trains(g, 4)
	j.do(holds(`!document.querySelector(".slot.s-drained")`))

	j.asked("Exclude 127.0.0.1?", []string{`[title="The whole host 127.0.0.1"]`, `[data-verb="exclude"]`},
		chromedp.SendKeys(css("#for"), "60"))
	g = j.trains(g, 2)
	j.do(holds(`document.querySelectorAll(".slot.s-excluded").length === 2`))
	if err := j.AwaitEvents(t.Context(), func(events []follow.Event) bool {
		for _, e := range events {
			if e.Name == "excluded" && e.Until.Sub(e.Time).Minutes() > 59 {
				return true
			}
		}
		return false
	}); err != nil {
		t.Fatal(err)
	}
	j.asked("Use 127.0.0.1 again?", []string{`[title="The whole host 127.0.0.1"]`, `[data-verb="readmit"]`})
	g = j.trains(g, 4)

	j.asked("How many workers?", []string{"#scale"}, chromedp.Clear(css("#max-np")), chromedp.SendKeys(css("#max-np"), "3"))
	g = j.trains(g, 3)
	j.do(holds(`document.querySelector("#tiles").textContent.includes("1 to 3 allowed")`))

	j.refused()
	j.asked("Stop job "+j.RunID()+"?", []string{"#stop"})
	<-j.Ended()
	if got := j.Status(); got != 128+15 {
		t.Errorf("the job has ended with %d", got)
	}
	j.do(holds(`document.querySelector("#state").textContent === "stopped" || document.querySelector("#link.off")`))
}

// refused asks for something that the job refuses: the dialog says why, and stays open.
func (j *real) refused() {
	j.t.Helper()
	j.do(chromedp.Click(css("#scale")), holds(`document.querySelector("#ask[open]")`), chromedp.Clear(css("#min-np")), chromedp.SendKeys(css("#min-np"), "4"),
		chromedp.Click(css("#ask-yes")), holds(`document.querySelector("#ask[open]") && document.querySelector("#ask-error").textContent.length > 10`),
		chromedp.Click(css("#ask-no")), holds(`!document.querySelector("#ask[open]")`))
}

// TestKeyboard: everything on the page can be done with the keyboard.
func TestKeyboard(t *testing.T) {
	j := train(t, 1280, 1000)
	key := chromedp.KeyEvent
	focused := func(selector string) action {
		return holds(fmt.Sprintf(`document.activeElement.matches(%q)`, selector))
	}
	// Tab moves to the skip link and through the header to the slots, one of which is in the tab
	// order.
	for range 30 {
		j.do(key(kb.Tab))
		if evaluate[bool](t, j.ctx, `document.activeElement.matches(".slot")`) {
			break
		}
	}
	j.do(focused(`.slot[title^="localhost:0 "]`), key(kb.ArrowRight), focused(`.slot.selected[title^="localhost:1 "]`), key(kb.ArrowLeft), key(kb.ArrowRight),
		key(kb.ArrowRight), focused(`.slot.selected[title^="127.0.0.1:0 "]`), holds(`document.querySelector("#selected-title").textContent === "Slot 127.0.0.1:0"`))
	// A key opens the dialog, and Escape cancels it.
	before := j.commands()
	j.do(key("d"), holds(`document.querySelector("#ask[open]") && document.querySelector("#ask-title").textContent === "Drain 127.0.0.1:0?"`),
		focused("#ask-no"), key(kb.Escape), holds(`!document.querySelector("#ask[open]")`))
	if n := j.commands(); n != before {
		t.Errorf("%d commands after Escape", n-before)
	}
	// Tab moves to the button that confirms, and Enter presses it.
	j.do(key("d"), holds(`document.querySelector("#ask[open]")`), key(kb.Tab), focused("#ask-yes"), key(kb.Enter), holds(`!document.querySelector("#ask[open]")`))
	g := j.trains(1, 3)
	j.do(key("r"), holds(`document.querySelector("#ask-title").textContent === "Use 127.0.0.1:0 again?"`), key(kb.Tab), key(kb.Enter))
	j.trains(g, 4)
	j.do(holds(`document.querySelector(".slot.selected.s-training")`), key("o"), holds(`document.querySelector("#output-note").textContent.length > 0`))
	j.do(key("s"), holds(`document.querySelector("#ask[open]")`), focused("#min-np"), key(kb.Escape))
	// The filter takes letters as text, not as commands. A keyboard sends a key and its letter as
	// one event; the page must ignore the letter.
	if _, err := chromedp.Call(j.ctx, input.DispatchKeyEvent, input.DispatchKeyEventParams{
		Type: input.DispatchKeyEventTypeKeyDown, Key: "/", Code: "Slash", Text: "/", WindowsVirtualKeyCode: 191,
	}); err != nil {
		t.Fatal(err)
	}
	j.do(focused("#filter"), key("drain"), holds(`document.querySelector("#filter").value === "drain"`), holds(`document.querySelectorAll("#events time").length > 0 &&
		[...document.querySelectorAll("#events li")].every((e) => /drain/i.test(e.textContent))`))
	j.do(holds(`!document.querySelector("#ask[open]")`), key(kb.Escape), holds(`document.activeElement === document.body`))
	j.do(key("?"), holds(`document.querySelector("#keys[open]")`), key(kb.Escape), holds(`!document.querySelector("#keys[open]")`))
	j.do(key("t"), holds(`document.documentElement.dataset.theme === "light"`), key("t"), holds(`document.documentElement.dataset.theme === "dark"`))
}

// TestResume: the page says that its job's hvdrun has exited. A page that hvdrun dashboard serves
// continues with the next driver; the job's own page says that it needs the URL with that driver's
// tokens.
func TestResume(t *testing.T) {
	j := train(t, 1280, 1000)
	g := j.Generation
	folder, err := j.Folder()
	if err != nil {
		t.Fatal(err)
	}
	beside := open(t, 1280, 1000, j.serveBeside(folder))
	do(t, beside, chromedp.WaitVisible(css(".slot")), holds(`document.querySelector("#link.live")`))
	pid := j.PID
	j.KillDriver()
	j.do(holds(`document.querySelector("#link.off")`))
	silent := `document.querySelector("#state").textContent === "no answer" && document.querySelector("#banners").textContent.includes("hvdrun resume")`
	j.do(holds(silent))
	do(t, beside, holds(`document.querySelector("#state").textContent === "no driver" && document.querySelector("#banners").textContent.includes("hvdrun resume")`),
		holds(`document.querySelector("#stop").disabled`))
	next, err := j.Resume("")
	if err != nil {
		t.Fatal(err)
	}
	j.Running = next
	if next.PID == pid {
		t.Fatal("it is the same process")
	}
	// The tokens of the page are no longer valid once their hvdrun has exited.
	j.do(holds(`document.querySelector("#banners").textContent.includes("--url prints the new URL")`))
	j.ctx = open(t, 1280, 1000, j.url())
	j.do(chromedp.WaitVisible(css(".slot")))
	for _, ctx := range []context.Context{j.ctx, beside} {
		do(t, ctx, holds(`document.querySelector("#link.live") && document.querySelector("#state").textContent === "running"`),
			holds(`[...document.querySelectorAll("#events li")].some((e) => e.textContent.includes("another driver has taken over"))`),
			holds(`document.querySelectorAll(".slot.s-training").length === 4 && !document.querySelector("#stop").disabled`))
	}
	j.do(holds(`!document.querySelector("#banners").textContent.includes("no answer")`))
	// The records of starts repeat what other events say: the page shows them only if the filter
	// asks for them.
	records := `[...document.querySelectorAll("#events li")].some((e) => e.textContent.includes("audit") && e.textContent.includes("start localhost:"))`
	filter := func(text string) string {
		return fmt.Sprintf(`(document.querySelector("#filter").value = %q, document.querySelector("#filter").dispatchEvent(new Event("input")), true)`, text)
	}
	j.do(holds("!"+records), holds(filter("audit")), holds(records), holds(filter("")), holds("!"+records))
	// The page steers the next driver.
	j.asked("Drain localhost:1?", []string{slotOf("localhost:1"), `[data-verb="drain"]`})
	j.trains(g, 3)
	do(t, beside, holds(`document.querySelectorAll(".slot.s-drained").length === 1`))
}

// serveBeside runs hvdrun dashboard for the job and returns the URL that permits steering.
func (j *real) serveBeside(folder string) string {
	j.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cmd := j.Subcommand(ctx, "dashboard", folder, "--listen", "127.0.0.1:0")
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		j.t.Fatal(err)
	}
	j.t.Cleanup(func() {
		cancel()
		_ = cmd.Wait() // it is killed above
	})
	text := ""
	for b := make([]byte, 4096); ; {
		n, err := out.Read(b)
		text += string(b[:n])
		if _, rest, found := strings.Cut(text, "to watch and steer: "); found && strings.Contains(rest, "\n") {
			url, _, _ := strings.Cut(rest, "\n")
			return url
		}
		if err != nil {
			j.t.Fatalf("%v: %s", err, text)
		}
	}
}
