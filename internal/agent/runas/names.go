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

// namesBound bounds a request to a directory service.
const namesBound = 10 * time.Second

// tools are the directories of getent and id, whatever PATH is.
var tools = []string{"/usr/bin", "/bin", "/usr/local/bin"}

// UserByID returns the user of this host with a user id. Without cgo, Go reads only /etc/passwd;
// for users missing there UserByID runs getent, which knows all sources of the system, such as
// LDAP. It blocks for at most 10 s.
func UserByID(id string) (*user.User, error) {
	u, err := user.LookupId(id)
	return orByGetent(u, err, id)
}

// userByName is like UserByID, for a user's name.
func userByName(name string) (*user.User, error) {
	u, err := user.Lookup(name)
	if _, number := strconv.ParseUint(name, 10, 32); number == nil {
		return u, err // getent would take it for a user id
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

// groupsOf returns the ids of a user's groups, including the primary one, from the sources of
// UserByID.
func groupsOf(u *user.User) ([]string, error) {
	if ids := strings.Fields(output("id", "-G", u.Username)); len(ids) > 0 {
		return ids, nil
	}
	return u.GroupIds()
}

// groupID returns the id of a group, from the sources of UserByID.
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
			return "" // it exists, and does not know the answer
		}
	}
	return ""
}
