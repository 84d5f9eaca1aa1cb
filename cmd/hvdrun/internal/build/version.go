// Package build reports the version of this program, and the versions of the formats that it reads
// and writes.
package build

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/discovery/gossip"
	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/licenses"
)

// build describes this program, as hvdrun version --json prints it.
type build struct {
	Version string `json:"version"` // of the module; (devel) if it was built from a working tree
	// Commit is the commit of the source, and Modified reports changes on top of it. Empty and
	// false: the build does not record them.
	Commit   string `json:"commit"`
	Modified bool   `json:"modified"`
	Go       string `json:"go"`
	OS       string `json:"os"`
	Arch     string `json:"arch"`
	// The versions of the formats that hvdrun's programs exchange.
	Agent   int `json:"agent"`   // between drivers and agents
	Gossip  int `json:"gossip"`  // in what agents announce
	Journal int `json:"journal"` // of a job's journal
	JobFile int `json:"job_file"`
}

// release and commit are the version and the commit, set by the linker if the build itself does not
// record them.
var release, commit string

func thisBuild() build {
	b := build{
		Version: "(devel)", Commit: commit, Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH,
		Agent: client.HelloVersion, Gossip: gossip.MetaVersion, Journal: decide.JournalVersion, JobFile: jobdir.FileVersion,
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	if info.Main.Version != "" {
		b.Version = info.Main.Version
	}
	if release != "" {
		b.Version = release
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Commit = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	return b
}

// Number is the version of the module; (devel) if it was built from a working tree.
func Number() string { return thisBuild().Version }

// Version describes the build: the version of the module or the commit, the version of Go, and the
// platform.
func Version() string {
	b := thisBuild()
	if b.Version == "(devel)" && b.Commit != "" {
		b.Version += " " + b.Commit
	}
	return fmt.Sprintf("%s (%s, %s/%s)", b.Version, b.Go, b.OS, b.Arch)
}

// Command returns the command hvdrun version.
func Command(p *cli.Program) *cobra.Command {
	var all, asJSON, sbom bool
	cmd := &cobra.Command{
		Use:   "version [--json | --licenses | --sbom]",
		Short: "Print the version, the commit and the versions of formats, or the licences of what hvdrun is linked with",
		Long: `version prints the version, the commit, and the versions of the messages to agents and of the files that hvdrun keeps. Two
hvdruns with the same of these work together; otherwise one of them prints one line that says so. With --licenses it prints
the modules that hvdrun and its discovery plugins are linked with, each with its version, its licence and the place of its
source, and the texts of all licences and notices; with --sbom, those modules as a software bill of materials in CycloneDX's
JSON.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			var err error
			switch {
			case all:
				var list *licenses.List
				if list, err = licenses.All(); err == nil {
					err = list.Print(p.Stdout)
				}
			case sbom:
				var list *licenses.List
				if list, err = licenses.All(); err == nil {
					err = list.CycloneDX(p.Stdout, thisBuild().Version)
				}
			case asJSON:
				err = cli.WriteJSON(p.Stdout, thisBuild())
			default:
				err = thisBuild().print(p)
			}
			return cli.Failed(err)
		},
	}
	cmd.Flags().BoolVar(&all, "licenses", false, "print the licences, of the discovery plugins too")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	cmd.Flags().BoolVar(&sbom, "sbom", false, "print a software bill of materials, of the discovery plugins too")
	cmd.MarkFlagsMutuallyExclusive("licenses", "json", "sbom")
	return cmd
}

func (b build) print(p *cli.Program) error {
	known := b.Commit
	switch {
	case known == "":
		known = "unknown"
	case b.Modified:
		known += ", with changes"
	}
	_, err := fmt.Fprintf(p.Stdout, "hvdrun %s\ncommit %s\nagents %d, gossip %d, journal %d, job file %d\n",
		Version(), known, b.Agent, b.Gossip, b.Journal, b.JobFile)
	return err
}
