package site

import (
	"encoding/json"
	"strings"

	"github.com/yuin/goldmark/ast"
)

// index is what the search looks through: the text below each heading of each page.
type index struct {
	Pages    []indexedPage    `json:"pages"`
	Sections []indexedSection `json:"sections"`
}

type indexedPage struct {
	URL   string `json:"url"`
	Title string `json:"title"`
}

type indexedSection struct {
	Page    int    `json:"page"`
	Heading string `json:"heading"`
	Anchor  string `json:"anchor"`
	Text    string `json:"text"`
}

// add adds a page.
func (x *index) add(p *page) {
	x.Pages = append(x.Pages, indexedPage{pageURL(p.name), p.title})
	of := len(x.Pages) - 1
	var text strings.Builder
	current, next := indexedSection{Page: of, Heading: p.title}, 0
	end := func() {
		current.Text = strings.TrimSpace(text.String())
		if current.Anchor != "" || current.Text != "" {
			x.Sections = append(x.Sections, current)
		}
		text.Reset()
	}
	for n := p.root.FirstChild(); n != nil; n = n.NextSibling() {
		if n.Kind() == ast.KindHeading {
			end()
			h := p.headings[next]
			next++
			current = indexedSection{Page: of, Heading: h.Text, Anchor: h.Anchor}
			continue
		}
		text.WriteString(p.plain(n) + " ")
	}
	end()
}

// prefix makes the index a script, since a page that is opened as a file may not fetch others.
const prefix = "window.hvdrunIndex = "

// script returns the index as a script.
func (x *index) script() []byte {
	text, err := json.Marshal(x)
	if err != nil {
		panic(err) // strings and numbers have a form in JSON
	}
	return append(append([]byte(prefix), text...), ";\n"...)
}
