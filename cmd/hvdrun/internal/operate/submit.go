package operate

import (
	"crypto/rand"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/plan"
)

// manifestText is the output of submit kubernetes, with names in double braces for the values and
// parts that submission.manifest fills in.
//
//go:embed submit.yaml
var manifestText string

// submission is a job for Kubernetes.
type submission struct {
	Name, Namespace, Image   string
	NP, MinNP, MaxNP, Slots  int
	MinPods                  int
	GPUs                     int
	CPU, Memory, GPUResource string
	Queue                    string
	Storage, StorageClass    string
	User, Grace, Drain       int
	Plugin, Key              string
	claims, driverFlags      []string
	Mounts                   []mount
	DriverArgs               []string
}

// mount is a persistent volume claim that all pods mount.
type mount struct{ Volume, Claim, Path string }

func submitCommand(p *cli.Program) *cobra.Command {
	s := submission{}
	cmd := &cobra.Command{
		Use:   "submit",
		Short: "Print a manifest that runs a job on a cluster",
	}
	kubernetes := &cobra.Command{
		Use:   "kubernetes [flags] -- command [args…]",
		Short: "Print the manifest of a job for Kubernetes",
		Long: `submit kubernetes prints the manifest of a job, for kubectl apply: an elastic Job of agents, in whose pods the workers run,
and a Job of the driver. The driver sets the number of agents: as many as --max-np can use, but no more than the namespace's
quotas allow and no fewer than --min-np needs. When a quota shrinks, a pod is deleted or a node is drained, the workers leave
at a step boundary. When the driver's pod is lost, another one takes over the job, whose folder is on a volume.

The pods run as a non-root user, with a read-only root file system and no capabilities; the pod security level "restricted"
permits them. The image has hvdrun, sh, the plugin kubernetes and the program. The manifest contains a new key: whoever has
it can run programs in the job's pods.`,
		Example: `  hvdrun submit kubernetes --image registry.example/train:1 -np 4 --min-np 2 \
      --max-np 8 -- train --epochs 90 | kubectl apply -f -
  kubectl logs -f job/NAME-driver`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			if err := s.complete(args); err != nil {
				return err
			}
			_, err := io.WriteString(p.Stdout, s.manifest())
			return cli.Failed(err)
		},
	}
	fs := kubernetes.Flags()
	fs.SortFlags = false
	fs.SetInterspersed(false)
	fs.StringVar(&s.Image, "image", "", "the pods' image")
	fs.StringVar(&s.Name, "name", "", "name of the job, with which the names of its objects begin (default: hvdrun- and letters)")
	fs.StringVarP(&s.Namespace, "namespace", "n", "", "namespace of the objects (default: kubectl's)")
	fs.IntVar(&s.NP, "np", 0, "slots needed before the first start (default: --min-np)")
	fs.IntVar(&s.MinNP, "min-np", 1, "fewest workers with which training continues")
	fs.IntVar(&s.MaxNP, "max-np", 0, "most workers (default: -np)")
	fs.IntVar(&s.Slots, "slots-per-host", 1, "workers in a pod; also --slots")
	fs.StringVar(&s.CPU, "cpu", "1", "processors of a pod of workers")
	fs.StringVar(&s.Memory, "memory", "1Gi", "memory of a pod of workers, its shared memory included")
	fs.IntVar(&s.GPUs, "gpus", 0, "GPUs of a pod of workers")
	fs.StringVar(&s.GPUResource, "gpu-resource", "nvidia.com/gpu", "name of the resource of these GPUs")
	fs.StringVar(&s.Queue, "queue", "", "Kueue's queue for the agents, as an elastic job")
	fs.StringArrayVar(&s.claims, "mount", nil, "CLAIM:PATH: a PersistentVolumeClaim and its path in all pods (repeatable)")
	fs.StringVar(&s.Storage, "storage", "1Gi", "room for the job's folder")
	fs.StringVar(&s.StorageClass, "storage-class", "", "storage class of its volume (default: the cluster's)")
	fs.IntVar(&s.User, "user", 65532, "user and group of all processes")
	fs.IntVar(&s.Grace, "grace", 90, "seconds for the workers of a deleted pod to leave; more than a step and its commit take")
	fs.StringVar(&s.Plugin, "plugin", "/usr/local/lib/hvdrun/plugins/kubernetes", "the plugin kubernetes in the image")
	fs.StringArrayVar(&s.driverFlags, "driver-flag", nil, "one more flag for hvdrun, as --driver-flag=--verbose (repeatable)")
	cmd.AddCommand(kubernetes)
	return cmd
}

