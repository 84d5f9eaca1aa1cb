// Package cluster stores the keys of a cluster of agents for the people who start jobs on it: the
// authority that signs certificates, the gossip keys, the tokens by which hosts may join, and the
// hosts that have joined.
//
// State is the part that changes, with pure methods: which hosts may join with a token, which hosts
// have certificates, and the phases in which the gossip key is replaced. Dir is the folder that
// holds everything. Several processes may use one folder.
package cluster
