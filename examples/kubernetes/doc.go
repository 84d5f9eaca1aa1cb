// Package kubernetes has the manifests of a cluster of agents. Its tests check that they are
// consistent with each other and with the plugin.
package kubernetes
