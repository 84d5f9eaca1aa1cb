package scaler

import "crypto/md5"

// idLength is the length of object IDs in Scaler's programs, in bytes.
const idLength = 24

// objectID returns the ID of an object of a client: 8 bytes derived from the client's identity
// source, and 16 derived from the content. Scaler uses MD5; nothing here relies on it for security.
func objectID(source, content []byte) []byte {
	owner, object := md5.Sum(source), md5.Sum(content)
	return append(append(make([]byte, 0, idLength), owner[:8]...), object[:]...)
}
