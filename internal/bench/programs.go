package bench

import "embed"

// programs has the programs by which other libraries' collectives are measured, below the folder
// peers. They are C and C++ and are compiled where they are run, against the libraries that are
// there. Each takes the operation, the seconds to spend on a size and the sizes, and prints a line
// for each size: bytes, samples, and in microseconds the least, the median and the 99th percentile.
//
//go:embed peers
var programs embed.FS
