package store_test

import (
	"path/filepath"
	"testing"

	"github.com/hvdrun/hvdrun/rendezvous/store"
	"github.com/hvdrun/hvdrun/rendezvous/store/storetest"
)

func TestMemory(t *testing.T) {
	m := &store.Memory{}
	storetest.Run(t, func(*testing.T) store.Store { return m })
}

func TestFile(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	storetest.Run(t, func(t *testing.T) store.Store {
		f, err := store.OpenFile(dir)
		if err != nil {
			t.Fatal(err)
		}
		return f
	})
}
