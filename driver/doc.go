// Package driver decides: it follows the source of hosts, starts and stops workers, publishes worlds, and tells workers
// when the hosts have changed.
//
// A pure machine (machine.go for what happens, reconcile.go for what follows from it) takes events and returns actions;
// one loop (loop.go) feeds it and carries its actions out. The stories in testdata tell what it does in each situation.
package driver
