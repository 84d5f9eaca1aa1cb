// Package runas decides as which user an agent that runs as root starts the workers of a driver.
//
// A policy is a file with lines of key=value fields. The first line that matches applies. Empty
// lines and lines that begin with # are skipped:
//
//	user=alice                as=alice
//	user=bob run=nightly-*    as=trainer groups=trainer,video cgroup=/sys/fs/cgroup/training
//	uid=1000-1999             as=@user
//
// Conditions apply to the certificate of the driver: user and run are patterns of path.Match, uid
// is a number or a range; all conditions of a line must match. as is a user of this host, or @user:
// the user named by the certificate, who must not be root. groups are the groups of the process,
// the primary one first; without it they are the user's groups. cgroup is the folder of a version 2
// cgroup below which each worker gets its own.
package runas

import (
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/launch"
)

const (
	// fromCertificate is the user that stands for the one named by the certificate.
	fromCertificate = "@user"
	// maxPolicy bounds the file of a policy, in bytes, and maxGroups a process's groups.
	maxPolicy = 1 << 20
	maxGroups = 64
)

// Policy decides which drivers may run workers as which user.
type Policy struct {
	file  string
	rules []rule
}

// rule is a line of a policy.
type rule struct {
	line        int
	user, run   string // patterns; empty: any
	least, most uint64 // of the user id
	anyUID      bool
	as          string
	groups      []string
	cgroup      string
}

// Rule is the policy's decision for a driver.
type Rule struct {
	// As is the user, and Cgroup the folder of a cgroup, or empty.
	As     launch.User
	Cgroup string
}

// Read reads a policy from a file. Only root and the user of this process may be able to change it.
func Read(file string) (*Policy, error) {
	text, err := safefile.OwnText(file, maxPolicy)
	if err != nil {
		return nil, err
	}
	return Parse(file, string(text))
}

// Parse reads the text of a policy. Its errors begin with the file and the line.
func Parse(file, text string) (*Policy, error) {
	if len(text) > maxPolicy {
		return nil, fmt.Errorf("%s: the policy is longer than %d bytes", file, maxPolicy)
	}
	p := &Policy{file: file}
	n := 0
	for line := range strings.Lines(text) {
		n++
		fields := strings.Fields(line)
		if len(fields) == 0 || strings.HasPrefix(fields[0], "#") {
			continue
		}
		r := rule{line: n, anyUID: true}
		for _, field := range fields {
			if err := r.take(field); err != nil {
				return nil, fmt.Errorf("%s:%d: %w", file, n, err)
			}
		}
		if r.as == "" {
			return nil, fmt.Errorf("%s:%d: as=USER is missing: the user whom workers run as", file, n)
		}
		p.rules = append(p.rules, r)
	}
	if len(p.rules) == 0 {
		return nil, fmt.Errorf("%s: no line says as which user workers run; for example: user=* as=nobody", file)
	}
	return p, nil
}

// take parses a field of the line.
func (r *rule) take(field string) (err error) {
	key, value, ok := strings.Cut(field, "=")
	if !ok || value == "" {
		return fmt.Errorf("%q is not key=value", field)
	}
	given := false
	switch key {
	case "user":
		given, r.user = r.user != "", value
		err = checkPattern(value)
	case "run":
		given, r.run = r.run != "", value
		err = checkPattern(value)
	case "uid":
		given, r.anyUID = !r.anyUID, false
		r.least, r.most, err = parseRange(value)
	case "as":
		given, r.as = r.as != "", value
	case "groups":
		given, r.groups = r.groups != nil, strings.Split(value, ",")
		if len(r.groups) > maxGroups {
			err = fmt.Errorf("the list has %d groups; at most %d are allowed", len(r.groups), maxGroups)
		}
	case "cgroup":
		given, r.cgroup = r.cgroup != "", filepath.Clean(value)
		if !filepath.IsAbs(value) {
			err = fmt.Errorf("cgroup %q is not an absolute path", value)
		}
	default:
		return fmt.Errorf("unknown key %q; the keys are user, uid, run, as, groups and cgroup", key)
	}
	if given {
		return fmt.Errorf("%s is given twice", key)
	}
	return err
}

