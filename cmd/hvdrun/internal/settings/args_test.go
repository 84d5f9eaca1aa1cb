package settings

import (
	"slices"
	"strings"
	"testing"
)

var testSubcommands = []string{"tasks", "discover", "help", "completion", "__complete"}

func testMeant(word string) string {
	if word == "discovery" { // there is such a program
		return ""
	}
	return NearestOf(word, testSubcommands)
}

func TestNormalize(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"-np2 train", "--np=2 -- train"},
		{"-n 2 train", "--np=2 -- train"},
		{"-n2 -n=3 train -n", "--np=2 --np=3 -- train -n"},
		{"discovery", "-- discovery"},
		{"-- discove", "-- discove"},
		{"-np 8 train", "--np=8 -- train"},
		{"-np=8 train -np 3", "--np=8 -- train -np 3"},
		{"--num-proc 4 --min_num_proc 2 -max-num-proc 8 t", "--np=4 --min-np=2 --max-np=8 -- t"},
		{"-hostfile f --slots 2 t", "--hostfile=f --slots-per-host=2 -- t"},
		{"-H a:2,b:4 t", "--hosts=a:2,b:4 -- t"},
		{"-Ha:2 t", "--hosts=a:2 -- t"},
		{"-H=a:2 t", "--hosts=a:2 -- t"},
		{"-hosts a:2 t", "--hosts=a:2 -- t"},
		{"-p 22 -i key t", "--ssh-port=22 --ssh-identity-file=key -- t"},
		{"-p=22 -p23 t", "--ssh-port=22 --ssh-port=23 -- t"},
		{"-prefix-timestamp --verbose t --verbose", "--prefix-output-with-timestamp=true --verbose=true -- t --verbose"},
		{"--verbose=no t", "--verbose=no -- t"},
		{"--blacklist-cooldown-range 120 600 t", "--blacklist-cooldown-range=120,600 -- t"},
		{"--blacklist_cooldown_range 1s 2m t 5", "--blacklist-cooldown-range=1s,2m -- t 5"},
		{"--blacklist-cooldown-range 120,600 7", "--blacklist-cooldown-range=120,600 -- 7"},
		{"--blacklist-cooldown-range=120,600 7", "--blacklist-cooldown-range=120,600 -- 7"},
		{"--blacklist-cooldown-range=120 600 t", "--blacklist-cooldown-range=120,600 -- t"},
		{"--blacklist-cooldown-range 120 t", "--blacklist-cooldown-range=120 -- t"},
		{"-np 2 -- discover -np 3", "--np=2 -- discover -np 3"},
		{"-np 2 discover -hostfile f --json", "--np=2 discover --hostfile=f --json"},
		{"t discover", "-- t discover"},
		{"tasks run sweep -np 3", "tasks run -- sweep -np 3"},
		{"tasks run --job 3f2a ./sweep --job x", "tasks run --job 3f2a -- ./sweep --job x"},
		{"tasks run --job=3f2a ./sweep", "tasks run --job=3f2a -- ./sweep"},
		{"tasks run --invitation f ./sweep -n", "tasks run --invitation f -- ./sweep -n"},
		{"tasks explain --job 3f2a trial/v1", "tasks explain --job 3f2a trial/v1"},
		{"-np -1 t", "--np=-1 -- t"},
		{"discover --own -1 --for -.5s", "discover --own -1 --for -.5s"},
		{"__complete -np", "__complete -np"},
		{"completion bash --no-descriptions", "completion bash --no-descriptions"},
		{"-h", "-h"},
		{"-help", "--help"},
		{"-v", "-v"},
		{"-version", "--version"},
		{"", ""},
	} {
		got, err := Normalize(strings.Fields(c.in), testSubcommands, testMeant)
		if err != nil || !slices.Equal(got, strings.Fields(c.want)) {
			t.Errorf("%q: %q, %v; want %q", c.in, got, err, c.want)
		}
	}
}

