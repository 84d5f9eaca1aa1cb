package cluster

import (
	"context"
	"errors"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/identity"
)

const (
	// driverLife is how long a driver's certificate is valid. It is renewed at half of that.
	driverLife = 24 * time.Hour
	// followPause is the pause between two reads of the folder by a driver.
	followPause = 500 * time.Millisecond
	// DefaultHold is the least duration of a phase of a rotation. It is much longer than
	// followPause, so that drivers know the keys before others encrypt with them.
	DefaultHold = 5 * time.Second
	// lookWarning is the pause between two warnings about a folder that cannot be read.
	lookWarning = time.Minute
)

// Driver returns credentials for the driver of a run, started by the user.
func (d *Dir) Driver(runID, user, uid string, now time.Time) (*identity.Credentials, error) {
	return d.authority.IssueFor(identity.Subject{RunID: runID, Role: identity.Driver, User: user, UID: uid}, now, driverLife)
}

// Follow renews a driver's credentials, which may be nil, at half of their life, and calls use with
// the gossip keys whenever their version differs from used, the version used last. It blocks until
// ctx ends.
func (d *Dir) Follow(ctx context.Context, creds *identity.Credentials, used uint64, use func(keys [][]byte) error, log logrus.FieldLogger) {
	look := time.NewTicker(followPause)
	defer look.Stop()
	var warned time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-look.C:
		}
		err := d.renew(creds, time.Now())
		if err == nil {
			used, err = d.useRing(used, use)
		}
		if err != nil && time.Since(warned) > lookWarning {
			warned = time.Now()
			log.Warnf("the keys of the cluster cannot be kept up to date: %v", err)
		}
	}
}

// renew replaces credentials after half of their life.
func (d *Dir) renew(creds *identity.Credentials, now time.Time) error {
	if creds == nil {
		return nil
	}
	from, until := creds.Valid()
	if now.Sub(from) < until.Sub(from)/2 {
		return nil
	}
	next, err := d.authority.IssueFor(creds.Subject(), now, until.Sub(from))
	if err != nil {
		return err
	}
	return errors.Join(creds.Renew(next), d.RecordDriver(next))
}

// useRing calls use with keys of a version other than used, and returns the version in use
// afterwards.
func (d *Dir) useRing(used uint64, use func(keys [][]byte) error) (uint64, error) {
	s, err := d.View()
	if err != nil || s.Ring.Version == used {
		return used, err
	}
	if err := use(s.Ring.Keys); err != nil {
		return used, err
	}
	return s.Ring.Version, nil
}
