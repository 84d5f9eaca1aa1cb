package operation

import (
	"fmt"

	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Compression is the format in which float32 elements are sent, with the values of Compression in
// package collective.
type Compression uint8

// The formats, and how many there are.
const (
	NotCompressed Compression = iota
	AsFloat16
	AsBFloat16
	compressions
)

// String returns the name of the type on the wire.
func (c Compression) String() string {
	switch c {
	case NotCompressed:
		return "none"
	case AsFloat16, AsBFloat16:
		return c.Wire().String()
	}
	return fmt.Sprintf("compression(%d)", uint8(c))
}

// Wire returns the type on the wire; 0 stands for the type of the data.
func (c Compression) Wire() kernel.Type {
	return [compressions]kernel.Type{AsFloat16: kernel.Float16, AsBFloat16: kernel.BFloat16}[c]
}

// Check returns an error for a compression that does not exist, or does not apply to the type.
func (c Compression) Check(t kernel.Type) error {
	switch {
	case c >= compressions:
		return fmt.Errorf("%v is not a compression", c)
	case c != NotCompressed && t != kernel.Float32:
		return fmt.Errorf("compression to %v is for float32, not for %v", c, t)
	}
	return nil
}
