package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"path"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/stacks"
)

// stacksAsked are the questions for stacks that the program has not answered.
type stacksAsked struct {
	last    uint64
	waiting map[uint64]chan string // of capacity 1
}

const (
	mostQuestions  = 4           // that may wait for an answer
	stacksPatience = time.Second // less than that of the driver
)

// askForStacks asks the program where it is.
func (p *proxy) askForStacks(ctx context.Context, most int) ([]byte, error) {
	p.mu.Lock()
	if len(p.asked.waiting) >= mostQuestions {
		p.mu.Unlock()
		return nil, errors.New("the program has not answered the questions before")
	}
	p.asked.last++
	id, answer := p.asked.last, make(chan string, 1)
	if p.asked.waiting == nil {
		p.asked.waiting = make(map[uint64]chan string)
	}
	p.asked.waiting[id] = answer
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.asked.waiting, id)
	}()
	p.say(stacksLine{"stacks", id, min(most/2, maxStacks)})
	late := time.NewTimer(stacksPatience)
	defer late.Stop()
	select {
	case text := <-answer:
		return json.Marshal(stacks.Worker{Goroutines: readStacks(text)})
	case <-late.C:
		return nil, errors.New("the program does not say where it is")
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-p.ctx.Done():
		return nil, context.Cause(p.ctx)
	}
}

// hearStacks takes an answer.
func (p *proxy) hearStacks(r request) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if answer := p.asked.waiting[r.ID]; answer != nil {
		delete(p.asked.waiting, r.ID)
		answer <- r.Text
	}
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
