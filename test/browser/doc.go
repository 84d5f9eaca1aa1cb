// Package browser tests the page of package dashboard in a real browser, Debian's chromium, against
// real jobs, and makes the screenshots of the documentation. It is a separate module, so that
// hvdrun does not depend on the library that drives the browser.
package browser