// manifest returns the manifest with the values of the user, each either as JSON, which is valid
// YAML, or consisting only of letters, digits and dashes.
func (s *submission) manifest() string {
	var volumes, mounts, args, queueRule, queueLabel, storageClass, in, subjectNamespace string
	for _, m := range s.Mounts {
		volumes += fmt.Sprintf("\n        - {name: %s, persistentVolumeClaim: {claimName: %s}}", m.Volume, quote(m.Claim))
		mounts += fmt.Sprintf("\n            - {name: %s, mountPath: %s}", m.Volume, quote(m.Path))
	}
	for _, arg := range s.DriverArgs {
		args += "            - " + quote(arg) + "\n"
	}
	if s.Queue != "" {
		queueRule, queueLabel = queueRuleText, queueLabelText
	}
	if s.StorageClass != "" {
		storageClass = "  storageClassName: " + quote(s.StorageClass) + "\n"
	}
	if s.Namespace != "" {
		in, subjectNamespace = " -n "+s.Namespace, ", namespace: "+quote(s.Namespace)
	}
	resources := fmt.Sprintf("{cpu: %s, memory: %s", quote(s.CPU), quote(s.Memory))
	if s.GPUs > 0 {
		resources += fmt.Sprintf(", %s: %d", s.GPUResource, s.GPUs)
	}
	values := []string{
		"{{name}}", s.Name, "{{image}}", quote(s.Image), "{{namespace}}", quote(s.Namespace), "{{in}}", in, "{{subjectNamespace}}", subjectNamespace,
		"{{meta}}", fmt.Sprintf("namespace: %s, labels: {hvdrun.dev/job: %s}", quote(s.Namespace), s.Name),
		"{{security}}", "{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}",
		"{{minNP}}", strconv.Itoa(s.MinNP), "{{maxNP}}", strconv.Itoa(s.MaxNP), "{{slots}}", strconv.Itoa(s.Slots), "{{minPods}}", strconv.Itoa(s.MinPods),
		"{{user}}", strconv.Itoa(s.User), "{{grace}}", strconv.Itoa(s.Grace), "{{drain}}", strconv.Itoa(s.Drain), "{{key}}", quote(s.Key),
		"{{storage}}", quote(s.Storage), "{{storageClass}}", storageClass, "{{resources}}", resources + "}",
		"{{queue}}", quote(s.Queue), "{{driverArgs}}", args,
	}
	fill := strings.NewReplacer(values...).Replace
	return strings.NewReplacer(append(values, "{{copyKey}}", fill(copyKeyText), "{{volumes}}", fill(volumesText)+volumes, "{{mounts}}", mountsText+mounts,
		"{{queueRule}}", fill(queueRule), "{{queueLabel}}", fill(queueLabel))...).Replace(manifestText)
}

// quote returns text as a string of JSON.
func quote(text string) string {
	b, _ := json.Marshal(text) // cannot fail
	return string(b)
}

// Parts of the manifest that it has more than once, or not always.
const (
	copyKeyText = `
        - name: key # hvdrun refuses a key that the pod's group can read
          image: {{image}}
          command: [sh, -c, "umask 077; cp /etc/hvdrun/key /run/hvdrun/key"]
          resources: {limits: {cpu: 100m, memory: 32Mi}}
          securityContext: {{security}}
          volumeMounts:
            - {name: secret, mountPath: /etc/hvdrun, readOnly: true}
            - {name: key, mountPath: /run/hvdrun}`
	volumesText = `
        - {name: secret, secret: {secretName: {{name}}, defaultMode: 0440}}
        - {name: key, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
        - {name: tmp, emptyDir: {}}`
	mountsText = `
            - {name: key, mountPath: /run/hvdrun}
            - {name: tmp, mountPath: /tmp}`
	queueRuleText = `  # An administrator may add a binding to the ClusterRole kueue-clusterqueue-viewer-role, so that
  # the job gives back what the queue no longer has.
  - {apiGroups: [kueue.x-k8s.io], resources: [localqueues], resourceNames: [{{queue}}], verbs: [get]}
`
	queueLabelText = `    kueue.x-k8s.io/queue-name: {{queue}}
  annotations:
    kueue.x-k8s.io/elastic-job: "true"
`
)

