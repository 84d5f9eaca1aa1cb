// Package netns runs jobs over hosts that are network namespaces of this machine: agents in some,
// the driver in another, joined by a bridge, so that a host can be cut off as if by pulling its
// cable. Its tests need root and iproute2, and are built with the tag netns only: `make check-net`
// runs them, and so does `make check` where it may.
package netns
