package scheduler

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
)

const (
	// recordAt is the size of a record, in bytes, beyond which a new one is started. A record with
	// a single part may be larger; see the bounds of package link.
	recordAt = 1 << 20
	// mostUnwritten is the number of bytes that may wait for a disk that accepts no writes.
	mostUnwritten = 64 << 20
	// leastCompacted is the size in bytes up to which a journal is not compacted.
	leastCompacted = 64 << 20
	// slice is the largest number of tasks that snapshot collects without releasing the lock.
	slice = 1000
	// gatherFor is how long the writer waits for more to write. Nothing urgent waits for it.
	gatherFor = 2 * time.Millisecond
	// acceptWithin and acceptAt bound the delay of an acknowledgement to a client, as a time and as
	// a number of tasks. Until then it waits for the next message with a result, which can include
	// it.
	acceptWithin = 50 * time.Millisecond
	acceptAt     = 512
	// returning is the time from the arrival of the first worker to the start of the tasks of a
	// journal. Meanwhile other workers may come back with the tasks that they run.
	returning = 2 * time.Second
)

// records is the state of the journal of tasks.
type records struct {
	recorder *recorder // nil: there is no journal
	groups   int       // number of groups that have been recorded
	held     bool      // tasks of the journal wait for workers that may still run them
}

// recorder writes what must survive this process to the journal. What has been acknowledged is on
// disk. The scheduler's lock protects its fields, except the keeper, which only the writing
// goroutine uses.
type recorder struct {
	s       *Scheduler
	k       *journal.Keeper
	pages                 // to be written
	waiting int           // size of these pages
	writing int           // size of the records that the writer has taken
	acks    map[*peer]ack // to be sent when the records are written
	tells   []queue.ID    // tasks whose outcomes are sent to their clients then
	telling bool          // tell is sending such outcomes
	lost    bool          // records were dropped: a snapshot is needed
	why     error         // why the journal cannot be written
	news    wake.Flag
	stop    chan struct{}
	done    chan struct{}
}

// ack acknowledges the tasks of a client, or the results of a worker, up to a number. It is sent
// once they are on disk.
type ack struct{ accepted, heard uint64 }

// begin starts the writer. If j is nil, the journal is created with the first record.
func (s *Scheduler) begin(path string, j *journal.Journal) {
	s.recorder = &recorder{
		s: s, acks: map[*peer]ack{}, news: wake.New(), stop: make(chan struct{}), done: make(chan struct{}),
		k: &journal.Keeper{Rules: journal.Rules{
			Path: path, Run: s.cfg.Run, Least: leastCompacted, Keep: mostUnwritten,
			Log: s.cfg.Log, Level: logrus.ErrorLevel, Name: "tasks: the journal",
			Follows: "tasks keep running, but clients and workers keep what they have sent until it can be written",
		}},
	}
	if j != nil {
		s.recorder.k.Take(j)
	}
	go s.recorder.write()
}

// note adds a part to the record that is written next. part is what add adds, and determines the
// size; nil means that add adds only a few numbers. The caller holds the lock.
func (s *Scheduler) note(part proto.Message, add func(*taskspb.TasksRecord)) {
	b := s.recorder
	if b == nil || b.lost {
		return
	}
	b.waiting += b.pages.add(part, add)
	if b.waiting > mostUnwritten && b.why != nil || int64(b.waiting) > s.cfg.Memory {
		b.drop()
	}
	b.news.Set()
}

// drop drops the records that are to be written. The caller holds the lock.
func (b *recorder) drop() { b.pages, b.waiting, b.lost = pages{}, 0, true }

// ackLater acknowledges to a peer what it has sent so far, once everything noted so far is written.
// The caller holds the lock.
func (s *Scheduler) ackLater(p *peer) {
	if s.cfg.Repeated && !p.worker {
		return
	}
	if s.recorder == nil {
		p.acknowledge(ack{p.accepted, p.heard})
		return
	}
	s.recorder.acks[p] = ack{p.accepted, p.heard}
	s.recorder.news.Set()
}

