// Command gen packs the files of a release, for deploy/release/build: archives of programs, the
// image for containers, the Helm chart, the bill of materials, notes, modules, and checksums.
//
//	go run ./deploy/release/gen -version v1.2.3 -time EPOCH -trees FOLDER -out FOLDER ROOT
//	go run ./deploy/release/gen -same ONE.yaml OTHER.yaml
//
// The same sources and programs give the same bytes: times are -time, owners 0, and names sorted.
package main

import (
	"crypto/sha256"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// release describes what is packed, and from what.
type release struct {
	version string    // v1.2.3
	time    time.Time // of all files
	root    string    // the repository
	trees   string    // a folder for each architecture, with its programs
	out     string
}

// architectures are the architectures of the programs.
var architectures = []string{"amd64", "arm64"}

func main() {
	var r release
	var seconds int64
	compares := flag.Bool("same", false, "compare the objects of Kubernetes in two files, and do nothing else")
	flag.StringVar(&r.version, "version", "", "of the release, such as v1.2.3")
	flag.Int64Var(&seconds, "time", 0, "of all files, in seconds since 1970")
	flag.StringVar(&r.trees, "trees", "", "the folder that has one with programs for each architecture")
	flag.StringVar(&r.out, "out", "", "the folder for the files")
	flag.Parse()
	if *compares && flag.NArg() == 2 {
		exit(same(flag.Arg(0), flag.Arg(1)))
	}
	r.time, r.root = time.Unix(seconds, 0).UTC(), flag.Arg(0)
	if r.version == "" || r.trees == "" || r.out == "" || flag.NArg() != 1 {
		flag.Usage()
		os.Exit(2)
	}
	exit(r.pack())
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// pack writes all files except the Debian packages, which must be there already, and then the
// checksums.
func (r *release) pack() error {
	for _, step := range []func() error{r.archives, r.image, r.chart, r.billOfMaterials, r.notes, r.modules, r.checksums} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// archives writes a tar of the programs for each architecture.
func (r *release) archives() error {
	for _, arch := range architectures {
		name := fmt.Sprintf("hvdrun_%s_linux_%s", r.version, arch)
		files, err := tree(filepath.Join(r.trees, arch), name)
		if err != nil {
			return err
		}
		if err := r.write(name+".tar.gz", zipped(archive(files, r.time))); err != nil {
			return err
		}
	}
	return nil
}

// notes writes the section of CHANGELOG.md for the version.
func (r *release) notes() error {
	text, err := os.ReadFile(filepath.Join(r.root, "CHANGELOG.md"))
	if err != nil {
		return err
	}
	notes, err := notesOf(string(text), r.version)
	if err != nil {
		return err
	}
	return r.write("NOTES.md", []byte(notes))
}

// notesOf returns the section of a version or, if the changelog lacks it, the section Unreleased.
// Links point to the files of that version.
func notesOf(changelog, version string) (string, error) {
	for _, title := range []string{version, strings.TrimPrefix(version, "v"), "Unreleased"} {
		_, text, found := strings.Cut("\n"+changelog, "\n## "+title+"\n")
		if !found {
			continue
		}
		text, _, _ = strings.Cut(text, "\n## ")
		if text = strings.TrimSpace(text); text == "" {
			return "", fmt.Errorf("CHANGELOG.md: the section %q is empty", title)
		}
		at := "](https://github.com/hvdrun/hvdrun/blob/" + version + "/"
		text = strings.NewReplacer("](http", "](http", "](", at).Replace(text)
		return "# hvdrun " + version + "\n\n" + text + "\n", nil
	}
	return "", fmt.Errorf("CHANGELOG.md has neither a section %q nor one %q", version, "Unreleased")
}

// checksums writes SHA256SUMS for all files in its folder.
func (r *release) checksums() error {
	entries, err := os.ReadDir(r.out)
	if err != nil {
		return err
	}
	var b strings.Builder
	for _, e := range entries { // in sorted order
		if e.IsDir() || e.Name() == "SHA256SUMS" {
			continue
		}
		data, err := os.ReadFile(filepath.Join(r.out, e.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&b, "%x  %s\n", sha256.Sum256(data), e.Name())
	}
	return r.write("SHA256SUMS", []byte(b.String()))
}

func (r *release) write(name string, data []byte) error {
	return os.WriteFile(filepath.Join(r.out, name), data, 0o644)
}

// tree returns the files below a folder, with prefix before their names.
func tree(dir, prefix string) (files []file, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if !d.Type().IsRegular() {
			return fmt.Errorf("%s is not a regular file", path)
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		mode := int64(0o644)
		if info.Mode()&0o100 != 0 {
			mode = 0o755
		}
		files = append(files, file{prefix + "/" + filepath.ToSlash(name), mode, data})
		return nil
	})
	return files, err
}
