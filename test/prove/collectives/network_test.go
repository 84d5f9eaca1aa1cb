package main

import (
	"strings"
	"testing"
)

func TestParseSockets(t *testing.T) {
	const text = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:9C41 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11 1 0 100 0 0 10 0
   1: 0100007F:9C41 0200007F:8A02 01 00000100:0000000F 01:00000014 00000000     0        0 12 2 0 20 4 30 10 -1
`
	all := parseSockets(text)
	if len(all) != 1 || all["12"] != (socket{"0100007F:9C41", "0200007F:8A02", 256, 15}) {
		t.Errorf("%+v", all)
	}
}

func TestStacks(t *testing.T) {
	const dump = `SIGQUIT: quit
PC=0x4 m=0 sigcode=0

goroutine 1 [sync.WaitGroup.Wait]:
sync.runtime_SemacquireWaitGroup(0x1?, 0x0?)
	/go/src/runtime/sema.go:114 +0x2e
main.(*actor).act(0xc000)
	/x/rank.go:210 +0x1

goroutine 9 gp=0x218 m=7 mp=0x21 [chan receive, 2 minutes]:
github.com/hvdrun/hvdrun/collective.(*call).pause(0xc000, {0x1, 0x2})
	/x/collective/group.go:465 +0x165
created by github.com/hvdrun/hvdrun/collective.(*Group).engine in goroutine 7
	/x/collective/async.go:240 +0x1

goroutine 10 [IO wait]:
github.com/hvdrun/hvdrun/collective.(*Endpoint).accept(0xc000)
	/x/collective/endpoint.go:1 +0x1

rax 0x0
`
	want := "    goroutine 9 [chan receive, 2 minutes]: collective.(*call).pause group.go:465 < collective.(*Group).engine async.go:240\n"
	if got := stacks(dump); got != want {
		t.Errorf("%s", got)
	}
	if got := tail(strings.Repeat("x", 5000)); len(got) > 2100 {
		t.Errorf("%d bytes", len(got))
	}
}
