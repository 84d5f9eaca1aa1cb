//go:build static || !linux

package gpu

import (
	"context"
	"fmt"
)

// Inventory returns ErrNoGPU.
func Inventory() ([]Device, error) {
	return nil, fmt.Errorf("%w: this program was built with -tags static, which loads no library of NVIDIA", ErrNoGPU)
}

// Watch returns ErrNoGPU.
func Watch(context.Context, func(Event)) error {
	_, err := Inventory()
	return err
}
