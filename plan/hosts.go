package plan

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"unicode/utf8"
)

// MaxSlots is the largest number of slots of a host. It exceeds any machine; a larger number is a
// typing error that would exhaust the driver's memory.
const MaxSlots = 1 << 16

const (
	maxTotalSlots = 1 << 20 // of all hosts in a list, for the same reason
	maxNameLength = 255     // a DNS name has at most 253 characters; an address with a zone is shorter
	maxQuote      = 80      // bytes of a line quoted in an error
)

// ParseError is an error in a line of a listing or in an item of a list of hosts.
type ParseError struct {
	// Line is the line number, from 1; 0 if the error is in an item.
	Line int
	// Item is the number of the item in a comma-separated list, from 1; 0 if the error is in a
	// line.
	Item int
	// Text is the line or item, truncated if it is long.
	Text string
	// Reason describes the error.
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

// ParseHosts parses the output of a discovery script or a hostfile: one host per line, in order.
//
//	name            name:slots      name slots=n
//	[v6]            [v6]:slots      v6
//
// A line may be blank, may end in CRLF, and may contain a comment, from a # at its beginning or
// after white space to its end. A line without slots has defaultSlots; if that is negative, such a
// line is an error. A host of 0 slots is known but takes no workers. A host that is listed twice
// with the same slots counts once, at its first position; with different slots it is an error.
// Names that differ only in case are one host, as it is first written. A bare IPv6 address is
// accepted only if its last part cannot be a number of slots. An empty text is an empty list.
//
// Every error is a *ParseError. The caller owns the result.
func ParseHosts(text string, defaultSlots int) ([]Host, error) {
	return parseLines(text, newListing(defaultSlots, "on line"))
}

// ParseHostfile parses a hostfile: the format of ParseHosts, but the slots of a host that is listed
// again are added up, as mpirun does. Batch systems write such files, a line for each slot.
func ParseHostfile(text string, defaultSlots int) ([]Host, error) {
	b := newListing(defaultSlots, "on line")
	b.sums = true
	return parseLines(text, b)
}

func parseLines(text string, b *listing) ([]Host, error) {
	if strings.HasPrefix(text, "\xff\xfe") || strings.HasPrefix(text, "\xfe\xff") {
		return nil, &ParseError{Line: 1, Text: shorten(text), Reason: "the text is in UTF-16; write it in UTF-8"}
	}
	text = strings.TrimPrefix(text, "\ufeff") // byte order mark
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

// ParseHostList parses the hosts of a command line: items separated by commas or ends of lines,
// each in the format of a line of ParseHostfile without comments. A comma may follow the last item
// of a line; other empty items are errors, and empty lines are not. Every error is a *ParseError
// with the item's number.
func ParseHostList(list string, defaultSlots int) ([]Host, error) {
	b := newListing(defaultSlots, "in item")
	b.sums = true
	number := 0
	for _, item := range listItems(list) {
		number++
		reason := "missing host"
		if words := strings.Fields(item); strings.Contains(item, ";") {
			reason = "hosts are separated by commas, not by semicolons"
		} else if len(words) > 0 {
			reason = b.add(number, words)
		}
		if reason != "" {
			return nil, &ParseError{Item: number, Text: shorten(item), Reason: reason}
		}
	}
	return b.hosts, nil
}

// listItems splits a list of hosts.
func listItems(list string) (items []string) {
	for line := range strings.Lines(list) {
		line = strings.TrimSpace(line)
		if line == "" && strings.TrimSpace(list) != "" {
			continue
		}
		if cut := strings.TrimRight(strings.TrimSuffix(line, ","), " \t"); cut != "" {
			line = cut
		}
		items = append(items, strings.Split(line, ",")...)
	}
	if len(items) == 0 {
		return []string{list}
	}
	return items
}

// CheckHosts validates hosts by the rules of ParseHosts: their names, the bounds of their slots,
// and that no host is listed twice. Lists that this package has not parsed must be checked before
// use.
func CheckHosts(hosts []Host) error {
	b := newListing(-1, "as host")
	b.exact = true
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
				reason = fmt.Sprintf("listed before, as host %d", b.seen[h.Name].number)
			}
		}
		if reason != "" {
			return fmt.Errorf("plan: host %d: %s: %q", i+1, reason, shorten(h.String()))
		}
	}
	return nil
}

// withoutComment removes a comment. A # inside a word does not start one: then the name is refused,
// rather than half of it taken for a host.
func withoutComment(line string) string {
	for i := range len(line) {
		if line[i] == '#' && (i == 0 || strings.ContainsRune(" \t\v\f\r", rune(line[i-1]))) {
			return line[:i]
		}
	}
	return line
}

// SameButCase returns two host names that differ only in case, or two empty strings. DNS treats
// such names as one machine.
func SameButCase(hosts []Host) (first, second string) {
	seen := make(map[string]string, len(hosts))
	for _, h := range hosts {
		folded := strings.ToLower(h.Name)
		if before, again := seen[folded]; again && before != h.Name {
			return before, h.Name
		}
		seen[folded] = h.Name
	}
	return "", ""
}

// listing collects hosts. Its methods return the reason why a host is refused, or "".
type listing struct {
	defaultSlots int
	where        string // what the numbers count, such as "on line"
	sums         bool   // the slots of a host that is listed again are added up
	exact        bool   // names that differ in case are different hosts
	hosts        []Host
	seen         map[string]place
	total        int
}

