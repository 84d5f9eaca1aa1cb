package gossip

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// The reasons why a member of the cluster, or a program at its address, refuses this member.
var (
	ErrKey   = errors.New("its key differs from this one's")
	errLabel = errors.New("it closed the connection without an answer: its cluster has another label, or it belongs to no cluster")
)

// refusals maps texts of memberlist's errors to the reasons for which the two ends disagree. A
// member with another label closes the connection before it answers.
var refusals = []struct {
	text string
	err  error
}{
	{"No installed keys could decrypt", ErrKey},
	{"encryption is configured but remote state is not encrypted", ErrKey},
	{"remote state is encrypted and encryption is not configured", ErrKey},
	{": EOF", errLabel},
	{"connection reset by peer", errLabel},
	{"broken pipe", errLabel},
	{"closed pipe", errLabel},
}

// A member to which more than a hundred others connect at once closes some of the connections, as a
// member with another label does. A connection that was closed is therefore tried hangUps more
// times, each after a random pause of up to hangUpPause.
const (
	hangUps     = 4
	hangUpPause = 500 * time.Millisecond
)

// contact exchanges the full state with the member at an address.
func (m *Member) contact(addr string) error {
	n, err := m.list.Join([]string{addr})
	if n > 0 {
		m.sign()
		return nil
	}
	if err == nil {
		return errors.New("nothing was tried")
	}
	for _, r := range refusals {
		if strings.Contains(strings.ToLower(err.Error()), strings.ToLower(r.text)) {
			return r.err
		}
	}
	// "1 error occurred:\n\t* failed to join ADDR: REASON\n\n"
	text := strings.Join(strings.Fields(err.Error()), " ")
	if _, reason, ok := strings.Cut(text, "failed to join "+addr+": "); ok {
		text = reason
	}
	return errors.New(text)
}

// errSelf is the error for an observer's seed that is the observer itself.
var errSelf = errors.New("it is this member")

// refused reports whether a seed was reached and refused this member.
func refused(err error) bool { return errors.Is(err, ErrKey) || errors.Is(err, errLabel) }

// seedPause is the pause between two attempts to reach the seeds; see SeedPatience.
const seedPause = 250 * time.Millisecond

// enter contacts the seeds until one has answered, for as long as Config permits.
func (m *Member) enter(ctx context.Context) error {
	until := time.Now().Add(m.cfg.SeedPatience)
	for attempt := 1; ; attempt++ {
		err := m.enterOnce(ctx)
		if err == nil || refused(err) || ctx.Err() != nil || !time.Now().Before(until) {
			return err
		}
		if attempt == 1 {
			m.log.WithError(err).Warnf("gossip: no seed can be reached; trying for %v", m.cfg.SeedPatience)
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(seedPause):
		}
	}
}

// enterOnce contacts all seeds at once. It returns when one has answered or all have failed. If the
// member is itself one of the seeds, it succeeds although no other seed answers, unless the cluster
// is known to have had members and none has joined it.
func (m *Member) enterOnce(ctx context.Context) error {
	answers := make(chan error, len(m.cfg.Join))
	for _, seed := range m.cfg.Join {
		m.spawn(func() {
			if err := m.contactSeed(ctx, seed); err != nil {
				answers <- fmt.Errorf("%s: %w", seed, err)
			} else {
				answers <- nil
			}
		})
	}
	var failed failures
	self := false
	for range m.cfg.Join {
		select {
		case <-ctx.Done():
			return fmt.Errorf("gossip: joining the cluster: %w", context.Cause(ctx))
		case err := <-answers:
			switch {
			case err == nil:
				return nil
			case errors.Is(err, errSelf):
				self = true
			default:
				failed = append(failed, err)
			}
		}
	}
	switch {
	case len(failed) == 0 || self && !(m.cfg.NotFirst && m.alone()):
		return nil
	case m.cfg.KeepTrying && !refused(failed):
		m.log.WithError(failed).Warn("gossip: no seed can be reached; still trying")
		return nil
	}
	return fmt.Errorf("gossip: no member of the cluster admits this one: %w", failed)
}

// contactSeed tries all addresses of a seed.
func (m *Member) contactSeed(ctx context.Context, seed string) error {
	addrs, err := resolve(ctx, seed)
	if err != nil {
		return err
	}
	if m.meta == nil && slices.Contains(addrs, m.addr) {
		return errSelf
	}
	var failed failures
	for _, addr := range addrs {
		err := m.contact(addr)
		for range hangUps {
			if !errors.Is(err, errLabel) {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("%w (%w)", err, context.Cause(ctx))
			case <-m.ctx.Done():
				return errClosed
			case <-time.After(time.Duration(rand.Int64N(int64(hangUpPause)))):
			}
			err = m.contact(addr)
		}
		if err == nil {
			return nil
		}
		if len(addrs) > 1 {
			err = fmt.Errorf("%s: %w", addr, err)
		}
		failed = append(failed, err)
	}
	return failed
}

// failures is several errors, formatted as one line.
type failures []error

func (f failures) Error() string {
	texts := make([]string, len(f))
	for i, err := range f {
		texts[i] = err.Error()
	}
	return strings.Join(texts, "; ")
}

func (f failures) Unwrap() []error { return f }
