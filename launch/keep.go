package launch

// Keeper is a Launcher whose workers outlive the process that uses it: agents keep them, with what
// is to be told of them, until another driver of the run comes. That one calls Run again for each
// worker of which it has not written down the end; the one that was started before is taken over
// then, and not started once more.
type Keeper interface {
	Launcher
	// Adopt names the workers, by incarnation, for which Run will be called since a driver before
	// this one may have started them. It is called before the first Run, and not at all by a first
	// driver. Agents may forget what there is to tell of others.
	Adopt(incarnations []string)
	// Settle says that what Run has returned for the incarnation is written down. The agent keeps
	// it until then. It does not block.
	Settle(incarnation string)
}
