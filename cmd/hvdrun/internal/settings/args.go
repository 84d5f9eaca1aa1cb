package settings

import (
	"fmt"
	"slices"
	"strings"
)

// arguments rewrites a command line in the style of horovodrun into one that pflag parses as
// intended. pflag would parse -np as the one-letter flags n and p. The rules:
//
//   - long flags may have one dash, underscores and their other names, and -np is also -n, with its
//     number behind it or after it;
//   - each flag is rewritten as --name=value, with the two words of --blacklist-cooldown-range as
//     one value;
//   - the first word that is not a flag begins the command and gets -- before it, unless it is a
//     subcommand.
type arguments struct {
	in, out     []string
	subcommands []string
	meant       func(word string) string // returns the subcommand that a word misspells; empty: none
	inside      string                   // the subcommand seen so far
	runs        bool                     // "run" follows the subcommand
}

// Normalize returns the rewritten arguments. It returns an error if a flag or the first word is
// invalid.
func Normalize(args, subcommands []string, meant func(word string) string) ([]string, error) {
	a := arguments{in: args, subcommands: subcommands, meant: meant}
	for len(a.in) > 0 {
		word := a.in[0]
		switch {
		case word == "--":
			return append(a.out, a.in...), nil
		case word == "-" || !strings.HasPrefix(word, "-"):
			last, err := a.positional(word)
			if err != nil {
				return nil, err
			}
			if last {
				return append(a.out, a.in...), nil
			}
		default:
			if err := a.flag(word); err != nil {
				return nil, err
			}
		}
	}
	return a.out, nil
}

// positional takes a word that is not a flag and reports whether the rest must stay unchanged. It
// returns an error for a misspelled subcommand.
func (a *arguments) positional(word string) (last bool, err error) {
	switch {
	case a.inside == "tasks" && a.runs: // the rest belongs to the program
		a.out = append(a.out, "--")
		return true, nil
	case a.inside != "":
		a.runs = word == "run"
		a.take(word)
		return false, nil
	case slices.Contains(a.subcommands, word):
		a.take(word)
		a.inside = word
		if strings.HasPrefix(word, "__complete") {
			a.in = completed(a.in, a.subcommands, a.meant)
		}
		return strings.HasPrefix(word, "__") || word == TorchrunName, nil
	}
	if like := a.meant(word); like != "" {
		return false, fmt.Errorf("no command %q; did you mean %q? A program of that name is run after --", word, like)
	}
	a.out = append(a.out, "--")
	return true, nil
}

// completed rewrites the words of a command line for the shell's completion. The last word is
// incomplete, and may be the value of the flag before it.
func completed(words, subcommands []string, meant func(word string) string) []string {
	last := len(words) - 1
	if last < 1 {
		return words
	}
	if whole, err := Normalize(words[:last], subcommands, meant); err == nil {
		return append(whole, words[last])
	}
	flag := canonical(strings.TrimLeft(words[last-1], "-"))
	whole, err := Normalize(words[:last-1], subcommands, meant)
	if err != nil || SettingNamed(flag) == nil {
		return words
	}
	return append(whole, "--"+flag, words[last])
}

// take moves the first word to the output as text.
func (a *arguments) take(text string) {
	a.in, a.out = a.in[1:], append(a.out, text)
}

// ofTasksRun lists the flags of hvdrun tasks run. Each has a value.
var ofTasksRun = []string{"job", "invitation"}

