package launch

import "io"

// TaggedWriter returns a writer whose lines have this tag.
func TaggedWriter(o *Output, tag string, rank func() int) io.WriteCloser {
	return &LineWriter{output: o, tag: tag, rank: rank}
}

// MaxPiece is the maximum length of an unfinished line that is held back.
const MaxPiece = maxPiece
