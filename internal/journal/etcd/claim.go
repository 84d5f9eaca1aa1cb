package etcd

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/hvdrun/hvdrun/internal/retry"
)

// renewals is the number of renewals of a claim within the time of its lease.
const renewals = 20

// errLost: the claim has ended, or may have, so another driver may run the job.
var errLost = errors.New("etcd: the claim to the job is lost")

// Claim is a driver's claim to a job, through which it writes the job's copy. It implements
// journal.Mirror. Its methods may be called by many goroutines.
type Claim struct {
	// ID identifies the claim, and Previous the claim before it; empty: this is the job's first
	// claim.
	ID, Previous string

	store *Store
	names names
	lease clientv3.LeaseID
	proof string // the value of the key driver, which differs in each claim

	ctx     context.Context
	stop    context.CancelFunc
	running sync.WaitGroup
	lost    chan struct{} // closed when the claim may have ended
	once    sync.Once

	backlog

	position // used by the writing goroutine
}

// backlog holds the tasks to be written.
type backlog struct {
	mu      sync.Mutex
	work    []task
	queued  uint64        // number of tasks so far
	written uint64        // number of tasks done
	failure error         // of the last attempt; nil: it succeeded
	change  chan struct{} // closed and replaced when work or written changes
}

// task is one write. Tasks are written in order.
type task struct {
	records [][]byte
	replace bool // the records replace all earlier ones
	behind  bool // marks the journal as lacking records
	file    string
	value   []byte
}

// Claim makes the caller the job's driver until Release, or until it has not reached etcd for the
// time of the lease. who is the caller's name for others, such as that of its machine. If another
// driver has the claim, the error is a *HeldError; Await waits for the end of that claim.
func (s *Store) Claim(ctx context.Context, run, who string) (*Claim, error) {
	n := s.names(run)
	id := rand.Text()
	began := time.Now()
	call, cancel := context.WithTimeout(ctx, callBound)
	defer cancel()
	proof := s.sealed(n.driver(), []byte(who)) // each sealing has its own nonce
	lease, err := s.client.Grant(call, int64((s.cfg.Lease+time.Second-1)/time.Second))
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	r, err := s.client.Txn(call).
		If(clientv3.Compare(clientv3.CreateRevision(n.driver()), "=", 0)).
		Then(clientv3.OpPut(n.driver(), proof, clientv3.WithLease(lease.ID)),
			clientv3.OpGet(n.last()), clientv3.OpPut(n.last(), s.sealed(n.last(), []byte(id))), clientv3.OpGet(n.current())).
		Else(clientv3.OpGet(n.driver())).Commit()
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	if !r.Succeeded {
		by := "another machine"
		if kvs := r.Responses[0].GetResponseRange().Kvs; len(kvs) > 0 {
			if text, err := s.opened(n.driver(), kvs[0].Value); err == nil {
				by = string(text)
			}
		}
		_, _ = s.client.Revoke(call, lease.ID) // it would expire by itself
		return nil, &HeldError{by}
	}
	c := &Claim{
		ID: id, store: s, names: n, lease: lease.ID, proof: proof,
		lost: make(chan struct{}), backlog: backlog{change: make(chan struct{})},
	}
	if err := c.begin(r); err != nil {
		_, _ = s.client.Revoke(call, lease.ID)
		return nil, err
	}
	c.ctx, c.stop = context.WithCancel(context.Background())
	c.running.Go(func() { c.renew(began) })
	c.running.Go(c.write)
	return c, nil
}

// begin sets the claim's position and predecessor from what its transaction has read.
func (c *Claim) begin(r *clientv3.TxnResponse) error {
	if kvs := r.Responses[1].GetResponseRange().Kvs; len(kvs) > 0 {
		text, err := c.store.opened(c.names.last(), kvs[0].Value)
		if err != nil {
			return fmt.Errorf("etcd: %w", err)
		}
		c.Previous = string(text)
	}
	if kvs := r.Responses[3].GetResponseRange().Kvs; len(kvs) > 0 {
		at, err := c.store.position(c.names, kvs[0].Value)
		if err != nil {
			return fmt.Errorf("etcd: %w", err)
		}
		c.number = at.number
	}
	return nil
}

