package shm

// Guarded is a member whose operations, in which it waits for other members, are reached by Do
// alone. The other methods do not wait, and may be called as those of [Member].
type Guarded struct {
	member *Member
	before func() error
}

// Guard gives a member to a Guarded one, which runs before in front of every operation: what other
// members may need of this one, besides the operation, in order to come to theirs. The member must
// not be used otherwise any more.
func Guard(m *Member, before func() error) *Guarded { return &Guarded{m, before} }

// BeforeError is an error of what Guard was given.
type BeforeError struct{ Err error }

// Error is that of Err.
func (e *BeforeError) Error() string { return e.Err.Error() }

// Unwrap returns Err.
func (e *BeforeError) Unwrap() error { return e.Err }

// Do runs operations of the member, in body. It returns their error, or a [*BeforeError], and then
// body has not run.
func (g *Guarded) Do(d Desc, body func(*Member, Desc) error) error {
	if err := g.before(); err != nil {
		return &BeforeError{err}
	}
	return body(g.member, d)
}

// Index is as of [Member].
func (g *Guarded) Index() int { return g.member.Index() }

// Abort is as of [Member].
func (g *Guarded) Abort() { g.member.Abort() }

// Gone is as of [Member].
func (g *Guarded) Gone(index int) { g.member.Gone(index) }

// Dead is as of [Member].
func (g *Guarded) Dead() (index int, is bool) { return g.member.Dead() }

// Watch is as of [Member].
func (g *Guarded) Watch(t *Times) { g.member.Watch(t) }

// Close is as of [Member].
func (g *Guarded) Close() error { return g.member.Close() }