// tellLater sends the outcome of a task to its client once everything noted until the caller
// releases the lock is written. It returns false, and does nothing, if there is no journal, the
// journal cannot be written, or recorder.tell is the caller. The caller holds the lock.
func (s *Scheduler) tellLater(id queue.ID) bool {
	b := s.recorder
	if b == nil || b.telling || b.why != nil {
		return false
	}
	b.tells = append(b.tells, id)
	b.news.Set()
	return true
}

// tell sends the outcomes of tasks to their clients. The caller holds the lock.
func (b *recorder) tell(all []queue.ID) {
	b.telling = true
	defer func() { b.telling = false }()
	for _, id := range all {
		if p := b.s.peers[id.Client]; p != nil && p.link != nil {
			b.s.tell(p, id)
		}
	}
}

// ackDones calls ackLater for a worker that leaves or has sent many results since the last call:
// workers can keep results for a while. The caller holds the lock.
func (s *Scheduler) ackDones(p *peer) {
	if p.leaving || p.untold > tellAt {
		p.untold = 0
		s.ackLater(p)
	}
}

// acknowledge puts an acknowledgement on the link of a peer, which need not repeat what it covers.
// The caller holds the lock.
func (p *peer) acknowledge(a ack) {
	p.durable = a
	switch {
	case p.link == nil:
	case p.worker:
		p.put(nil, func(m *taskspb.FromTasks) { m.Heard = a.heard })
	default:
		_ = p.link.Put(nil, func(m *taskspb.FromTasks) { m.Accepted = a.accepted })
		p.owe(a.accepted)
	}
}

// debts are the clients for which an acknowledgement was put on the link but not sent yet.
type debts struct {
	owing []*peer
	owes  *time.Timer // fires payOff
}

// owe makes sure that the acknowledgement put for a client is sent soon, even if nothing else is
// sent. The caller holds the lock.
func (p *peer) owe(accepted uint64) {
	switch {
	case accepted >= p.told+acceptAt:
		p.told = accepted
		p.touch()
	case !p.owed && !p.s.closed:
		p.owed = true
		p.s.debts.add(p)
	}
}

// add adds a client.
func (d *debts) add(p *peer) {
	if d.owing = append(d.owing, p); len(d.owing) == 1 {
		d.owes.Reset(acceptWithin)
	}
}

// payOff sends the acknowledgements of all clients in owing.
func (s *Scheduler) payOff() {
	s.mu.Lock()
	defer s.unlock()
	for _, p := range s.owing {
		p.owed, p.told = false, p.durable.accepted
		if p.link != nil {
			p.touch()
		}
	}
	clear(s.owing)
	s.owing = s.owing[:0]
}

// write writes what is noted until stop is closed, with one sync for everything that has
// accumulated.
func (b *recorder) write() {
	defer close(b.done)
	defer b.k.Close()
	for more := true; more; {
		var again <-chan time.Time
		if at, failing := b.k.Next(); failing {
			again = time.After(time.Until(at))
		}
		select {
		case <-b.news:
			select {
			case <-time.After(gatherFor):
			case <-b.stop:
				more = false
			}
		case <-again:
		case <-b.stop:
			more = false
		}
		if !more {
			b.k.Hurry()
		}
		b.commit(time.Now())
	}
}

// commit writes what is noted, and then acknowledges it to the peers.
func (b *recorder) commit(now time.Time) {
	s := b.s
	s.mu.Lock()
	records, acks, tells, lost := b.records, b.acks, b.tells, b.lost
	if len(records) == 0 && len(acks) == 0 && len(tells) == 0 && !lost && b.why == nil {
		s.mu.Unlock()
		return
	}
	b.writing += b.waiting
	b.pages, b.waiting, b.acks, b.tells, b.lost = pages{}, 0, map[*peer]ack{}, nil, false
	s.mu.Unlock()
	err := b.append(now, records, lost)
	s.mu.Lock()
	defer s.unlock()
	b.writing, b.why = b.k.Waiting(), err
	b.tell(tells)
	if err != nil {
		b.tell(b.tells)
		b.tells = nil
		if b.lost || b.k.Lacking() {
			b.drop()
		}
		for p, a := range acks {
			if _, later := b.acks[p]; !later {
				b.acks[p] = a
			}
		}
		return
	}
	for p, a := range acks {
		if s.peers[p.session] == p {
			p.acknowledge(a)
		}
	}
}

