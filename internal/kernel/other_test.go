//go:build !amd64 || !unix || purego

package kernel

func addVector(map[string]*table) {}