// Lost returns a channel that is closed when the claim has ended, or may have, because etcd was
// unreachable or took no write for four fifths of the lease. After that the driver must make no
// more decisions.
func (c *Claim) Lost() <-chan struct{} { return c.lost }

func (c *Claim) lose() { c.once.Do(func() { close(c.lost) }) }

// bound returns how long the claim lasts after the last renewal, and after the first failure of a
// write.
func (c *Claim) bound() time.Duration { return c.store.cfg.Lease * 4 / 5 }

// renew renews the lease until the claim ends. A renewal counts from the time it was sent.
func (c *Claim) renew(last time.Time) {
	bound := c.bound()
	ticker := time.NewTicker(c.store.cfg.Lease / renewals)
	defer ticker.Stop()
	failures := retry.Row{Least: tellEvery}
	for {
		began := time.Now()
		call, cancel := context.WithDeadline(c.ctx, last.Add(bound))
		_, err := c.store.client.KeepAliveOnce(call, c.lease)
		cancel()
		switch {
		case c.ctx.Err() != nil:
			return
		case err == nil:
			last = began
			failures.Ended()
		case errors.Is(err, rpctypes.ErrLeaseNotFound), time.Since(last) >= bound:
			c.lose()
			return
		default:
			failures.Warn(c.store.cfg.Log, time.Now(), fmt.Sprintf("the claim to the job is not renewed, and ends %v after the last time", bound), err)
		}
		select {
		case <-ticker.C:
		case <-c.ctx.Done():
			return
		}
	}
}

// add queues a task.
func (c *Claim) add(t task) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if last := len(c.work) - 1; last >= 0 && t.replace {
		// Records that are replaced need not be written; files keep their places.
		for i := range c.work {
			c.work[i].records, c.work[i].replace, c.work[i].behind = nil, false, false
		}
	}
	c.work = append(c.work, t)
	c.queued++
	c.changed()
}

// changed wakes all that wait for a change; c.mu is held.
func (c *Claim) changed() {
	close(c.change)
	c.change = make(chan struct{})
}

// Append implements journal.Mirror.
func (c *Claim) Append(payload []byte) {
	c.add(task{records: [][]byte{append([]byte(nil), payload...)}})
}

// Replace implements journal.Mirror.
func (c *Claim) Replace(records [][]byte) { c.add(task{replace: true, records: records}) }

// SetBehind implements journal.Mirror.
func (c *Claim) SetBehind() { c.add(task{behind: true}) }

// Put queues a file and takes ownership of value. Sync blocks until it is written.
func (c *Claim) Put(name string, value []byte) { c.add(task{file: name, value: value}) }

// Sync implements journal.Mirror: it blocks until etcd has everything that is queued, or the claim
// is lost.
func (c *Claim) Sync() error {
	c.mu.Lock()
	upTo := c.queued
	c.mu.Unlock()
	for {
		c.mu.Lock()
		done, change := c.written >= upTo, c.change
		c.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-change:
		case <-c.lost:
			return errLost
		case <-c.ctx.Done():
			return errLost
		}
	}
}

// State describes why the copy is not complete; "": it is.
func (c *Claim) State() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failure == nil || c.queued == c.written {
		return ""
	}
	return fmt.Sprintf("etcd lacks %d records: %v", c.queued-c.written, c.failure)
}

// write writes queued tasks until the claim ends.
func (c *Claim) write() {
	for {
		c.mu.Lock()
		tasks, change := c.work, c.change
		c.work = nil
		c.mu.Unlock()
		if len(tasks) == 0 {
			select {
			case <-change:
				continue
			case <-c.ctx.Done():
				return
			}
		}
		if !c.writeAll(tasks) {
			return
		}
		c.mu.Lock()
		c.written += uint64(len(tasks))
		c.changed()
		c.mu.Unlock()
	}
}

// writeAll writes tasks in order, with consecutive records in one stream. It returns false when the
// claim has ended.
func (c *Claim) writeAll(tasks []task) bool {
	var stream []byte
	flush := func() bool {
		ok := c.writeStream(stream, true)
		stream = nil
		return ok
	}
	for _, t := range tasks {
		ok := true
		switch {
		case t.file != "":
			name := c.names.file(t.file)
			ok = flush() && c.commit(clientv3.OpPut(name, c.store.sealed(name, t.value)))
		case t.behind:
			name := c.names.behind()
			ok = flush() && c.commit(clientv3.OpPut(name, c.store.sealed(name, nil)))
		case t.replace:
			stream = nil
			ok = c.replace(t.records)
		}
		if !ok {
			return false
		}
		if !t.replace {
			stream = frame(stream, t.records)
		}
	}
	return flush()
}

