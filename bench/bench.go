// Package bench holds the programs by which `hvdrun bench` measures the collectives of other
// libraries beside hvdrun's.
//
// They are C and C++ and are compiled where they are run, against the libraries that are there.
// Each takes the operation, the seconds to spend on a size and the sizes, and prints a line for
// each size: bytes, samples, and in microseconds the least, the median and the 99th percentile.
package bench

import "embed"

// Peers has the sources, below the folder peers.
//
//go:embed peers
var Peers embed.FS
