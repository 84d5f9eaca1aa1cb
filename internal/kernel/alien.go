package kernel

import (
	"fmt"
	"reflect"
	"strings"
)

// alienNames are parts, in lower case, of the names of types that hold 16-bit floating point
// numbers.
var alienNames = []string{"float", "half", "bf16", "fp16", "f16"}

// CheckAlien returns an error if t is another package's type of 16-bit floating point numbers: a
// defined type over uint16 whose name, or a method Float32, says so. Its elements would be reduced
// as integers.
func CheckAlien(t reflect.Type) error {
	if t.Kind() != reflect.Uint16 || t == reflect.TypeFor[uint16]() {
		return nil
	}
	_, alien := t.MethodByName("Float32")
	for _, name := range alienNames {
		alien = alien || strings.Contains(strings.ToLower(t.Name()), name)
	}
	if !alien {
		return nil
	}
	return fmt.Errorf("elements of %v would be reduced as integers: hand over collective.AsFloat16(data) or collective.AsBFloat16(data), "+
		"or collective.AsUint16(data) if they are integers", t)
}
