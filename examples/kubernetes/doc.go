// Package kubernetes tests the manifests of a cluster of agents: that they are consistent with each
// other and with the plugin.
package kubernetes
