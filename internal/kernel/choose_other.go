//go:build !amd64 || purego

package kernel

var chosen = &twin
