package scaler

import "crypto/md5"

// idLength is the length of object IDs in Scaler's programs, in bytes.
const idLength = 24

// ObjectID returns the ID of an object of a client: 8 bytes derived from the client's identity
// source, and 16 derived from the content. Scaler uses MD5; nothing here relies on it for security.
func ObjectID(source, content []byte) []byte {
	owner, object := md5.Sum(source), md5.Sum(content)
	return append(append(make([]byte, 0, idLength), owner[:8]...), object[:]...)
}

// SerializerID returns the id of a client's serializer, with which a Python worker reads and writes
// all other objects of the client.
func SerializerID(source []byte) []byte { return ObjectID(source, []byte("serializer")) }

// IsSerializerID reports whether an ID is that of a client's serializer.
func IsSerializerID(id []byte) bool {
	serializer := md5.Sum([]byte("serializer"))
	return len(id) == idLength && string(id[8:]) == string(serializer[:])
}
