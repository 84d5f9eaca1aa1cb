// Package dashboard is the page on which a person watches a job and steers it: a server of one
// embedded page, which follows a job by its status, its events and what its journal tells. It
// depends on nothing outside this machine.
package dashboard
