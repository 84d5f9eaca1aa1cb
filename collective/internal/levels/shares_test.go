package levels

import (
	"slices"
	"testing"
)

// speedsOf returns the speeds that hosts with links of the given speeds measure while all of them
// send. Each connection has its part of the slower link, and the others share what slow hosts leave
// of a fast link.
func speedsOf(links ...uint32) []uint32 {
	n := len(links)
	speeds := make([]uint32, n*n)
	left, open := slices.Clone(links), make([]uint32, n) // the rest of each link, and its connections without a speed so far
	for i := range open {
		open[i] = uint32(n - 1)
	}
	for range n {
		slow := -1
		for i := range n {
			if open[i] > 0 && (slow < 0 || left[i]/open[i] < left[slow]/open[slow]) {
				slow = i
			}
		}
		if slow < 0 {
			break
		}
		each := left[slow] / open[slow]
		for j := range n {
			if j != slow && speeds[slow*n+j] == 0 {
				speeds[slow*n+j], speeds[j*n+slow] = each, each
				left[j] -= each
				open[j]--
			}
		}
		open[slow] = 0
	}
	return speeds
}

// TestDivide: a host with a slow link combines less, so that all hosts end at the same time. The
// shares remain equal if the gain is small or a speed is unknown.
func TestDivide(t *testing.T) {
	unknown := speedsOf(9000, 9000, 4500)
	unknown[5] = 0
	kept := []int{0, 90, 180, 192}
	for name, tt := range map[string]struct {
		speeds []uint32
		cuts   []int
		want   []int
	}{
		"equal":                    {speedsOf(9000, 9000, 9000, 9000), nil, nil},
		"nearly equal":             {speedsOf(9000, 9000, 9000, 8600), nil, nil},
		"three quarters":           {speedsOf(9000, 9000, 9000, 6750), nil, []int{0, 77, 154, 231, 256}},
		"half":                     {speedsOf(9000, 9000, 9000, 4500), nil, []int{0, 85, 170, 254, 256}},
		"two of half the speed":    {speedsOf(4500, 9000, 9000, 4500), nil, []int{0, 2, 128, 254, 256}},
		"three, one of half":       {speedsOf(9000, 9000, 4500), nil, []int{0, 95, 190, 192}},
		"the fastest links":        {speedsOf(4e9, 4e9, 4e9, 2e9), nil, []int{0, 85, 170, 254, 256}},
		"unknown":                  {unknown, nil, nil},
		"unknown by now":           {unknown, kept, kept},
		"hardly other than before": {speedsOf(9000, 9000, 4700), kept, kept},
		"equal by now":             {speedsOf(9000, 9000, 9000), kept, nil},
		"has been replaced":        {speedsOf(4500, 9000, 9000), kept, []int{0, 2, 97, 192}},
	} {
		n := 3
		if len(tt.speeds) == 16 {
			n = 4
		}
		if cuts := divide(tt.speeds, n, tt.cuts); !slices.Equal(cuts, tt.want) || (cuts == nil) != (tt.want == nil) {
			t.Errorf("%s: %v, want %v", name, cuts, tt.want)
		}
	}
}
