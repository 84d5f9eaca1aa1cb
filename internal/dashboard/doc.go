// Package dashboard serves a page on which a user watches and steers a job in a browser. The page
// follows the job by its status, its events and its journal, and loads nothing from other machines.
package dashboard
