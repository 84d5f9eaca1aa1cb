package operate

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/collective/timeline"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

func timelineCommand(p *cli.Program) *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "timeline [flags] F | file.rank.N.json…",
		Short: "Join the timelines of a job's ranks into one that Perfetto opens",
		Long: `timeline joins the files that the ranks of a job with --timeline-filename F have written, into one file for ui.perfetto.dev
and chrome://tracing. Each rank is a process there, with times by the clock of rank 0. Copy the files of other hosts next to
those of this one first, or name all files.`,
		Example: `  hvdrun -np 4 --timeline-filename trace ./train
  hvdrun timeline trace`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			files := args
			if len(args) == 1 {
				found, err := timeline.Files(args[0])
				if err == nil && len(found) > 0 {
					files = found
				} else if _, serr := os.Stat(args[0]); serr != nil {
					path, _ := timeline.Path(args[0], 0)
					return fmt.Errorf("the files of the ranks, such as %s, do not exist", path)
				}
			}
			if output == "" {
				if len(args) > 1 {
					return errors.New("--output is missing: the name of the file to write")
				}
				output = strings.TrimSuffix(args[0], ".json") + ".json"
			}
			return cli.Failed(mergeTimelines(p, files, output))
		},
	}
	cmd.Flags().StringVar(&output, "output", "", "file to write (default: F.json)")
	return cmd
}

func mergeTimelines(p *cli.Program, files []string, output string) (err error) {
	for _, f := range files {
		if f == output {
			return fmt.Errorf("%s would be written over", f)
		}
	}
	out, err := safefile.Rewrite(output, safefile.Private)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	merged, err := timeline.Merge(out, files)
	if err != nil {
		return err
	}
	torn := ""
	if merged.Torn > 0 {
		torn = fmt.Sprintf("; %d lines were not whole", merged.Torn)
	}
	_, err = fmt.Fprintf(p.Stdout, "%s: %d events of %d files%s\n", output, merged.Events, len(files), torn)
	return err
}
