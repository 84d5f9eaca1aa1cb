// Package site makes a static site of the project's pages in Markdown: the documentation, the pages
// of the root, and what these link to. The site needs no server and no other host, holds no script
// or style in its pages, and its bytes follow from the files alone.
package site

import (
	"bytes"
	"embed"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"unicode/utf8"
)

//go:embed assets
var assets embed.FS

// mostText is the longest file, in bytes, that gets a page of its own text.
const mostText = 256 << 10

// Source is what a site is made from.
type Source struct {
	// FS is the root of the repository.
	FS fs.FS
	// Files are the paths of all files that may be published, such as those that git tracks. What
	// is not among them is neither read nor listed.
	Files []string
}

// section is a group of pages in the navigation.
type section struct {
	title string
	pages []*page
}

// builder is a site in the making.
type builder struct {
	src   Source
	files map[string]bool
	dirs  map[string]bool
	pages map[string]*page // of Markdown, by file
	queue []string         // folders and files that pages link to
	out   map[string][]byte
}

// Build returns the files of the site by their paths. Errors begin with the file and line that they
// are about: a link that leads nowhere, HTML within Markdown, a page that cannot be read.
func Build(src Source) (map[string][]byte, error) {
	b := &builder{src: src, files: map[string]bool{}, dirs: map[string]bool{".": true}, pages: map[string]*page{}, out: map[string][]byte{}}
	for _, f := range src.Files {
		b.files[f] = true
		for dir := path.Dir(f); dir != "."; dir = path.Dir(dir) {
			b.dirs[dir] = true
		}
	}
	for _, f := range src.Files {
		dir := path.Dir(f)
		if path.Ext(f) == ".md" && (dir == "." || dir == "docs" || dir == "docs/design" || dir == "docs/reference") {
			if err := b.parse(f); err != nil {
				return nil, err
			}
		}
	}
	if b.pages["README.md"] == nil {
		return nil, fmt.Errorf("site: README.md, the first page, is not there")
	}
	if err := b.follow(); err != nil {
		return nil, err
	}
	return b.out, b.write()
}

// follow resolves the links of all pages, and reads the pages that these lead to, until no page is
// new.
func (b *builder) follow() error {
	for done := map[string]bool{}; len(done) < len(b.pages); {
		for _, name := range sorted(b.pages) {
			if done[name] {
				continue
			}
			done[name] = true
			if err := b.resolve(b.pages[name]); err != nil {
				return err
			}
		}
	}
	for _, name := range sorted(b.pages) {
		if err := b.checkAnchors(b.pages[name]); err != nil {
			return err
		}
	}
	return nil
}

// readme returns the page of a folder, or "".
func (b *builder) readme(dir string) string {
	if name := path.Join(dir, "README.md"); b.files[name] {
		return name
	}
	return ""
}

// target returns the page of the site for a file or folder of the repository, and what the page is
// made from, if that is Markdown. The file or folder becomes part of the site.
func (b *builder) target(name string) (url, markdown string, err error) {
	switch {
	case b.dirs[name]:
		b.queue = append(b.queue, name)
		if readme := b.readme(name); readme != "" {
			return pageURL(readme), readme, b.parse(readme)
		}
		return path.Join(name, "index.html"), "", nil
	case !b.files[name]:
		return "", "", fmt.Errorf("%s is not there, or not in git", name)
	case path.Ext(name) == ".md":
		return pageURL(name), name, b.parse(name)
	case isImage(name):
		return name, "", b.copy(name)
	}
	b.queue = append(b.queue, name)
	return name + ".html", "", nil
}

func (b *builder) copy(name string) error {
	text, err := fs.ReadFile(b.src.FS, name)
	if err != nil {
		return fmt.Errorf("site: %w", err)
	}
	b.out[name] = text
	return nil
}

// parse reads a page of Markdown, once.
func (b *builder) parse(name string) error {
	if b.pages[name] != nil {
		return nil
	}
	text, err := fs.ReadFile(b.src.FS, name)
	if err != nil {
		return fmt.Errorf("site: %w", err)
	}
	p, err := parse(name, text)
	if err == nil {
		b.pages[name] = p
	}
	return err
}

