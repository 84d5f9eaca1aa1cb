package main

import (
	"context"
	"encoding/xml"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
)

// TestPicture: the picture is an XML document with a line for each trial.
func TestPicture(t *testing.T) {
	for name, all := range map[string][]result{
		"none": nil,
		"one":  {{setting{0.1, 0.9, 8, 1}, outcome{[]float64{0.5}, 0.9}}},
		"two": {
			{setting{0.1, 0.9, 8, 2}, outcome{[]float64{2, 0.1}, 0.9}},
			{setting{0.1, 0, 8, 2}, outcome{[]float64{2, 1}, 0.5}},
		},
	} {
		text := picture(all)
		for d := xml.NewDecoder(strings.NewReader(text)); ; {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v\n%s", name, err, text)
			}
		}
		if strings.Contains(text, "NaN") || strings.Count(text, "<polyline") != len(all) {
			t.Errorf("%s:\n%s", name, text)
		}
	}
}

// TestTrials: a good setting is better than a bad one, and a trial has the same result again.
func TestTrials(t *testing.T) {
	settings := []setting{{0.0001, 0, 8, 1}, {0.1, 0.9, 16, 2}}
	var before []result
	for range 2 {
		var results []result
		for _, s := range settings {
			o, err := train(context.Background(), s)
			if err != nil {
				t.Fatal(err)
			}
			results = append(results, result{s, o})
		}
		best(results)
		if r := results[0]; r.setting != settings[1] || len(r.Loss) != 2 || !(r.Accuracy > 0.5) {
			t.Errorf("best: %+v", r)
		}
		if before != nil && !slices.EqualFunc(before, results, func(a, b result) bool {
			return a.setting == b.setting && a.Accuracy == b.Accuracy && slices.Equal(a.Loss, b.Loss)
		}) {
			t.Errorf("%+v, then %+v", before, results)
		}
		before = results
	}
}
