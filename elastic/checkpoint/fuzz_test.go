package checkpoint

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// FuzzOpen: a file is either refused, or reading it returns only bytes of the file. The seal does
// not protect against forged headers, so the test also seals arbitrary headers.
func FuzzOpen(f *testing.F) {
	var b bytes.Buffer
	if err := encode(&b, sample, sampleTensors, blobs()); err != nil {
		f.Fatal(err)
	}
	file := b.Bytes()
	end := 8 + int(binary.LittleEndian.Uint64(file))
	f.Add(file[8:end], []byte{3}, true)
	f.Add(file[:end], file[len(file)-100:], false)
	one := `{"__metadata__":{"hvdrun":"{\"version\":1,\"parts\":[{\"name\":\"a\",\"tensors\":[\"t\"],\"sums\":[[0]]}]}"},` +
		`"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"hvdrun.seal":{"dtype":"U8","shape":[12],"data_offsets":[1,13]}}`
	f.Add([]byte(one), []byte{0}, true)
	f.Add([]byte(strings.Replace(one, `[\"t\"]`, `[\"t\",\"t\"]`, 1)), []byte{0}, true)
	f.Add([]byte(strings.Replace(one, `\"version\":1`, `\"version\":2`, 1)), []byte{0}, true)
	f.Add([]byte(strings.Replace(one, `[0,1]`, `[9,1]`, 1)), []byte{0}, true)
	f.Fuzz(func(t *testing.T, header, data []byte, sealed bool) {
		text := append(append([]byte(nil), header...), data...)
		if sealed {
			head := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
			text = append(append(head, data...), seal(head)...)
		}
		path := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := Open(path)
		if err != nil {
			return
		}
		defer c.Close()
		all := int64(0)
		for _, p := range c.About.Parts {
			all += c.Len(p)
			read, err := c.Read(p)
			if checked := c.Check(p); (checked == nil) != (err == nil) {
				t.Errorf("%q: %v when it is read, %v when it is checked", p.Name, err, checked)
			}
			for _, tensor := range read {
				if !bytes.Contains(text, tensor) {
					t.Errorf("%q: bytes that the file has not", p.Name)
				}
			}
		}
		if all > int64(len(text)) {
			t.Errorf("%d bytes in a file of %d", all, len(text))
		}
	})
}
