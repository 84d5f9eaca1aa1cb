// Package torch tests PyTorch programs under hvdrun torchrun; the tests need Debian's
// python3-torch. Its compare.py measures hvdrun torchrun beside PyTorch's own launcher, and its
// collectives.py measures the backend hvdrun beside gloo.
package torch
