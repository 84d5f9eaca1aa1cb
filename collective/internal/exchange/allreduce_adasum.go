package exchange

import "github.com/hvdrun/hvdrun/collective/internal/operation"

// receiveAdasum is like receiveCombined, for Adasum, which needs both whole vectors at once.
func (c *Call) receiveAdasum(peer int, step uint32, data []byte, first int) error {
	memory := c.Scratch(operation.AdasumWork + len(data))
	work, other := memory[:operation.AdasumWork], memory[operation.AdasumWork:]
	if err := c.receiveAll(peer, step, other); err != nil {
		return err
	}
	if first != unsent {
		if err := c.WaitSent(first, first+c.Frames(len(data))); err != nil {
			return err
		}
	}
	if peer < c.Rank {
		operation.AddAdaptively(c.Desc.Type, data, other, data, work)
	} else {
		operation.AddAdaptively(c.Desc.Type, data, data, other, work)
	}
	return nil
}
