// Package frame sends and receives values over connections, as JSON preceded by its length.
package frame

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
)

// Write writes a value as JSON. It returns an error if the JSON has more than most bytes.
func Write(w io.Writer, v any, most int) error {
	text, err := json.Marshal(v)
	if err == nil && len(text) > most {
		err = tooLong(len(text), most)
	}
	if err == nil {
		_, err = w.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(text))), text...))
	}
	return err
}

// Read reads a value that Write has written, and stores it in v, a pointer. It allocates memory as
// bytes arrive. It returns an error if the JSON has more than most bytes. At the end of the
// connection it returns io.EOF.
func Read(r io.Reader, v any, most int) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(head[:])
	if int64(n) > int64(most) {
		return tooLong(int(n), most)
	}
	text, err := io.ReadAll(io.LimitReader(r, int64(n)))
	if err == nil && len(text) < int(n) {
		err = io.ErrUnexpectedEOF
	}
	if err == nil {
		err = json.Unmarshal(text, v)
	}
	return err
}

func tooLong(bytes, most int) error {
	return fmt.Errorf("frame: the message has %d bytes; at most %d are allowed", bytes, most)
}
