package site

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"golang.org/x/net/html"
)

// repository is the site of this repository.
var repository = sync.OnceValues(func() (map[string][]byte, error) {
	src, err := source()
	if err != nil {
		return nil, err
	}
	return Build(src)
})

func source() (Source, error) {
	const root = "../.."
	out, err := exec.Command("git", "-C", root, "ls-files", "-z").Output()
	if err != nil {
		return Source{}, err
	}
	src := Source{FS: os.DirFS(root)}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(out), "\x00"), "\x00") {
		if info, err := os.Lstat(path.Join(root, name)); err == nil && info.Mode().IsRegular() {
			src.Files = append(src.Files, name)
		}
	}
	return src, nil
}

func built(t *testing.T) map[string][]byte {
	t.Helper()
	files, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// element is a start of an element.
type element struct {
	tag   string
	attrs map[string]string
}

// void are elements without an end.
var void = []string{"meta", "link", "img", "br", "hr", "input"}

// elements reads a page, whose elements must end in the reverse order of their beginnings.
func elements(t *testing.T, name string, text []byte) (all []element) {
	t.Helper()
	var open []string
	for z := html.NewTokenizer(bytes.NewReader(text)); ; {
		switch z.Next() {
		case html.ErrorToken:
			if !errors.Is(z.Err(), io.EOF) || len(open) > 0 {
				t.Errorf("%s ends within %v: %v", name, open, z.Err())
			}
			return all
		case html.StartTagToken, html.SelfClosingTagToken:
			token := z.Token()
			e := element{token.Data, map[string]string{}}
			for _, a := range token.Attr {
				if _, twice := e.attrs[a.Key]; twice {
					t.Errorf("%s: <%s> has two attributes %s", name, e.tag, a.Key)
				}
				e.attrs[a.Key] = a.Val
			}
			all = append(all, e)
			if !slices.Contains(void, e.tag) {
				open = append(open, e.tag)
			}
		case html.EndTagToken:
			token := z.Token()
			if len(open) == 0 || open[len(open)-1] != token.Data {
				t.Fatalf("%s: </%s> within %v", name, token.Data, open)
			}
			open = open[:len(open)-1]
		case html.CommentToken:
			t.Errorf("%s: a comment %q", name, z.Token().Data)
		}
	}
}

// pagesOf returns the elements of all pages.
func pagesOf(t *testing.T, files map[string][]byte) map[string][]element {
	t.Helper()
	pages := map[string][]element{}
	for name, text := range files {
		if path.Ext(name) == ".html" {
			pages[name] = elements(t, name, text)
			if _, err := html.Parse(bytes.NewReader(text)); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	return pages
}

// TestLinks: all that pages link to is in the site, anchors included, and nothing that a page loads
// is of another host.
func TestLinks(t *testing.T) {
	files := built(t)
	pages := pagesOf(t, files)
	ids := map[string]map[string]bool{}
	for name, all := range pages {
		ids[name] = map[string]bool{}
		for _, e := range all {
			if id, has := e.attrs["id"]; has {
				if ids[name][id] || id == "" {
					t.Errorf("%s: id %q twice, or empty", name, id)
				}
				ids[name][id] = true
			}
		}
	}
	links, anchors := 0, 0
	for name, all := range pages {
		for _, e := range all {
			to, has := e.attrs["href"]
			if src, is := e.attrs["src"]; is {
				to, has = src, true
			}
			foreign := strings.Contains(to, ":") || strings.HasPrefix(to, "//")
			switch {
			case !has || foreign && e.tag == "a" && strings.HasPrefix(to, "https://"):
				continue
			case foreign:
				t.Errorf("%s: <%s> of %s", name, e.tag, to)
				continue
			}
			links++
			file, anchor, _ := strings.Cut(to, "#")
			if file = path.Join(path.Dir(name), file); strings.HasPrefix(to, "#") {
				file = name
			}
			if files[file] == nil {
				t.Errorf("%s: a link to %s, which is not there", name, to)
			} else if anchor != "" {
				if anchors++; !ids[file][anchor] {
					t.Errorf("%s: a link to %s, which is no anchor", name, to)
				}
			}
		}
	}
	t.Logf("%d pages, %d links, %d with anchors", len(pages), links, anchors)
	if len(pages) < 50 || links < 1000 || anchors < 200 {
		t.Errorf("%d pages, %d links, %d with anchors", len(pages), links, anchors)
	}
}

// TestStrictPolicy: a policy that allows scripts and styles from files alone refuses nothing.
func TestStrictPolicy(t *testing.T) {
	files := built(t)
	for name, all := range pagesOf(t, files) {
		headings := 0
		for _, e := range all {
			for a := range e.attrs {
				if a == "style" || strings.HasPrefix(a, "on") {
					t.Errorf("%s: <%s %s=…>", name, e.tag, a)
				}
			}
			switch {
			case e.tag == "script" && e.attrs["src"] == "", slices.Contains([]string{"style", "iframe", "object", "base", "form"}, e.tag):
				t.Errorf("%s: <%s> %v", name, e.tag, e.attrs)
			case e.tag == "img" && e.attrs["alt"] == "":
				t.Errorf("%s: a picture %s without words", name, e.attrs["src"])
			case e.tag == "h1":
				headings++
			}
		}
		if headings != 1 {
			t.Errorf("%s has %d headings of the first level", name, headings)
		}
	}
	for _, name := range []string{"site.css", "site.js"} {
		for _, bad := range []string{"http:", "https:", "url(", "@import", "innerHTML", "eval("} {
			if strings.Contains(string(files[name]), bad) {
				t.Errorf("%s has %s", name, bad)
			}
		}
	}
}

// TestSameBytes: the site follows from the files, in whatever order they are named.
func TestSameBytes(t *testing.T) {
	first := built(t)
	src, err := source()
	if err != nil {
		t.Fatal(err)
	}
	rand.Shuffle(len(src.Files), func(i, j int) { src.Files[i], src.Files[j] = src.Files[j], src.Files[i] })
	second, err := Build(src)
	if err != nil {
		t.Fatal(err)
	}
	if !maps.EqualFunc(first, second, bytes.Equal) {
		for name := range first {
			if !bytes.Equal(first[name], second[name]) {
				t.Errorf("%s differs", name)
			}
		}
		t.Errorf("%d and %d files", len(first), len(second))
	}
}

// readIndex reads the index of the search from its script.
func readIndex(t *testing.T, files map[string][]byte) (x index) {
	t.Helper()
	text, is := strings.CutPrefix(string(files["search-index.js"]), prefix)
	text, ends := strings.CutSuffix(text, ";\n")
	if !is || !ends {
		t.Fatalf("the index begins with %.40q", files["search-index.js"])
	}
	if err := json.Unmarshal([]byte(text), &x); err != nil {
		t.Fatal(err)
	}
	return x
}

// TestIndex: words of pages stand in the index, with an anchor of the page where they are.
func TestIndex(t *testing.T) {
	files := built(t)
	x := readIndex(t, files)
	for _, s := range x.Sections {
		page := x.Pages[s.Page]
		if s.Anchor != "" && !bytes.Contains(files[page.URL], []byte(`id="`+s.Anchor+`"`)) {
			t.Errorf("%s has no anchor %s", page.URL, s.Anchor)
		}
	}
	for _, want := range []struct{ word, url, anchor string }{
		{"make demo", "index.html", "try-it"},
		{"SIGKILL of one of 4 workers", "index.html", "figures"},
		{"dragonfly", "", ""},
		{"gofmt, go vet, staticcheck", "CONTRIBUTING.html", "build-and-test"},
		{"1,000 workers", "docs/operating.html", ""},
	} {
		found := false
		for _, s := range x.Sections {
			if strings.Contains(s.Text, want.word) && x.Pages[s.Page].URL == want.url && (want.anchor == "" || s.Anchor == want.anchor) {
				found = true
			}
		}
		if found != (want.url != "") {
			t.Errorf("%q: found: %v", want.word, found)
		}
	}
}

// small is a site of few files.
func small(change map[string]string) (map[string][]byte, error) {
	files := map[string]string{
		"README.md":          "# Title\n\nSee [a](docs/a.md#two-words), [folder](examples/x) and [file](f.proto).\n\n![picture](docs/p.png)\n",
		"docs/a.md":          "# A & B\n\n## Two `words`\n\n## Two words\n\n| a | b |\n|---|--:|\n| 1 | `<2>` |\n\n<!-- unseen -->\n\n[up](../README.md) [back](#two-words-1)\n",
		"docs/p.png":         "\x89PNG",
		"f.proto":            "message <M> {}\n",
		"examples/x/main.go": "package main\n",
		"examples/x/data.gz": "\x1f\x8b\x00",
		"examples/x/in/y.go": "package in\n",
		"unlinked/z.md":      "# Z\n",
		"unlinked/secret":    "secret\n",
	}
	maps.Copy(files, change)
	src := Source{FS: fstest.MapFS{}}
	for name, text := range files {
		src.FS.(fstest.MapFS)[name] = &fstest.MapFile{Data: []byte(text)}
		if text != "" {
			src.Files = append(src.Files, name)
		}
	}
	return Build(src)
}

func TestPages(t *testing.T) {
	files, err := small(nil)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"docs/a.html", "docs/p.png", "examples/x/in/index.html", "examples/x/in/y.go.html", "examples/x/index.html", "examples/x/main.go.html",
		"f.proto.html", "icon.svg", "index.html", "search-index.js", "site.css", "site.js",
	}
	if got := sorted(files); !slices.Equal(got, want) {
		t.Errorf("files %q, want %q", got, want)
	}
	for name, parts := range map[string][]string{
		"index.html":              {`href="docs/a.html#two-words"`, `href="examples/x/index.html"`, `href="f.proto.html"`, `src="docs/p.png"`, `data-root=""`},
		"docs/a.html":             {`id="two-words"`, `id="two-words-1"`, `href="../index.html"`, `align="right"`, "&lt;2&gt;", "<title>A &amp; B · hvdrun</title>", `data-root="../"`},
		"f.proto.html":            {"message &lt;M&gt; {}"},
		"examples/x/index.html":   {`<a href="main.go.html">main.go</a>`, `<a href="in/index.html">in/</a>`, "<li>data.gz</li>"},
		"examples/x/main.go.html": {`data-root="../../"`},
	} {
		for _, part := range parts {
			if !strings.Contains(string(files[name]), part) {
				t.Errorf("%s lacks %s:\n%s", name, part, files[name])
			}
		}
	}
	if strings.Contains(string(files["docs/a.html"]), "unseen") {
		t.Error("a comment is shown")
	}
}

func TestFolderOfAPage(t *testing.T) {
	files, err := small(map[string]string{"examples/x/README.md": "# X\n\n[its program](main.go)\n"})
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"<title>X · hvdrun</title>", "Files of this folder", `<a href="main.go.html">main.go</a>`, "Examples and plugins"} {
		if !strings.Contains(string(files["examples/x/index.html"]), part) {
			t.Errorf("the page lacks %s:\n%s", part, files["examples/x/index.html"])
		}
	}
}

func TestRefused(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"docs/a.md", "# A\n\n## Two words\n\n[x](b.md)\n", "site: docs/a.md:5: a link: docs/b.md is not there, or not in git"},
		{"docs/a.md", "# A\n", "site: README.md:3: docs/a.md has no heading #two-words"},
		{"docs/a.md", "# A\n\n## Two words\n\n<b>x</b>\n", "site: docs/a.md:5: HTML within a line"},
		{"docs/a.md", "# A\n\n## Two words\n\n<div>\n", "site: docs/a.md:5: HTML, which"},
		{"docs/a.md", "# A\n\n## Two words\n\n![x](https://example.com/x.png)\n", "site: docs/a.md:5: https://example.com/x.png is of another host"},
		{"docs/a.md", "# A\n\n## Two words\n\n[x](javascript:alert(1))\n", "site: docs/a.md:5: javascript:alert(1) is of another host"},
		{"docs/a.md", "# A\n\n## Two words\n\n[x](../../etc/passwd)\n", "site: docs/a.md:5: a link: ../etc/passwd is not there"},
		{"docs/a.md", "# A\n\n## Two words\n\n[x](../f.proto#L3)\n", "site: docs/a.md:5: a link to #L3 of ../f.proto, which is no page"},
		{"docs/a.md", "## Two words\n", "site: docs/a.md: no heading of the first level"},
		{"f.proto", "\x00\n", "site: f.proto is not text"},
		{"f.proto", strings.Repeat("x", mostText+1), "site: f.proto has 262145 bytes, 262144 at most"},
		{"README.md", "", "site: README.md, the first page, is not there"},
	} {
		if _, err := small(map[string]string{c.name: c.text}); err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%s = %.60q: error %v, want %s…", c.name, c.text, err, c.want)
		}
	}
}

func TestRelative(t *testing.T) {
	for _, c := range [][3]string{
		{"index.html", "docs/a.html", "docs/a.html"},
		{"docs/a.html", "index.html", "../index.html"},
		{"docs/a.html", "docs/b.html", "b.html"},
		{"docs/design/a.html", "docs/b.html", "../b.html"},
		{"examples/x/index.html", "docs/b.html", "../../docs/b.html"},
	} {
		if got := relative(c[0], c[1]); got != c[2] {
			t.Errorf("from %s to %s: %s, want %s", c[0], c[1], got, c[2])
		}
	}
}
