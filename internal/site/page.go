package site

import (
	"bytes"
	"fmt"
	"net/url"
	"path"
	"strings"
	"unicode"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	extast "github.com/yuin/goldmark/extension/ast"
	"github.com/yuin/goldmark/renderer"
	"github.com/yuin/goldmark/renderer/html"
	"github.com/yuin/goldmark/text"
	"github.com/yuin/goldmark/util"
)

// markdown reads GitHub's Markdown. Columns are aligned by an attribute, not by a style.
var markdown = goldmark.New(
	goldmark.WithExtensions(
		extension.NewTable(extension.WithTableCellAlignMethod(extension.TableCellAlignAttribute)),
		extension.Strikethrough, extension.TaskList, extension.NewLinkify(),
	),
	goldmark.WithRendererOptions(renderer.WithNodeRenderers(util.Prioritized(headings{}, 100)), html.WithXHTML()),
)

// page is a file of Markdown.
type page struct {
	name     string // of the file
	title    string
	source   []byte
	root     ast.Node
	headings []heading
	anchors  map[string]bool
	links    []link // to other pages, with an anchor
}

// heading is a heading of a page.
type heading struct {
	Level  int
	Text   string
	Anchor string
}

// link is a link to an anchor of another page, or of this one.
type link struct {
	line   int
	page   string
	anchor string
}

// parse reads a page, and gives its headings the anchors that GitHub gives them.
func parse(name string, source []byte) (*page, error) {
	p := &page{name: name, source: source, root: markdown.Parser().Parse(text.NewReader(source)), anchors: map[string]bool{}}
	err := ast.Walk(p.root, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			return ast.WalkContinue, nil
		}
		switch n := n.(type) {
		case *ast.Heading:
			h := heading{n.Level, p.plain(n), ""}
			h.Anchor = p.anchor(h.Text)
			n.SetAttributeString("id", []byte(h.Anchor))
			p.headings = append(p.headings, h)
			if p.title == "" && n.Level == 1 {
				p.title = h.Text
			}
		case *ast.RawHTML:
			return ast.WalkStop, p.errorf(n, "HTML within a line, which the site does not have")
		case *ast.HTMLBlock:
			if n.HTMLBlockType != ast.HTMLBlockType2 { // a comment
				return ast.WalkStop, p.errorf(n, "HTML, which the site does not have")
			}
		}
		return ast.WalkContinue, nil
	})
	if err == nil && p.title == "" {
		err = fmt.Errorf("site: %s: no heading of the first level", name)
	}
	return p, err
}

// errorf returns an error about a node.
func (p *page) errorf(n ast.Node, format string, args ...any) error {
	return fmt.Errorf("site: %s:%d: %s", p.name, p.line(n), fmt.Sprintf(format, args...))
}

// line is the line on which the node, or what it is in, begins.
func (p *page) line(n ast.Node) int {
	for ; n != nil; n = n.Parent() {
		if n.Type() == ast.TypeBlock && n.Lines() != nil && n.Lines().Len() > 0 {
			return 1 + bytes.Count(p.source[:n.Lines().At(0).Start], []byte("\n"))
		}
	}
	return 1
}

// anchor returns GitHub's anchor for a heading; a second one of the same text gets a number.
func (p *page) anchor(title string) string {
	slug := strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case unicode.IsLetter(r), unicode.IsDigit(r), r == '-', r == '_':
			return unicode.ToLower(r)
		}
		return -1
	}, title)
	unique := slug
	for i := 1; p.anchors[unique] || unique == ""; i++ {
		unique = fmt.Sprintf("%s-%d", slug, i)
	}
	p.anchors[unique] = true
	return unique
}

// plain is the text of a node, without its marks. Blocks and cells are separated by a space.
func (p *page) plain(n ast.Node) string {
	var out strings.Builder
	p.plainTo(&out, n)
	return strings.Join(strings.Fields(out.String()), " ")
}

