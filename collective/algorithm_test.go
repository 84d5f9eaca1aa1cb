package collective

import (
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
)

func TestParseAlgorithm(t *testing.T) {
	for a := range Algorithm(operation.Algorithms) {
		if back, err := ParseAlgorithm(a.String()); back != a || err != nil {
			t.Errorf("%v is read as %v, %v", a, back, err)
		}
	}
	if a, err := ParseAlgorithm(""); a != Auto || err != nil {
		t.Errorf("nothing is read as %v, %v", a, err)
	}
	if a, err := ParseAlgorithm("Ring"); a != Ring || err != nil {
		t.Errorf("Ring is read as %v, %v", a, err)
	}
	if _, err := ParseAlgorithm("rong"); err == nil || !strings.Contains(err.Error(), `"rong"`) ||
		!strings.Contains(err.Error(), "rabenseifner") {
		t.Errorf("rong: %v", err)
	}
}
