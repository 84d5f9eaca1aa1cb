// Package netns runs jobs over hosts that are network namespaces of this machine: agents in some,
// the driver in another, connected by a bridge, so that a host can be disconnected. Its tests need
// root and iproute2, and are built only with the tag netns: `make check-net` runs them, and so does
// `make check` if permitted.
package netns
