package collective

// Local returns the n connected groups of one process, by rank, generation 0; each is used by a goroutine of its own. They
// start no goroutines. An n below 1 gives none.
func Local(n int) []*Group {
	w := make(localWorld, max(n, 0))
	for i := range w {
		w[i] = newGroup(0, i, n)
		if n > 1 {
			w[i].path = &localPath{world: w, rank: i}
		}
	}
	return w
}

type localWorld []*Group

// localPath moves frames by copying from the sender's memory to the receiver's, on the goroutine of whichever comes second.
type localPath struct {
	world localWorld
	rank  int
}

func (p *localPath) send(to int, o *outgoing) { p.world[to].boxes[p.rank].deliver(o) }

func (p *localPath) flood(n *notice) {
	for i, g := range p.world {
		if i != p.rank {
			g.fail(*n)
		}
	}
}

func (p *localPath) release() {}

// quiesce takes back the requests of both kinds: those for frames, and the frames that wait where they were sent. After a
// leave there are none, and what has been kept for slower ranks must stay.
func (p *localPath) quiesce() {
	if p.world[p.rank].err() == nil {
		return
	}
	for i, g := range p.world {
		if i != p.rank {
			p.world[p.rank].boxes[i].close()
			g.boxes[p.rank].close()
		}
	}
}

func (p *localPath) leave() {
	for i, g := range p.world {
		if i != p.rank {
			g.boxes[p.rank].end(p.world[p.rank].finished.Load())
		}
	}
}
