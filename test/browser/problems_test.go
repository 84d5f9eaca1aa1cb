package browser

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

// problems fails the test at its end if the page threw an error or the browser complained, for
// example about something that the content security policy forbids.
func problems(t *testing.T, ctx context.Context) {
	var mu sync.Mutex
	var all []string
	add := func(text string) {
		mu.Lock()
		defer mu.Unlock()
		all = append(all, text)
	}
	err := chromedp.Listen(ctx, func(event any) {
		switch e := event.(type) {
		case *runtime.EventExceptionThrown:
			add(fmt.Sprintf("%s %+v", e.ExceptionDetails.Text, e.ExceptionDetails.Exception))
		case *log.EventEntryAdded:
			if e.Entry.Level == log.EntryLevelError && !expected(e.Entry.Text) {
				add(e.Entry.Text + " " + e.Entry.URL)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		mu.Lock()
		defer mu.Unlock()
		for _, text := range all {
			t.Error("the page: ", text)
		}
	})
}

// expected returns whether text is a complaint about what tests cause on purpose: the server is
// gone, or it refuses a request.
func expected(text string) bool {
	return strings.Contains(text, "net::ERR_") || strings.Contains(text, "status of 409") || strings.Contains(text, "status of 404") ||
		strings.Contains(text, "status of 401") || strings.Contains(text, "status of 403")
}
