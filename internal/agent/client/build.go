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

// ownBuild reads a program file on the first call of get: the one at a given path, or that of this
// process, which remains the file that was executed even if another file has taken its name since.
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
