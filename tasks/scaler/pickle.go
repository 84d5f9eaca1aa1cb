package scaler

import (
	"encoding/binary"
	"strings"
)

// maxError is the largest length of an exception's text in bytes.
const maxError = 64 << 10

// exception returns a pickled Python exception, as from pickle.dumps, of a class in the module
// builtins with text as its only argument. Clients raise it when they ask for the result.
func exception(class, text string) []byte {
	if len(text) > maxError {
		text = text[:maxError]
	}
	text = strings.ToValidUTF8(text, "\uFFFD")
	p := []byte("\x80\x03cbuiltins\n" + class + "\nX") // protocol 3, the class, a string
	p = binary.LittleEndian.AppendUint32(p, uint32(len(text)))
	return append(append(p, text...), "\x85R."...) // a tuple of it, the call, the end
}

// isPickle reports whether p is a pickle of protocol 2 or later, as cloudpickle writes.
func isPickle(p []byte) bool { return len(p) > 2 && p[0] == 0x80 && p[1] >= 2 && p[1] <= 5 }
