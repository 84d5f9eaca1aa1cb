package decide

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

var update = flag.Bool("update", false, "rewrite the scenarios in testdata with the machine's current output")

// TestStories runs every scenario of testdata: its commands (unindented lines) are input to a
// machine, whose actions must be the indented lines after each command. The scenarios are best read
// from top to bottom:
//
//	config np=2 min=1 max=4 limit=1 policy=host cooldown=1s,60s static tasks stateless start=30s …
//	hosts a:2 b:2!             the list of discovery; a host with ! is draining
//	join a:0 b:1 commits=3     these workers ask for a newer world (they hold the job's state if they have commits);
//	                           with "late", for one newer than the world before their last;
//	                           with "ahead", for one newer than a world that does not exist yet;
//	                           with "trained" or "untrained", they report whether training has ended;
//	                           with program=NAME, they use the worker protocol over their sockets
//	trains                     rank 0 of the world has synchronised and trains
//	trains a:0                 its heartbeats report that it trains, after another has reported done
//	exit a:0 code=1|signal=9|ok|evicted|refused|taken=RUN|unstartable|unkillable
//	                           with "ran=f,g", while it ran tasks of these functions
//	report a:0 done|leaving|draining|committed|writing|written|unwritten commits=3
//	report a:0 over ipc        and so on: the backend of its GPUs; with "before" at the end, in the previous world
//	wait 5s                    time passes; deadlines in between expire
//	writes a:0                 more of its last checkpoint is on the disk
//	stalled a:0 WORDS          the others wait for it, for the reason in the words; with "alone", no worker waits
//	stuck                      and they have waited for too long
//	stirred a:0 · hung a:0 WORDS
//	dying a:0 WORDS            its process is dying; with signal=9, a signal is ending it
//	moved a:0 1s               this time ago it made progress towards the next world
//	failing a:0 WORDS          its program reports the error that ends it
//	task-stuck a:0             it runs a task that does not end
//	discovery-failed first|later
//	interrupt
//	drain a:0                  an operator's command, for a slot or a whole host, like the following three
//	exclude a 10s              (without a time: until it is readmitted)
//	readmit a
//	scale min=1 max=4          (max=0: no bound)
//	goodput                    an operator asks how the time was spent
//	status                     an operator asks for the status
//	resume 20s                 the driver dies, and another one continues after this time
//	together                   the inputs up to "now" belong to one step
//
// A worker is named by its slot. The second worker in the same slot is a:0#2 in the output; a:0 in
// a command means the one that is alive.
func TestStories(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no stories: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := tell(t, string(want), false)
			// Each step can run in another driver, restored from a snapshot.
			if again := tell(t, string(want), true); again != got {
				t.Errorf("%s: a machine made of a snapshot does something else:\n%s", file, diff(got, again))
			}
			if got == string(want) {
				return
			}
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			t.Errorf("%s: the machine does something else (-update rewrites the story):\n%s", file, diff(string(want), got))
		})
	}
}

// tell runs a scenario's commands and returns the scenario with its current output. If saved is
// set, each step runs in a new machine, restored from a snapshot.
func tell(t *testing.T, text string, saved bool) string {
	t.Helper()
	var out strings.Builder
	s := &story{t: t, saved: saved, now: time.Unix(0, 0).UTC(), out: &out, starts: map[plan.SlotID]int{}}
	for n, line := range strings.Split(strings.TrimRight(text, "\n"), "\n") {
		if strings.HasPrefix(line, "  ") {
			continue
		}
		out.WriteString(line + "\n")
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if err := s.command(strings.Fields(line)); err != nil {
			t.Fatalf("line %d: %q: %v", n+1, line, err)
		}
		if s.m != nil {
			checkInvariants(t, s.m)
		}
	}
	return out.String()
}

type story struct {
	t      *testing.T
	m      *Machine
	saved  bool // each step runs in another machine
	now    time.Time
	out    *strings.Builder
	starts map[plan.SlotID]int
	latest uint64  // generation
	slow   bool    // processes are reported as forked
	held   []Input // of the step that "now" ends
	holds  bool
}

