//go:build !cgo || !linux

package gpu

import (
	"context"
	"fmt"
)

// Inventory returns ErrNoGPU.
func Inventory() ([]Device, error) {
	return nil, fmt.Errorf("%w: this program was built without cgo", ErrNoGPU)
}

// Watch returns ErrNoGPU.
func Watch(context.Context, func(Event)) error {
	_, err := Inventory()
	return err
}
