// Command gen writes the project's static site. What a folder of that name held before is replaced,
// if it was a site.
//
//	go run ./internal/site/gen ROOT FOLDER
//
// ROOT is the repository: what git does not track there is not published.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/hvdrun/hvdrun/internal/site"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: gen ROOT FOLDER")
		os.Exit(2)
	}
	if err := write(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// write makes the site beside the folder, and puts it in the folder's place when it is whole.
func write(root, folder string) error {
	names, err := tracked(root)
	if err != nil {
		return err
	}
	files, err := site.Build(site.Source{FS: os.DirFS(root), Files: names})
	if err != nil {
		return err
	}
	if err := replaceable(folder); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(filepath.Clean(folder)), 0o755); err != nil {
		return fmt.Errorf("site: %w", err)
	}
	temp, err := os.MkdirTemp(filepath.Dir(filepath.Clean(folder)), ".site-")
	if err != nil {
		return fmt.Errorf("site: %w", err)
	}
	defer os.RemoveAll(temp)
	for name, text := range files {
		path := filepath.Join(temp, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return fmt.Errorf("site: %w", err)
		}
		if err := os.WriteFile(path, text, 0o644); err != nil {
			return fmt.Errorf("site: %w", err)
		}
	}
	if err := os.Chmod(temp, 0o755); err != nil {
		return fmt.Errorf("site: %w", err)
	}
	if err := os.RemoveAll(folder); err != nil {
		return fmt.Errorf("site: %w", err)
	}
	if err := os.Rename(temp, folder); err != nil {
		return fmt.Errorf("site: %w", err)
	}
	fmt.Printf("%d files in %s\n", len(files), folder)
	return nil
}

// replaceable refuses a folder that holds something other than a site.
func replaceable(folder string) error {
	entries, err := os.ReadDir(folder)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(entries) == 0 {
		return nil
	}
	if err != nil {
		return fmt.Errorf("site: %w", err)
	}
	for _, name := range []string{"index.html", "search-index.js"} {
		if _, err := os.Stat(filepath.Join(folder, name)); err != nil {
			return fmt.Errorf("site: %s holds something other than a site: remove it, or name another folder", folder)
		}
	}
	return nil
}

// tracked returns the files of the repository that git knows and that are there.
func tracked(root string) (names []string, err error) {
	cmd := exec.Command("git", "-C", root, "ls-files", "-z")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("site: git -C %s ls-files: %w: %s", root, err, bytes.TrimSpace(stderr.Bytes()))
	}
	for name := range strings.SplitSeq(string(out), "\x00") {
		if name == "" {
			continue
		}
		info, err := os.Lstat(filepath.Join(root, name))
		if err == nil && info.Mode().IsRegular() {
			names = append(names, name)
		}
	}
	return names, nil
}
