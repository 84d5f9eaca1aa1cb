package kubernetes

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Client sends requests to the API server as one user. Several goroutines can call its methods.
type Client struct {
	url, token string
	http       *http.Client
}

// statusError is an answer that reports an error.
type statusError struct {
	Code    int
	Message string
}

// Error contains the server's message.
func (e *statusError) Error() string {
	return fmt.Sprintf("kubernetes: %d: %s", e.Code, e.Message)
}

// Code returns the status of a *statusError, or 0 for other errors.
func Code(err error) int {
	if s, ok := errors.AsType[*statusError](err); ok {
		return s.Code
	}
	return 0
}

// Content types of a patch.
const (
	MergePatch     = "application/merge-patch+json"
	strategicPatch = "application/strategic-merge-patch+json"
)

// Do sends a request with body, unless body is nil, and decodes the answer into into, unless into
// is nil.
func (c *Client) Do(ctx context.Context, method, path string, body, into any) error {
	return c.send(ctx, method, path, "application/json", body, into)
}

// Patch changes an object. kind is the content type of the patch.
func (c *Client) Patch(ctx context.Context, path, kind string, body, into any) error {
	return c.send(ctx, http.MethodPatch, path, kind, body, into)
}

func (c *Client) send(ctx context.Context, method, path, contentType string, body, into any) error {
	answer, err := c.open(ctx, method, path, contentType, body)
	if err != nil {
		return err
	}
	defer answer.Close()
	if into == nil {
		_, err = io.Copy(io.Discard, answer)
		return err
	}
	return json.NewDecoder(answer).Decode(into)
}

func (c *Client) open(ctx context.Context, method, path, contentType string, body any) (io.ReadCloser, error) {
	var text io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		text = bytes.NewReader(b)
	}
	r, err := http.NewRequestWithContext(ctx, method, c.url+path, text)
	if err != nil {
		return nil, err
	}
	r.Header.Set("Authorization", "Bearer "+c.token)
	r.Header.Set("Content-Type", contentType)
	r.Header.Set("Accept", "application/json")
	answer, err := c.http.Do(r)
	if err != nil {
		return nil, err
	}
	if answer.StatusCode < 300 {
		return answer.Body, nil
	}
	defer answer.Body.Close()
	said, _ := io.ReadAll(io.LimitReader(answer.Body, 1<<20)) // as much of it as arrives
	var status struct {
		Message string `json:"message"`
	}
	if json.Unmarshal(said, &status) != nil {
		status.Message = string(said)
	}
	return nil, &statusError{answer.StatusCode, status.Message}
}

// event is an event of a watch.
type event struct {
	Type   string          `json:"type"`
	Object json.RawMessage `json:"object"`
}

// watch calls each for every event after a version, until ctx or the stream ends.
func (c *Client) watch(ctx context.Context, path, version string, each func(event)) error {
	stream, err := c.open(ctx, http.MethodGet, path+"?watch=1&resourceVersion="+version, "", nil)
	if err != nil {
		return err
	}
	defer stream.Close()
	for decoder := json.NewDecoder(stream); ; {
		var e event
		if err := decoder.Decode(&e); err != nil {
			return err
		}
		if e.Type == "ERROR" {
			return fmt.Errorf("kubernetes: watch of %s: %s", path, e.Object)
		}
		each(e)
	}
}

// folders maps a kind to the API's path of its objects.
var folders = map[string]string{
	"Namespace": "api/v1/namespaces", "Node": "api/v1/nodes",
	"Pod": "api/v1/%s/pods", "Service": "api/v1/%s/services", "Secret": "api/v1/%s/secrets",
	"ConfigMap": "api/v1/%s/configmaps", "ServiceAccount": "api/v1/%s/serviceaccounts",
	"PersistentVolumeClaim": "api/v1/%s/persistentvolumeclaims", "ResourceQuota": "api/v1/%s/resourcequotas",
	"StatefulSet": "apis/apps/v1/%s/statefulsets", "Job": "apis/batch/v1/%s/jobs",
	"Role":                "apis/rbac.authorization.k8s.io/v1/%s/roles",
	"RoleBinding":         "apis/rbac.authorization.k8s.io/v1/%s/rolebindings",
	"NetworkPolicy":       "apis/networking.k8s.io/v1/%s/networkpolicies",
	"PodDisruptionBudget": "apis/policy/v1/%s/poddisruptionbudgets",

	"ClusterRoleBinding": "apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
	"ClusterRole":        "apis/rbac.authorization.k8s.io/v1/clusterroles",

	"CustomResourceDefinition":       "apis/apiextensions.k8s.io/v1/customresourcedefinitions",
	"MutatingWebhookConfiguration":   "apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
	"ValidatingWebhookConfiguration": "apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations",

	"ResourceFlavor": "apis/kueue.x-k8s.io/v1beta2/resourceflavors",
	"ClusterQueue":   "apis/kueue.x-k8s.io/v1beta2/clusterqueues",
	"LocalQueue":     "apis/kueue.x-k8s.io/v1beta2/%s/localqueues",
}

// Path returns the path of an object of a namespace in the API, or of all objects of the kind if
// name is empty.
func Path(namespace, kind, name string) string {
	folder, known := folders[kind]
	if !known {
		panic("kubernetes: where objects of the kind " + kind + " are is not known")
	}
	if strings.Contains(folder, "%s") {
		folder = fmt.Sprintf(folder, "namespaces/"+namespace)
	}
	return strings.TrimSuffix("/"+folder+"/"+name, "/")
}

// Create creates the objects of a YAML text in a namespace, in their order. It returns an error if
// the API does not know a field.
func (c *Client) Create(ctx context.Context, namespace string, text []byte) error {
	for decoder := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var o map[string]any
		err := decoder.Decode(&o)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if o == nil {
			continue
		}
		kind, _ := o["kind"].(string)
		err = c.Do(ctx, http.MethodPost, Path(namespace, kind, "")+"?fieldValidation=Strict", o, nil)
		if err != nil {
			return fmt.Errorf("%s: %w", kind, err)
		}
	}
}
