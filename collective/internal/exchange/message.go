package exchange

// Sender is the rank in a lane of messages that sends them to the other rank.
const Sender = 0

const ackMessage = 1 // step of the frame that acknowledges a whole message

// PassSockets moves a message over the sockets of a lane of two ranks. It blocks on both until the
// receiver has all of it.
func (c *Call) PassSockets(data []byte) error {
	if c.Rank == Sender {
		for i := range c.Frames(len(data)) {
			c.Send(1-Sender, 0, c.Cut(data, i))
		}
		return c.Receive(1-Sender, ackMessage, nil)
	}
	first, next := c.inUsed, 0
	for i := range c.Frames(len(data)) {
		for ; next < min(i+window, c.Frames(len(data))); next++ {
			c.Post(Sender, 0, c.Cut(data, next))
		}
		if err := c.wait(&c.ins[first+i].Done); err != nil {
			return err
		}
	}
	c.Send(Sender, ackMessage, nil)
	return nil
}
