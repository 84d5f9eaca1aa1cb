package collective

import (
	"slices"
	"strings"

	"github.com/sirupsen/logrus"
)

// TellBackend records how a package combines device memory: the name of its backend, and why. The
// package calls it on every rank when the ranks of the group have chosen a backend, or have changed
// it. In each generation, rank 0 of the group of all ranks logs each name and reason once, and
// calls [Config].Backend once for each name. It does not block.
func (g *Group) TellBackend(name, why string) {
	f := g.family
	if g.rank != 0 || g.size != f.Size {
		return
	}
	f.mu.Lock()
	line := name + ": " + why
	told := slices.Contains(f.told, line)
	known := slices.ContainsFunc(f.told, func(before string) bool { return strings.HasPrefix(before, name+": ") })
	if !told {
		f.told = append(f.told, line)
	}
	f.mu.Unlock()
	if told {
		return
	}
	if f.log != nil {
		f.log.WithFields(logrus.Fields{"generation": g.generation, "size": g.size, "backend": name, "why": why}).
			Info("collective: the ranks have chosen how to combine device memory")
	}
	if f.backend != nil && !known {
		f.backend(g.generation, name)
	}
}
