// Package torch runs PyTorch programs by hvdrun torchrun, in tests that need Debian's
// python3-torch, and has compare.py, which measures it beside PyTorch's own launcher, and
// collectives.py, which measures the backend hvdrun beside gloo.
package torch
