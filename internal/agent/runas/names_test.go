package runas

import (
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"testing"
)

// TestNamesOfADirectoryService: users and groups of a directory service are found with the system's
// tools.
func TestNamesOfADirectoryService(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"getent": `case "$1 $2" in
			"passwd ldap-ada"|"passwd 70001") echo 'ldap-ada:*:70001:80001:Ada:/home/ada:/bin/sh';;
			"group ldap-lab") echo 'ldap-lab:*:80002:ldap-ada';;
			*) exit 2;;
			esac`,
		"id": `[ "$*" = "-G ldap-ada" ] && echo 80001 80002`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+text+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	defer func(before []string) { tools = before }(tools)
	tools = []string{t.TempDir(), dir}
	want := user.User{Username: "ldap-ada", Uid: "70001", Gid: "80001", Name: "Ada", HomeDir: "/home/ada"}
	if u, err := userByName("ldap-ada"); err != nil || *u != want {
		t.Errorf("by name: %v, %v", u, err)
	}
	if u, err := UserByID("70001"); err != nil || *u != want {
		t.Errorf("by number: %v, %v", u, err)
	}
	if u, err := userByName("70001"); err == nil {
		t.Errorf("a number is no name: %v", u)
	}
	as, err := lookUp("ldap-ada", nil)
	if err != nil || as.UID != 70001 || as.GID != 80001 || !slices.Equal(as.Groups, []uint32{80001, 80002}) || as.Home != "/home/ada" {
		t.Errorf("%+v, %v", as, err)
	}
	if as, err := lookUp("ldap-ada", []string{"ldap-lab"}); err != nil || !slices.Equal(as.Groups, []uint32{80002}) {
		t.Errorf("with a group: %+v, %v", as, err)
	}
	if u, err := userByName("nobody-has-this-name"); err == nil {
		t.Errorf("found %v", u)
	}
	if id, err := groupID("nobody-has-this-name"); err == nil {
		t.Errorf("found group %v", id)
	}
	if u, err := UserByID("0"); err != nil || u.Username != "root" {
		t.Errorf("0: %v, %v", u, err)
	}
}