func (s *story) command(words []string) error {
	args := words[1:]
	if words[0] == "config" {
		return s.config(args)
	}
	if s.m == nil {
		return errors.New("a story begins with config")
	}
	switch words[0] {
	case "hosts":
		hosts, err := plan.ParseHosts(strings.ReplaceAll(strings.Join(args, "\n"), "!", ""), 1)
		if err != nil {
			return err
		}
		for i, arg := range args {
			hosts[i].Draining = strings.HasSuffix(arg, "!")
		}
		s.step(HostsFound{hosts})
	case "join":
		return s.join(args)
	case "exit":
		return s.exit(args)
	case "report":
		return s.report(args)
	case "wait":
		d, err := time.ParseDuration(args[0])
		if err != nil {
			return err
		}
		s.pass(d)
	case "failing":
		w, err := s.worker(args[0])
		if err != nil {
			return err
		}
		s.step(WorkerFailing{w.id, strings.Join(args[1:], " ")})
	case "forked":
		w, err := s.worker(args[0])
		if err != nil {
			return err
		}
		s.step(WorkerForked{w.id, 4711})
	case "stuck":
		s.step(WorldStuck{s.m.Current.Generation, "ranks 0 1 in AllReduce (operation 7) for 2m0s"})
	case "writes":
		w, err := s.worker(args[0])
		if err != nil {
			return err
		}
		s.step(WorkerWrites{w.id})
	case "stalled", "located", "stirred", "hung", "dying", "moved", "trains":
		return s.stall(words[0], args)
	case "discovery-failed":
		if args[0] == "first" {
			s.step(SourceFailed{Cause{errors.New("no such script")}})
		} else {
			s.step(SourceStale{Cause{errors.New("exit status 1")}})
		}
	case "resume":
		d, err := time.ParseDuration(args[0])
		if err != nil {
			return err
		}
		s.now = s.now.Add(d)
		s.step(Resumed{})
	case "goodput":
		fmt.Fprintf(s.out, "  %v\n", s.m.Goodput(s.now))
	case "interrupt":
		s.step(Interrupted{Cause{job.StopSignal{Signal: syscall.SIGINT}}})
	case "status":
		s.status()
	case "together":
		s.holds = true
	case "now":
		held := s.held
		s.held, s.holds = nil, false
		s.step(held...)
	case "task-stuck":
		s.step(TasksTold{job.TaskEvent{Name: job.TaskWorkerStuck, Incarnation: args[0], Worker: "w", Function: "f", N: 3, Text: "cancelled, has not ended for 30s"}})
	case "drain", "exclude", "readmit", "scale":
		return s.ask(words[0], args)
	default:
		return errors.New("no such command")
	}
	return nil
}

func (s *story) stall(kind string, args []string) error {
	generation := s.m.Current.Generation
	if len(args) == 0 && kind == "trains" {
		s.step(WorldTrains{generation})
		return nil
	}
	if len(args) == 0 {
		s.step(WorldJammed{generation, "all have been in AllReduce for 5s", 5 * time.Second})
		return nil
	}
	w, err := s.worker(args[0])
	if err != nil {
		return err
	}
	what := strings.Join(args[1:], " ")
	switch kind {
	case "stalled":
		s.step(WorkerStalled{w.id, generation, what, 5 * time.Second})
	case "located":
		s.step(WorkerLocated{w.id, generation, "holds up 2 others", what})
	case "stirred":
		s.step(WorkerStirred{w.id, generation})
	case "hung":
		s.step(WorkerHung{w.id, generation, what})
	case "dying":
		var by syscall.Signal
		if v, ok := strings.CutPrefix(what, "signal="); ok {
			n, err := strconv.Atoi(v)
			if err != nil {
				return err
			}
			by = syscall.Signal(n)
			what = job.Exit{Code: 128 + n, Signal: by}.String()
		}
		s.step(WorkerDying{w.id, what, by})
	case "trains":
		s.step(WorkerTrains{w.id, generation})
	case "moved":
		ago, err := time.ParseDuration(what)
		if err != nil {
			return err
		}
		s.step(WorkerMoved{w.id, generation, ago})
	}
	return nil
}