// append writes records to disk, or a snapshot if records are lost or one is due. It returns nil
// when everything is on disk.
func (b *recorder) append(now time.Time, records []*taskspb.TasksRecord, lost bool) error {
	if lost {
		b.k.Drop()
	}
	for _, r := range records {
		text, err := proto.Marshal(r)
		if err != nil {
			b.k.Drop()
			break
		}
		_ = b.k.Append(now, text) // on failure it is kept, or the snapshot has it
	}
	if b.k.Due(now, false) {
		_ = b.k.Compact(now, b.snapshot) // Sync returns the error
	}
	return b.k.Sync(now)
}

// snapshot yields records of everything that is known. Releases come last, because a task that was
// released is kept for tasks that need it, which may be in other records. A release that is noted
// meanwhile is not part of the snapshot: a task that needs the released one may have been submitted
// before it, and the record of that task follows the snapshot.
func (b *recorder) snapshot(yield func([]byte) bool) {
	s := b.s
	var all pages
	s.mu.Lock()
	s.firstPages(&all)
	ids := s.q.All()
	released := s.q.Released(ids)
	s.mu.Unlock()
	for {
		for _, r := range all.records {
			text, err := proto.Marshal(r)
			if err != nil || len(text) > 0 && !yield(text) {
				return
			}
		}
		all = pages{}
		switch {
		case len(ids) > 0:
			ids = s.taskPages(&all, ids)
		case len(released) > 0:
			released = releasePages(&all, released)
		default:
			return
		}
	}
}

// taskPages adds the first few of the tasks and returns the rest.
func (s *Scheduler) taskPages(to *pages, ids []queue.ID) []queue.ID {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := 0; i < slice && len(ids) > 0 && len(to.records) < 2; i++ {
		s.noteAll(to, ids[0])
		ids = ids[1:]
	}
	return ids
}

// releasePages adds the releases of the first few of the tasks and returns the rest.
func releasePages(to *pages, ids []queue.ID) []queue.ID {
	for len(ids) > 0 && len(to.records) < 2 {
		name := &taskspb.TaskName{Client: ids[0].Client, N: ids[0].N}
		to.add(nil, func(r *taskspb.TasksRecord) { r.Releases = append(r.Releases, name) })
		ids = ids[1:]
	}
	return ids
}

// pages are records that are no larger than recordAt, except records with a single part.
type pages struct {
	records []*taskspb.TasksRecord // parts are added to the last one
	size    int                    // size of the last one
}

// add adds a part, and returns an upper bound of the bytes that it takes.
func (p *pages) add(part proto.Message, add func(*taskspb.TasksRecord)) int {
	bytes := link.SizeOf(part)
	if len(p.records) == 0 || p.size+bytes > recordAt {
		p.records, p.size = append(p.records, &taskspb.TasksRecord{}), 0
	}
	p.size += bytes
	add(p.records[len(p.records)-1])
	return bytes
}

// firstPages adds what a snapshot contains before the tasks. The caller holds the lock.
func (s *Scheduler) firstPages(to *pages) {
	for i := 0; s.q.GroupAt(i) != nil; i++ {
		g := groupOf(s.q.GroupAt(i))
		to.add(g, func(r *taskspb.TasksRecord) { r.Groups = append(r.Groups, g) })
	}
	for _, p := range s.peers {
		if p.worker {
			continue
		}
		c := clientOf(p)
		to.add(c, func(r *taskspb.TasksRecord) { r.Clients = append(r.Clients, c) })
		for id := range p.puts {
			_, size := s.q.Holders(id)
			use := &taskspb.TaskUse{Client: p.session, Value: id[:], Size: uint64(size), Put: true}
			to.add(use, func(r *taskspb.TasksRecord) { r.Uses = append(r.Uses, use) })
		}
	}
}