func (a *arguments) flag(word string) error {
	body := strings.TrimPrefix(strings.TrimPrefix(word, "-"), "-")
	name, value, assigned := strings.Cut(body, "=")
	name = canonical(name)
	if name == "h" || name == "v" || name == "help" || name == "version" || name == "f" && a.inside == "logs" {
		if len(name) > 1 {
			word = "--" + body
		}
		a.take(word)
		return nil
	}
	oneDash := !strings.HasPrefix(word, "--")
	st := SettingNamed(name)
	if oneDash && st == nil {
		if number, ok := numberOfRanks(body); ok {
			st, name, value, assigned = SettingNamed("np"), "np", strings.TrimPrefix(number, "="), number != ""
		} else if st = settingOfLetter(body); st != nil {
			name, value, assigned = st.Name, strings.TrimPrefix(body[1:], "="), len(body) > 1
		}
	}
	if st == nil {
		if of, _ := advice(name); a.inside != "" && (!oneDash && of == "" || isNegative(word)) {
			a.take(word) // a flag of the subcommand itself, or the value of one
			if a.runs && !assigned && slices.Contains(ofTasksRun, name) && len(a.in) > 0 {
				a.take(a.in[0]) // the value of the flag, not the program
			}
			return nil
		}
		return unknownFlag(word, name)
	}
	a.in = a.in[1:]
	if st.arg == "" {
		if !assigned {
			value = "true"
		}
		a.out = append(a.out, "--"+name+"="+value)
		return nil
	}
	if !assigned {
		if len(a.in) == 0 {
			return fmt.Errorf("%s needs a value: %s", flagName(name), st.arg)
		}
		value, a.in = a.in[0], a.in[1:]
	}
	if name == cooldownRange && len(a.in) > 0 && !strings.Contains(value, ",") {
		if _, err := ParseDuration(a.in[0]); err == nil {
			value, a.in = value+","+a.in[0], a.in[1:]
		}
	}
	a.out = append(a.out, "--"+name+"="+value)
	return nil
}

// isNegative reports whether a word is a negative number or duration rather than a flag.
func isNegative(word string) bool {
	rest := strings.TrimPrefix(strings.TrimPrefix(word, "-"), ".")
	return word != rest && rest != "" && '0' <= rest[0] && rest[0] <= '9'
}

// numberOfRanks reports whether a flag is -np or -n in one of mpirun's forms (-np, -np4, -n, -n4,
// -n=4), and returns the text after the letters.
func numberOfRanks(body string) (number string, ok bool) {
	number, ok = strings.CutPrefix(body, "np")
	if !ok {
		number, ok = strings.CutPrefix(body, "n")
	}
	return number, ok && (number == "" || number[0] == '=' || strings.Trim(number, "0123456789") == "")
}

// settingOfLetter returns the setting whose one-letter flag is given as -p 22, -p=22 or -p22; nil
// if there is no such setting.
func settingOfLetter(body string) *setting {
	for i := range Table {
		st := &Table[i]
		if st.short == "" || !strings.HasPrefix(body, st.short) {
			continue
		}
		switch rest := body[1:]; {
		case rest == "", rest[0] == '=', st.short == "H", st.short == "p" && strings.Trim(rest, "0123456789") == "":
			return st
		}
	}
	return nil
}

// unknownFlag returns the error for the unknown flag word.
func unknownFlag(word, name string) error {
	written, _, _ := strings.Cut(word, "=")
	if of, why := advice(name); of != "" {
		return fmt.Errorf("%s of %s is not taken: %s", written, of, why)
	}
	if like := nearest(name); like != "" {
		return fmt.Errorf("unknown flag %s; did you mean %s?", written, flagName(like))
	}
	return fmt.Errorf("unknown flag %s; `hvdrun help flags` lists the flags", written)
}

// nearest returns the setting of a job that name abbreviates or nearly spells, or "".
func nearest(name string) string {
	var known []string
	for i := range Table {
		known = append(append(known, Table[i].Name), Table[i].aliases...)
	}
	return canonical(NearestOf(name, known))
}

// NearestOf returns the one of the known names that name abbreviates or nearly spells, or "".
func NearestOf(name string, known []string) string {
	best, bound := "", 3
	for _, n := range known {
		d := distance(name, n)
		if len(name) >= 3 && strings.HasPrefix(n, name) {
			d = 1
		}
		if d < bound && d < len(name) {
			best, bound = n, d
		}
	}
	return best
}

// distance returns the edit distance of a and b: the number of letters to insert, delete or
// replace.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// TorchrunName is the subcommand whose arguments, from the script on, belong to the script.
const TorchrunName = "torchrun"
