package settings

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// ParseDuration parses 30s, 500ms or, as in Horovod, a number of seconds. The duration must be
// positive.
func ParseDuration(text string) (time.Duration, error) {
	d, err := time.ParseDuration(text)
	if seconds, ferr := strconv.ParseFloat(text, 64); ferr == nil && !math.IsNaN(seconds) {
		if math.Abs(seconds) >= math.MaxInt64/1e9 {
			return 0, fmt.Errorf("%q is too long", text)
		}
		d, err = time.Duration(seconds*1e9), nil
	}
	if err != nil {
		return 0, fmt.Errorf("%q is not a duration (30s, 500ms, or a number of seconds)", text)
	}
	if d <= 0 {
		return 0, fmt.Errorf("%q is not more than 0", text)
	}
	return d, nil
}

// parseRange parses "MIN MAX" or "MIN,MAX".
func parseRange(text string) (low, high time.Duration, err error) {
	words := strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' })
	if len(words) != 2 {
		return 0, 0, fmt.Errorf("%q is not two durations MIN MAX", text)
	}
	if low, err = ParseDuration(words[0]); err != nil {
		return 0, 0, err
	}
	if high, err = ParseDuration(words[1]); err != nil {
		return 0, 0, err
	}
	if low > high {
		return 0, 0, fmt.Errorf("the minimum, %v, exceeds the maximum, %v", low, high)
	}
	return low, high, nil
}

// ParseCount parses a number that must not be less than least.
func ParseCount(text string, least int) (int, error) {
	n, err := strconv.Atoi(text)
	if errors.Is(err, strconv.ErrRange) {
		return 0, fmt.Errorf("%q is too large", text)
	}
	if err != nil {
		return 0, fmt.Errorf("%q is not a whole number", text)
	}
	if n < least {
		return 0, fmt.Errorf("%q is less than %d", text, least)
	}
	return n, nil
}

// parseBytes parses a number of bytes with an optional suffix KiB, MiB, GiB or TiB, or "unlimited",
// which is the largest value.
func parseBytes(text string) (uint64, error) {
	if strings.EqualFold(text, "unlimited") {
		return math.MaxUint64, nil
	}
	digits, unit := strings.TrimRight(text, "KMGTiB"), 0
	switch text[len(digits):] {
	case "", "B":
	case "KiB":
		unit = 10
	case "MiB":
		unit = 20
	case "GiB":
		unit = 30
	case "TiB":
		unit = 40
	default:
		return 0, fmt.Errorf("%q is not a number of bytes (4096, 64MiB, unlimited)", text)
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	if err != nil || n > math.MaxUint64>>unit {
		return 0, fmt.Errorf("%q is not a number of bytes (4096, 64MiB, unlimited)", text)
	}
	return n << unit, nil
}

func parseSwitch(text string) (bool, error) {
	switch strings.ToLower(text) {
	case "true", "yes", "on", "1":
		return true, nil
	case "false", "no", "off", "0":
		return false, nil
	}
	return false, fmt.Errorf("%q is neither true nor false", text)
}

// parseList parses a,b,c.
func parseList(text string) ([]string, error) {
	list := strings.Split(text, ",")
	for i, word := range list {
		if list[i] = strings.TrimSpace(word); list[i] == "" {
			return nil, fmt.Errorf("%q has an empty name", text)
		}
	}
	return list, nil
}

// parseChoice returns the index of the choice that equals text, ignoring case.
func parseChoice(text string, choices ...string) (int, error) {
	for i, c := range choices {
		if strings.EqualFold(text, c) {
			return i, nil
		}
	}
	return 0, fmt.Errorf("%q is not one of %s", text, strings.Join(choices, ", "))
}
