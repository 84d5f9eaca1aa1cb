// Command check runs the checks of the project.
//
//	check              the checks that every change must pass: make check
//	check costs        the same; a package that is expensive compared with others is an error
//	check all [PART…]  all proofs, or those that are named: make check-all
//	check parts        the parts of check all
//	check under FILE KIND PROGRAM [ARG…]
//
// The first three run the last form for the tests of each package; if budget.txt divides a
// package's tests, each run is of one kind. It appends the processor time of the tests to FILE, and
// fails if they leave a process behind.
//
// Neither the clock nor processor time decides check: it only warns of a package whose tests take a
// much larger share of their line in budget.txt than those of the median package. check costs, a
// part of check all, fails in this case.
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
		err = check(ctx, false)
	case verb == "costs" && len(args) == 0:
		err = check(ctx, true)
	case verb == "all":
		err = all(ctx, args)
	case verb == "parts" && len(args) == 0:
		for _, p := range parts {
			fmt.Printf("%-12s %s\n", p.name, p.what)
		}
	default:
		fmt.Fprintln(os.Stderr, "usage: check | check costs | check all [PART…] | check parts")
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "check:", err)
		os.Exit(1)
	}
}