// place is where a host is in a listing: the number of its line or item, and its index in hosts.
type place struct{ number, at int }

func newListing(defaultSlots int, where string) *listing {
	return &listing{defaultSlots: defaultSlots, where: where, seen: map[string]place{}}
}

// add adds the host in the words of a line. There must be at least one word.
func (b *listing) add(number int, words []string) string {
	name, slots, reason := splitSlots(words[0])
	if reason != "" {
		return reason
	}
	for i, word := range words[1:] {
		key, value, found := strings.Cut(word, "=")
		switch {
		case key == "slots" && (!found || value == "" && i+2 < len(words)):
			return "blanks around the = of slots=n; leave them out"
		case !found && isNumber(word) && len(words) > 2:
			return fmt.Sprintf("%q after the host is not of the form slots=n; "+
				`of a file of Grid Engine, give what awk '{print $1":"$2}' "$PE_HOSTFILE" prints`, word)
		case !found && HasSlots(word):
			return fmt.Sprintf("%q after the host is not of the form slots=n; other hosts follow after a comma (-H) or on their own line", shorten(word))
		case !found:
			return fmt.Sprintf("%q after the host is not of the form slots=n", shorten(word))
		case key == "max_slots" || key == "max-slots":
			return fmt.Sprintf("%q is not known; leave it out: a host never has more workers than slots=n says", key)
		case key != "slots":
			return fmt.Sprintf("%q is not known; only slots=n may follow a host: leave it out", shorten(key))
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

// HasSlots reports whether the word is a host with a number of slots, such as node1:2, and
// therefore not the name of a command.
func HasSlots(word string) bool {
	name, slots, reason := splitSlots(word)
	return reason == "" && isNumber(slots) && nameFault(name) == ""
}

// keep appends the host. If it is already listed, keep adds up the slots (sums) or refuses a
// different number of slots.
func (b *listing) keep(number int, h Host) string {
	key := h.Name
	if !b.exact {
		key = strings.ToLower(key)
	}
	before, again := b.seen[key]
	if again && !b.sums {
		if had := b.hosts[before.at].Slots; had != h.Slots {
			return fmt.Sprintf("host %s has %d slots here but %d %s %d", h.Name, h.Slots, had, b.where, before.number)
		}
		return ""
	}
	if b.total += h.Slots; b.total > maxTotalSlots {
		return fmt.Sprintf("more than %d slots in all", maxTotalSlots)
	}
	if again {
		kept := &b.hosts[before.at]
		if kept.Slots += h.Slots; kept.Slots > MaxSlots {
			return tooManySlots + " together with those before"
		}
		return ""
	}
	b.seen[key] = place{number, len(b.hosts)}
	b.hosts = append(b.hosts, h)
	return ""
}

const (
	noNumber     = "slots are not a number"
	colonsHint   = "two colons, where host:slots has one; a port is given by --ssh-port, or by Port in ssh's configuration"
	bracketsHint = "an IPv6 address and its slots are written [address]:slots"
)

var tooManySlots = fmt.Sprintf("more than %d slots", MaxSlots)

// number parses a number of slots; "" is the default.
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
	if err != nil || n > MaxSlots { // digits only, so an error means that the number is too large
		return 0, tooManySlots
	}
	return n, ""
}

// splitSlots splits a host and its slots; slots is "" if the text names none.
func splitSlots(word string) (name, slots, reason string) {
	if inner, bracket := strings.CutPrefix(word, "["); bracket {
		name, rest, closed := strings.Cut(inner, "]")
		slots, colon := strings.CutPrefix(rest, ":")
		switch {
		case !closed:
			return "", "", "bracket not closed"
		case !isV6(name):
			return "", "", "not an IPv6 address in the brackets"
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
		// fe80::1:4 may be an address, or fe80::1 with 4 slots: it is ambiguous.
		switch {
		case strings.Count(word, ":") == 2 && !strings.Contains(word, "::") && !strings.ContainsAny(word, ",["):
			return "", "", colonsHint // an IPv6 address with just two colons has them side by side
		case strings.ContainsAny(word, ",["):
			return "", "", nameFault(word[strings.IndexAny(word, ",["):])
		case !isV6(word) || isV6(name) && isNumber(slots):
			return "", "", bracketsHint
		}
		return word, "", ""
	}
	if slots == "" {
		return "", "", noNumber
	}
	return name, slots, ""
}

// nameFault returns the reason why a host name is invalid, or "". A name must not begin with a dash
// because ssh would take it for an option.
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
			return fmt.Sprintf("%q is not allowed in a host name%s", r, instead[r])
		}
	}
	if first := rune(name[0]); !v6 && !isAlnum(first) && first != '_' {
		return fmt.Sprintf("a host name must not begin with %q", first)
	}
	return ""
}

// instead holds, for characters that are not allowed in a name, what to write instead.
var instead = map[rune]string{
	'@': "; the user is given by User in ssh's configuration, or by --ssh-command 'ssh -l USER'",
	'[': rangeHint,
	']': rangeHint,
	',': "; a list with commas is given to -H; a file has a host on each line",
	0:   "; if the text is in UTF-16, write it in UTF-8",
}

const rangeHint = "; a range of names is written out, a name on each line: scontrol show hostnames 'node[01-04]' prints them"

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

// shorten truncates text for an error, between two characters.
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