func (s *story) config(args []string) error {
	cfg := Config{Size: job.Size{Elastic: true}}
	for _, arg := range args {
		key, value, _ := strings.Cut(arg, "=")
		n, _ := strconv.Atoi(value)
		d, _ := time.ParseDuration(value)
		switch key {
		case "np":
			cfg.Size.NP = n
		case "min":
			cfg.Size.Min = n
		case "max":
			cfg.Size.Max = n
		case "spares":
			cfg.Size.Spares = n
		case "starts":
			cfg.Size.Starts = n
		case "tasks":
			cfg.Size.TasksOnly = true
		case "stateless":
			cfg.Size.Stateless = true
		case "slow":
			s.slow = true
		case "static":
			cfg.Size.Elastic = false
		case "limit":
			cfg.Blame.ResetLimit = &n
		case "failures":
			cfg.Blame.FailureLimit = n
		case "window":
			cfg.Blame.ResetWindow = d
		case "policy":
			if value == "host" {
				cfg.Blame.Policy = job.BlameHost
			}
		case "cooldown":
			lo, hi, _ := strings.Cut(value, ",")
			cfg.Blame.CooldownMin, _ = time.ParseDuration(lo)
			cfg.Blame.CooldownMax, _ = time.ParseDuration(hi)
		case "start":
			cfg.Timeouts.Start = d
		case "join":
			cfg.Timeouts.Join = d
		case "elastic":
			cfg.Timeouts.Elastic = d
		case "exit":
			cfg.Timeouts.Exit = d
		case "finish":
			cfg.Timeouts.Finish = d
		default:
			return fmt.Errorf("config has no %q", key)
		}
	}
	cfg, err := withDefaults(cfg)
	if err != nil {
		return err
	}
	s.m = New(cfg, func(id plan.SlotID) string {
		s.starts[id]++
		if n := s.starts[id]; n > 1 {
			return fmt.Sprintf("%v#%d", id, n)
		}
		return id.String()
	})
	return nil
}

func (s *story) join(args []string) error {
	var commits uint64
	var trained *bool
	var shift uint64
	var workers []string
	var lost []int
	var undone time.Duration
	var program string
	for _, arg := range args {
		if v, ok := strings.CutPrefix(arg, "commits="); ok {
			n, err := strconv.ParseUint(v, 10, 64)
			if err != nil {
				return err
			}
			commits = n
		} else if v, ok := strings.CutPrefix(arg, "undone="); ok {
			d, err := time.ParseDuration(v)
			if err != nil {
				return err
			}
			undone = d
		} else if v, ok := strings.CutPrefix(arg, "lost="); ok {
			for _, rank := range strings.Split(v, ",") {
				n, err := strconv.Atoi(rank)
				if err != nil {
					return err
				}
				lost = append(lost, n)
			}
		} else if by, ok := map[string]uint64{"late": ^uint64(0), "ahead": 1}[arg]; ok {
			shift = by
		} else if v, ok := strings.CutPrefix(arg, "program="); ok {
			program = v
		} else if arg == "trained" || arg == "untrained" {
			trained = new(arg == "trained")
		} else {
			workers = append(workers, arg)
		}
	}
	for _, name := range workers {
		w, err := s.worker(name)
		if err != nil {
			return err
		}
		s.step(WorkerJoined{w.id, Join{
			After: w.Generation + shift, Trained: trained, Commits: commits, HoldsState: commits > 0,
			DataAddrs: []string{"data"}, Lost: lost, Undone: undone, Program: program,
		}})
	}
	return nil
}

