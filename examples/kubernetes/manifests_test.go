package kubernetes_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// object contains the tested fields of all kinds of manifests.
type object struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string `yaml:"kind"`
	Metadata   struct {
		Name      string `yaml:"name"`
		Namespace string `yaml:"namespace"`
	} `yaml:"metadata"`
	Rules   []rule            `yaml:"rules"`
	RoleRef subject           `yaml:"roleRef"`
	Data    map[string]string `yaml:"data"`
	Subject []subject         `yaml:"subjects"`
	Spec    struct {
		ClusterIP      string    `yaml:"clusterIP"`
		EarlyAddresses bool      `yaml:"publishNotReadyAddresses"`
		Selector       yaml.Node `yaml:"selector"`
		Ports          []port    `yaml:"ports"`
		ServiceName    string    `yaml:"serviceName"`
		Template       struct {
			Metadata struct {
				Labels map[string]string `yaml:"labels"`
			} `yaml:"metadata"`
			Spec podSpec `yaml:"spec"`
		} `yaml:"template"`
	} `yaml:"spec"`
}

type rule struct {
	Groups    []string `yaml:"apiGroups"`
	Resources []string `yaml:"resources"`
	Verbs     []string `yaml:"verbs"`
}

type subject struct {
	Kind string `yaml:"kind"`
	Name string `yaml:"name"`
}

type port struct {
	Name          string `yaml:"name"`
	Port          int    `yaml:"port"`
	TargetPort    string `yaml:"targetPort"`
	ContainerPort int    `yaml:"containerPort"`
	Protocol      string `yaml:"protocol"`
}

type podSpec struct {
	ServiceAccount string      `yaml:"serviceAccountName"`
	RestartPolicy  string      `yaml:"restartPolicy"`
	InitContainers []container `yaml:"initContainers"`
	Containers     []container `yaml:"containers"`
	Volumes        []volume    `yaml:"volumes"`
}

type volume struct {
	Name      string `yaml:"name"`
	ConfigMap struct {
		Name string `yaml:"name"`
	} `yaml:"configMap"`
	Secret struct {
		Name string `yaml:"secretName"`
		Mode int    `yaml:"defaultMode"`
	} `yaml:"secret"`
}

type container struct {
	Name      string   `yaml:"name"`
	Command   []string `yaml:"command"`
	Args      []string `yaml:"args"`
	Ports     []port   `yaml:"ports"`
	Readiness struct {
		TCP struct {
			Port string `yaml:"port"`
		} `yaml:"tcpSocket"`
	} `yaml:"readinessProbe"`
	Mounts []struct {
		Name string `yaml:"name"`
		Path string `yaml:"mountPath"`
	} `yaml:"volumeMounts"`
}

// manifests reads all manifests, by kind and name.
func manifests(t *testing.T) map[string]*object {
	t.Helper()
	var files []string
	for _, folder := range []string{"base", "job", "run-as"} {
		for _, file := range listed(t, folder) {
			files = append(files, filepath.Join(folder, file))
		}
	}
	all := map[string]*object{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for decoder := yaml.NewDecoder(bytes.NewReader(text)); ; {
			o := &object{}
			if err := decoder.Decode(o); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			key := o.Kind + "/" + o.Metadata.Name
			if o.APIVersion == "" || o.Metadata.Name == "" || o.Metadata.Namespace != "" || all[key] != nil {
				t.Errorf("%s: %q has no version or name, a namespace, or is there twice", file, key)
			}
			all[key] = o
		}
	}
	return all
}

