package main

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

const module = "github.com/hvdrun/hvdrun/"

// standing are goroutines that always wait in every rank.
var standing = []string{"(*Endpoint).accept", "(*link).readControl", "(*tripwire).run", "(*actor).watch",
	"(*engine).await async_engine.go"}

// stacks returns the other goroutines of a dump that are in package collective or in a step, one
// per line, innermost calls first.
func stacks(dump string) string {
	var b strings.Builder
	for block := range strings.SplitSeq(dump, "\n\n") {
		lines := strings.Split(strings.TrimSpace(block), "\n")
		if !strings.HasPrefix(lines[0], "goroutine ") {
			continue
		}
		var frames []string
		ours := false
		for i := 1; i+1 < len(lines); i += 2 {
			name, created := strings.CutPrefix(lines[i], "created by ")
			if created {
				name, _, _ = strings.Cut(name, " in goroutine")
			} else if end := strings.LastIndex(name, "("); end > 0 {
				name = name[:end] // without its arguments
			}
			file, _, _ := strings.Cut(strings.TrimSpace(lines[i+1]), " ")
			ours = ours || strings.HasPrefix(name, module+"collective") || strings.HasPrefix(name, "main.performOf")
			if strings.HasPrefix(name, module) || strings.HasPrefix(name, "main.") {
				frames = append(frames, strings.TrimPrefix(name, module)+" "+path.Base(file))
			}
		}
		text := strings.Join(frames, " < ")
		stands := slices.ContainsFunc(standing, func(name string) bool { return strings.Contains(text, name) })
		if ours && !stands {
			number, _, _ := strings.Cut(lines[0], " gp=")
			state := lines[0][strings.LastIndex(lines[0], "["):]
			fmt.Fprintf(&b, "    %s %s %s\n", number, state, text)
		}
	}
	return b.String()
}