func TestNormalizeRefuses(t *testing.T) {
	for _, c := range []struct{ in, message string }{
		{"--min-mp 2 t", "unknown flag --min-mp; did you mean --min-np?"},
		{"--elastic 5 t", "unknown flag --elastic; did you mean --elastic-timeout?"},
		{"--zebra=5 t", "unknown flag --zebra; `hvdrun help flags` lists the flags"},
		{"-5 t", "unknown flag -5; `hvdrun help flags`"},
		{"-Z t", "unknown flag -Z; `hvdrun help flags`"},
		{"-x A=1 t", "-x of mpirun is not taken: the variables"},
		{"--env A=1 t", "--env of mpirun is not taken"},
		{"-np 2 --bind-to core t", "--bind-to of mpirun is not taken: workers are not bound"},
		{"--mca btl tcp t", "--mca of mpirun is not taken"},
		{"--nproc-per-node=4 t.py", "--nproc-per-node of torchrun is not taken: `hvdrun torchrun` takes"},
		{"--rdzv_backend=c10d t.py", "--rdzv_backend of torchrun is not taken"},
		{"--num_processes 4 t.py", "--num_processes of accelerate launch is not taken: use -np"},
		{"-pile 22 t", "unknown flag -pile"},
		{"-np", "-np needs a value: N"},
		{"-n", "-np needs a value: N"},
		{"-n2x t", "unknown flag -n2x"},
		{"taks", `no command "taks"; did you mean "tasks"? A program of that name is run after --`},
		{"-np 2 discove --verbose", `no command "discove"; did you mean "discover"?`},
		{"discover --min-mp 2", ""}, // cobra's to refuse
		{"discover --gloo", "--gloo of horovodrun is not taken"},
	} {
		_, err := Normalize(strings.Fields(c.in), testSubcommands, testMeant)
		if c.message == "" && err != nil || c.message != "" && (err == nil || !strings.Contains(err.Error(), c.message)) {
			t.Errorf("%q: %v; want %q", c.in, err, c.message)
		}
	}
}

// TestFlagsOfHorovodrun: every flag of horovodrun is either one of ours, or refused with one line
// of advice.
func TestFlagsOfHorovodrun(t *testing.T) {
	flags := `-v --version -np --num-proc -cb --check-build --disable-cache --start-timeout --network-interfaces
		--network-interface --output-filename --verbose --config-file --tcp --binding-args --fusion-threshold-mb
		--cycle-time-ms --cache-capacity --hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather
		--no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune --autotune-log-file
		--autotune-warmup-samples --autotune-steps-per-sample --autotune-bayes-opt-max-samples
		--autotune-gaussian-process-noise --min-np --min-num-proc --max-np --max-num-proc --slots-per-host
		--elastic-timeout --reset-limit --blacklist-cooldown-range --timeline-filename --timeline-mark-cycles
		--no-timeline-mark-cycles --no-stall-check --stall-check --stall-check-warning-time-seconds
		--stall-check-shutdown-time-seconds --mpi-threads-disable --no-mpi-threads-disable --mpi-args
		--num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level --log-with-timestamp
		--log-without-timestamp -prefix-timestamp --prefix-output-with-timestamp -H --hosts -hostfile --hostfile
		-p --ssh-port -i --ssh-identity-file
		--host-discovery-script --gloo --mpi --jsrun`
	for _, flag := range strings.Fields(flags) {
		_, err := Normalize([]string{flag, "1", "2", "train"}, nil, testMeant)
		name := canonical(strings.TrimLeft(flag, "-"))
		if err == nil {
			if of, _ := advice(name); of != "" {
				t.Errorf("%s is both taken and refused", flag)
			}
			continue
		}
		if _, why := advice(name); why == "" || !strings.Contains(err.Error(), why) || strings.Contains(why, "\n") {
			t.Errorf("%s: %v", flag, err)
		}
	}
}

func TestDistance(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"np", "", 2}, {"", "np", 2}, {"min-np", "min-mp", 1}, {"kitten", "sitting", 3}} {
		if got := distance(c.a, c.b); got != c.want {
			t.Errorf("%q to %q: %d, want %d", c.a, c.b, got, c.want)
		}
	}
}
