package scaler

import "crypto/md5"

// idLength is how long ids of objects are in Scaler's programs.
const idLength = 24

// ObjectID returns the id of an object of a client: 8 bytes for the client with the identity
// source, and 16 for the content. Scaler uses MD5; nothing here relies on it for security.
func ObjectID(source, content []byte) []byte {
	owner, object := md5.Sum(source), md5.Sum(content)
	return append(append(make([]byte, 0, idLength), owner[:8]...), object[:]...)
}

// SerializerID returns the id of a client's serializer, with which a Python worker reads and writes
// all other objects of the client.
func SerializerID(source []byte) []byte { return ObjectID(source, []byte("serializer")) }

// IsSerializerID returns whether an id is that of a client's serializer.
func IsSerializerID(id []byte) bool {
	serializer := md5.Sum([]byte("serializer"))
	return len(id) == idLength && string(id[8:]) == string(serializer[:])
}
