package collective

import (
	"slices"
	"strings"

	"github.com/sirupsen/logrus"
)

// TellBackend is called on every rank by a package that combines what is in memory of devices, when
// the ranks of the group have chosen by what means, or that they go by another from now on. Of the
// ranks of a generation, all together, rank 0 writes each name and reason to its log once, and
// tells [Config].Backend of each name once. It does not block.
func (g *Group) TellBackend(name, why string) {
	f := g.family
	if g.rank != 0 || g.size != f.size {
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
			Info("collective: how memory of devices is combined")
	}
	if f.backend != nil && !known {
		f.backend(g.generation, name)
	}
}
