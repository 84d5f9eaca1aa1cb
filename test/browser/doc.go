// Package browser tests the page of package dashboard in a real browser, Debian's chromium, against
// real jobs, and makes the screenshots of the documentation. It is a module of its own: hvdrun does
// not need what drives the browser.
package browser
