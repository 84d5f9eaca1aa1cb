package site

import (
	"bytes"
	"fmt"
	"html/template"
	"path"
	"slices"
	"strings"

	"github.com/yuin/goldmark/ast"
)

// view is what a page of the site shows.
type view struct {
	URL, Title, Body string
	Contents         []heading
	nav              []section
}

// frame is what all pages have around their text.
var frame = template.Must(template.New("").Parse(`<!doctype html>
<html lang="en" data-root="{{.Root}}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{.Title}}</title>
<link rel="icon" href="{{.Root}}icon.svg">
<link rel="stylesheet" href="{{.Root}}site.css">
<script src="{{.Root}}site.js" defer></script>
</head>
<body>
<a class="skip" href="#content">Skip to the text</a>
<header>
<a class="name" href="{{.Root}}index.html">hvdrun</a>
<div class="search" role="search" hidden>
<input id="search" type="search" placeholder="Search ( / )" aria-label="Search the documentation" aria-controls="hits" autocomplete="off" spellcheck="false">
<p id="found" class="hidden" role="status"></p>
<ol id="hits" hidden></ol>
</div>
<a class="menu" href="#pages">Pages</a>
</header>
<div class="columns">
<main id="content" tabindex="-1">
{{.Body}}
</main>
<nav id="pages" aria-label="Pages" tabindex="-1">
{{range .Nav}}<h2>{{.Title}}</h2>
<ul>
{{range .Items}}<li>{{if .Here}}<a href="{{.Href}}" aria-current="page">{{.Title}}</a>{{with $.Contents}}
<ul class="contents">
{{range .}}<li><a href="#{{.Anchor}}">{{.Text}}</a></li>
{{end}}</ul>{{end}}{{else}}<a href="{{.Href}}">{{.Title}}</a>{{end}}</li>
{{end}}</ul>
{{end}}</nav>
</div>
</body>
</html>
`))

type item struct {
	Href, Title string
	Here        bool
}

type group struct {
	Title string
	Items []item
}

// emit writes a page of the site.
func (b *builder) emit(v view) error {
	if b.out[v.URL] != nil {
		return fmt.Errorf("site: two pages would be %s", v.URL)
	}
	root := strings.Repeat("../", strings.Count(v.URL, "/"))
	title := v.Title
	if v.URL != "index.html" {
		title += " · hvdrun"
	}
	var groups []group
	for _, s := range v.nav {
		g := group{Title: s.title}
		for _, p := range s.pages {
			url := pageURL(p.name)
			g.Items = append(g.Items, item{relative(v.URL, url), p.title, url == v.URL})
		}
		groups = append(groups, g)
	}
	contents := slices.DeleteFunc(slices.Clone(v.Contents), func(h heading) bool { return h.Level != 2 })
	var out bytes.Buffer
	err := frame.Execute(&out, map[string]any{
		"Root": root, "Title": title, "Contents": contents, "Nav": groups,
		"Body": template.HTML(v.Body), // made by goldmark, or escaped
	})
	if err != nil {
		return fmt.Errorf("site: %s: %w", v.URL, err)
	}
	b.out[v.URL] = out.Bytes()
	return nil
}

// navigation groups the pages: those for users in the order in which README.md names them, those
// about the design in that of their own list, then those of the root and of other folders.
func (b *builder) navigation() []section {
	first := b.pages["README.md"]
	sections := []section{{title: "hvdrun", pages: []*page{first}}}
	placed := map[*page]bool{first: true}
	add := func(title string, order *page, is func(name string) bool) {
		s := section{title: title}
		place := func(p *page) {
			if p != nil && !placed[p] && is(p.name) {
				placed[p] = true
				s.pages = append(s.pages, p)
			}
		}
		if order != nil {
			place(order)
			for _, name := range b.order(order) {
				place(b.pages[name])
			}
		}
		for _, name := range sorted(b.pages) {
			place(b.pages[name])
		}
		if len(s.pages) > 0 {
			sections = append(sections, s)
		}
	}
	add("Using hvdrun", first, func(name string) bool { return path.Dir(name) == "docs" && name != "docs/walks.md" })
	add("The project", first, func(name string) bool { return path.Dir(name) == "." })
	add("Design", b.pages["docs/design/README.md"], func(name string) bool { return strings.HasPrefix(name, "docs/") })
	add("Examples and plugins", nil, func(string) bool { return true })
	return sections
}

// order returns the pages to which a page links, in the order of its links.
func (b *builder) order(p *page) (names []string) {
	byURL := map[string]string{}
	for name := range b.pages {
		byURL[pageURL(name)] = name
	}
	_ = ast.Walk(p.root, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if l, is := n.(*ast.Link); is && entering {
			to, _, _ := strings.Cut(string(l.Destination), "#")
			if name := byURL[path.Join(path.Dir(pageURL(p.name)), to)]; name != "" {
				names = append(names, name)
			}
		}
		return ast.WalkContinue, nil
	})
	return names
}
