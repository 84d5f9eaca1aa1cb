package plan

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"unicode/utf8"
)

// MaxSlots is the most slots that one host may have. It is far above any machine; a larger number
// is a slip of the pen and would cost the driver its memory.
const MaxSlots = 1 << 16

const (
	maxTotalSlots = 1 << 20 // of all hosts of a list together, for the same reason
	maxNameLength = 255     // a DNS name has at most 253 characters; an address with a zone is shorter
	maxQuote      = 80      // characters of a line that an error repeats
)

// ParseError says what is wrong with one line of a listing, or with one item of a list of hosts.
type ParseError struct {
	// Line is the number of the line, from 1; 0 where the error is about an item.
	Line int
	// Item is the number of the item in a comma separated list, from 1; 0 where the error is about
	// a line.
	Item int
	// Text is the line or item, shortened where it is long.
	Text string
	// Reason says what is wrong with it.
	Reason string
}

// Error returns "plan: line 3: …" or "plan: item 3 of the list of hosts: …", with the text quoted.
func (e *ParseError) Error() string {
	where := "line " + strconv.Itoa(e.Line)
	if e.Item > 0 {
		where = "item " + strconv.Itoa(e.Item) + " of the list of hosts"
	}
	return fmt.Sprintf("plan: %s: %s: %q", where, e.Reason, e.Text)
}

// ParseHosts reads what a discovery script prints or a hostfile holds: one host a line, in order.
//
//	name            name:slots      name slots=n
//	[v6]            [v6]:slots      v6
//
// A line may be blank, may end in CRLF, and may hold a comment, from a # at its beginning or after
// white space to its end. A line without slots has defaultSlots; a negative defaultSlots says that
// there is no default, and makes such a line an error. A host of 0 slots is known but takes no
// worker now. A host that is listed twice with the same slots counts once, where it stood first;
// with different slots it is an error. A bare IPv6 address is accepted only where its end cannot be
// meant as slots. An empty text is an empty list.
//
// Every error is a *ParseError. The list is the caller's.
func ParseHosts(text string, defaultSlots int) ([]Host, error) {
	b := newListing(defaultSlots, "on line")
	text = strings.TrimPrefix(text, "\ufeff") // what some editors put before the first line
	number := 0
	for line := range strings.SplitSeq(text, "\n") {
		number++
		words := strings.Fields(withoutComment(line))
		if len(words) == 0 {
			continue
		}
		if reason := b.add(number, words); reason != "" {
			return nil, &ParseError{Line: number, Text: shorten(strings.TrimRight(line, "\r")), Reason: reason}
		}
	}
	return b.hosts, nil
}

// ParseHostList reads the hosts of a command line: items separated by commas, each written as a
// line of ParseHosts is, but without comments. An item must not be empty. Every error is a
// *ParseError that has the item's number.
func ParseHostList(list string, defaultSlots int) ([]Host, error) {
	b := newListing(defaultSlots, "in item")
	number := 0
	for item := range strings.SplitSeq(list, ",") {
		number++
		reason := "no host"
		if words := strings.Fields(item); len(words) > 0 {
			reason = b.add(number, words)
		}
		if reason != "" {
			return nil, &ParseError{Item: number, Text: shorten(item), Reason: reason}
		}
	}
	return b.hosts, nil
}

// CheckHosts returns what would be an error in a listing of these hosts: a name that no host has,
// slots out of bounds, a host that is listed twice. Lists that were not parsed by this package pass
// here before they are believed.
func CheckHosts(hosts []Host) error {
	b := newListing(-1, "as host")
	for i, h := range hosts {
		reason := nameFault(h.Name)
		switch {
		case reason != "":
		case h.Slots < 0:
			reason = "negative slots"
		case h.Slots > MaxSlots:
			reason = tooManySlots
		default:
			before := len(b.hosts)
			if reason = b.keep(i+1, h); reason == "" && len(b.hosts) == before {
				reason = fmt.Sprintf("listed before, as host %d", b.seen[h.Name])
			}
		}
		if reason != "" {
			return fmt.Errorf("plan: host %d: %s: %q", i+1, reason, shorten(h.String()))
		}
	}
	return nil
}

// withoutComment cuts a comment off. A # inside a word is no comment: the name will be refused,
// rather than half of it be taken for a host.
func withoutComment(line string) string {
	for i := range len(line) {
		if line[i] == '#' && (i == 0 || strings.ContainsRune(" \t\v\f\r", rune(line[i-1]))) {
			return line[:i]
		}
	}
	return line
}

// listing gathers hosts; its methods return a reason where one is refused.
type listing struct {
	defaultSlots int
	where        string // "on line": what the numbers count
	hosts        []Host
	seen         map[string]int // number of the line or item that named a host
	slots        map[string]int
	total        int
}

func newListing(defaultSlots int, where string) *listing {
	return &listing{defaultSlots: defaultSlots, where: where, seen: map[string]int{}, slots: map[string]int{}}
}

