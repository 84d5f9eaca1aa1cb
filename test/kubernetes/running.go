package kubernetes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// running is a pod that the kubelet runs.
type running struct {
	k              *Kubelet
	pod            *pod
	space, address string
	dir            string
	failed         error // the reason why it cannot run

	once    sync.Once
	grace   time.Duration // once deleted is closed
	deleted chan struct{}
	gone    chan struct{} // closed when the API server no longer has the pod
	goneOne sync.Once

	mu     sync.Mutex
	states map[string]*containerState
	procs  map[string]*os.Process // the running ones
	over   bool
	ready  bool
}

func (r *running) logPath(container string) string { return filepath.Join(r.dir, container+".log") }

// delete starts the pod's end with this grace period.
func (r *running) delete(grace time.Duration) {
	r.once.Do(func() {
		r.grace = grace
		close(r.deleted)
	})
}

// remove ends the pod at once, because the API server no longer has it.
func (r *running) remove() {
	r.delete(0)
	r.goneOne.Do(func() { close(r.gone) })
}

func (r *running) alive() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.over
}

func (r *running) isReady() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ready
}

// kill kills a container.
func (r *running) kill(name string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.procs[name]
	if p == nil {
		return fmt.Errorf("kubernetes: no container %s of pod %s runs", name, r.pod.Metadata.Name)
	}
	return p.Kill()
}

