package launch

import "io"

// TaggedWriter returns an end with a tag of its own.
func TaggedWriter(o *Output, tag string, rank func() int) io.WriteCloser {
	return &LineWriter{output: o, tag: tag, rank: rank}
}

// MaxPiece is the most text of one line that is held back.
const MaxPiece = maxPiece
