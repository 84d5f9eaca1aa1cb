package client

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"sync"
)

// build is a program file, known by its content.
type build struct {
	path string
	size int64
	sum  string // SHA-256, hexadecimal
}

func (b *build) name() string { return "hvdrun-" + b.sum }

// ownBuild is the program of this process, or another, read when it is first asked for. The file of
// this process is that which was started, even where another has taken its name since.
type ownBuild struct {
	once  sync.Once
	build build
	err   error
}

func (o *ownBuild) get(path string) (*build, error) {
	o.once.Do(func() { o.build, o.err = readBuild(cmp.Or(path, "/proc/self/exe")) })
	return &o.build, o.err
}

func readBuild(path string) (build, error) {
	f, err := os.Open(path)
	if err != nil {
		return build{}, fmt.Errorf("agent: this program: %w", err)
	}
	defer f.Close()
	h := sha256.New()
	n, err := io.Copy(h, f)
	if err != nil {
		return build{}, fmt.Errorf("agent: this program: %w", err)
	}
	return build{path: path, size: n, sum: hex.EncodeToString(h.Sum(nil))}, nil
}
