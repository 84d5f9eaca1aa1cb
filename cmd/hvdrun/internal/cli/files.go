package cli

import (
	"fmt"
	"io"
	"os"
)

// ReadAll returns the content of an open file. It returns an error if more than most bytes follow.
func ReadAll(f *os.File, most int64) (string, error) {
	b, err := io.ReadAll(io.LimitReader(f, most+1))
	switch {
	case err != nil:
		return "", err
	case int64(len(b)) > most:
		return "", fmt.Errorf("%s is longer than %d bytes", f.Name(), most)
	}
	return string(b), nil
}