// add takes the words of one line, of which there is at least one.
func (b *listing) add(number int, words []string) string {
	name, slots, reason := splitSlots(words[0])
	if reason != "" {
		return reason
	}
	for _, word := range words[1:] {
		key, value, found := strings.Cut(word, "=")
		switch {
		case !found:
			return fmt.Sprintf("%q after the host is not of the form slots=n", shorten(word))
		case key != "slots":
			return fmt.Sprintf("%q is not known; only slots=n may follow a host", shorten(key))
		case slots != "":
			return "slots given twice"
		case value == "":
			return noNumber
		}
		slots = value
	}
	if reason := nameFault(name); reason != "" {
		return reason
	}
	n, reason := b.number(slots)
	if reason != "" {
		return reason
	}
	return b.keep(number, Host{Name: name, Slots: n})
}

// keep appends the host unless it is there already.
func (b *listing) keep(number int, h Host) string {
	if first, again := b.seen[h.Name]; again {
		if b.slots[h.Name] != h.Slots {
			return fmt.Sprintf("host %s has %d slots here but %d %s %d", h.Name, h.Slots, b.slots[h.Name], b.where, first)
		}
		return ""
	}
	if b.total += h.Slots; b.total > maxTotalSlots {
		return fmt.Sprintf("more than %d slots in all", maxTotalSlots)
	}
	b.seen[h.Name], b.slots[h.Name] = number, h.Slots
	b.hosts = append(b.hosts, h)
	return ""
}

const (
	noNumber     = "slots are not a number"
	bracketsHint = "an IPv6 address and its slots are written [address]:slots"
)

var tooManySlots = fmt.Sprintf("more than %d slots", MaxSlots)

// number reads slots; "" is the default.
func (b *listing) number(slots string) (int, string) {
	if slots == "" {
		switch {
		case b.defaultSlots < 0:
			return 0, "no slots given, and there is no default"
		case b.defaultSlots > MaxSlots:
			return 0, "no slots given, and the default is " + tooManySlots
		}
		return b.defaultSlots, ""
	}
	if rest, negative := strings.CutPrefix(slots, "-"); negative && isNumber(rest) {
		return 0, "negative slots"
	}
	if !isNumber(slots) {
		return 0, noNumber
	}
	n, err := strconv.Atoi(slots)
	if err != nil || n > MaxSlots { // of digits alone, only too large a number is an error
		return 0, tooManySlots
	}
	return n, ""
}

// splitSlots splits the word that names a host; slots is "" where the word has none.
func splitSlots(word string) (name, slots, reason string) {
	if inner, bracket := strings.CutPrefix(word, "["); bracket {
		name, rest, closed := strings.Cut(inner, "]")
		slots, colon := strings.CutPrefix(rest, ":")
		switch {
		case !closed:
			return "", "", "bracket without its end"
		case !isV6(name):
			return "", "", "no IPv6 address in the brackets"
		case rest != "" && !colon:
			return "", "", bracketsHint
		case colon && slots == "":
			return "", "", noNumber
		}
		return name, slots, ""
	}
	last := strings.LastIndexByte(word, ':')
	if last < 0 {
		return word, "", ""
	}
	name, slots = word[:last], word[last+1:]
	if strings.Contains(name, ":") {
		// fe80::1:4 may be an address, or fe80::1 with 4 slots: neither is guessed.
		if !isV6(word) || isV6(name) && isNumber(slots) {
			return "", "", bracketsHint
		}
		return word, "", ""
	}
	if slots == "" {
		return "", "", noNumber
	}
	return name, slots, ""
}

// nameFault says why no host can be called so. A name that begins with a dash would be an option to
// ssh.
func nameFault(name string) string {
	switch {
	case name == "":
		return "no name"
	case len(name) > maxNameLength:
		return fmt.Sprintf("name longer than %d characters", maxNameLength)
	}
	v6 := isV6(name)
	for _, r := range name {
		if !(isAlnum(r) || strings.ContainsRune(".-_", r) || v6 && strings.ContainsRune(":%", r)) {
			return fmt.Sprintf("no host has %q in its name", r)
		}
	}
	if first := rune(name[0]); !v6 && !isAlnum(first) && first != '_' {
		return fmt.Sprintf("no name begins with %q", first)
	}
	return ""
}

func isAlnum(r rune) bool {
	return '0' <= r && r <= '9' || 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z'
}

func isNumber(s string) bool {
	return s != "" && strings.Trim(s, "0123456789") == ""
}

func isV6(s string) bool {
	addr, err := netip.ParseAddr(s)
	return err == nil && addr.Is6()
}

// shorten bounds what an error repeats of its input, at a character's edge.
func shorten(text string) string {
	if len(text) <= maxQuote {
		return text
	}
	cut := maxQuote
	for cut > maxQuote-utf8.UTFMax && !utf8.RuneStart(text[cut]) {
		cut--
	}
	return text[:cut] + "…"
}
