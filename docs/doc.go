// Package docs has the pages of the documentation. Its tests keep them and README.md true: they run
// the commands, check flags, messages, links and files, and build the training loop of the README.
package docs