func (p *page) plainTo(out *strings.Builder, n ast.Node) {
	switch n := n.(type) {
	case *ast.Text:
		out.Write(n.Value(p.source))
		if n.SoftLineBreak() || n.HardLineBreak() {
			out.WriteByte(' ')
		}
	case *ast.String:
		out.Write(n.Value)
	case *ast.AutoLink:
		out.Write(n.Label(p.source))
	case *ast.CodeBlock, *ast.FencedCodeBlock:
		out.Write(n.Lines().Value(p.source))
	}
	for c := n.FirstChild(); c != nil; c = c.NextSibling() {
		p.plainTo(out, c)
	}
	if _, cell := n.(*extast.TableCell); cell || n.Type() == ast.TypeBlock {
		out.WriteByte(' ')
	}
}

// resolve makes the page's links lead to pages of the site.
func (b *builder) resolve(p *page) error {
	return ast.Walk(p.root, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			return ast.WalkContinue, nil
		}
		var err error
		switch n := n.(type) {
		case *ast.Link:
			n.Destination, err = b.destination(p, n, string(n.Destination))
		case *ast.Image:
			if !isImage(string(n.Destination)) {
				return ast.WalkStop, p.errorf(n, "%s is no image of a kind that the site has", n.Destination)
			}
			n.Destination, err = b.destination(p, n, string(n.Destination))
		}
		if err != nil {
			return ast.WalkStop, err
		}
		return ast.WalkContinue, nil
	})
}

// destination returns where a link of a page leads in the site. Links to other hosts stay; images
// of them are refused.
func (b *builder) destination(p *page, n ast.Node, to string) ([]byte, error) {
	u, err := url.Parse(to)
	if err != nil {
		return nil, p.errorf(n, "a link: %v", err)
	}
	if _, image := n.(*ast.Image); u.Scheme != "" || u.Host != "" {
		if image || u.Scheme != "https" && u.Scheme != "http" && u.Scheme != "mailto" {
			return nil, p.errorf(n, "%s is of another host", to)
		}
		return []byte(to), nil
	}
	if u.Path == "" {
		p.links = append(p.links, link{p.line(n), p.name, u.Fragment})
		return []byte(to), nil
	}
	target, page, err := b.target(path.Join(path.Dir(p.name), u.Path))
	if err != nil {
		return nil, p.errorf(n, "a link: %v", strings.TrimPrefix(err.Error(), "site: "))
	}
	way := relative(pageURL(p.name), target)
	if u.Fragment != "" {
		if page == "" {
			return nil, p.errorf(n, "a link to #%s of %s, which is no page of Markdown", u.Fragment, u.Path)
		}
		p.links = append(p.links, link{p.line(n), page, u.Fragment})
		way += "#" + u.Fragment
	}
	return []byte(way), nil
}

// checkAnchors refuses links to headings that are not there.
func (b *builder) checkAnchors(p *page) error {
	for _, l := range p.links {
		if !b.pages[l.page].anchors[l.anchor] {
			return fmt.Errorf("site: %s:%d: %s has no heading #%s", p.name, l.line, l.page, l.anchor)
		}
	}
	return nil
}

// scrolls are elements that may be wider than the page: they scroll, by the keyboard as well.
var scrolls = strings.NewReplacer(
	"<table>", `<div class="table" tabindex="0"><table>`, "</table>", "</table></div>",
	"<pre><code", `<pre tabindex="0"><code`, "<!-- raw HTML omitted -->\n", "",
)

// render returns the page's HTML.
func (p *page) render() (string, error) {
	var out bytes.Buffer
	if err := markdown.Renderer().Render(&out, p.source, p.root); err != nil {
		return "", fmt.Errorf("site: %s: %w", p.name, err)
	}
	return scrolls.Replace(out.String()), nil
}

// headings renders headings with a link to themselves.
type headings struct{}

func (headings) RegisterFuncs(r renderer.NodeRendererFuncRegisterer) {
	r.Register(ast.KindHeading, func(w util.BufWriter, _ []byte, n ast.Node, entering bool) (ast.WalkStatus, error) {
		h := n.(*ast.Heading)
		id, _ := h.AttributeString("id")
		anchor := escape(string(id.([]byte)))
		if entering {
			fmt.Fprintf(w, `<h%d id="%s">`, h.Level, anchor)
		} else {
			fmt.Fprintf(w, ` <a class="anchor" href="#%s" aria-label="Link to this heading">#</a></h%d>`+"\n", anchor, h.Level)
		}
		return ast.WalkContinue, nil
	})
}

func escape(s string) string { return string(util.EscapeHTML([]byte(s))) }
