package scheduler

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/link"
)

// attachTo attaches a peer whose connection is read.
func attachTo(t *testing.T, s *Scheduler, h *taskspb.TasksHello) (*peer, *link.Link[*taskspb.FromTasks], error) {
	near, far := net.Pipe()
	read := make(chan struct{})
	go func() {
		defer close(read)
		_, _ = io.Copy(io.Discard, far)
	}()
	l := link.New(near, func() *taskspb.FromTasks { return &taskspb.FromTasks{} })
	t.Cleanup(func() {
		l.Close()
		far.Close()
		<-read
	})
	p, err := s.attach(identity.Subject{}, h, l)
	return p, l, err
}

// FuzzMessages: whatever a client and two workers send, the scheduler continues, and its counts
// stay valid.
func FuzzMessages(f *testing.F) {
	hash := []byte("12345678")
	one := &taskspb.TaskGroup{Function: &taskspb.TaskFunction{Name: "f", Hash: hash}, Demand: []*taskspb.Amount{{Name: "cpu", Milli: 1000}}}
	of := &taskspb.Attempt{Client: 1, N: 1}
	for _, all := range [][]*taskspb.ToTasks{
		{{Groups: []*taskspb.TaskGroup{one}, Submits: []*taskspb.SubmitTask{{N: 1}, {N: 2, Options: &taskspb.TaskOptions{Needs: []uint64{1, 2}}}}, Status: true}},
		{{Leases: []*taskspb.LeaseAnswer{{Granted: true}}, Dones: []*taskspb.TaskDone{{Of: of, Result: &taskspb.TaskResult{State: 3, Size: 1 << 63}}}}},
		{{Cancels: []*taskspb.CancelTask{{N: 1}}, Releases: []uint64{1, 2, 2}, Left: true}},
		{{Leaving: true, Left: true, Returned: []*taskspb.Attempt{of}, Kept: []*taskspb.Attempt{of}}},
	} {
		var text []byte
		for _, m := range all {
			b, err := proto.Marshal(m)
			if err != nil {
				f.Fatal(err)
			}
			for who := range byte(3) {
				text = append(append(text, who, byte(len(b))), b...)
			}
		}
		f.Add(text)
	}
	log := logrus.New()
	log.SetOutput(io.Discard)
	f.Fuzz(func(t *testing.T, text []byte) {
		s := New(Config{Log: log})
		t.Cleanup(s.Close)
		fn := []*taskspb.TaskFunction{{Name: "f", Hash: hash}}
		offers := []*taskspb.Amount{{Name: "cpu", Milli: 1000}}
		var peers []*peer
		var links []*link.Link[*taskspb.FromTasks]
		for i := range uint64(3) {
			p, l, err := attachTo(t, s, &taskspb.TasksHello{Session: i + 1, Worker: i > 0, Host: "a", Functions: fn, Offers: offers})
			if err != nil {
				t.Fatal(err)
			}
			peers, links = append(peers, p), append(links, l)
		}
		for len(text) >= 2 {
			who, n := text[0]%3, min(int(text[1]), len(text)-2)
			var m taskspb.ToTasks
			if proto.Unmarshal(text[2:2+n], &m) == nil {
				_ = s.take(peers[who], links[who], &m) // an error ends the connection
			}
			text = text[2+n:]
		}
		s.mu.Lock()
		if q := s.q.Status(time.Now()); q.Waiting < 0 || q.Ready < 0 || q.Running < 0 {
			t.Errorf("it counts %+v", q)
		}
		s.unlock()
		for _, p := range peers {
			s.Expel(p.from.Incarnation)
		}
	})
}
