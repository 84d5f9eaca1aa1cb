package elastic

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/hvdrun/hvdrun/elastic/internal/transfer"
)

// FuzzOpening: an opening of a sync that is accepted has all the parts that it names.
func FuzzOpening(f *testing.F) {
	layout := []string{`value "a": int`, `value "b": string`}
	for _, o := range []opening{
		{Commits: 3, Layout: layout, Carried: [][]byte{{1}, nil}},
		{Commits: 3, Layout: layout},
		{Layout: layout[:1], Carried: [][]byte{{1}}},
	} {
		b := o.append(nil)
		f.Add(b[:len(b)-4])
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		o, err := readOpening(transfer.Seal(text), layout)
		if err == nil && (len(o.Layout) != len(layout) || len(o.Carried) != len(layout)) {
			t.Errorf("taken: %+v", o)
		}
		if err == nil {
			if again, err := readOpening(o.append(nil), layout); err != nil || fmt.Sprint(again) != fmt.Sprint(o) {
				t.Errorf("%+v, %v, want %+v", again, err, o)
			}
		}
		if _, err := readOpening(text, layout); err == nil && len(text) < 4 {
			t.Error("a text without a checksum is taken")
		}
	})
}

// FuzzPositions: positions of samplers and scalings read from a checkpoint are within their bounds.
// Written again, they are read as the same position.
func FuzzPositions(f *testing.F) {
	s, c := NewSampler(100, SamplerOptions{}), NewScaling(ScalingOptions{Of: 4})
	for _, encode := range []func() ([]byte, error){s.encode, c.encode} {
		b, err := encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add(bytes.Repeat([]byte{0xff}, 30))
	f.Fuzz(func(t *testing.T, b []byte) {
		if s.decode(b) == nil {
			was := s.live
			if again, err := s.encode(); err != nil || s.decode(again) != nil || s.live != was || was.pos < 0 || was.pos > 100 {
				t.Errorf("%x: %+v, then %+v, %v", b, was, s.live, err)
			}
			s.Next()
		}
		if c.decode(b) == nil {
			was := c.live
			if again, err := c.encode(); err != nil || c.decode(again) != nil || c.live != was || was.size < 0 || was.step < 0 {
				t.Errorf("%x: %+v, then %+v, %v", b, was, c.live, err)
			}
			c.Next()
		}
	})
}
