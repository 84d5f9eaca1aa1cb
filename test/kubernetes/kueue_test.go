package kubernetes_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/hvdrun/hvdrun/test/kubernetes"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// queues are Kueue's objects: the quota for everyone and the queue of the namespace. The viewer's
// role comes from Kueue's own manifests.
const queues = `{apiVersion: kueue.x-k8s.io/v1beta2, kind: ResourceFlavor, metadata: {name: any}}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: everyone}
spec: %s
---
{apiVersion: kueue.x-k8s.io/v1beta2, kind: LocalQueue, metadata: {name: team}, spec: {clusterQueue: everyone}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: kueue-clusterqueue-viewer-role}
rules: [{apiGroups: [kueue.x-k8s.io], resources: [clusterqueues], verbs: [get, list, watch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: digits}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: kueue-clusterqueue-viewer-role}
subjects: [{kind: ServiceAccount, name: digits, namespace: queued}]
`

// quotaOf returns the specification of a ClusterQueue with enough processors for this number of
// agents.
func quotaOf(agents int) string {
	return fmt.Sprintf(`{"namespaceSelector": {}, "resourceGroups": [{"coveredResources": ["cpu", "memory"], `+
		`"flavors": [{"name": "any", "resources": [{"name": "cpu", "nominalQuota": "%d00m"}, {"name": "memory", "nominalQuota": "10Gi"}]}]}]}`, agents)
}

// TestKueue runs a job whose agents Kueue admits: first within a quota, then with a larger one,
// then with a smaller one, for which workers leave at a step boundary, and then until the job is
// done.
func TestKueue(t *testing.T) {
	ctx, cancel := context.WithDeadline(t.Context(), sandbox.Limit())
	defer cancel()
	kueue, err := cluster.StartKueue(ctx)
	if errors.Is(err, kubernetes.ErrMissing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer kueue.Stop()
	const steps = 100
	j := newJob(t, "queued", "restricted", "-steps", fmt.Sprint(steps), "-step-time", "2ms", "-gate", "20=grow", "-gate", "40=shrink", "-gate", "60=again", "-gate", "80=end")
	j.create(fmt.Appendf(nil, queues, quotaOf(2)))
	j.submit("--queue", "team")
	j.say("submitted; the queue has the processors of 2 agents")
	quota := func(agents int) {
		t.Helper()
		j.patch(kubernetes.Path("", "ClusterQueue", "everyone"), `{"spec": `+quotaOf(agents)+`}`)
		j.say("the queue has the processors of %d agents", agents)
	}
	j.awaitSize(2)
	quota(4)
	j.open("grow")
	j.awaitSize(4)
	quota(3)
	j.open("shrink")
	j.awaitSize(3)
	j.await("3 agents are left", j.agents(3))
	quota(4)
	j.open("again")
	j.awaitSize(4)
	j.open("end")
	j.finish(steps)
}
