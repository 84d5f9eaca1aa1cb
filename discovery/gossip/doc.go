// Package gossip finds hosts by gossip: an agent on each host advertises the host, and every member
// knows all others.
//
// A Member is part of a cluster: an agent, which advertises its Meta, or an observer, which has
// none and only listens. A Source is an observer, and a discovery.Discoverer and Watcher: the
// agents' hosts, the oldest start first.
//
//	agent: Join(Config{Meta}) ─┐                                 ┌→ Watch → discovery.Poll → the driver
//	agent: Join(Config{Meta}) ─┼ memberlist ┼ Member → roster → Source
//	agent: Join(Config{Meta}) ─┘ (encrypted, of one label)       └→ Agent(host): where to launch
//
// What the driver may rely on:
//
//   - A host that leaves is draining first, and then gone. One that vanishes is taken off the list
//     within 2 s: probes find out, and a member that is suspected has time to refute it.
//   - A restarted agent is another incarnation. Its host is missing from one list, so that it is
//     seen to leave and to return, even where the restart was too quick to be noticed.
//   - Of two agents that claim one host, the one that was there first is kept; the other is
//     refused, and told so.
//   - An observer that hears no member knows nothing: discovery fails then, and the last list
//     stays. While all are silent, the silence of one does not count as its death.
//   - After a partition, members go back to their seeds, and to those that they lost.
//
// The messages are those of hashicorp/memberlist, encrypted by AES-256-GCM with a key that is
// derived from the cluster's. A holder of the cluster's key can send anything; messages of others
// are dropped. SetKeys replaces the key without a restart.
package gossip
