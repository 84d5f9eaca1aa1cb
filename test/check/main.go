// Command check proves a change.
//
//	check              what every change must pass: make check
//	check all [PART…]  all proofs that there are, or some: make check-all
//	check parts        the parts of check all
//	check under FILE KIND PROGRAM [ARG…]
//
// The last form runs the tests of a package for the other two, those of a kind of run where
// budget.txt divides them: it appends their processor time to FILE, and fails if they leave a
// process behind.
//
// Nothing is decided by the clock: a package fails when it takes more processor time than its line
// in budget.txt allows, unless all others are slow too.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	verb, args := "", os.Args[1:]
	if len(args) > 0 {
		verb, args = args[0], args[1:]
	}
	if verb == "under" && len(args) > 2 {
		os.Exit(underKind(args[0], kind(args[1]), args[2:]))
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	var err error
	switch {
	case verb == "" && len(args) == 0:
		err = check(ctx)
	case verb == "all":
		err = all(ctx, args)
	case verb == "parts" && len(args) == 0:
		for _, p := range parts {
			fmt.Printf("%-12s %s\n", p.name, p.what)
		}
	default:
		fmt.Fprintln(os.Stderr, "usage: check | check all [PART…] | check parts")
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "check:", err)
		os.Exit(1)
	}
}
