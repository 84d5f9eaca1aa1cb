package client

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"sync"
)

// build is a program file, known by its content. It is read once.
type build struct {
	once sync.Once
	err  error // of the reading
	path string
	size int64
	sum  string // SHA-256, hexadecimal
}

func (b *build) name() string { return "hvdrun-" + b.sum }

// read reads the file at the path on the first call. /proc/self/exe is the file that this process
// executes, even if another file has taken its name since.
func (b *build) read(path string) error {
	b.once.Do(func() {
		if b.err = b.sumUp(path); b.err != nil {
			b.err = fmt.Errorf("agent: this program: %w", b.err)
		}
	})
	return b.err
}

func (b *build) sumUp(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha256.New()
	b.size, err = io.Copy(h, f)
	b.path, b.sum = path, hex.EncodeToString(h.Sum(nil))
	return err
}