// noteAll adds everything that must be known about a task, except its release. The caller holds the
// lock.
func (s *Scheduler) noteAll(to *pages, id queue.ID) {
	t, ok := s.q.Saved(id)
	if !ok {
		return
	}
	sub := submitOf(t.Task)
	to.add(sub, func(r *taskspb.TasksRecord) { r.Submits = append(r.Submits, sub) })
	if t.Tries > 0 || len(t.Killers) > 0 {
		loss := &taskspb.TaskLoss{Client: id.Client, N: id.N, Tries: uint32(t.Tries), Killers: t.Killers}
		to.add(loss, func(r *taskspb.TasksRecord) { r.Losses = append(r.Losses, loss) })
	}
	if t.Result.State.Over() {
		over := &taskspb.TaskOver{Client: id.Client, N: id.N, Result: wireResult(t.Result)}
		to.add(over, func(r *taskspb.TasksRecord) { r.Overs = append(r.Overs, over) })
	}
}

func submitOf(t queue.Task) *taskspb.TaskSubmitted {
	sub := &taskspb.TaskSubmitted{Client: t.ID.Client, Group: uint32(t.Group.Index), Task: &taskspb.SubmitTask{N: t.ID.N, Priority: t.Priority, Args: t.Spec}}
	if o := t.Options; o != nil && !queue.AreDefaults(o) {
		to := &taskspb.TaskOptions{
			Prefer: o.Prefer, Pin: o.Pin, Retries: uint32(o.Retries), Again: o.Again, LimitMs: uint64(o.TimeLimit.Milliseconds()),
		}
		for _, id := range o.Needs {
			to.Needs = append(to.Needs, id.N)
		}
		for _, id := range o.Objects {
			to.Values = append(to.Values, id[:])
		}
		sub.Task.Options = to
	}
	return sub
}

func groupOf(g *queue.Group) *taskspb.TaskGroup {
	at := strings.LastIndexByte(g.Function, '@') // as functionKey has put it
	hash, _ := hex.DecodeString(g.Function[at+1:])
	of := &taskspb.TaskGroup{Function: &taskspb.TaskFunction{Name: g.Function[:at], Hash: hash}}
	for _, a := range g.Demand {
		of.Demand = append(of.Demand, &taskspb.Amount{Name: a.Name, Milli: a.Milli})
	}
	return of
}

func clientOf(p *peer) *taskspb.TaskClient {
	f := p.from
	return &taskspb.TaskClient{
		Session: p.session, Host: p.host, Pid: p.pid, RunId: f.RunID, Role: string(f.Role), FromHost: f.Host, Index: int64(f.Index),
		Incarnation: f.Incarnation, User: f.User, Uid: f.UID,
	}
}

// noteOvers records the outcomes of tasks, and the workers that were lost while they ran tasks. The
// caller holds the lock.
func (s *Scheduler) noteOvers() {
	for _, id := range s.q.Over {
		if r, ok := s.q.Result(id); ok {
			over := &taskspb.TaskOver{Client: id.Client, N: id.N, Result: s.sharedResult(r)}
			s.note(over, func(m *taskspb.TasksRecord) { m.Overs = append(m.Overs, over) })
		}
	}
	for _, id := range s.q.Losses {
		if t, ok := s.q.Saved(id); ok {
			loss := &taskspb.TaskLoss{Client: id.Client, N: id.N, Tries: uint32(t.Tries), Killers: t.Killers}
			s.note(loss, func(m *taskspb.TasksRecord) { m.Losses = append(m.Losses, loss) })
		}
	}
	s.q.Over, s.q.Losses = s.q.Over[:0], s.q.Losses[:0]
}

// Open is like New, for a job that is resumed: it continues with the tasks in the journal of cfg.
func Open(cfg Config) (*Scheduler, error) {
	path := cfg.Journal
	cfg.Journal = ""
	s := New(cfg)
	r := replay{s: s, now: time.Now()}
	j, _, err := journal.Open(path, r.next)
	if errors.Is(err, fs.ErrNotExist) {
		s.begin(path, nil)
		return s, nil
	}
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("tasks: the journal: %w", err)
	}
	if len(s.q.Objects()) > 0 { // nobody is connected yet
		if _, err := s.openStore(); err != nil {
			s.cfg.Log.WithError(err).Warn("tasks: the scheduler has no store")
		}
	}
	s.mu.Lock()
	defer s.unlock()
	if s.held = s.q.Suspended() > 0; s.held {
		s.cfg.Log.Infof("tasks: %d tasks of %d clients continue", s.q.Suspended(), len(s.peers))
	}
	for _, id := range s.q.Objects() {
		s.storedHere(r.now, id)
	}
	s.q.Out, s.q.Over, s.q.Losses = nil, nil, nil
	for s.q.GroupAt(s.groups) != nil {
		s.besides += costOfGroup(groupOf(s.q.GroupAt(s.groups)))
		s.groups++
	}
	for _, p := range s.peers {
		p.gone = time.AfterFunc(resumedGrace, func() { s.giveUp(p) })
	}
	s.begin(path, j)
	return s, nil
}

