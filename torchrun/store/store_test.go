package store_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/hvdrun/hvdrun/torchrun/store"
	"github.com/hvdrun/hvdrun/torchrun/store/storetest"
)

func TestMemory(t *testing.T) {
	m := &storetest.Memory{}
	storetest.Run(t, func(*testing.T) store.Store { return m })
}

// TestClock: a store's clock continues from the given time.
func TestClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		noon := time.Date(2020, 1, 1, 12, 0, 0, 0, time.UTC)
		told, ofDay := store.ClockAt(noon), store.Clock{}
		<-time.NewTimer(time.Minute).C
		if now := told.Now(); !now.Equal(noon.Add(time.Minute)) || !ofDay.Now().Equal(time.Now()) {
			t.Errorf("%v, %v", now, ofDay.Now())
		}
	})
}
