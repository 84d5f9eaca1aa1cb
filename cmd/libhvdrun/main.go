// Command libhvdrun is the shared library libhvdrun.so, with which programs in C, and in languages
// that can call C, use package collective. hvdrun.h documents it. It is built by make lib, with
// cgo:
//
//	go build -buildmode=c-shared -o libhvdrun.so ./cmd/libhvdrun
package main

func main() {}
