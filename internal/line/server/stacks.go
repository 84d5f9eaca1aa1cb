package server

import (
	"encoding/json"
	"path"
	"regexp"
	"strconv"
	"strings"

	"github.com/hvdrun/hvdrun/stacks"
)

// maxStacks bounds what of an answer is read, in bytes.
const maxStacks = 64 << 10

// stacksOf returns the stacks that a program has told, as JSON of the package stacks.
func stacksOf(text string) []byte {
	encoded, err := json.Marshal(stacks.Worker{Goroutines: readStacks(text[:min(len(text), maxStacks)])})
	if err != nil {
		return nil // cannot happen: it is a plain value
	}
	return encoded
}

// frameLine is a frame as Python's faulthandler writes it.
var frameLine = regexp.MustCompile(`^  File "(.*)", line (\d+) in (.*)$`)

// readStacks reads stacks in the format of Python's faulthandler: a line that begins a thread, and
// one for each frame, the innermost first. Other lines are left out.
func readStacks(text string) (all []stacks.Goroutines) {
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		m := frameLine.FindStringSubmatch(line)
		switch {
		case m == nil && strings.Contains(line, "hread 0x"):
			all = append(all, stacks.Goroutines{Count: 1})
		case m == nil || len(all) == 0:
		case len(all[len(all)-1].Frames) < stacks.MaxFrames:
			number, _ := strconv.Atoi(m[2]) // 0 for one that is too large
			g := &all[len(all)-1]
			g.Frames = append(g.Frames, stacks.Frame{Func: functionOf(m[1], m[3]), File: m[1], Line: number})
		}
		if len(all) > stacks.MaxGroups {
			break
		}
	}
	stacks.Sort(all)
	return all[:min(len(all), stacks.MaxGroups)]
}

// functionOf names a function of a file of Python. That of a library, or of package hvdrun, is no
// code of the user.
func functionOf(file, name string) string {
	module := strings.TrimSuffix(path.Base(file), ".py")
	ours := path.Base(path.Dir(file)) == "hvdrun" && (module == "torch" || strings.HasPrefix(module, "_"))
	if ours || strings.Contains(file, "/lib/python") || strings.Contains(file, "-packages/") || strings.HasPrefix(file, "<") {
		return "internal/" + module + "." + name
	}
	return module + "." + name
}