// frame appends records, each after its length.
func frame(stream []byte, records [][]byte) []byte {
	for _, r := range records {
		stream = append(binary.LittleEndian.AppendUint32(stream, uint32(len(r))), r...)
	}
	return stream
}

// writeStream appends bytes to the journal that is being written. counts: that journal is the
// current one.
func (c *Claim) writeStream(stream []byte, counts bool) bool {
	for len(stream) > 0 {
		part := stream[:min(len(stream), chunkBytes)]
		name := c.names.chunk(c.number, c.chunks)
		c.chunks++
		ops := []clientv3.Op{clientv3.OpPut(name, c.store.sealed(name, part))}
		if counts {
			ops = append(ops, c.putPosition())
		}
		if !c.commit(ops...) {
			return false
		}
		stream = stream[len(part):]
	}
	return true
}

// putPosition returns the write of the current journal's number and of the number of its parts.
func (c *Claim) putPosition() clientv3.Op {
	name := c.names.current()
	return clientv3.OpPut(name, c.store.sealed(name, []byte(c.position.String())))
}

// replace writes a new journal, makes it the current one, and deletes the others.
func (c *Claim) replace(records [][]byte) bool {
	old := c.number
	c.position = position{number: old + 1}
	// An earlier driver may have begun a journal with the same number.
	if !c.commit(clientv3.OpDelete(c.names.journal(c.number), clientv3.WithPrefix())) || !c.writeStream(frame(nil, records), false) {
		return false
	}
	end := c.names.journal(c.number)
	return c.commit(c.putPosition(), clientv3.OpDelete(c.names.behind())) &&
		c.commit(clientv3.OpDelete(c.names.journals(), clientv3.WithRange(end)))
}

// commit executes operations conditionally on the claim, and retries until etcd has executed them.
// It returns false when the claim has ended. It ends the claim after bound without success, because
// an etcd without space renews leases but refuses all writes.
func (c *Claim) commit(ops ...clientv3.Op) bool {
	began := time.Now()
	failures := retry.Row{Least: tellEvery}
	for {
		call, cancel := context.WithTimeout(c.ctx, min(callBound, c.bound()))
		r, err := c.store.client.Txn(call).
			If(clientv3.Compare(clientv3.Value(c.names.driver()), "=", c.proof)).Then(ops...).Commit()
		cancel()
		if c.ctx.Err() != nil {
			return false
		}
		c.mu.Lock()
		c.failure = err
		c.mu.Unlock()
		if err == nil {
			if failures.Ended() > 0 {
				c.store.cfg.Log.Warn("etcd takes the copy of the journal again")
			}
			if !r.Succeeded {
				c.lose()
			}
			return r.Succeeded
		}
		if since := time.Since(began); since >= c.bound() {
			c.store.cfg.Log.WithError(err).Errorf("etcd has not taken a write for %v, and the claim to the job is given up", since.Round(time.Second))
			c.lose()
			return false
		}
		failures.Warn(c.store.cfg.Log, time.Now(), fmt.Sprintf("etcd does not take the copy of the journal, and the claim to the job ends after %v of this", c.bound()), err)
		if retry.Pause(c.ctx, attemptPause) != nil {
			return false
		}
	}
}

// Release ends the claim. If finished is set, the job has ended, and Release deletes its copy;
// otherwise another driver may claim the job at once. It blocks for at most five seconds, and
// returns when all goroutines of the claim have ended.
func (c *Claim) Release(finished bool) error {
	c.stop()
	c.running.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), callBound)
	defer cancel()
	var err error
	if finished {
		_, err = c.store.client.Txn(ctx).
			If(clientv3.Compare(clientv3.Value(c.names.driver()), "=", c.proof)).
			Then(clientv3.OpDelete(c.names.base, clientv3.WithPrefix())).Commit()
	}
	_, revoked := c.store.client.Revoke(ctx, c.lease)
	if err = errors.Join(err, revoked); err != nil {
		return fmt.Errorf("etcd: %w", err)
	}
	return nil
}
