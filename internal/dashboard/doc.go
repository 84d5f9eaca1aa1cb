// Package dashboard serves a page that shows and steers a job in a browser. The page follows the
// job by its status, its events and its journal, and loads nothing from other machines.
package dashboard
