package main

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
)

// The parts of the OCI formats that an image of one layer needs.
type (
	descriptor struct {
		MediaType   string            `json:"mediaType"`
		Digest      string            `json:"digest"`
		Size        int               `json:"size"`
		Platform    *platform         `json:"platform,omitempty"`
		Annotations map[string]string `json:"annotations,omitempty"`
	}
	platform struct {
		Architecture string `json:"architecture"`
		OS           string `json:"os"`
	}
	index struct {
		SchemaVersion int          `json:"schemaVersion"`
		MediaType     string       `json:"mediaType"`
		Manifests     []descriptor `json:"manifests"`
	}
	manifest struct {
		SchemaVersion int          `json:"schemaVersion"`
		MediaType     string       `json:"mediaType"`
		Config        descriptor   `json:"config"`
		Layers        []descriptor `json:"layers"`
	}
	imageConfig struct {
		Created      string       `json:"created"`
		Architecture string       `json:"architecture"`
		OS           string       `json:"os"`
		Config       runConfig    `json:"config"`
		RootFS       rootFS       `json:"rootfs"`
		History      []historyOne `json:"history"`
	}
	runConfig struct {
		User       string
		Env        []string
		Entrypoint []string
		Cmd        []string
		WorkingDir string
		Labels     map[string]string
	}
	rootFS struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"`
	}
	historyOne struct {
		Created   string `json:"created"`
		CreatedBy string `json:"created_by"`
	}
)

const media = "application/vnd.oci.image."

// users is the image's /etc/passwd. Its programs run as hvdrun.
const users = "root:x:0:0:root:/root:/sbin/nologin\nhvdrun:x:65532:65532:hvdrun:/tmp:/sbin/nologin\nnobody:x:65534:65534:nobody:/:/sbin/nologin\n"

// image writes an image for all architectures, as a tar in OCI's image layout, from which training
// images copy hvdrun and its plugins. The programs need no other file.
func (r *release) image() error {
	l := layout{blobs: map[string]file{}}
	platforms := index{SchemaVersion: 2, MediaType: media + "index.v1+json"}
	for _, arch := range architectures {
		files, err := tree(filepath.Join(r.trees, arch), "usr")
		if err != nil {
			return err
		}
		platforms.Manifests = append(platforms.Manifests, r.imageOf(&l, arch, files))
	}
	all := l.addJSON(platforms.MediaType, platforms)
	all.Annotations = map[string]string{"org.opencontainers.image.ref.name": r.version}
	files := []file{
		{"oci-layout", 0o644, []byte(`{"imageLayoutVersion":"1.0.0"}`)},
		{"index.json", 0o644, marshal(index{SchemaVersion: 2, MediaType: media + "index.v1+json", Manifests: []descriptor{all}})},
	}
	for _, blob := range l.blobs {
		files = append(files, blob)
	}
	return r.write(fmt.Sprintf("hvdrun_%s_image.tar", r.version), archive(files, r.time))
}

// imageOf adds the image of one architecture, with the given programs, to the layout.
func (r *release) imageOf(l *layout, arch string, programs []file) descriptor {
	files := []file{
		{"etc/passwd", 0o644, []byte(users)},
		{"tmp/", 0o1777, nil},
	}
	for _, f := range programs {
		if !strings.HasPrefix(f.name, "usr/share/") || strings.HasPrefix(f.name, "usr/share/doc/") {
			files = append(files, f)
		}
	}
	layer := archive(files, r.time)
	created := r.time.Format("2006-01-02T15:04:05Z")
	config := imageConfig{
		Created: created, Architecture: arch, OS: "linux",
		Config: runConfig{
			User: "65532:65532", Env: []string{"PATH=/usr/bin", "HOME=/tmp"},
			Entrypoint: []string{"/usr/bin/hvdrun"}, Cmd: []string{"--help"}, WorkingDir: "/tmp",
			Labels: map[string]string{
				"org.opencontainers.image.source": "https://github.com/hvdrun/hvdrun", "org.opencontainers.image.version": r.version,
				"org.opencontainers.image.licenses": "Apache-2.0",
			},
		},
		RootFS:  rootFS{"layers", []string{digest(layer)}},
		History: []historyOne{{created, "make release"}},
	}
	m := manifest{
		SchemaVersion: 2, MediaType: media + "manifest.v1+json",
		Config: l.addJSON(media+"config.v1+json", config),
		Layers: []descriptor{l.add(media+"layer.v1.tar+gzip", zipped(layer))},
	}
	d := l.addJSON(m.MediaType, m)
	d.Platform = &platform{arch, "linux"}
	return d
}

// layout holds the blobs of an OCI image layout by digest.
type layout struct{ blobs map[string]file }

func (l *layout) add(mediaType string, data []byte) descriptor {
	d := digest(data)
	l.blobs[d] = file{"blobs/" + strings.Replace(d, ":", "/", 1), 0o644, data}
	return descriptor{MediaType: mediaType, Digest: d, Size: len(data)}
}

func (l *layout) addJSON(mediaType string, v any) descriptor { return l.add(mediaType, marshal(v)) }

func digest(data []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(data)) }

func marshal(v any) []byte {
	data, err := json.Marshal(v)
	must(err)
	return data
}
