package tasks

import (
	"bytes"
	"encoding"
	"encoding/binary"
	"encoding/gob"
	"fmt"
	"math"
	"reflect"
	"slices"
)

// The first byte of an encoded value, which says how it is encoded.
const (
	asNothing = iota
	asBytes
	asString
	asInt
	asUint
	asFloat
	asBool
	asBinary
	asGob
)

// encode encodes a value. A nil pointer is a valid value.
func encode(v reflect.Value) ([]byte, error) {
	if !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return []byte{asNothing}, nil
	}
	if m, ok := v.Interface().(encoding.BinaryMarshaler); ok {
		b, err := m.MarshalBinary()
		return append([]byte{asBinary}, b...), err
	}
	switch v.Kind() {
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return append([]byte{asBytes}, v.Bytes()...), nil
		}
	case reflect.String:
		return append([]byte{asString}, v.String()...), nil
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return binary.AppendVarint([]byte{asInt}, v.Int()), nil
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return binary.AppendUvarint([]byte{asUint}, v.Uint()), nil
	case reflect.Float32, reflect.Float64:
		return binary.LittleEndian.AppendUint64([]byte{asFloat}, math.Float64bits(v.Float())), nil
	case reflect.Bool:
		if v.Bool() {
			return []byte{asBool, 1}, nil
		}
		return []byte{asBool, 0}, nil
	case reflect.Struct:
		if v.NumField() == 0 {
			return []byte{asNothing}, nil
		}
	}
	if v.Kind() != reflect.Pointer { // methods of the pointer count too, as in decoding
		p := reflect.New(v.Type())
		p.Elem().Set(v)
		if m, ok := p.Interface().(encoding.BinaryMarshaler); ok {
			b, err := m.MarshalBinary()
			return append([]byte{asBinary}, b...), err
		}
		v = p
	}
	var buf bytes.Buffer
	buf.WriteByte(asGob)
	err := gob.NewEncoder(&buf).EncodeValue(v)
	return buf.Bytes(), err
}

// The size limits, which are those of Ray, beyond which a value is stored and not sent with a task.
const (
	// inlineLimit is the largest size of an argument that is sent with the task. A result that is
	// sent must be smaller.
	inlineLimit = 100 << 10
	// messageLimit is the largest total size of the arguments that are sent with a task, and of
	// results.
	messageLimit = 10 << 20
)

// encodeParts is like encode, for a value that may be large: it does not copy a slice of bytes.
func encodeParts(v reflect.Value) ([][]byte, error) {
	if v.IsValid() && v.Kind() == reflect.Slice && v.Type().Elem().Kind() == reflect.Uint8 && v.Len() > inlineLimit/2 {
		if _, ok := v.Interface().(encoding.BinaryMarshaler); !ok {
			return [][]byte{{asBytes}, v.Bytes()}, nil
		}
	}
	b, err := encode(v)
	return [][]byte{b}, err
}

// lengthOf returns the total number of bytes of the parts.
func lengthOf(parts [][]byte) (n int) {
	for _, p := range parts {
		n += len(p)
	}
	return n
}

// decode decodes a value of type t. It does not keep b.
func decode(b []byte, t reflect.Type) (reflect.Value, error) {
	if len(b) > 0 && b[0] == asBytes {
		b = bytes.Clone(b)
	}
	return decodeOwn(b, t)
}

// decodeOwn is like decode, but b becomes part of the value: nothing else may use it.
func decodeOwn(b []byte, t reflect.Type) (reflect.Value, error) {
	v := reflect.New(t).Elem()
	if len(b) == 0 {
		return v, fmt.Errorf("the encoding of a %v is empty", t)
	}
	how, b := b[0], b[1:]
	wrong := fmt.Errorf("the bytes do not encode a %v", t)
	switch kind := t.Kind(); {
	case how == asNothing:
		return v, nil
	case how == asBinary:
		u, ok := v.Addr().Interface().(encoding.BinaryUnmarshaler)
		if !ok && kind == reflect.Pointer {
			v.Set(reflect.New(t.Elem()))
			u, ok = v.Interface().(encoding.BinaryUnmarshaler)
		}
		if !ok {
			return v, fmt.Errorf("%v has no UnmarshalBinary", t)
		}
		return v, u.UnmarshalBinary(b)
	case how == asGob:
		return v, gob.NewDecoder(bytes.NewReader(b)).DecodeValue(v)
	case how == asBytes && kind == reflect.Slice && t.Elem().Kind() == reflect.Uint8:
		v.SetBytes(slices.Clip(b))
	case how == asString && kind == reflect.String:
		v.SetString(string(b))
	case how == asInt && v.CanInt():
		n, size := binary.Varint(b)
		if size != len(b) || v.OverflowInt(n) {
			return v, wrong
		}
		v.SetInt(n)
	case how == asUint && v.CanUint():
		n, size := binary.Uvarint(b)
		if size != len(b) || v.OverflowUint(n) {
			return v, wrong
		}
		v.SetUint(n)
	case how == asFloat && v.CanFloat() && len(b) == 8:
		v.SetFloat(math.Float64frombits(binary.LittleEndian.Uint64(b)))
	case how == asBool && kind == reflect.Bool && len(b) == 1:
		v.SetBool(b[0] != 0)
	default:
		return v, wrong
	}
	return v, nil
}
