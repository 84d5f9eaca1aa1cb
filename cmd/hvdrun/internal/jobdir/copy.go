package jobdir

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

// The files of a job's copy in etcd.
const (
	CopiedAbout  = "job.json"
	CopiedLaunch = "launch.json"
	CopiedKey    = "authority"
	CopiedAgents = "agents"
)

// Copy is the copy of a job that was read from etcd or from another node.
type Copy struct {
	Records [][]byte
	Files   map[string][]byte
	Args    []string // arguments of hvdrun on this machine; nil: those in the copy
}

// ChooseFolder makes the job's folder in the first of StateDirs that can be used. It removes what
// an earlier driver of this machine left there: the copy in etcd is authoritative.
func (d *Dir) ChooseFolder(env []string) error {
	var failed []error
	for _, all := range StateDirs(env, Shared) {
		d.Path = filepath.Join(all, d.About.RunID)
		err := Usable(env, all, Shared, true)
		if err == nil {
			var running bool
			running, err = journal.Locked(d.Journal())
			switch {
			case running:
				return errors.New("its driver on this machine is running")
			case errors.Is(err, fs.ErrNotExist):
				err = nil
			case err == nil:
				err = os.RemoveAll(d.Path)
			}
		}
		if err == nil {
			err = safefile.MakeDir(d.Path, safefile.Private)
		}
		if err == nil {
			err = d.private()
		}
		if err == nil {
			return nil
		}
		failed = append(failed, err)
	}
	return errors.Join(failed...)
}

// Fill writes the journals of the copy into the folder.
func (d *Dir) Fill(found Copy) error {
	agents := bytes.Split(bytes.TrimSpace(found.Files[CopiedAgents]), []byte("\n"))
	for path, records := range map[string][][]byte{d.Journal(): found.Records, d.AgentsPath(): agents} {
		j, err := journal.Create(path, d.About.RunID)
		if err != nil {
			return err
		}
		for _, r := range records {
			if len(r) > 0 && err == nil {
				err = j.Append(r)
			}
		}
		if err := errors.Join(err, j.Sync(), j.Close()); err != nil {
			return err
		}
	}
	return nil
}
