package main

import (
	"bufio"
	"cmp"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

//go:embed budget.txt
var budgetText string

// kind says how check runs the tests of a package.
type kind string

const (
	plain kind = "plain" // without cgo and the race detector
	race  kind = "race"  // under the race detector, once
	later kind = "later" // by check all alone
)

// line is the limit of a package, or of each package without its own line.
type line struct {
	pkg     string // the folder, or "*"
	seconds float64
	kind    kind
	plain   []string // of a package of kind race: the tests that run without the race detector
}

// flags returns the flags with which the test binary of this package runs the tests of a kind.
func (l line) flags(k kind) []string {
	if len(l.plain) == 0 {
		return nil
	}
	these := "^(" + strings.Join(l.plain, "|") + ")$"
	if k == plain {
		return []string{"-test.run=" + these}
	}
	return []string{"-test.skip=" + these}
}

// budget is the table of budget.txt. Its zero value allows nothing.
type budget struct {
	rest  line            // for packages without a line
	lines map[string]line // by folder
}

// parseBudget parses lines of "folder seconds kind", and comments that begin with #. A line that
// begins with white space continues the one before: it names tests that run without the race
// detector.
func parseBudget(text string) (budget, error) {
	b := budget{lines: map[string]line{}}
	n, last := 0, ""
	for row := range strings.Lines(text) {
		n++
		row, _, _ = strings.Cut(row, "#")
		fields := strings.Fields(row)
		if len(fields) == 0 {
			continue
		}
		if row[0] == ' ' || row[0] == '\t' {
			if b.lines[last].kind != race {
				return budget{}, fmt.Errorf("budget.txt:%d: tests that run plain, of what is not run under race", n)
			}
			l := b.lines[last]
			l.plain = append(l.plain, fields...)
			b.lines[last] = l
			continue
		}
		if len(fields) != 3 {
			return budget{}, fmt.Errorf("budget.txt:%d: %q is not \"folder seconds kind\"", n, strings.TrimSpace(row))
		}
		l := line{pkg: fields[0], kind: kind(fields[2])}
		var err error
		if l.seconds, err = strconv.ParseFloat(fields[1], 64); err != nil || !(l.seconds > 0) {
			return budget{}, fmt.Errorf("budget.txt:%d: %q is no number of seconds", n, fields[1])
		}
		if !slices.Contains([]kind{plain, race, later}, l.kind) {
			return budget{}, fmt.Errorf("budget.txt:%d: there is no kind %q", n, l.kind)
		}
		_, twice := b.lines[l.pkg]
		if twice || l.pkg == "*" && b.rest.pkg != "" {
			return budget{}, fmt.Errorf("budget.txt:%d: a second line for %s", n, l.pkg)
		}
		if l.pkg == "*" {
			b.rest = l
		} else {
			b.lines[l.pkg] = l
		}
		last = l.pkg
	}
	if b.rest.pkg == "" {
		return budget{}, errors.New("budget.txt: there is no line for *, all other packages")
	}
	return b, nil
}

// of returns the line of the package in a folder.
func (b budget) of(dir string) line {
	if l, is := b.lines[dir]; is {
		return l
	}
	return line{pkg: dir, seconds: b.rest.seconds, kind: b.rest.kind}
}

// split groups the folders of packages with tests by their kinds; a package with some plain tests
// is in two groups. In each group the packages with the highest limits come first, so that no long
// one is left to run alone at the end. It returns an error if a line names no package.
func (b budget) split(dirs []string) (byKind map[kind][]string, err error) {
	byKind = map[kind][]string{}
	for _, dir := range dirs {
		l := b.of(dir)
		byKind[l.kind] = append(byKind[l.kind], dir)
		if len(l.plain) > 0 {
			byKind[plain] = append(byKind[plain], dir)
		}
	}
	for _, group := range byKind {
		slices.SortStableFunc(group, func(x, y string) int { return cmp.Compare(b.of(y).seconds, b.of(x).seconds) })
	}
	for dir := range b.lines {
		if !slices.Contains(dirs, dir) {
			err = errors.Join(err, fmt.Errorf("budget.txt: %s is no package with tests", dir))
		}
	}
	return byKind, err
}

// readUsage reads what check under recorded and adds up the runs of each package. root is the
// folder of the module.
func readUsage(file, root string) (all []usage, err error) {
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // no test has run
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var u usage
		if err := json.Unmarshal(lines.Bytes(), &u); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if u.Dir, err = filepath.Rel(root, u.Dir); err != nil {
			return nil, err
		}
		if i := slices.IndexFunc(all, func(has usage) bool { return has.Dir == u.Dir }); i >= 0 {
			all[i].Seconds += u.Seconds
			all[i].Wall += u.Wall
			all[i].Left = append(all[i].Left, u.Left...)
			continue
		}
		all = append(all, u)
	}
	slices.SortFunc(all, func(a, b usage) int { return cmp.Compare(b.Seconds, a.Seconds) })
	return all, nil
}

// costliest formats a table of the n packages that took the most time, with their lines.
func (b budget) costliest(all []usage, n int) string {
	var text strings.Builder
	fmt.Fprintf(&text, "%9s %7s %7s  %s\n", "processor", "line", "wall", "package")
	sum := 0.0
	for i, u := range all {
		sum += u.Seconds
		if i < n {
			fmt.Fprintf(&text, "%7.1f s %5.0f s %5.0f s  %s (%s)\n", u.Seconds, b.of(u.Dir).seconds, u.Wall, u.Dir, b.of(u.Dir).kind)
		}
	}
	fmt.Fprintf(&text, "%7.1f s  the tests of %d packages\n", sum, len(all))
	return text.String()
}

// pace returns the median share of their lines that packages took: about 0.5 on an idle machine
// like the one on which the lines were measured. Packages without their own line take too
// little time to count.
func (b budget) pace(all []usage) float64 {
	var shares []float64
	for _, u := range all {
		if l, has := b.lines[u.Dir]; has {
			shares = append(shares, u.Seconds/l.seconds)
		}
	}
	if len(shares) == 0 {
		return 0
	}
	slices.Sort(shares)
	return shares[len(shares)/2]
}

// exceeded returns a message for each package that took more than its line, and more than twice
// what the pace of the others allows: on another kind of machine, or beside other work, all
// packages take more time.
func (b budget) exceeded(all []usage) (over []string) {
	pace := b.pace(all)
	for _, u := range all {
		l := b.of(u.Dir)
		if u.Seconds > l.seconds*max(1, 2*pace) {
			over = append(over, fmt.Sprintf("%s took %.1f s of processor time, and has %.0f s in test/check/budget.txt, "+
				"of which the median package took %.0f %%: make its tests cheaper, or raise the line and say why",
				u.Dir, u.Seconds, l.seconds, 100*pace))
		}
	}
	return over
}
