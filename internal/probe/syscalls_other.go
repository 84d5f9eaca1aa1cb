//go:build !amd64 && !arm64

package probe

// syscallNames is empty where the numbers are unknown: a call is shown by its number.
var syscallNames = map[int]string{}