// listed returns the manifests of a folder, which are those that its kustomization names.
func listed(t *testing.T, folder string) (files []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(folder, "kustomization.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var k struct {
		Resources []string `yaml:"resources"`
	}
	if err := yaml.Unmarshal(text, &k); err != nil {
		t.Fatal(err)
	}
	for _, file := range k.Resources {
		if strings.HasSuffix(file, ".yaml") {
			files = append(files, file)
		}
	}
	there, err := filepath.Glob(filepath.Join(folder, "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	same(t, "manifests of "+folder, len(files)+1, len(there))
	return files
}

// get returns one manifest.
func get(t *testing.T, all map[string]*object, key string) *object {
	t.Helper()
	if all[key] == nil {
		t.Fatalf("there is no %s", key)
	}
	return all[key]
}

// values returns the values of a flag.
func values(c container, flag string) (values []string) {
	for _, arg := range c.Args {
		if value, is := strings.CutPrefix(arg, flag+"="); is {
			values = append(values, value)
		}
	}
	return values
}

func same(t *testing.T, what string, got, want any) {
	t.Helper()
	a, errA := yaml.Marshal(got)
	b, errB := yaml.Marshal(want)
	if errA != nil || errB != nil || string(a) != string(b) {
		t.Errorf("%s: %s, want %s", what, bytes.TrimSpace(a), bytes.TrimSpace(b))
	}
}

func TestRights(t *testing.T) {
	all := manifests(t)
	driver := get(t, all, "Job/train-driver").Spec.Template.Spec
	binding := get(t, all, "RoleBinding/train-driver")
	same(t, "who is bound", binding.Subject, []subject{{"ServiceAccount", driver.ServiceAccount}})
	role := get(t, all, binding.RoleRef.Kind+"/"+binding.RoleRef.Name)
	same(t, "rights", role.Rules, []rule{{[]string{""}, []string{"pods"}, []string{"get", "list", "watch"}}})
	get(t, all, "ServiceAccount/"+driver.ServiceAccount)
	worker := get(t, all, "StatefulSet/train-worker").Spec.Template.Spec
	get(t, all, "ServiceAccount/"+worker.ServiceAccount)
	if worker.ServiceAccount == driver.ServiceAccount {
		t.Error("workers have the driver's rights")
	}
	same(t, "the driver's restarts", driver.RestartPolicy, "Never")
}

func TestDriverFindsWorkers(t *testing.T) {
	all := manifests(t)
	service := get(t, all, "Service/train-worker")
	set := get(t, all, "StatefulSet/train-worker")
	worker := set.Spec.Template.Spec.Containers[0]
	driver := get(t, all, "Job/train-driver").Spec.Template.Spec.Containers[0]
	labels := set.Spec.Template.Metadata.Labels
	var selector struct {
		MatchLabels map[string]string `yaml:"matchLabels"`
	}
	if err := set.Spec.Selector.Decode(&selector); err != nil {
		t.Fatal(err)
	}
	var serviceSelector map[string]string
	if err := service.Spec.Selector.Decode(&serviceSelector); err != nil {
		t.Fatal(err)
	}
	same(t, "the StatefulSet's labels", selector.MatchLabels, labels)
	same(t, "the Service's labels", serviceSelector, labels)
	same(t, "the StatefulSet's Service", set.Spec.ServiceName, service.Metadata.Name)
	if service.Spec.ClusterIP != "None" || !service.Spec.EarlyAddresses {
		t.Error("the Service is not headless, or has only pods that are ready")
	}
	settings := map[string]string{}
	for _, v := range values(driver, "--discovery-config") {
		key, value, _ := strings.Cut(v, "=")
		settings[key] = value
	}
	key, value, _ := strings.Cut(settings["label_selector"], "=")
	same(t, "the plugin's labels", map[string]string{key: value}, labels)
	same(t, "names of hosts", settings["host"], "name")
	same(t, "the plugin's container", settings["container"], worker.Name)
	readme, err := os.ReadFile("../../plugins/kubernetes/README.md")
	if err != nil {
		t.Fatal(err)
	}
	for key := range settings {
		if !bytes.Contains(readme, []byte("\n| `"+key+"` |")) {
			t.Errorf("the plugin has no setting %s", key)
		}
	}
	join := service.Metadata.Name + ":7946"
	same(t, "whom the driver joins", values(driver, "--gossip-join"), []string{join})
	same(t, "whom agents join", values(worker, "--join"), []string{join})
	same(t, "the label", values(driver, "--gossip-label"), values(worker, "--label"))
}

func TestPorts(t *testing.T) {
	all := manifests(t)
	service := get(t, all, "Service/train-worker")
	worker := get(t, all, "StatefulSet/train-worker").Spec.Template.Spec.Containers[0]
	for _, p := range service.Spec.Ports {
		i := slices.IndexFunc(worker.Ports, func(c port) bool { return c.Name == p.TargetPort })
		if i < 0 || worker.Ports[i].ContainerPort != p.Port || worker.Ports[i].Protocol != p.Protocol {
			t.Errorf("port %s of the Service leads nowhere", p.Name)
		}
	}
	i := slices.IndexFunc(worker.Ports, func(c port) bool { return c.Name == worker.Readiness.TCP.Port })
	if i < 0 {
		t.Fatal("the probe asks a port that is not there")
	}
	same(t, "the port that is probed", values(worker, "--launch-port"), []string{"7947"})
	same(t, "the launch port", worker.Ports[i].ContainerPort, 7947)
}

// secrets returns the secrets that a container of a pod mounts, and where.
func secrets(t *testing.T, spec podSpec, c container) map[string]string {
	t.Helper()
	found := map[string]string{}
	for _, m := range c.Mounts {
		i := slices.IndexFunc(spec.Volumes, func(v volume) bool { return v.Name == m.Name })
		if i < 0 || spec.Volumes[i].Secret.Name == "" {
			continue // it is of a claim's template, or of another kind
		}
		if mode := spec.Volumes[i].Secret.Mode; mode != 0o440 {
			t.Errorf("%s: mode %#o of a secret", c.Name, mode)
		}
		found[spec.Volumes[i].Secret.Name] = m.Path
	}
	return found
}

// TestCustody: the authority is where jobs are started and certificates signed, a token where a pod
// enrolls, and neither where workers are. The README makes them.
func TestCustody(t *testing.T) {
	all := manifests(t)
	worker := get(t, all, "StatefulSet/train-worker").Spec.Template.Spec
	driver := get(t, all, "Job/train-driver").Spec.Template.Spec
	keeper := get(t, all, "StatefulSet/train-cluster").Spec.Template.Spec
	agent, enroll := worker.Containers[0], worker.InitContainers[0]
	same(t, "secrets of the agent", secrets(t, worker, agent), map[string]string{})
	token := secrets(t, worker, enroll)
	same(t, "the token's copy", values(enroll, "--token-file"), []string{"/run/hvdrun/token"})
	if copies := "cp " + token["train-token"] + "/token /run/hvdrun/;"; !strings.Contains(strings.Join(enroll.Command, " "), copies) {
		t.Errorf("the token is not copied: %q", enroll.Command)
	}
	same(t, "secrets of those who enroll", len(token), 1)
	same(t, "the driver's copy", values(driver.Containers[0], "--cluster"), []string{"/run/hvdrun/cluster"})
	if copies := "cp " + secrets(t, driver, driver.Containers[0])["train-cluster"] + "/$f "; !strings.Contains(driver.Containers[0].Command[2], copies) {
		t.Errorf("the driver's keys are not copied: %q", driver.Containers[0].Command)
	}
	same(t, "secrets of the keeper", secrets(t, keeper, keeper.InitContainers[0]), map[string]string{"train-cluster": "/keys"})
	for _, flag := range []string{"--enroll", "--state-dir"} {
		same(t, flag, values(agent, flag), values(enroll, flag))
	}
	service := get(t, all, "Service/train-cluster")
	same(t, "where agents enroll", values(agent, "--enroll"), []string{service.Metadata.Name + ":7945"})
	same(t, "where they are served", values(keeper.Containers[0], "--listen"), []string{":7945"})
	same(t, "the service's port", service.Spec.Ports[0].Port, keeper.Containers[0].Ports[0].ContainerPort)
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{
		"hvdrun cluster init train\n", "hvdrun cluster token train train.token --reusable",
		"kubectl create secret generic train-cluster --from-file=train/authority.pem --from-file=train/state.json\n",
		"kubectl create secret generic train-token --from-file=token=train.token\n",
	} {
		if !bytes.Contains(readme, []byte(command)) {
			t.Errorf("the README lacks %q", command)
		}
	}
}

// TestRunAs: the policy is one that agents take.
func TestRunAs(t *testing.T) {
	policy := get(t, manifests(t), "ConfigMap/train-run-as").Data["run-as"]
	if !strings.HasPrefix(policy, "user=") || !strings.Contains(policy, " as=") {
		t.Errorf("the policy is %q", policy)
	}
}

func TestReadmeNamesAllFiles(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, folder := range []string{"base", "job", "run-as"} {
		for _, file := range listed(t, folder) {
			if !bytes.Contains(readme, []byte("| `"+folder+"/"+file+"` |")) {
				t.Errorf("the README does not tell of %s/%s", folder, file)
			}
		}
		if !bytes.Contains(readme, []byte("kubectl apply -k "+folder)) {
			t.Errorf("the README does not apply %s", folder)
		}
	}
}
