package main

import (
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/plugins/settings"
)

// config holds the settings, which README.md describes.
type config struct {
	namespace     string
	labels        string
	fields        string
	container     string
	job           string // the Job whose number of pods the plugin sets; "": none
	resource      string
	defaultSlots  int
	host          string // ip, name or fqdn
	clusterDomain string
	pageSize      int64
	timeout       time.Duration
	watchTimeout  time.Duration
	kubeconfig    string
	context       string
}

// readConfig reads and checks all settings.
func readConfig(values map[string]string) (config, error) {
	s := settings.Read("kubernetes", values)
	c := config{
		namespace:     s.Text("namespace", ""),
		labels:        s.Text("label_selector", ""),
		fields:        s.Text("field_selector", ""),
		container:     s.Text("container", ""),
		job:           s.Text("job", ""),
		resource:      s.Text("resource", "nvidia.com/gpu"),
		defaultSlots:  s.Int("default_slots", 1, 0, plan.MaxSlots),
		host:          s.OneOf("host", "ip", "name", "fqdn"),
		clusterDomain: strings.Trim(s.Text("cluster_domain", "cluster.local"), "."),
		pageSize:      int64(s.Int("page_size", 500, 1, 1<<20)),
		timeout:       s.Duration("timeout", 15*time.Second, time.Millisecond, time.Hour),
		watchTimeout:  s.Duration("watch_timeout", 5*time.Minute, time.Second, time.Hour),
		kubeconfig:    s.Text("kubeconfig", ""),
		context:       s.Text("context", ""),
	}
	if c.namespace != "" && strings.ContainsAny(c.namespace, "/?#% ,") {
		s.Fault("namespace", "%q is not the name of one namespace", c.namespace)
	}
	if strings.ContainsAny(c.job, "/?#% ,") {
		s.Fault("job", "%q is not the name of a Job", c.job)
	}
	return c, s.Err()
}

// access returns the access to the API server: by the kubeconfig in the settings; else, in a pod,
// by its service account; else by the kubeconfig that kubectl would use.
func (c *config) access(dir string, lookup func(string) (string, bool)) (*access, error) {
	path := c.kubeconfig
	if path == "" {
		if host, _ := lookup("KUBERNETES_SERVICE_HOST"); host != "" && c.context == "" {
			return inCluster(dir, lookup)
		}
		path, _ = lookup("KUBECONFIG")
	}
	if path == "" {
		if home, _ := lookup("HOME"); home != "" {
			path = filepath.Join(home, ".kube", "config")
		}
		if _, err := os.Stat(path); err != nil && c.context == "" {
			return inCluster(dir, lookup) // its error contains the remedy
		}
	}
	return fromKubeconfig(path, c.context)
}
