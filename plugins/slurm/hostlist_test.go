package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestExpandHostlist(t *testing.T) {
	for list, want := range map[string]string{
		"n1":                    "n1",
		"n[1-3,7],gpu-[01-04]":  "n1 n2 n3 n7 gpu-01 gpu-02 gpu-03 gpu-04",
		"rack[1-2]n[01-03]":     "rack1n01 rack1n02 rack1n03 rack2n01 rack2n02 rack2n03",
		"n[08-11]":              "n08 n09 n10 n11",
		"n[9-011]":              "n9 n10 n11",
		"n[1-010]":              "n1 n2 n3 n4 n5 n6 n7 n8 n9 n10",
		"n[007-009,10-11]":      "n007 n008 n009 n10 n11",
		"n[01,1]":               "n01 n1",
		"[1-3]":                 "1 2 3",
		"n[1-2][3-4]":           "n13 n14 n23 n24",
		"n[1-2]-ib.example.com": "n1-ib.example.com n2-ib.example.com",
		"a,b,a":                 "a b a",
	} {
		got, err := expandHostlist(list)
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("%s: %v, %v; want %s", list, got, err, want)
		}
	}
}

func TestExpandHostlistRefuses(t *testing.T) {
	for _, list := range []string{
		"", ",", "a,,b", "n[", "n[1", "n]", "n[1]]", "n[]", "n[1,]", "n[3-1]", "n[a-c]", "n[1-2-3]", "n[-1]", "n[1, 2]", "a b",
		" a", "a\nb", "n[[1]]", "n[1-99999999]", "n[1-60000]x[1-60000]", "n[1234567890]", "n[1-40000],n[1-40000]",
	} {
		if got, err := expandHostlist(list); err == nil {
			t.Errorf("%q was taken for %d names", list, len(got))
		}
	}
}

// anyList draws a list in Slurm's notation, and returns the names for which it stands, computed in
// another way. Text after the last brackets occurs in newer versions.
func anyList(t *rapid.T, suffixes bool) (list string, names []string) {
	var items []string
	for range rapid.IntRange(1, 4).Draw(t, "items") {
		item, expanded := "", []string{""}
		bracketed := false
		for range rapid.IntRange(1, 2).Draw(t, "parts") {
			text := rapid.StringMatching(`[a-z][a-z0-9-]{0,3}[a-z]`).Draw(t, "text")
			item += text
			for i := range expanded {
				expanded[i] += text
			}
			if !(bracketed && !suffixes) && !rapid.Bool().Draw(t, "brackets") {
				continue
			}
			bracketed = true
			ranges, numbers := anyRanges(t)
			item += "[" + ranges + "]"
			var product []string
			for _, e := range expanded {
				for _, n := range numbers {
					product = append(product, e+n)
				}
			}
			expanded = product
		}
		items = append(items, item)
		names = append(names, expanded...)
	}
	return strings.Join(items, ","), names
}

func anyRanges(t *rapid.T) (ranges string, numbers []string) {
	var parts []string
	for range rapid.IntRange(1, 3).Draw(t, "ranges") {
		low := rapid.IntRange(0, 1200).Draw(t, "low")
		high := low + rapid.IntRange(0, 12).Draw(t, "more")
		width := rapid.IntRange(1, 5).Draw(t, "width")
		part := fmt.Sprintf("%0*d", width, low)
		digits := len(part)
		if high > low {
			part += fmt.Sprintf("-%0*d", digits, high)
		}
		parts = append(parts, part)
		for n := low; n <= high; n++ {
			text := fmt.Sprint(n)
			numbers = append(numbers, strings.Repeat("0", max(0, digits-len(text)))+text)
		}
	}
	return strings.Join(parts, ","), numbers
}

func TestExpandHostlistProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list, want := anyList(t, true)
		if got, err := expandHostlist(list); err != nil || !slices.Equal(got, want) {
			t.Fatalf("%s: %v, %v; want %v", list, got, err, want)
		}
	})
}

func FuzzExpandHostlist(f *testing.F) {
	for _, list := range []string{"n[1-3,7],gpu-[01-04]", "rack[1-2]n[01-03]", "n[", "a,,b", "n[9-011]", "[1-3]x", "n[1-99999999]"} {
		f.Add(list)
	}
	f.Fuzz(func(t *testing.T, list string) {
		names, err := expandHostlist(list)
		if err != nil {
			if len(names) > 0 {
				t.Errorf("both names and an error: %v", err)
			}
			return
		}
		if len(names) == 0 || len(names) > maxNodes {
			t.Errorf("%d names", len(names))
		}
		for _, name := range names {
			if name == "" || strings.ContainsAny(name, "[], \t\r\n") {
				t.Fatalf("%q is not a name", name)
			}
		}
	})
}

func TestExpandCounts(t *testing.T) {
	for list, want := range map[string]string{"4(x3),2": "[4 4 4 2]", "1": "[1]", "0(x2)": "[0 0]"} {
		if got, err := expandCounts(list); err != nil || fmt.Sprint(got) != want {
			t.Errorf("%s: %v, %v; want %s", list, got, err, want)
		}
	}
	for _, list := range []string{"", "4(x3", "4(x)", "x", "4,", "-1", "4(3)", "1(x999999999)", "0(x0)"} {
		if got, err := expandCounts(list); err == nil {
			t.Errorf("%q was taken for %v", list, got)
		}
	}
}

func FuzzExpandCounts(f *testing.F) {
	f.Add("4(x3),2")
	f.Fuzz(func(t *testing.T, list string) {
		if counts, err := expandCounts(list); err == nil && (len(counts) == 0 || len(counts) > maxNodes) {
			t.Errorf("%d numbers", len(counts))
		}
	})
}