func (s *story) exit(args []string) error {
	w, err := s.worker(args[0])
	if err != nil {
		return err
	}
	var exit job.Exit
	key, value, _ := strings.Cut(args[1], "=")
	n, _ := strconv.Atoi(value)
	switch key {
	case "ok":
	case "code":
		exit.Code = n
	case "signal":
		exit.Signal, exit.Code = syscall.Signal(n), 128+n
	case "evicted": // by its agent
		exit = job.Exit{Code: 143, Signal: syscall.SIGTERM, Evicted: true}
	case "unkillable":
		exit = job.Exit{Code: 137, Err: errors.New("process 100 is in state D"), Unkillable: true}
	case "refused": // by its agent
		exit = job.Exit{Code: 127, Err: errors.New("the host is draining"), Evicted: true}
	case "taken": // by another run
		exit = job.Exit{Code: 127, Err: errors.New("the slot is taken"), TakenBy: value}
	case "unstartable":
		exit = job.Exit{Code: 127, Err: errors.New("no such file")}
	default:
		return errors.New("exit needs ok, code=, signal= or unstartable")
	}
	var ran []string
	if len(args) > 2 {
		ran = strings.Split(strings.TrimPrefix(args[2], "ran="), ",")
	}
	s.step(WorkerEnded{ID: w.id, Exit: exit, Ran: ran})
	return nil
}

func (s *story) report(args []string) error {
	w, err := s.worker(args[0])
	if err != nil {
		return err
	}
	kinds := map[string]Report{
		"done": ReportDone, "leaving": ReportLeaving, "committed": ReportCommitted,
		"draining": ReportDraining, "fetching": ReportFetching,
		"writing": ReportWriting, "written": ReportWritten, "unwritten": ReportNotWritten,
	}
	r := WorkerReported{ID: w.id, Report: kinds[args[1]], Generation: w.Generation}
	if args[1] == "over" && len(args) > 2 {
		told := BackendTold{w.id, w.Generation, args[2]}
		if len(args) > 3 {
			told.Generation--
		}
		s.step(told)
		return nil
	} else if len(args) > 2 {
		if r.Commits, err = strconv.ParseUint(strings.TrimPrefix(args[2], "commits="), 10, 64); err != nil {
			return err
		}
	}
	s.step(r)
	return nil
}

// status prints a status.
func (s *story) status() {
	st := s.m.Status(s.now, nil)
	clock := func(t time.Time) string { return t.Format(time.TimeOnly) }
	fmt.Fprintf(s.out, "  %s since %s, generation %d of %d, resets: %d\n", st.State, clock(st.Since), st.Generation, st.Size, st.Resets)
	for _, h := range st.Hosts {
		for _, slot := range h.Slots {
			fmt.Fprintf(s.out, "  %s:%d %s", h.Host, slot.Slot, slot.State)
			if slot.Rank != nil {
				fmt.Fprintf(s.out, " rank %d", *slot.Rank)
			}
			if slot.Commits != nil {
				fmt.Fprintf(s.out, " commits %d", *slot.Commits)
			}
			if slot.Out != "" && slot.Out != slot.State {
				fmt.Fprintf(s.out, ", then %s", slot.Out)
			}
			if slot.Until != nil {
				fmt.Fprintf(s.out, " until %s", clock(*slot.Until))
			}
			if slot.Failures > 0 {
				fmt.Fprintf(s.out, ", failures: %d", slot.Failures)
			}
			if slot.What != "" {
				fmt.Fprintf(s.out, " (%s)", slot.What)
			}
			if !h.Listed {
				fmt.Fprint(s.out, ", not listed")
			}
			if h.Draining {
				fmt.Fprint(s.out, ", draining")
			}
			fmt.Fprintln(s.out)
		}
	}
	for _, w := range st.Waits {
		fmt.Fprintf(s.out, "  waits until %s for %s\n", clock(w.Until), w.For)
	}
	if st.Message != "" {
		fmt.Fprintf(s.out, "  says %s\n", st.Message)
	}
}

