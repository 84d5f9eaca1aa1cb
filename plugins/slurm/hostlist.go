package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

const (
	// maxNodes bounds the names that a list may expand to: far more than any cluster has, and
	// Slurm's bound for a single range.
	maxNodes = 1 << 16
	// maxDigits bounds the digits of a number in a range, so that it fits an int and its padding is
	// short.
	maxDigits = 9
)

// expandHostlist expands Slurm's short form of a list of names, in its order: n[1-3,7],gpu-[01-04]
// stands for n1 n2 n3 n7 gpu-01 gpu-02 gpu-03 gpu-04. Numbers are padded to the digits of the first
// number of their range. A name may have several brackets, of which the last varies fastest, and
// text after them. Forms that Slurm does not write are errors: empty names, reversed ranges,
// brackets without an end.
func expandHostlist(list string) ([]string, error) {
	var names []string
	for _, item := range splitOutside(list, '[', ']') {
		more, err := expandItem(item, maxNodes-len(names))
		if err != nil {
			return nil, fmt.Errorf("slurm: list of nodes %q: %w", shorten(list), err)
		}
		names = append(names, more...)
	}
	return names, nil
}

// splitOutside splits at the commas that are not between the brackets open and closing.
func splitOutside(list string, open, closing byte) (items []string) {
	depth, start := 0, 0
	for i := range len(list) {
		switch {
		case list[i] == open:
			depth++
		case list[i] == closing:
			depth--
		case list[i] == ',' && depth == 0:
			items = append(items, list[start:i])
			start = i + 1
		}
	}
	return append(items, list[start:])
}

var errTooManyNodes = fmt.Errorf("more than %d names", maxNodes)

// expandItem expands one name with brackets into at most room names.
func expandItem(item string, room int) ([]string, error) {
	names := []string{""}
	rest := item
	for rest != "" {
		text, after, bracket := strings.Cut(rest, "[")
		if strings.ContainsAny(text, "] \t\r\n") {
			return nil, fmt.Errorf("%q is not a name", shorten(item))
		}
		numbers := []string{""}
		if bracket {
			inner, behind, closed := strings.Cut(after, "]")
			if !closed {
				return nil, errors.New("a bracket is not closed")
			}
			var err error
			if numbers, err = expandRanges(inner); err != nil {
				return nil, err
			}
			after = behind
		}
		if len(names)*len(numbers) > room {
			return nil, errTooManyNodes
		}
		product := make([]string, 0, len(names)*len(numbers))
		for _, name := range names {
			for _, number := range numbers {
				product = append(product, name+text+number)
			}
		}
		names, rest = product, after
	}
	if names[0] == "" {
		return nil, errors.New("a name is empty")
	}
	if len(names) > room {
		return nil, errTooManyNodes
	}
	return names, nil
}

// expandRanges expands the text within brackets, such as 1-3,07.
func expandRanges(ranges string) (numbers []string, err error) {
	for r := range strings.SplitSeq(ranges, ",") {
		low, high, isRange := strings.Cut(r, "-")
		if !isRange {
			high = low
		}
		first, err := number(low)
		if err != nil {
			return nil, err
		}
		last, err := number(high)
		if err != nil {
			return nil, err
		}
		if first > last {
			return nil, fmt.Errorf("range %q goes down", r)
		}
		if last-first >= maxNodes-len(numbers) {
			return nil, errTooManyNodes
		}
		for n := first; n <= last; n++ {
			numbers = append(numbers, fmt.Sprintf("%0*d", len(low), n))
		}
	}
	return numbers, nil
}

func number(digits string) (int, error) {
	if digits == "" || strings.Trim(digits, "0123456789") != "" {
		return 0, fmt.Errorf("%q is not a number", shorten(digits))
	}
	if len(digits) > maxDigits {
		return 0, fmt.Errorf("%q has more than %d digits", shorten(digits), maxDigits)
	}
	return strconv.Atoi(digits)
}

// expandCounts expands Slurm's short form of a list with one number for each node: 4(x3),2 stands
// for 4 4 4 2.
func expandCounts(list string) ([]int, error) {
	var counts []int
	for item := range strings.SplitSeq(list, ",") {
		digits, repeat, repeated := strings.Cut(item, "(x")
		count, err := number(digits)
		times := 1
		if err == nil && repeated {
			inner, closed := strings.CutSuffix(repeat, ")")
			if times, err = number(inner); err == nil && !closed {
				err = errors.New("a parenthesis is not closed")
			}
		}
		if err == nil && times == 0 {
			err = errors.New("a number is repeated 0 times")
		}
		if err == nil && times > maxNodes-len(counts) {
			err = errTooManyNodes
		}
		if err != nil {
			return nil, fmt.Errorf("slurm: numbers %q: %w", shorten(list), err)
		}
		for range times {
			counts = append(counts, count)
		}
	}
	return counts, nil
}

// shorten truncates text that an error repeats.
func shorten(text string) string {
	const most = 120
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}
