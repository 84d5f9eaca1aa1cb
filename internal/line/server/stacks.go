package server

import (
	"encoding/json"
	"path"
	"regexp"
	"strconv"
	"strings"

	"github.com/hvdrun/hvdrun/stacks"
)

// maxStacks bounds the bytes that are read of an answer.
const maxStacks = 64 << 10

// stacksOf returns the stacks that a program has sent, as JSON of package stacks.
func stacksOf(text string) []byte {
	encoded, err := json.Marshal(stacks.Worker{Goroutines: readStacks(text[:min(len(text), maxStacks)])})
	if err != nil {
		return nil // cannot happen: it is a plain value
	}
	return encoded
}

// frameLine is a frame as Python's faulthandler writes it.
var frameLine = regexp.MustCompile(`^  File "(.*)", line (\d+) in (.*)$`)

// readStacks parses stacks in the format of Python's faulthandler: a line for each thread, followed
// by one for each frame, innermost first. It skips other lines.
func readStacks(text string) (all []stacks.Goroutines) {
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		m := frameLine.FindStringSubmatch(line)
		switch {
		case m == nil && strings.Contains(line, "hread 0x"):
			all = append(all, stacks.Goroutines{Count: 1})
		case m == nil || len(all) == 0:
		case len(all[len(all)-1].Frames) < stacks.MaxFrames:
			number, _ := strconv.Atoi(m[2]) // 0 if it is too large
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

// functionOf returns the name of a function in a Python file, marked if it is not code of the user
// but of a library or package hvdrun.
func functionOf(file, name string) string {
	module := strings.TrimSuffix(path.Base(file), ".py")
	ours := path.Base(path.Dir(file)) == "hvdrun" && (module == "torch" || strings.HasPrefix(module, "_"))
	if ours || strings.Contains(file, "/lib/python") || strings.Contains(file, "-packages/") || strings.HasPrefix(file, "<") {
		return "internal/" + module + "." + name
	}
	return module + "." + name
}