func checkPattern(pattern string) error {
	if _, err := path.Match(pattern, ""); err != nil {
		return fmt.Errorf("%q is not a pattern", pattern)
	}
	return nil
}

func parseRange(text string) (least, most uint64, err error) {
	low, high, isRange := strings.Cut(text, "-")
	if !isRange {
		high = low
	}
	least, err1 := strconv.ParseUint(low, 10, 32)
	most, err2 := strconv.ParseUint(high, 10, 32)
	if err1 != nil || err2 != nil || least > most {
		return 0, 0, fmt.Errorf("uid %q is not a number or a range such as 1000-1999", text)
	}
	return least, most, nil
}

// applies returns whether the conditions of the rule hold.
func (r *rule) applies(who identity.Subject) bool {
	matches := func(pattern, text string) bool {
		match, _ := path.Match(pattern, text)
		return pattern == "" || match
	}
	if !matches(r.user, who.User) || !matches(r.run, who.RunID) {
		return false
	}
	uid, err := strconv.ParseUint(who.UID, 10, 32)
	return r.anyUID || err == nil && uid >= r.least && uid <= r.most
}

// find returns the first rule that applies.
func (p *Policy) find(who identity.Subject) (*rule, error) {
	for i := range p.rules {
		if p.rules[i].applies(who) {
			return &p.rules[i], nil
		}
	}
	return nil, fmt.Errorf("no line of %s lets user %q (uid %s), run %s, start workers", p.file, who.User, who.UID, who.RunID)
}

// For returns the rule for the driver with the certificate. It looks up users and groups on this
// host.
func (p *Policy) For(who identity.Subject) (Rule, error) {
	r, err := p.find(who)
	if err != nil {
		return Rule{}, err
	}
	name := r.as
	if name == fromCertificate {
		name = who.User
	}
	as, err := lookUp(name, r.groups)
	switch {
	case r.as == fromCertificate && who.User == "":
		err = errors.New("the driver's certificate names no user")
	case err == nil && r.as == fromCertificate && as.UID == 0:
		err = errors.New("@user is never root")
	}
	if err != nil {
		return Rule{}, fmt.Errorf("%s:%d: %w", p.file, r.line, err)
	}
	return Rule{As: as, Cgroup: r.cgroup}, nil
}

// Check returns an error if a line names a user or group that this host does not have, or a cgroup
// that usable refuses.
func (p *Policy) Check(usable func(cgroup string) error) error {
	for _, r := range p.rules {
		var err error
		if r.as != fromCertificate {
			_, err = lookUp(r.as, r.groups)
		} else {
			_, err = lookUpGroups(r.groups)
		}
		if err == nil && r.cgroup != "" {
			err = usable(r.cgroup)
		}
		if err != nil {
			return fmt.Errorf("%s:%d: %w", p.file, r.line, err)
		}
	}
	return nil
}

// lookUp returns a user of this host, with the given groups, or with the user's own if there are
// none.
func lookUp(name string, groups []string) (launch.User, error) {
	u, err := userByName(name)
	if err != nil {
		return launch.User{}, fmt.Errorf("this host has no user %q", name)
	}
	uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
	gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
	if err := errors.Join(err1, err2); err != nil {
		return launch.User{}, fmt.Errorf("user %q: %w", name, err)
	}
	as := launch.User{Name: u.Username, UID: uint32(uid), GID: uint32(gid), Home: u.HomeDir}
	if len(groups) > 0 {
		if as.Groups, err = lookUpGroups(groups); err != nil {
			return launch.User{}, err
		}
		as.GID = as.Groups[0]
		return as, nil
	}
	ids, err := groupsOf(u)
	if err != nil {
		return launch.User{}, fmt.Errorf("the groups of user %q: %w", name, err)
	}
	for _, id := range ids[:min(len(ids), maxGroups)] {
		if gid, err := strconv.ParseUint(id, 10, 32); err == nil {
			as.Groups = append(as.Groups, uint32(gid))
		}
	}
	return as, nil
}

func lookUpGroups(names []string) (ids []uint32, err error) {
	for _, name := range names {
		gid, err := groupID(name)
		if err != nil {
			return nil, err
		}
		id, err := strconv.ParseUint(gid, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("group %q: %w", name, err)
		}
		ids = append(ids, uint32(id))
	}
	return ids, nil
}
