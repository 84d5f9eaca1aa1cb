package store_test

import (
	"testing"

	"github.com/hvdrun/hvdrun/torchrun/store"
	"github.com/hvdrun/hvdrun/torchrun/store/storetest"
)

func TestMemory(t *testing.T) {
	m := &store.Memory{}
	storetest.Run(t, func(*testing.T) store.Store { return m })
}
