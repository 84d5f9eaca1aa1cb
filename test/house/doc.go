// Package house checks rules of the source code with tests: which package may import which, what
// every package must have, and what none may have.
package house
