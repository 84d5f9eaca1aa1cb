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
//   - A host that leaves is first draining, and then gone. A host that vanishes is removed from the
//     list within 2 s: probes notice it, and a suspected member has time to refute the suspicion.
//   - A restarted agent is another incarnation. Watch leaves its host out of one list, so that it
//     visibly leaves and returns, even if the restart was too quick to be noticed. If one list is
//     not enough for a host to be gone, the host does not leave and keeps its age. That is the case
//     if RemovalAfter of discovery.Poll is above 1, if all agents restart at once (that list is
//     empty), or if another source lists the host. Discover does not show restarts.
//   - If two agents claim one host, the first one is kept; the other is refused, and learns of
//     that.
//   - If an observer hears no member, discovery fails, and the last list stays. While all members
//     are silent, the silence of one does not count as its death.
//   - After a partition, members contact their seeds, and the members that they lost.
//
// The messages are those of hashicorp/memberlist, encrypted by AES-256-GCM with a key derived from
// the cluster's key. Anyone who has the cluster's key can send any message; other messages are
// dropped. SetKeys replaces the key without a restart.
package gossip
