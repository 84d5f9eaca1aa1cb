package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/internal/licenses"
)

func (p *program) versionCommand() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "version [--licenses]",
		Short: "Print the version, or the licences of what hvdrun is linked with",
		Long: `version prints what hvdrun --version does. With --licenses it prints the modules that hvdrun and its discovery plugins are
linked with, each with its version, its licence and where its source is had, and then the full texts of all licences and
notices.`,
		Args:                  cobra.NoArgs,
		DisableFlagsInUseLine: true,
		RunE: func(*cobra.Command, []string) error {
			if !all {
				fmt.Fprintf(p.stdout, "hvdrun %s\n", version())
				return nil
			}
			list, err := licenses.All()
			if err == nil {
				err = list.Print(p.stdout)
			}
			if err != nil {
				return runError{err}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&all, "licenses", false, "print the licences, of the discovery plugins too")
	return cmd
}
