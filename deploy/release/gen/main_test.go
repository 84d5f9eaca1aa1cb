package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// at is the modification time of all packed files.
var at = time.Unix(1_700_000_000, 0).UTC()

// unpacked returns the names, headers and contents of a tar's files.
func unpacked(t *testing.T, r io.Reader) (names []string, headers map[string]*tar.Header, data map[string][]byte) {
	t.Helper()
	headers, data = map[string]*tar.Header{}, map[string][]byte{}
	for a := tar.NewReader(r); ; {
		h, err := a.Next()
		if errors.Is(err, io.EOF) {
			return names, headers, data
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(a)
		if err != nil {
			t.Fatal(err)
		}
		names, headers[h.Name], data[h.Name] = append(names, h.Name), h, content
	}
}

// packed returns a release whose programs are text.
func packed(t *testing.T) *release {
	t.Helper()
	r := &release{version: "v1.2.3-rc.1", time: at, root: "../../..", trees: t.TempDir(), out: t.TempDir()}
	for _, arch := range architectures {
		for name, mode := range map[string]os.FileMode{
			"bin/hvdrun": 0o755, "lib/hvdrun/plugins/file": 0o755, "share/doc/hvdrun/copyright": 0o644, "share/man/man1/hvdrun.1.gz": 0o600,
		} {
			path := filepath.Join(r.trees, arch, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(name+" of "+arch), mode); err != nil {
				t.Fatal(err)
			}
		}
	}
	return r
}

func read(t *testing.T, r *release, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(r.out, name))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// TestArchives: an archive has one folder with the archive's name, its files belong to root, and it
// has the same bytes each time.
func TestArchives(t *testing.T) {
	r := packed(t)
	if err := r.archives(); err != nil {
		t.Fatal(err)
	}
	const name = "hvdrun_v1.2.3-rc.1_linux_arm64"
	once := read(t, r, name+".tar.gz")
	r2 := packed(t)
	if err := r2.archives(); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(once, read(t, r2, name+".tar.gz")) {
		t.Error("the same files give other bytes")
	}
	z, err := gzip.NewReader(bytes.NewReader(once))
	if err != nil {
		t.Fatal(err)
	}
	names, headers, data := unpacked(t, z)
	if !slices.IsSorted(names) || len(names) != 14 {
		t.Errorf("%q", names)
	}
	for n, h := range headers {
		if !strings.HasPrefix(n, name+"/") || h.Uid != 0 || h.Gid != 0 || !h.ModTime.Equal(at) {
			t.Errorf("%+v", h)
		}
	}
	if h := headers[name+"/bin/hvdrun"]; h == nil || h.Mode != 0o755 || string(data[h.Name]) != "bin/hvdrun of arm64" {
		t.Errorf("%+v", h)
	}
	if h := headers[name+"/share/man/man1/hvdrun.1.gz"]; h == nil || h.Mode != 0o644 {
		t.Errorf("%+v", h)
	}
}

// TestImage: each digest of the layout is that of an existing file, and each platform has a layer
// with its own hvdrun and a folder for temporary files.
func TestImage(t *testing.T) {
	r := packed(t)
	if err := r.image(); err != nil {
		t.Fatal(err)
	}
	_, _, files := unpacked(t, bytes.NewReader(read(t, r, "hvdrun_v1.2.3-rc.1_image.tar")))
	if string(files["oci-layout"]) != `{"imageLayoutVersion":"1.0.0"}` {
		t.Errorf("oci-layout: %s", files["oci-layout"])
	}
	blob := func(d descriptor, to any) []byte {
		t.Helper()
		data := files["blobs/"+strings.Replace(d.Digest, ":", "/", 1)]
		if len(data) != d.Size || digest(data) != d.Digest {
			t.Fatalf("%+v is not there, or another: %d bytes", d, len(data))
		}
		if to != nil {
			if err := json.Unmarshal(data, to); err != nil {
				t.Fatal(err)
			}
		}
		return data
	}
	var top, platforms index
	if err := json.Unmarshal(files["index.json"], &top); err != nil || len(top.Manifests) != 1 {
		t.Fatalf("%v: %s", err, files["index.json"])
	}
	if name := top.Manifests[0].Annotations["org.opencontainers.image.ref.name"]; name != r.version {
		t.Errorf("the image is named %q", name)
	}
	blob(top.Manifests[0], &platforms)
	if len(platforms.Manifests) != 2 {
		t.Fatalf("%+v", platforms)
	}
	for i, arch := range architectures {
		var m manifest
		var c imageConfig
		if p := platforms.Manifests[i].Platform; p == nil || *p != (platform{arch, "linux"}) {
			t.Errorf("%+v", p)
		}
		blob(platforms.Manifests[i], &m)
		blob(m.Config, &c)
		z, err := gzip.NewReader(bytes.NewReader(blob(m.Layers[0], nil)))
		if err != nil {
			t.Fatal(err)
		}
		layer, err := io.ReadAll(z)
		if err != nil {
			t.Fatal(err)
		}
		if c.Architecture != arch || !slices.Equal(c.RootFS.DiffIDs, []string{digest(layer)}) || c.Config.User != "65532:65532" {
			t.Errorf("%+v", c)
		}
		_, headers, data := unpacked(t, bytes.NewReader(layer))
		if string(data["usr/bin/hvdrun"]) != "bin/hvdrun of "+arch || headers["usr/lib/hvdrun/plugins/file"] == nil ||
			headers["usr/share/doc/hvdrun/copyright"] == nil || headers["usr/share/man/man1/hvdrun.1.gz"] != nil {
			t.Errorf("the layer has %v", headers)
		}
		if h := headers["tmp/"]; h == nil || h.Mode != 0o1777 {
			t.Errorf("%+v", h)
		}
	}
}

// TestChart: the chart has the release's version and its templates. make check-release compares
// what helm renders with the kustomization.
func TestChart(t *testing.T) {
	r := packed(t)
	if err := r.chart(); err != nil {
		t.Fatal(err)
	}
	z, err := gzip.NewReader(bytes.NewReader(read(t, r, "hvdrun-1.2.3-rc.1.tgz")))
	if err != nil {
		t.Fatal(err)
	}
	_, _, files := unpacked(t, z)
	if text := string(files["hvdrun/Chart.yaml"]); !strings.Contains(text, "\nversion: 1.2.3-rc.1\nappVersion: 1.2.3-rc.1\n") {
		t.Error(text)
	}
	for _, name := range []string{"values.yaml", "README.md", "templates/rbac.yaml", "templates/workers.yaml", "templates/driver.yaml"} {
		if len(files["hvdrun/"+name]) == 0 {
			t.Errorf("the chart lacks %s", name)
		}
	}
}

func TestNotes(t *testing.T) {
	const changelog = "# Changes\n\n## Unreleased\n\n- new ([state](docs/state.md), [other](https://example.com))\n\n## v1.0.0\n\n- old\n\n## 0.9.0\n\n## v0.8.0\n"
	for version, want := range map[string]string{
		"v2.0.0": "# hvdrun v2.0.0\n\n- new ([state](https://github.com/hvdrun/hvdrun/blob/v2.0.0/docs/state.md), [other](https://example.com))\n",
		"v1.0.0": "# hvdrun v1.0.0\n\n- old\n",
	} {
		if got, err := notesOf(changelog, version); got != want || err != nil {
			t.Errorf("%s: %q, %v", version, got, err)
		}
	}
	for _, bad := range []string{"v0.9.0", "v0.8.0"} {
		if got, err := notesOf(changelog, bad); err == nil {
			t.Errorf("%s: %q", bad, got)
		}
	}
	if _, err := notesOf("# Changes\n", "v1.0.0"); err == nil {
		t.Error("there are notes of no section")
	}
}

func TestChecksums(t *testing.T) {
	r := packed(t)
	for _, name := range []string{"b", "a", "SHA256SUMS"} {
		if err := r.write(name, []byte(name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.checksums(); err != nil {
		t.Fatal(err)
	}
	const want = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb  a\n" +
		"3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d  b\n"
	if got := string(read(t, r, "SHA256SUMS")); got != want {
		t.Error(got)
	}
}

// TestTagged: the go.mod of a nested module at its tag requires the release and replaces nothing.
func TestTagged(t *testing.T) {
	for _, dir := range nested {
		text, err := os.ReadFile(filepath.Join("../../..", dir, "go.mod"))
		if err != nil {
			t.Fatal(err)
		}
		mod, path, err := tagged(text, "v1.2.3")
		if err != nil {
			t.Fatal(err)
		}
		if path != ours+"/"+dir || strings.Contains(string(mod), "replace") || !strings.Contains(string(mod), "\t"+ours+" v1.2.3\n") {
			t.Errorf("%s: %s", path, mod)
		}
	}
	if _, _, err := tagged([]byte("module example.com/x\n\nreplace example.com/y => ../y\n"), "v1.2.3"); err == nil {
		t.Error("a module that replaces another is taken")
	}
	sum := withSums([]byte("b v1 h1:x=\nb v1/go.mod h1:y=\n"), []string{"a v1 h1:z=", "b v1 h1:x="})
	if string(sum) != "a v1 h1:z=\nb v1 h1:x=\nb v1/go.mod h1:y=\n" {
		t.Errorf("%s", sum)
	}
}

func TestSame(t *testing.T) {
	one, err := objectsOf([]byte("kind: A\nmetadata: {name: x}\nn: 4\n---\n# none\n---\nkind: B\nmetadata: {name: x}\n"))
	if err != nil || len(one) != 2 {
		t.Fatalf("%v, %v", one, err)
	}
	other, err := objectsOf([]byte("kind: B\nmetadata: {name: x}\n---\nn: 4\nkind: A\nmetadata: {name: x}\n"))
	if err != nil || compare(one, other) != nil {
		t.Errorf("%v, %v", other, compare(one, other))
	}
	other["A x"].(map[string]any)["n"] = 5
	if err := compare(one, other); err == nil || !strings.HasPrefix(err.Error(), "A x differs") {
		t.Error(err)
	}
	delete(other, "B x")
	if err := compare(one, other); err == nil || !strings.Contains(err.Error(), "B x differs") {
		t.Error(err)
	}
	if _, err := objectsOf([]byte("kind: A\nmetadata: {name: x}\n---\nkind: A\nmetadata: {name: x}\n")); err == nil {
		t.Error("two objects of a name are taken")
	}
}
