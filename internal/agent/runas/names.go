package runas

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"os/user"
	"strconv"
	"strings"
	"time"
)

// namesBound is how long a directory service may take for an answer.
const namesBound = 10 * time.Second

// tools are where getent and id are looked for, whatever PATH is.
var tools = []string{"/usr/bin", "/bin", "/usr/local/bin"}

// UserByID returns the user of this host with a number. Without cgo Go reads only /etc/passwd;
// users that are missing there are looked up by getent, which knows all sources of the system, such
// as LDAP. It blocks as long as that takes, at most 10 s.
func UserByID(id string) (*user.User, error) {
	u, err := user.LookupId(id)
	return orByGetent(u, err, id)
}

// userByName returns the user of this host who has a name, as UserByID does.
func userByName(name string) (*user.User, error) {
	u, err := user.Lookup(name)
	if _, number := strconv.ParseUint(name, 10, 32); number == nil {
		return u, err // getent would take it for the number
	}
	return orByGetent(u, err, name)
}

func orByGetent(u *user.User, err error, key string) (*user.User, error) {
	if err == nil {
		return u, nil
	}
	// name:password:number:group:comment:home:shell
	fields := strings.Split(strings.TrimSpace(output("getent", "passwd", key)), ":")
	if len(fields) != 7 {
		return nil, err
	}
	return &user.User{Username: fields[0], Uid: fields[2], Gid: fields[3], Name: fields[4], HomeDir: fields[5]}, nil
}

// groupsOf returns the numbers of a user's groups, the main one among them, as UserByID finds them.
func groupsOf(u *user.User) ([]string, error) {
	if ids := strings.Fields(output("id", "-G", u.Username)); len(ids) > 0 {
		return ids, nil
	}
	return u.GroupIds()
}

// groupID returns the number of a group, as UserByID finds it.
func groupID(name string) (string, error) {
	g, err := user.LookupGroup(name)
	if err == nil {
		return g.Gid, nil
	}
	if fields := strings.Split(strings.TrimSpace(output("getent", "group", name)), ":"); len(fields) == 4 {
		return fields[2], nil
	}
	return "", fmt.Errorf("this host has no group %q", name)
}

// output returns what a tool prints; empty if the tool is missing or fails.
func output(tool string, args ...string) string {
	ctx, cancel := context.WithTimeout(context.Background(), namesBound)
	defer cancel()
	for _, dir := range tools {
		cmd := exec.CommandContext(ctx, dir+"/"+tool, args...)
		cmd.WaitDelay = time.Second
		out, err := cmd.Output()
		switch {
		case err == nil:
			return string(out)
		case !errors.Is(err, fs.ErrNotExist):
			return "" // it is there, and knows nothing
		}
	}
	return ""
}
