//go:build training

package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestFashionMNIST trains on the whole data set, once with one worker and once while workers die
// and hosts are added and removed: the variables at the end are the same, bit by bit.
func TestFashionMNIST(t *testing.T) {
	const limit = 30 * time.Minute
	if _, err := os.Stat(debianData); errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("%s is not there: apt-get install dataset-fashion-mnist", debianData)
	}
	hosts := list(filepath.Join(t.TempDir(), "hosts"))
	if err := hosts.set("localhost:2"); err != nil {
		t.Fatal(err)
	}
	hvdrun := []string{"-np", "2", "--min-np", "1", "--host-discovery-script", "cat " + string(hosts)}
	undisturbed := runJob(t, limit, nil, alone, nil)
	disturbed := runJob(t, limit, []act{
		{200, kill(1)},
		{500, hosts.becomes("localhost:2", "127.0.0.2:2")},
		{700, kill(0)},
		{900, kill(2)},
		{1000, hosts.becomes("127.0.0.2:2")},
		{1300, kill(0)},
		{1500, hosts.becomes("127.0.0.2:1")},
		{1700, hosts.becomes("127.0.0.2:1", "localhost:2")},
		{1900, kill(1)},
	}, hvdrun, nil)
	t.Logf("held-out accuracy %.4f with 5 deaths and 4 resizes, in %d worlds; digest %s", disturbed.accuracy, disturbed.worlds, disturbed.digest())
	disturbed.same(t, undisturbed, 0.88)
}