// ask gives the machine an operator's command.
func (s *story) ask(verb string, args []string) error {
	c := job.Command{Verb: job.Verb(verb)}
	for i, arg := range args {
		key, value, _ := strings.Cut(arg, "=")
		n, err := strconv.Atoi(value)
		switch {
		case key == "min":
			c.MinNP = &n
		case key == "max":
			c.MaxNP = &n
		case i == 1:
			c.For, err = time.ParseDuration(arg)
		default:
			host, slot, whole := strings.Cut(arg, ":")
			err = nil
			if c.Host = host; whole {
				n, err = strconv.Atoi(slot)
				c.Slot = &n
			}
		}
		if err != nil {
			return err
		}
	}
	if err := c.Check(); err != nil {
		return err
	}
	s.step(Commanded{c})
	return nil
}

// worker returns the living worker in a slot, or the worker with exactly this name.
func (s *story) worker(name string) (*Worker, error) {
	for _, w := range s.m.workers {
		if w.id == name || w.slot.String() == name {
			return w, nil
		}
	}
	return nil, fmt.Errorf("no worker %s is there", name)
}

// pass advances time, stopping at each deadline of the machine.
func (s *story) pass(d time.Duration) {
	end := s.now.Add(d)
	for range 1000 {
		at, ok := s.m.Deadline()
		if !ok || at.After(end) {
			s.now = end
			return
		}
		if at.After(s.now) {
			s.now = at
		}
		s.step(DeadlinePassed{})
	}
	s.t.Fatalf("a deadline at %v is never dealt with", s.now)
}

func (s *story) step(inputs ...Input) {
	if s.holds {
		s.held = append(s.held, inputs...)
		return
	}
	if s.saved {
		made := again(s.t, s.m)
		sameState(s.t, s.m, made, "before %T", inputs[0])
		s.m = made
	}
	for _, a := range s.m.Step(s.now, inputs...) {
		if line := s.describe(a); line != "" {
			fmt.Fprintf(s.out, "  %s\n", line)
		}
	}
}

func (s *story) describe(a Action) string {
	switch a := a.(type) {
	case StartWorker:
		switch {
		case a.Forked:
			return "take over " + a.ID
		case a.Again:
			return "start again, or take over " + a.ID
		}
		// Processes start at once in scenarios, unless the scenario reports them as forked.
		if !s.slow {
			s.m.find(a.ID).pid = 100
		}
		return fmt.Sprintf("start %s as rank %d of %d", a.ID, a.Slot.Rank, a.Trial.Size)
	case StopWorker:
		if a.Now {
			return "kill " + a.ID
		}
		return "stop " + a.ID
	case LookAt:
		return "look whether " + a.ID + " is being killed"
	case GiveTime:
		return "give more time to " + a.ID
	case ForgetWorker:
		return "forget " + a.ID
	case WatchDone:
		return ""
	case PublishWorld:
		if a.World.Generation > s.latest && a.World.Size() < s.m.size.Min {
			s.t.Errorf("a world of %d was published, the fewest are %d", a.World.Size(), s.m.size.Min)
		}
		s.latest = a.World.Generation
		names := make([]string, len(a.Members))
		for i, w := range a.Members {
			names[i] = w.id
		}
		return fmt.Sprintf("publish world %d: %s (root %d, seq %d)",
			a.World.Generation, strings.Join(names, " "), a.Root, a.Seq)
	case DismissWorker:
		return fmt.Sprintf("dismiss %s: %v", a.ID, a.Why)
	case NotifyWorkers:
		names := make([]string, len(a.Members))
		for i, w := range a.Members {
			names[i] = w.id
		}
		return fmt.Sprintf("notify %d %v: %s", a.Seq, a.Change, strings.Join(names, " "))
	case TellLoss:
		names := make([]string, len(a.Members))
		for i, w := range a.Members {
			names[i] = w.id
		}
		if len(a.Ranks) == 0 {
			return fmt.Sprintf("tell that generation %d is given up: %s", a.Generation, strings.Join(names, " "))
		}
		return fmt.Sprintf("tell that of generation %d ranks %v are dead: %s", a.Generation, a.Ranks, strings.Join(names, " "))
	case LogLine:
		if a.Level == Debug {
			return ""
		}
		return "log " + a.Text
	case Answer:
		if a.Refused != nil {
			return "refuse: " + a.Refused.Error()
		}
		return "answer: " + a.Done
	case Remind:
		names := make([]string, len(a.Late))
		for i, w := range a.Late {
			names[i] = w.id
		}
		if a.Limit == "" {
			return fmt.Sprintf("remind that %s is to %s", strings.Join(names, " "), a.To)
		}
		return fmt.Sprintf("remind that %s has %v to %s", strings.Join(names, " "), a.Left, a.To)
	case FinishJob:
		if a.Err == nil {
			return "finish"
		}
		return fmt.Sprintf("finish with status %d: %v", job.ExitStatus(a.Err), a.Err)
	case EmitEvent:
		return s.describeEvent(a.Event)
	}
	return fmt.Sprintf("%T", a)
}

