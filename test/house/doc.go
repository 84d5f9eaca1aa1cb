// Package house has the rules of the source, as tests: which package may import which, what every
// package must have, and what none may have.
package house
