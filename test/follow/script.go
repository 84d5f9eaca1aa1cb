package follow

import (
	"fmt"
	"strings"
)

// Stage is a stage of a discovery script. It begins when training has completed Step steps, the
// previous stage has been printed in Polls runs, the file After (if set) exists in the job's
// directory, and the events report the end of Exits workers.
type Stage struct {
	Step, Polls int
	After       string
	Exits       int
	// Hosts are printed, one word per line; with "!" the script fails.
	Hosts string
}

// script returns the text of the discovery script. For a moment, both a driver and the one that
// resumes the job can run it; it keeps its state in two files, so that one run finds the state in
// the second while another run has emptied the first.
func (j *Job) script() string {
	var s strings.Builder
	fmt.Fprintf(&s, `#!/bin/sh
cd '%s' || exit 1
stage=0 polls=0
[ ! -e at ] || read -r stage polls <at || read -r stage polls <before
[ "$polls" -lt 1 ] || : >"polled.$stage"
`, j.Dir)
	s.WriteString("case $stage in\n")
	for i, st := range j.Stages[1:] {
		test := fmt.Sprintf(`[ "$polls" -ge %d ]`, st.Polls)
		if st.Step > 0 { // every step is recorded
			test += fmt.Sprintf(` && grep -q '"step":%d,' steplog 2>/dev/null`, st.Step)
		}
		if st.After != "" {
			test += fmt.Sprintf(` && [ -e '%s' ]`, st.After)
		}
		if st.Exits > 0 {
			test += fmt.Sprintf(` && [ "$(grep -c '"worker_exited"' '%s')" -ge %d ]`, j.EventsPath(), st.Exits)
		}
		fmt.Fprintf(&s, "%d) if %s; then stage=%d polls=0; fi ;;\n", i, test, i+1)
	}
	s.WriteString("esac\necho \"$stage $((polls + 1))\" >before\necho \"$stage $((polls + 1))\" >at\n[ \"$polls\" -gt 0 ] || date +%s%N >\"shown.$stage\"\ncase $stage in\n")
	for i, st := range j.Stages {
		what := "printf '%s\\n' " + st.Hosts
		switch st.Hosts {
		case "":
			what = ":"
		case "!":
			what = "echo 'no hosts today' >&2; exit 1"
		}
		fmt.Fprintf(&s, "%d) %s ;;\n", i, what)
	}
	s.WriteString("esac\n")
	return s.String()
}