// describeEvent describes the events whose contents no action shows.
func (s *story) describeEvent(e job.Event) string {
	field := func(key string) any {
		for _, f := range e.Fields {
			if f.Key == key {
				return f.Value
			}
		}
		return nil
	}
	switch e.Name {
	case job.WorkerExited:
		return fmt.Sprintf("event worker_exited %s:%v: %v", field("host"), field("slot"), field("cause"))
	case job.WorkerDying:
		return fmt.Sprintf("event worker_dying %s:%v", field("host"), field("slot"))
	case job.Reset:
		return fmt.Sprintf("event reset %v", field("count"))
	case job.Stalled:
		return fmt.Sprintf("event stalled %v:%v", field("host"), field("slot"))
	case job.Located:
		return fmt.Sprintf("event located %v:%v", field("host"), field("slot"))
	case job.StallEnded:
		return fmt.Sprintf("event stall_ended %v:%v", field("host"), field("slot"))
	case job.CommitMissing:
		return fmt.Sprintf("event commit_missing %v:%v: %v", field("host"), field("slot"), field("change"))
	case job.DiscoveryFailed:
		return fmt.Sprintf("event discovery_failed: %v", field("error"))
	case job.Backend:
		return fmt.Sprintf("event backend %v of generation %v, size %v", field("backend"), field("generation"), field("size"))
	case job.Scaled:
		return fmt.Sprintf("event scaled to %v…%v", field("min_np"), field("max_np"))
	}
	return ""
}

// checkInvariants checks invariants after every input of every scenario.
func checkInvariants(t *testing.T, m *Machine) {
	t.Helper()
	seen := map[plan.SlotID]bool{}
	for _, w := range m.workers {
		if seen[w.slot] {
			t.Errorf("two workers live in %v", w.slot)
		}
		seen[w.slot] = true
		if w.Phase == training && w.Generation != m.Current.Generation {
			t.Errorf("%s trains in generation %d, the world is %d", w.id, w.Generation, m.Current.Generation)
		}
	}
}

func diff(want, got string) string {
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range max(len(w), len(g)) {
		var a, b string
		if i < len(w) {
			a = w[i]
		}
		if i < len(g) {
			b = g[i]
		}
		if a != b {
			lo := max(0, i-3)
			return fmt.Sprintf("first difference at line %d\nwant:\n%s\ngot:\n%s", i+1,
				strings.Join(w[min(lo, len(w)):min(i+4, len(w))], "\n"), strings.Join(g[min(lo, len(g)):min(i+4, len(g))], "\n"))
		}
	}
	return ""
}

// withDefaults returns the config with its zero fields filled in.
func withDefaults(cfg Config) (Config, error) {
	var err error
	if cfg.Size, err = cfg.Size.WithDefaults(); err != nil {
		return cfg, err
	}
	cfg.Blame, err = cfg.Blame.WithDefaults()
	cfg.Timeouts = cfg.Timeouts.WithDefaults()
	return cfg, err
}
