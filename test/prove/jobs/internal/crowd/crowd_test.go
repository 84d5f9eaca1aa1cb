package crowd

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(Role); role != "" {
		if err := Play(context.Background(), role, os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// TestSmallCrowd: a small job of several processes runs all phases: it forms a world, grows,
// shrinks, loses one in a hundred and a tenth of its workers at once, then a third of its hosts,
// and is stopped.
func TestSmallCrowd(t *testing.T) {
	sc := Scenario{Workers: 50, Each: 20, Result: filepath.Join(t.TempDir(), "result")}
	text, err := json.Marshal(sc)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "--events-file", sc.Result+".events", "--scenario", string(text))
	cmd.Env = append(os.Environ(), Role+"="+Driver)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var s Sample
	if text, err = os.ReadFile(sc.Result); err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range quantities {
		if *q.of(&s) <= 0 {
			t.Errorf("%s: %v", q.name, *q.of(&s))
		}
	}
}

func TestTable(t *testing.T) {
	few := Median([]Sample{{Formed: 30}, {Formed: 10}, {Formed: 20}})
	text := Table([]int{100, 1000}, []Sample{few, {Formed: 200, Acked: 5}})
	for _, want := range []string{
		"| workers | 100 | 1000 | exponent |\n|---|---|---|---|\n",
		"| from the start until all have the first world, ms | 20 | 200 | 1.00 |\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the table has no %q:\n%s", want, text)
		}
	}
	if got := exponent(10, 1000, 3, 30); got < 0.499 || got > 0.501 {
		t.Errorf("ten times as much for a hundred times as many: exponent %v", got)
	}
}