// run runs the pod from its start to its end.
func (r *running) run(ctx context.Context) {
	defer r.clean()
	err := r.failed
	if err == nil {
		err = r.prepare(ctx)
	}
	if err == nil {
		_ = r.k.hosts(ctx, r.pod.Metadata.Namespace) // the next change adds what is missing
		err = r.containers(ctx)
	}
	r.mu.Lock()
	r.over, r.ready = true, false
	r.mu.Unlock()
	if ctx.Err() != nil {
		return
	}
	phase := "Succeeded"
	for _, c := range r.pod.Spec.Containers {
		if s := r.states[c.Name]; s.ended.IsZero() || s.code != 0 {
			phase = "Failed"
		}
	}
	message := ""
	if err != nil {
		phase, message = "Failed", err.Error()
	}
	r.report(ctx, phase, message)
	_ = r.k.hosts(ctx, r.pod.Metadata.Namespace)
	select {
	case <-r.deleted:
	case <-ctx.Done():
		return
	}
	path := Path(r.pod.Metadata.Namespace, "Pod", r.pod.Metadata.Name)
	final := map[string]any{"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0, "preconditions": map[string]any{"uid": r.pod.Metadata.UID}}
	_ = r.k.Do(ctx, http.MethodDelete, path, final, nil) // the pod may be gone
}

// containers runs the init containers one by one, and then the others. It returns when all have
// ended, or an error if one of them cannot run.
func (r *running) containers(ctx context.Context) error {
	r.report(ctx, "Pending", "")
	for _, c := range r.pod.Spec.InitContainers {
		for {
			if err := r.attempt(ctx, c); err != nil {
				return err
			}
			if r.ending(ctx) {
				return nil
			}
			if r.states[c.Name].code == 0 {
				break
			}
			if r.pod.Spec.RestartPolicy == "Never" {
				return fmt.Errorf("init container %s has ended with %d", c.Name, r.states[c.Name].code)
			}
			if !r.pause(ctx) {
				return nil
			}
			r.again(c)
		}
	}
	failures := make([]error, len(r.pod.Spec.Containers))
	var wg sync.WaitGroup
	for i, c := range r.pod.Spec.Containers {
		wg.Go(func() {
			if failures[i] = r.keep(ctx, c); failures[i] != nil {
				r.delete(0)
			}
		})
	}
	wg.Go(func() { r.probe(ctx) })
	wg.Wait()
	return errors.Join(failures...)
}

// again counts another start of a container.
func (r *running) again(c container) {
	r.mu.Lock()
	defer r.mu.Unlock()
	*r.states[c.Name] = containerState{name: c.Name, restarts: r.states[c.Name].restarts + 1}
}

// ending returns whether the pod must end.
func (r *running) ending(ctx context.Context) bool {
	select {
	case <-r.deleted:
		return true
	default:
		return ctx.Err() != nil
	}
}

// pause waits before a container is started again, and returns false if the pod must end instead.
func (r *running) pause(ctx context.Context) bool {
	select {
	case <-time.After(200 * time.Millisecond):
		return true
	case <-r.deleted:
	case <-ctx.Done():
	}
	return false
}

// keep runs a container as often as the restart policy requires.
func (r *running) keep(ctx context.Context, c container) error {
	for {
		if err := r.attempt(ctx, c); err != nil {
			return err
		}
		failed := r.states[c.Name].code != 0
		if r.ending(ctx) || r.pod.Spec.RestartPolicy == "Never" || r.pod.Spec.RestartPolicy == "OnFailure" && !failed {
			return nil
		}
		r.report(ctx, "Running", "")
		if !r.pause(ctx) {
			return nil
		}
		r.again(c)
	}
}

// attempt runs a container once. If the pod is deleted meanwhile, the container gets SIGTERM, and
// SIGKILL after the grace period.
func (r *running) attempt(ctx context.Context, c container) error {
	cmd, err := r.command(c)
	if err != nil {
		return err
	}
	log, err := os.OpenFile(r.logPath(c.Name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	r.mu.Lock()
	if r.ending(ctx) {
		r.mu.Unlock()
		return nil
	}
	if err := cmd.Start(); err != nil {
		r.mu.Unlock()
		return fmt.Errorf("container %s: %w", c.Name, err)
	}
	r.states[c.Name].started, r.procs[c.Name] = time.Now(), cmd.Process
	r.mu.Unlock()
	exited := make(chan struct{})
	var ending sync.WaitGroup
	ending.Go(func() { r.end(ctx, cmd.Process, exited) })
	r.report(ctx, r.phase(), "")
	_ = cmd.Wait() // the state has the result
	close(exited)
	ending.Wait()
	status := cmd.ProcessState.Sys().(syscall.WaitStatus)
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.states[c.Name]
	s.ended, s.code, s.ready = time.Now(), status.ExitStatus(), false
	if status.Signaled() {
		s.code, s.signal = 128+int(status.Signal()), int(status.Signal())
	}
	delete(r.procs, c.Name)
	return nil
}

// end ends a process when the pod must end.
func (r *running) end(ctx context.Context, p *os.Process, exited <-chan struct{}) {
	select {
	case <-exited:
		return
	case <-ctx.Done():
		_ = p.Kill()
		return
	case <-r.deleted:
	}
	_ = p.Signal(syscall.SIGTERM)
	r.report(ctx, r.phase(), "")
	select {
	case <-exited:
		return
	case <-ctx.Done():
	case <-r.gone:
	case <-time.After(r.grace):
	}
	_ = p.Kill()
}

// phase returns Running once no init container is left.
func (r *running) phase() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.pod.Spec.Containers {
		if !r.states[c.Name].started.IsZero() {
			return "Running"
		}
	}
	return "Pending"
}

// probe determines which containers are ready, until all have ended.
func (r *running) probe(ctx context.Context) {
	probed := map[string]time.Time{}
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for {
		all, changed, alive := true, false, false
		for _, c := range r.pod.Spec.Containers {
			r.mu.Lock()
			s := *r.states[c.Name]
			r.mu.Unlock()
			runs := !s.started.IsZero() && s.ended.IsZero()
			ready := runs && s.ready
			if due := probed[c.Name].Add(time.Duration(c.period()) * time.Second); runs && (!s.ready || time.Now().After(due)) {
				ready = r.answers(c)
				probed[c.Name] = time.Now()
			}
			alive = alive || runs || s.started.IsZero()
			all = all && ready
			if ready != s.ready {
				changed = true
				r.mu.Lock()
				if t := r.states[c.Name]; t.ended.IsZero() && t.restarts == s.restarts {
					t.ready = ready
				}
				r.mu.Unlock()
			}
		}
		r.mu.Lock()
		changed = changed || r.ready != all
		r.ready = all
		r.mu.Unlock()
		if changed {
			r.report(ctx, r.phase(), "")
			_ = r.k.hosts(ctx, r.pod.Metadata.Namespace) // the next change tries again
		}
		if !alive && (r.ending(ctx) || r.pod.Spec.RestartPolicy != "Always") {
			return
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// answers returns whether a container's probe succeeds.
func (r *running) answers(c container) bool {
	if c.Readiness == nil || c.Readiness.TCP == nil {
		return true
	}
	port := 0
	switch p := c.Readiness.TCP.Port.(type) {
	case float64:
		port = int(p)
	case string:
		for _, known := range c.Ports {
			if known.Name == p {
				port = known.Port
			}
		}
	}
	conn, err := net.DialTimeout("tcp", fmt.Sprintf("%s:%d", r.address, port), time.Second)
	if err != nil {
		return false
	}
	_ = conn.Close()
	return true
}

// report sends the pod's status to the API server.
func (r *running) report(ctx context.Context, phase, message string) {
	r.mu.Lock()
	list := func(containers []container) (all []any) {
		for _, c := range containers {
			all = append(all, r.states[c.Name].status())
		}
		return all
	}
	truth := map[bool]string{true: "True", false: "False"}
	now := time.Now().UTC().Format(time.RFC3339)
	var conditions []any
	for _, kind := range []string{"Initialized", "ContainersReady", "Ready"} {
		is := r.ready
		if kind == "Initialized" {
			is = phase != "Pending"
		}
		conditions = append(conditions, map[string]any{"type": kind, "status": truth[is], "lastTransitionTime": now})
	}
	status := map[string]any{
		"phase": phase, "message": message, "podIP": r.address, "podIPs": []any{map[string]any{"ip": r.address}}, "hostIP": r.k.net.gateway,
		"hostIPs": []any{map[string]any{"ip": r.k.net.gateway}}, "conditions": conditions,
		"initContainerStatuses": list(r.pod.Spec.InitContainers), "containerStatuses": list(r.pod.Spec.Containers),
	}
	defer r.mu.Unlock() // so reports arrive in order
	path := Path(r.pod.Metadata.Namespace, "Pod", r.pod.Metadata.Name) + "/status"
	body := map[string]any{"metadata": map[string]any{"uid": r.pod.Metadata.UID}, "status": status}
	for range 20 {
		err := r.k.Patch(ctx, path, strategicPatch, body, nil)
		if err == nil || ctx.Err() != nil || Code(err) == http.StatusNotFound || Code(err) == http.StatusConflict || Code(err) == http.StatusUnprocessableEntity {
			return
		}
	}
}

// setup is the script that runs in the container's own namespaces, as root. Its arguments are a
// work folder, the host's name, the file of hosts, "ro" or "rw" for the root, the mounts, "--" and
// the command.
const setup = `set -e
work=$1 name=$2 hosts=$3 mode=$4; shift 4
mount --make-rprivate /
mount -t tmpfs tmpfs "$work"
mkdir "$work/upper" "$work/work" "$work/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" "$work/root"
root=$work/root
echo "$name" > /proc/sys/kernel/hostname
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm" # the machine's own is out of sight
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys" -o ro
mount --bind "$hosts" "$root/etc/hosts"
while [ "$1" != -- ]; do
	path=$root$(chroot "$root" realpath -m "$2") # /var/run is a link
	[ -d "$path" ] || mkdir -p "$path"
	mount --rbind "$1" "$path"
	[ "$3" = rw ] || mount -o remount,bind,ro "$path"
	shift 3
done
shift
[ "$mode" = rw ] || mount -o remount,bind,ro "$root"
cd "$root"
exec chroot "$root" "$@"
`

// command returns the command that runs a container.
func (r *running) command(c container) (*exec.Cmd, error) {
	if len(c.Command) == 0 {
		return nil, fmt.Errorf("container %s has no command, and images have none here", c.Name)
	}
	env := []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/", "HOSTNAME=" + cmp.Or(r.pod.Spec.Hostname, r.pod.Metadata.Name),
		"KUBERNETES_SERVICE_HOST=" + r.k.net.gateway, "KUBERNETES_SERVICE_PORT=" + r.k.port,
	}
	var expand []string
	for _, e := range c.Env {
		value := e.Value
		if e.From != nil {
			if e.From.Field == nil {
				return nil, fmt.Errorf("container %s: variable %s is from what is not known here", c.Name, e.Name)
			}
			var known bool
			if value, known = r.pod.field(e.From.Field.Path); !known {
				return nil, fmt.Errorf("container %s: field %s is not known here", c.Name, e.From.Field.Path)
			}
		}
		env = append(env, e.Name+"="+value)
		expand = append(expand, "$("+e.Name+")", value)
	}
	mode := "rw"
	if c.Security.ReadOnlyRoot {
		mode = "ro"
	}
	work := filepath.Join(r.dir, "work."+c.Name)
	if err := os.MkdirAll(work, 0o711); err != nil {
		return nil, err
	}
	args := []string{"--net=/run/netns/" + r.space, "/bin/sh", "-c", setup, "sh", work, cmp.Or(r.pod.Spec.Hostname, r.pod.Metadata.Name),
		filepath.Join(r.dir, "hosts"), mode}
	for path, folder := range r.k.image {
		access := "ro"
		if info, err := os.Stat(folder); err == nil && info.Mode()&0o002 != 0 {
			access = "rw"
		}
		args = append(args, folder, path, access)
	}
	for _, m := range c.Mounts {
		access := "rw"
		if m.ReadOnly {
			access = "ro"
		}
		args = append(args, r.volume(m.Name), m.Path, access)
	}
	rights, err := r.rights(c)
	if err != nil {
		return nil, err
	}
	args = append(append(args, "--", "/usr/bin/setpriv"), rights...)
	args = append(args, "--", "/bin/sh", "-c", `cd "$1" && shift && exec "$@"`, "sh", cmp.Or(c.Dir, "/"))
	replace := strings.NewReplacer(expand...)
	for _, arg := range append(c.Command, c.Args...) {
		args = append(args, replace.Replace(arg))
	}
	cmd := exec.Command("nsenter", args...)
	cmd.Env = env
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWUTS | syscall.CLONE_NEWPID, Setsid: true}
	return cmd, nil
}

// rights returns setpriv's flags for a container's user, groups and capabilities.
func (r *running) rights(c container) ([]string, error) {
	user, group := first(c.Security.User, r.pod.Spec.Security.User), first(c.Security.Group, r.pod.Spec.Security.Group)
	if n := c.Security.NonRoot; n == nil {
		c.Security.NonRoot = r.pod.Spec.Security.NonRoot
	}
	if n := c.Security.NonRoot; n != nil && *n && user == 0 {
		return nil, fmt.Errorf("container %s: it may not run as root, and images have no user here", c.Name)
	}
	args := []string{fmt.Sprint("--reuid=", user), fmt.Sprint("--regid=", group)}
	if g := r.pod.Spec.Security.FSGroup; g != nil {
		args = append(args, fmt.Sprint("--groups=", *g))
	} else {
		args = append(args, "--clear-groups")
	}
	if e := c.Security.Escalation; e != nil && !*e {
		args = append(args, "--no-new-privs")
	}
	if len(c.Security.Capabilities.Drop) > 0 {
		rights := "-all"
		for _, name := range c.Security.Capabilities.Add {
			rights += ",+" + strings.ToLower(name)
		}
		args = append(args, "--inh-caps=-all", "--bounding-set="+rights)
	}
	return args, nil
}

func first(values ...*int) int {
	for _, v := range values {
		if v != nil {
			return *v
		}
	}
	return 0
}