// Names of objects and of resources.
var (
	objectName   = regexp.MustCompile(`^[a-z]([-a-z0-9]*[a-z0-9])?$`)
	resourceName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9./]*[a-z0-9])?$`)
)

// maxObjectName is the maximum length in bytes of the name of an object. It leaves room for the
// suffixes added to it.
const maxObjectName = 40

// complete checks the flags and derives the other fields. command is the job's command.
func (s *submission) complete(command []string) error {
	if s.Name == "" {
		s.Name = "hvdrun-" + strings.ToLower(rand.Text()[:6])
	}
	if s.NP == 0 {
		s.NP = s.MinNP
	}
	if s.MaxNP == 0 {
		s.MaxNP = s.NP
	}
	switch {
	case s.Image == "":
		return errors.New("--image is missing: one with hvdrun, its plugin kubernetes, sh and the program")
	case !objectName.MatchString(s.Name) || len(s.Name) > maxObjectName:
		return fmt.Errorf("--name: %q is not a name of up to 40 lower-case letters, digits and dashes that begins with a letter", s.Name)
	case s.Namespace != "" && (!objectName.MatchString(s.Namespace) || len(s.Namespace) > maxObjectName):
		return fmt.Errorf("--namespace: %q is not the name of a namespace", s.Namespace)
	case s.MinNP < 1 || s.NP < s.MinNP || s.MaxNP < s.NP || s.MaxNP > plan.MaxSlots:
		return fmt.Errorf("1 ≤ --min-np ≤ -np ≤ --max-np does not hold: %d, %d, %d", s.MinNP, s.NP, s.MaxNP)
	case s.Slots < 1 || s.Slots > plan.MaxSlots:
		return fmt.Errorf("--slots-per-host is %d", s.Slots)
	case s.GPUs < 0:
		return fmt.Errorf("--gpus is %d", s.GPUs)
	case !resourceName.MatchString(s.GPUResource):
		return fmt.Errorf("--gpu-resource: %q is not the name of a resource", s.GPUResource)
	case s.User < 1:
		return fmt.Errorf("--user is %d: the pods do not run as root", s.User)
	case s.Grace < 2:
		return fmt.Errorf("--grace is %d seconds", s.Grace)
	}
	s.MinPods, s.Drain = (s.MinNP+s.Slots-1)/s.Slots, s.Grace-1
	for i, text := range s.claims {
		claim, path, _ := strings.Cut(text, ":")
		if claim == "" || !strings.HasPrefix(path, "/") {
			return fmt.Errorf("--mount: %q is not CLAIM:/PATH", text)
		}
		s.Mounts = append(s.Mounts, mount{"claim-" + strconv.Itoa(i), claim, path})
	}
	var key [identity.ClusterKeyLen]byte
	rand.Read(key[:])
	s.Key = hex.EncodeToString(key[:])
	s.DriverArgs = []string{
		"-np=" + strconv.Itoa(s.NP), "--min-np=" + strconv.Itoa(s.MinNP), "--max-np=" + strconv.Itoa(s.MaxNP),
		"--job-dir=/var/lib/hvdrun/job", "--elastic-timeout=24h", "--gossip-join=" + s.Name + "-agents:7946", "--gossip-key-file=/run/hvdrun/key",
		"--gossip-label=" + s.Name, "--discovery-plugin=" + s.Plugin,
		"--discovery-config=label_selector=hvdrun.dev/job=" + s.Name + ",hvdrun.dev/role=agent",
		"--discovery-config=container=agent", "--discovery-config=host=name", "--discovery-config=job=" + s.Name + "-agents",
	}
	if s.Namespace != "" {
		s.DriverArgs = append(s.DriverArgs, "--discovery-config=namespace="+s.Namespace)
	}
	s.DriverArgs = append(append(append(s.DriverArgs, s.driverFlags...), "--"), command...)
	for i, arg := range s.DriverArgs {
		s.DriverArgs[i] = strings.ReplaceAll(arg, "$", "$$") // Kubernetes expands $(NAME), and makes $$ one
	}
	return nil
}
