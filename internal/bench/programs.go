package bench

import "embed"

// programs contains the programs that measure the collectives of other libraries, in the folder
// peers. They are written in C and C++, and are compiled where they run, against the libraries
// installed there. The arguments are the operation, the seconds to spend on a size and the sizes.
// The output has a line for each size: bytes, samples, and in microseconds the least, the median
// and the 99th percentile.
//
//go:embed peers
var programs embed.FS