// resumeTasks starts the tasks of the journal that no worker has brought back.
func (s *Scheduler) resumeTasks() {
	s.mu.Lock()
	defer s.unlock()
	if s.held && !s.closed {
		s.held = false
		s.q.Resume(time.Now())
		s.act()
	}
}

// replay rebuilds the state from a journal.
type replay struct {
	s   *Scheduler
	now time.Time
}

// next applies a record. Its content may have been applied already.
func (r *replay) next(payload []byte) error {
	var m taskspb.TasksRecord
	if err := proto.Unmarshal(payload, &m); err != nil {
		return fmt.Errorf("tasks: a record: %w", err)
	}
	s := r.s
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range m.GetClients() {
		if s.peers[c.GetSession()] == nil && c.GetSession() != 0 {
			s.peers[c.GetSession()] = &peer{
				s: s, session: c.GetSession(), profile: profileOf(&taskspb.TasksHello{Host: c.GetHost(), Pid: c.GetPid()}),
				from: identity.Subject{
					RunID: c.GetRunId(), Role: identity.Role(c.GetRole()), Host: c.GetFromHost(), Index: int(c.GetIndex()),
					Incarnation: c.GetIncarnation(), User: c.GetUser(), UID: c.GetUid(),
				},
			}
		}
	}
	for _, g := range m.GetGroups() {
		s.q.Group(functionKey(g.GetFunction()), demandOf(g.GetDemand()))
	}
	for _, u := range m.GetUses() {
		if p := s.peers[u.GetClient()]; p != nil && u.GetPut() {
			if err := s.putBy(r.now, p, []*taskspb.PutValue{{Value: u.GetValue(), Size: u.GetSize()}}); err != nil {
				return err
			}
		} else if p != nil {
			s.unputBy(p, [][]byte{u.GetValue()})
		}
	}
	for _, sub := range m.GetSubmits() {
		if err := r.submitted(sub); err != nil {
			return err
		}
	}
	for _, l := range m.GetLosses() {
		s.q.RestoreLosses(queue.ID{Client: l.GetClient(), N: l.GetN()}, int(l.GetTries()), l.GetKillers())
	}
	for _, o := range m.GetOvers() {
		s.q.RestoreOver(r.now, queue.ID{Client: o.GetClient(), N: o.GetN()}, resultOf(o.GetResult()))
	}
	for _, t := range m.GetReleases() {
		s.q.Release(r.now, queue.ID{Client: t.GetClient(), N: t.GetN()})
	}
	for _, session := range m.GetGone() {
		if p := s.peers[session]; p != nil && !p.worker {
			delete(s.peers, session)
			s.endClient(r.now, p)
		}
	}
	s.q.Out, s.q.Over, s.q.Losses = s.q.Out[:0], nil, nil
	return nil
}

func (r *replay) submitted(sub *taskspb.TaskSubmitted) error {
	s, t := r.s, sub.GetTask()
	g, p := s.q.GroupAt(int(sub.GetGroup())), s.peers[sub.GetClient()]
	if g == nil {
		return fmt.Errorf("tasks: a record of a task of the group %d, which is not known", sub.GetGroup())
	}
	if p == nil {
		return nil // the client has been removed since
	}
	if p.accepted = max(p.accepted, t.GetN()); !s.cfg.Repeated {
		p.durable.accepted = p.accepted
	}
	s.q.Restore(queue.Task{
		ID: queue.ID{Client: p.session, N: t.GetN()}, Group: g, Priority: t.GetPriority(),
		Options: optionsOf(p.session, t.GetOptions()), Spec: t.GetArgs(), Cost: costOf(t),
	})
	return nil
}
