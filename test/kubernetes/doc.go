// Package kubernetes runs a real Kubernetes for tests: kube-apiserver and kube-controller-manager
// of the versions in servers/go.mod, which make check-kubernetes builds; etcd; Kueue of the version
// in kueue/go.mod; and its own kubelet, which runs the containers of pods as processes in
// namespaces. There is no scheduler, registry or DNS: the kubelet assigns pods to its nodes in
// turn, every image is the machine's own file system with some folders of the test, and /etc/hosts
// of the pods lists the services.
package kubernetes
