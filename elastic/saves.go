package elastic

import "github.com/hvdrun/hvdrun/elastic/internal/image"

// imageID identifies a save that all ranks of a world have made in one commit or sync. The zero
// value stands for a save of one rank alone. Saves with the same ID are equal if training is
// deterministic across ranks; comparisons verify that.
type imageID struct{ Generation, Count uint64 }

// saves contains the images of a State and metadata of the last one.
type saves struct {
	image.Store
	sources []image.Source // of the last save begun

	copying *image.Pending // begun by a commit and not settled yet; nil: none
	lost    error          // why the last settled save failed, until it is returned
	torn    bool           // foreign parts may have saved a newer value than the last image has

	mark     imageID            // of the last save
	given    imageID            // the last ID assigned
	clean    bool               // the live value equals the last save; set by Run, cleared by Sync
	promised *HostsUpdatedError // of a Commit after which tensors must not change
	synced   [][][]bool         // per part in memory and slice: the chunks that a sync has written to; nil: unknown
}

// nextMark returns the ID of the next save of a world. Failed saves count too, because all ranks
// call Commit and Sync equally often.
func (m *saves) nextMark(generation uint64) imageID {
	if m.given.Generation != generation {
		m.given = imageID{Generation: generation}
	}
	m.given.Count++
	return m.given
}
