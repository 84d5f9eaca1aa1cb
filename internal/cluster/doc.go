// Package cluster keeps what those who start jobs on a cluster of agents have: the authority that
// signs certificates, the keys of the gossip, the tokens by which hosts may join, and what is known
// of the hosts that have.
//
// State is what changes of it, with pure methods: who may join with a token, which hosts have
// certificates, and the phases in which the key of the gossip is replaced. Dir is the folder that
// holds it all. Several processes may use one folder.
package cluster