// write writes all pages, the index of the search, and the assets.
func (b *builder) write() error {
	nav := b.navigation()
	var index index
	for _, name := range sorted(b.pages) {
		p := b.pages[name]
		body, err := p.render()
		if err != nil {
			return err
		}
		if dir := path.Dir(name); name == b.readme(dir) && slices.Contains(b.queue, dir) {
			list, err := b.listing(dir, pageURL(name))
			if err != nil {
				return err
			}
			body += `<h2 id="files-of-this-folder">Files of this folder</h2>` + list
		}
		if err := b.emit(view{URL: pageURL(name), Title: p.title, Body: body, Contents: p.headings, nav: nav}); err != nil {
			return err
		}
		index.add(p)
	}
	if err := b.others(nav); err != nil {
		return err
	}
	b.out["search-index.js"] = index.script()
	return fs.WalkDir(assets, "assets", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := fs.ReadFile(assets, name)
		b.out[path.Base(name)] = text
		return err
	})
}

// others writes the pages of folders without Markdown, and of other files. Listings lead to more of
// them.
func (b *builder) others(nav []section) error {
	done := map[string]bool{}
	for len(b.queue) > 0 {
		name := b.queue[0]
		b.queue = b.queue[1:]
		if done[name] {
			continue
		}
		done[name] = true
		v := view{Title: name, nav: nav}
		var err error
		switch {
		case !b.dirs[name]:
			v.URL = name + ".html"
			var text []byte
			if text, err = b.text(name); err == nil {
				v.Body = "<h1>" + escape(name) + `</h1><pre class="file"><code>` + escape(string(text)) + "</code></pre>"
			}
		case b.readme(name) == "":
			v.URL = path.Join(name, "index.html")
			v.Body, err = b.listing(name, v.URL)
			v.Body = "<h1>" + escape(name) + "</h1>" + v.Body
		default:
			continue
		}
		if err == nil {
			err = b.emit(v)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// text returns the text of a file that gets a page of it.
func (b *builder) text(name string) ([]byte, error) {
	text, err := fs.ReadFile(b.src.FS, name)
	switch {
	case err != nil:
		return nil, fmt.Errorf("site: %w", err)
	case len(text) > mostText:
		return nil, fmt.Errorf("site: %s has %d bytes, %d at most for a page of it", name, len(text), mostText)
	case !utf8.Valid(text) || bytes.ContainsFunc(text, control):
		return nil, fmt.Errorf("site: %s is not text", name)
	}
	return text, nil
}

// control tells whether HTML has no way to say this character.
func control(r rune) bool { return r < ' ' && r != '\n' && r != '\t' && r != '\r' }

// listing returns the list of a folder's files and folders, each with a link to its page. Files
// without one, such as compressed data, are listed without a link.
func (b *builder) listing(dir, from string) (string, error) {
	var list strings.Builder
	list.WriteString(`<ul class="files">`)
	names := map[string]bool{}
	for name := range b.files {
		if rest, in := strings.CutPrefix(name, dir+"/"); in {
			first, _, deeper := strings.Cut(rest, "/")
			names[first] = deeper
		}
	}
	for _, first := range sorted(names) {
		name, label := path.Join(dir, first), first
		if names[first] {
			label += "/"
		}
		if _, err := b.text(name); !b.dirs[name] && err != nil && !isImage(name) {
			list.WriteString("<li>" + escape(label) + "</li>")
			continue
		}
		if b.readme(name) != "" && b.pages[b.readme(name)] == nil || path.Ext(name) == ".md" && b.pages[name] == nil {
			list.WriteString("<li>" + escape(label) + "</li>") // Markdown to which no page links
			continue
		}
		url, _, err := b.target(name)
		if err != nil {
			return "", fmt.Errorf("site: %s: %w", dir, err)
		}
		list.WriteString(`<li><a href="` + escape(relative(from, url)) + `">` + escape(label) + "</a></li>")
	}
	list.WriteString("</ul>")
	return list.String(), nil
}

// isImage tells whether a file is copied as it is.
func isImage(name string) bool {
	return slices.Contains([]string{".png", ".svg", ".jpg", ".gif", ".webp"}, path.Ext(name))
}

// pageURL is where a page of Markdown is in the site.
func pageURL(name string) string {
	dir, file := path.Split(name)
	if file == "README.md" {
		return dir + "index.html"
	}
	return dir + strings.TrimSuffix(file, ".md") + ".html"
}

// relative returns the way from one page of the site to another file of it.
func relative(from, to string) string {
	f, t := strings.Split(from, "/"), strings.Split(to, "/")
	for len(f) > 1 && len(t) > 1 && f[0] == t[0] {
		f, t = f[1:], t[1:]
	}
	return strings.Repeat("../", len(f)-1) + strings.Join(t, "/")
}

func sorted[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
