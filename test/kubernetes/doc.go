// Package kubernetes runs a real Kubernetes for tests: kube-apiserver and kube-controller-manager,
// of the versions in servers/go.mod, which make check-kubernetes builds, etcd, and a kubelet of its
// own, that runs the containers of pods as processes in namespaces; and Kueue beside it, of
// kueue/go.mod. There is no scheduler, no registry and no DNS: the kubelet places pods on its nodes
// in turn, every image is the machine's own file system with some folders of the test, and services
// stand in the pods' /etc/hosts.
package kubernetes
