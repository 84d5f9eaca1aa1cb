package elastic

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

// appendCanonical appends bytes of v that are equal in every process if gob considers the values
// equal. The output of gob is not: the order of maps varies, and types are numbered in the order of
// their first use in a process. v is addressable.
func appendCanonical(b []byte, v reflect.Value) ([]byte, error) {
	if own, ok, err := marshalled(v); ok || err != nil {
		return append(binary.AppendUvarint(b, uint64(len(own))), own...), err
	}
	switch v.Kind() {
	case reflect.Bool:
		if v.Bool() {
			return append(b, 1), nil
		}
		return append(b, 0), nil
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return binary.AppendVarint(b, v.Int()), nil
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64, reflect.Uintptr:
		return binary.AppendUvarint(b, v.Uint()), nil
	case reflect.Float32, reflect.Float64:
		return binary.LittleEndian.AppendUint64(b, math.Float64bits(v.Float())), nil
	case reflect.Complex64, reflect.Complex128:
		b = binary.LittleEndian.AppendUint64(b, math.Float64bits(real(v.Complex())))
		return binary.LittleEndian.AppendUint64(b, math.Float64bits(imag(v.Complex()))), nil
	case reflect.String:
		return append(binary.AppendUvarint(b, uint64(v.Len())), v.String()...), nil
	case reflect.Pointer, reflect.Interface:
		return appendIndirect(b, v)
	case reflect.Slice, reflect.Array:
		return appendList(b, v)
	case reflect.Map:
		return appendMap(b, v)
	case reflect.Struct:
		return appendStruct(b, v)
	}
	return b, nil // gob omits channels and functions
}

// marshalled returns the encoding of v by the methods that gob would call, and reports whether v
// has such methods.
func marshalled(v reflect.Value) ([]byte, bool, error) {
	if v.Kind() == reflect.Pointer && v.IsNil() || v.Kind() == reflect.Interface {
		return nil, false, nil
	}
	for _, x := range []any{v.Interface(), v.Addr().Interface()} {
		switch m := x.(type) {
		case gob.GobEncoder:
			b, err := m.GobEncode()
			return b, true, err
		case encoding.BinaryMarshaler:
			b, err := m.MarshalBinary()
			return b, true, err
		}
	}
	return nil, false, nil
}

func appendIndirect(b []byte, v reflect.Value) ([]byte, error) {
	if v.IsNil() {
		return append(b, 0), nil
	}
	b = append(b, 1)
	if v.Kind() == reflect.Interface {
		b = fmt.Appendf(b, "%v;", v.Elem().Type())
	}
	return appendCanonical(b, addressable(v.Elem()))
}

func appendList(b []byte, v reflect.Value) ([]byte, error) {
	b = binary.AppendUvarint(b, uint64(v.Len()))
	if v.Type().Elem() == reflect.TypeFor[byte]() {
		return append(b, v.Bytes()...), nil
	}
	var err error
	for i := 0; i < v.Len() && err == nil; i++ {
		b, err = appendCanonical(b, v.Index(i))
	}
	return b, err
}

func appendMap(b []byte, v reflect.Value) ([]byte, error) {
	entries := make([][]byte, 0, v.Len())
	for it := v.MapRange(); it.Next(); {
		e, err := appendCanonical(nil, addressable(it.Key()))
		if err == nil {
			e, err = appendCanonical(e, addressable(it.Value()))
		}
		if err != nil {
			return nil, err
		}
		entries = append(entries, e)
	}
	slices.SortFunc(entries, bytes.Compare)
	b = binary.AppendUvarint(b, uint64(len(entries)))
	for _, e := range entries {
		b = append(binary.AppendUvarint(b, uint64(len(e))), e...)
	}
	return b, nil
}

func appendStruct(b []byte, v reflect.Value) ([]byte, error) {
	var err error
	for i := 0; i < v.NumField() && err == nil; i++ {
		if v.Type().Field(i).IsExported() {
			b, err = appendCanonical(b, v.Field(i))
		}
	}
	return b, err
}

func addressable(v reflect.Value) reflect.Value {
	if v.CanAddr() {
		return v
	}
	a := reflect.New(v.Type()).Elem()
	a.Set(v)
	return a
}
