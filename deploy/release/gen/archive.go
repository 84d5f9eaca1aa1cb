package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"path"
	"slices"
	"strings"
	"time"
)

// file is a file of an archive, or a folder if the name ends in a slash.
type file struct {
	name string
	mode int64
	data []byte
}

// archive returns a tar of the files and their parent folders, sorted, all owned by root and with
// the time at.
func archive(files []file, at time.Time) []byte {
	files = slices.Clone(files)
	have := map[string]bool{}
	for _, f := range files {
		have[f.name] = true
	}
	for _, f := range files {
		for dir := path.Dir(strings.TrimSuffix(f.name, "/")); dir != "."; dir = path.Dir(dir) {
			if !have[dir+"/"] {
				have[dir+"/"] = true
				files = append(files, file{name: dir + "/", mode: 0o755})
			}
		}
	}
	slices.SortFunc(files, func(a, b file) int { return strings.Compare(a.name, b.name) })
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.data)), ModTime: at, Format: tar.FormatUSTAR, Typeflag: tar.TypeReg}
		if strings.HasSuffix(f.name, "/") {
			h.Typeflag = tar.TypeDir
		}
		must(w.WriteHeader(h))
		_, err := w.Write(f.data)
		must(err)
	}
	must(w.Close())
	return b.Bytes()
}

// zipped returns data compressed by gzip, with neither a name nor a time in the header.
func zipped(data []byte) []byte {
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	must(err)
	_, err = w.Write(data)
	must(err)
	must(w.Close())
	return b.Bytes()
}

// must panics on an error of a write into memory, which means that a name is too long for the
// format.
func must(err error) {
	if err != nil {
		panic(err)
	}
}
