// Package elastic lets a training program run as a worker of a job whose set of workers changes.
//
// A program calls Init to join the job that started it, collects the variables that training
// carries from step to step in a State, and passes its training loop to Run. The loop calls
// State.Commit where the state is consistent: at the end of every step, or of every tenth. Run
// calls the loop again in every new world, so the loop must continue from the values in the state
// (epoch, batch) and not from zero.
//
// # Guarantees
//
// After every sync all ranks have the state of one rank, the sync root: the driver chooses the rank
// with the most commits. When hosts are added or removed without a failure, the live state is
// synchronised and no step is repeated. When a worker is lost, every rank first restores its last
// commit, never a mix of two commits, and repeats the steps since then. A newly joined rank is
// never the sync root.
//
// A program started without hvdrun is a world of one.
package elastic
