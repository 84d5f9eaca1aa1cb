package cuda

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/hvdrun/hvdrun/collective"
)

// Part is a slice on a device as a part of a training state: it is an elastic.Part and an elastic.Imaged.
type Part[T collective.Element] struct {
	name  string
	live  *Slice[T]
	image []byte // of the last Save; nobody writes to it any more
	saved bool
}

// Tensor is the part whose live value is what live holds. A save copies it to the host through pinned memory, into a buffer of its
// own only where something has changed; a restore copies it back; a sync broadcasts it from device to device. What writes to the slice must be
// done when a state is committed, saved or checked. Its length must be the same on every rank.
func Tensor[T collective.Element](name string, live *Slice[T]) *Part[T] {
	return &Part[T]{name: name, live: live}
}

var errNothingSaved = errors.New("nothing has been saved yet that could be restored")

func (p *Part[T]) wrong(err error) error {
	if err != nil {
		err = fmt.Errorf("cuda: tensor %q: %w", p.name, err)
	}
	return err
}

// Save keeps a copy of the live value on the host. If it fails, the last one stays.
func (p *Part[T]) Save() error {
	n := int(p.live.bytes())
	last, fresh := p.image, []byte(nil)
	if len(last) != n || !p.saved {
		last, fresh = nil, make([]byte, n)
	}
	err := p.live.device.download(context.Background(), p.live.address, n, func(at int, b []byte) error {
		if fresh == nil && !bytes.Equal(last[at:at+len(b)], b) {
			fresh = make([]byte, n)
			copy(fresh, last[:at])
		}
		if fresh != nil {
			copy(fresh[at:], b)
		}
		return nil
	})
	if err != nil {
		return p.wrong(err)
	}
	if fresh != nil {
		p.image = fresh
	}
	p.saved = true
	return nil
}

// Restore makes the live value that of the last Save.
func (p *Part[T]) Restore() error {
	if !p.saved {
		return p.wrong(errNothingSaved)
	}
	return p.wrong(p.live.device.upload(context.Background(), p.live.address, p.image))
}

// Sync makes the live value of every rank that of root.
func (p *Part[T]) Sync(ctx context.Context, g *collective.Group, root int) error {
	return Broadcast(ctx, g, p.live, root)
}

// Image returns what the last Save has kept, which nobody may write to.
func (p *Part[T]) Image() ([]byte, error) {
	if !p.saved {
		return nil, p.wrong(errNothingSaved)
	}
	return p.image, nil
}

// SetImage makes the live value that of an image.
func (p *Part[T]) SetImage(b []byte) error {
	if uint64(len(b)) != p.live.bytes() {
		return p.wrong(fmt.Errorf("%d bytes for one of %d", len(b), p.live.bytes()))
	}
	return p.wrong(p.live.device.upload(context.Background(), p.live.address, b))
}
