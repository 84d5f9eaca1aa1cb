// Package gossip finds hosts by gossip: an agent on each host says what it is, and everybody hears
// of everybody.
//
// A Member is one voice in a cluster: an agent, which advertises its Meta, or an observer, which
// has none and only listens. A Source is an observer that speaks to the driver as a
// discovery.Discoverer and Watcher: the agents' hosts, the oldest start first.
//
//	agent: Join(Config{Meta}) ─┐                                 ┌→ Watch → discovery.Poll → the driver
//	agent: Join(Config{Meta}) ─┼ memberlist ┼ Member → roster → Source
//	agent: Join(Config{Meta}) ─┘ (encrypted, of one label)       └→ Agent(host): where to launch
//
// What the driver may rely on:
//
//   - A host that leaves is draining first, and then gone. One that vanishes is taken off the list
//     within 2 s: probes find out, and everybody who is accused has time to contradict.
//   - A restarted agent is another incarnation. Its host is missing from one list, so that it is
//     seen to go and to come, be the restart so quick that nobody noticed its death.
//   - Of two agents that claim one host, the one that was there first is kept; the other is
//     refused, and told so.
//   - An observer that hears nobody knows nothing: discovery fails then, and the last list stays.
//     It takes nobody's silence for a death while everybody is silent.
//   - After a partition, members go back to their seeds, and to those that they lost.
//
// The messages are those of hashicorp/memberlist, encrypted by AES-256-GCM with a key that is
// derived from the cluster's. Who has the cluster's key can say anything in it; who has not is not
// heard.
package gossip
