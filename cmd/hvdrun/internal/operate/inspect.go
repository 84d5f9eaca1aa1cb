package operate

import (
	"errors"
	"fmt"
	"os"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/elastic/checkpoint"
)

func inspectCommand(p *cli.Program) *cobra.Command {
	return &cobra.Command{
		Use:   "inspect FILE | DIR…",
		Short: "Print the contents of checkpoints, and whether they are whole",
		Long: `inspect prints the contents of a checkpoint of elastic.Checkpoint, or of each in a folder: the number of the commit, when it
was written and by how large a world, and the parts of the state. It reads all of it and compares the checksums; the exit
status is 1 if something is damaged. Any program that reads safetensors can read the tensors.`,
		Example: "  hvdrun inspect checkpoints/commit-00000000000000001200.safetensors",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			var bad []error
			for _, path := range args {
				files, err := checkpointsAt(path)
				if err != nil {
					return cli.Failed(err)
				}
				for _, file := range files {
					if err := inspect(p, file); err != nil {
						bad = append(bad, err)
					}
				}
			}
			return cli.Failed(errors.Join(bad...))
		},
	}
}

// checkpointsAt returns path if it is a file, or the checkpoints in the folder path, newest first.
func checkpointsAt(path string) ([]string, error) {
	info, err := os.Stat(path)
	if err != nil || !info.IsDir() {
		return []string{path}, err
	}
	commits, err := checkpoint.List(path)
	if err != nil {
		return nil, err
	}
	if len(commits) == 0 {
		return nil, fmt.Errorf("there is no checkpoint in %s", path)
	}
	var files []string
	for _, n := range commits {
		files = append(files, checkpoint.Path(path, n))
	}
	return files, nil
}

// inspect prints a checkpoint. It returns an error if the checkpoint is damaged.
func inspect(p *cli.Program, path string) error {
	f, err := checkpoint.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	about := f.About
	fmt.Fprintf(p.Stdout, "%s: commit %d of %s, by a world of %d; %d bytes, format %d\n", path, about.Commits,
		about.Time.Format(time.RFC3339), about.Size, f.Size, about.Version)
	var errs []error
	table := tabwriter.NewWriter(p.Stdout, 2, 0, 2, ' ', 0)
	for _, part := range about.Parts {
		state := "whole"
		if err := f.Check(part); err != nil {
			state = "DAMAGED"
			errs = append(errs, fmt.Errorf("%s: %w", path, err))
		}
		fmt.Fprintf(table, "  %s\t%s\t%d bytes\t%s\t%s\n", cli.EscapeCell(part.Name), cli.EscapeCell(part.Kind), f.Len(part), state, cli.EscapeCell(part.Text))
	}
	return errors.Join(append(errs, table.Flush())...)
}
