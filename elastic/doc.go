// Package elastic is the worker's side of a job whose workers come and go.
//
// A program calls Init to join the job that started it, gathers what training carries from step to
// step in a State, and gives its training loop to Run. The loop calls State.Commit where the state
// is whole: at the end of a step, or of every tenth. Run calls the loop again in every new world,
// so the loop must begin from what the state holds (epoch, batch) and not from zero.
//
// # What is promised
//
// After every sync the state of all ranks is the state of one of them: of the one with the most
// commits, which the driver names. Where hosts are added or removed in good order, that is the live
// state, and nothing is done twice. Where a worker is lost, every rank goes back to its last commit
// first, and never to a mix of two: what was done since is done again. A rank that has come to the
// job anew never gives its state to others.
//
// Started by hand, without hvdrun, the same program is a world of one.
package elastic
