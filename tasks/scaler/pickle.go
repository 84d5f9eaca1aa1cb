package scaler

import (
	"encoding/binary"
	"strings"
)

// maxError bounds the text of an exception.
const maxError = 64 << 10

// Exception returns a Python exception as pickle.dumps would: of a class of the module builtins,
// with the text as its only argument. Clients raise it when they ask for the result.
func Exception(class, text string) []byte {
	if len(text) > maxError {
		text = text[:maxError]
	}
	text = strings.ToValidUTF8(text, "\uFFFD")
	p := []byte("\x80\x03cbuiltins\n" + class + "\nX") // protocol 3, the class, a string
	p = binary.LittleEndian.AppendUint32(p, uint32(len(text)))
	return append(append(p, text...), "\x85R."...) // a tuple of it, the call, the end
}

// isPickle returns whether bytes are a pickle of protocol 2 or later, as cloudpickle writes.
func isPickle(p []byte) bool { return len(p) > 2 && p[0] == 0x80 && p[1] >= 2 && p[1] <= 5 }
