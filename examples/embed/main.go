// Embed is a launcher that embeds hvdrun's driver. It runs a job of elastic workers on this machine
// and prints what happens. If it is killed, the workers continue, and the same command line resumes
// the job.
//
//	embed -dir /run/user/1000/job -np 4 -- bin/digits
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/driver/agents"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

const runID = "embedded"

func main() {
	log.SetFlags(0)
	dir := flag.String("dir", "", "folder of the job, which only its user may enter")
	np := flag.Int("np", 2, "number of workers")
	hvdrun := flag.String("hvdrun", "", "path of hvdrun, for its agents; empty: the one in PATH")
	flag.Parse()
	if *dir == "" || flag.NArg() == 0 {
		log.Fatal("usage: embed -dir DIR [-np N] [-hvdrun PATH] -- command [args…]")
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	err := run(ctx, *dir, *np, *hvdrun, flag.Args())
	if err != nil {
		log.Print(err)
	}
	os.Exit(job.ExitStatus(err))
}

// run starts the job, or resumes it if the folder already has one.
func run(ctx context.Context, dir string, np int, hvdrun string, command []string) (err error) {
	authority, began, err := openAuthority(filepath.Join(dir, "authority"))
	if err != nil {
		return err
	}
	logger := logrus.New()
	logger.SetLevel(logrus.WarnLevel)
	launcher, err := agents.New(agents.Config{
		RunID: runID, Authority: authority, Hvdrun: hvdrun, Record: filepath.Join(dir, "agents"), Log: logger,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, launcher.Close()) }()
	cfg := driver.Config{
		RunID:     runID,
		Command:   command,
		Env:       plan.WithoutNode(os.Environ()),
		Source:    discovery.Fixed{plan.Host{Name: "localhost", Slots: np}},
		Launcher:  launcher,
		Authority: authority,
		Size:      job.Size{NP: np, Min: 1, Elastic: true},
		Journal:   filepath.Join(dir, "journal"),
		Events:    tell,
		Log:       logger,
	}
	if began {
		return driver.Resume(ctx, cfg)
	}
	return driver.Run(ctx, cfg)
}

// openAuthority reads the job's authority, or creates it. The authority is the secret of the job.
func openAuthority(path string) (a driver.Authority, began bool, err error) {
	text, err := os.ReadFile(path)
	if err == nil {
		a, err = driver.DecodeAuthority(string(text))
		return a, true, err
	}
	if !errors.Is(err, os.ErrNotExist) {
		return nil, false, err
	}
	if a, err = driver.NewAuthority(runID); err != nil {
		return nil, false, err
	}
	encoded, err := a.Encode()
	if err != nil {
		return nil, false, err
	}
	return a, false, os.WriteFile(path, []byte(encoded), 0o600)
}

// tell prints the events that matter to a user.
func tell(e job.Event) {
	switch e.Name {
	case job.WorldPublished, job.WorkerExited, job.Resumed, job.JobDone:
		entry, err := e.Entry()
		if err != nil {
			log.Print(err)
			return
		}
		_, words := entry.Words()
		fmt.Println(words)
	}
}
