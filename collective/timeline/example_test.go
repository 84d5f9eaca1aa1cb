package timeline_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/timeline"
)

// The files of all ranks are merged into one trace for Perfetto, as hvdrun timeline does.
func ExampleMerge() {
	dir, err := os.MkdirTemp("", "timeline-")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	name := filepath.Join(dir, "trace")

	recorder := timeline.New(timeline.Config{Filename: name})
	if err := recorder.Enter(context.Background(), collective.Local(1)[0]); err != nil {
		log.Fatal(err)
	}
	recorder.Span(collective.Span{Name: "AllReduce", Bytes: 1024})
	if err := recorder.Close(); err != nil {
		log.Fatal(err)
	}

	files, err := timeline.Files(name)
	if err != nil {
		log.Fatal(err)
	}
	out, err := os.Create(name + ".json")
	if err != nil {
		log.Fatal(err)
	}
	defer out.Close()
	merged, err := timeline.Merge(out, files)
	fmt.Println(len(files), merged.Torn, merged.Events > 0, err)
	// Output: 1 0 true <nil>
}
