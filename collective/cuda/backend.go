package cuda

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// The names of backends, for [Config].
const (
	BackendNCCL    = "nccl"      // NVIDIA's library; until its communicator is ready, the best of the others
	BackendIPC     = "ipc"       // kernels combine memory of processes of one host in place
	BackendHosts   = "ipc+hosts" // like ipc within each host; then each rank exchanges its part with the other hosts through pinned memory
	BackendStaging = "staging"   // everything goes through pinned memory of the host
)

// backends are the names of all backends, the best first.
var backends = []string{BackendNCCL, BackendIPC, BackendHosts, BackendStaging}

const (
	nonceSize  = 32
	maxRecord  = 4 << 10 // bytes
	maxTrouble = 256     // bytes
)

// backend is how the ranks of a group combine memory of their devices. All ranks of a group use the
// same kind, and each uses it for one operation at a time. The caller of deferFree or takeDeferred
// holds device.mu.
type backend interface {
	// name returns the backend's name in logs and events.
	name() string
	// allReduce combines n elements at an address of each rank in place, once the event ready has
	// occurred. If ready is nil, the elements are ready.
	allReduce(ctx context.Context, t kernel.Type, op collective.Op, address uint64, n int, ready *Event) error
	// broadcast sets n bytes at an address of each rank to those of root.
	broadcast(ctx context.Context, address uint64, n, root int) error
	// allGather copies the sizes[r] bytes of each rank r to into[r] on every rank. The bytes of
	// this rank are at own.
	allGather(ctx context.Context, own uint64, into []uint64, sizes []int) error
	// reduceScatter combines n elements at an address of each rank and writes this rank's part of
	// the result, as divided by kernel.Split, to into.
	reduceScatter(ctx context.Context, t kernel.Type, op collective.Op, address uint64, n int, into uint64) error
	// shut waits for operations in progress and closes the memory of other processes. A second call
	// does nothing.
	shut() error
	// takeDeferred returns the freed memory that other processes may have open, and forgets it.
	takeDeferred() []uint64
	// deferFree reports whether other processes may have the memory open. If so, the caller must
	// not free it: it is freed once takeDeferred has returned it.
	deferFree(address, bytes uint64) bool
}

// BackendError reports that a group cannot use the backend that a rank wants. Every rank of the
// group gets the same error, and the group remains usable.
type BackendError struct {
	Rank    int    // the rank that wants the backend
	Backend string // Config.Backend
	Reason  string // why the group cannot use it
}

// Error names the rank, the backend and the reason.
func (e *BackendError) Error() string {
	return fmt.Sprintf("cuda: rank %d wants the backend %s: %s", e.Rank, e.Backend, e.Reason)
}

// backend returns the backend of a group. The first call is an operation of the group, in which the
// ranks choose the backend together. It also closes the memory of other processes that was opened
// in earlier generations; when all ranks have done so, each frees its own memory.
func (d *Device) backend(ctx context.Context, g *collective.Group) (backend, error) {
	d.mu.Lock()
	b := d.backends[g]
	var past []backend
	for other, of := range d.backends {
		if other.Generation() < g.Generation() {
			past = append(past, of)
		}
	}
	d.mu.Unlock()
	if b != nil {
		return b, nil
	}
	if err := d.shutAll(past); err != nil {
		return nil, err
	}
	var addresses []uint64
	if g.Size() == 1 {
		b = &stagingBackend{d, g}
	} else { // ranks of earlier generations may have it open until they meet again
		d.mu.Lock()
		addresses, d.deferredFrees = d.deferredFrees, nil
		d.mu.Unlock()
		var err error
		if b, err = d.meet(ctx, g); err != nil {
			d.mu.Lock()
			d.deferredFrees = append(d.deferredFrees, addresses...)
			d.mu.Unlock()
			return nil, err
		}
	}
	d.mu.Lock()
	maps.DeleteFunc(d.backends, func(other *collective.Group, _ backend) bool { return other.Generation() < g.Generation() })
	d.backends[g] = b
	later := d.forgetFusions(g.Generation())
	for _, of := range past {
		later = append(later, of.takeDeferred()...)
	}
	if g.Size() > 1 {
		addresses = append(addresses, later...)
	} else {
		d.deferredFrees = append(d.deferredFrees, later...)
	}
	d.mu.Unlock()
	return b, d.freeAll(addresses)
}

// shutAll shuts backends, which another group of this process may be about to shut as well.
func (d *Device) shutAll(past []backend) error {
	d.shutting.Lock()
	defer d.shutting.Unlock()
	for _, of := range past {
		if err := of.shut(); err != nil {
			return err
		}
	}
	return nil
}

// freeAll frees memory that no process has open any more.
func (d *Device) freeAll(addresses []uint64) error {
	if len(addresses) == 0 {
		return nil
	}
	return d.do(func() error {
		var errs []error
		for _, address := range addresses {
			errs = append(errs, d.api.check("cuMemFree_v2", d.api.memFree(address)))
		}
		return errors.Join(errs...)
	})
}

// record is what a rank sends to the others about itself, so that all make the same choice.
type record struct {
	Host    string      // ranks with the same Host try to open each other's memory
	Device  [16]byte    // UUID
	Wish    string      // Config.Backend
	Forced  string      // the forced algorithm of AllReduces; empty if none is forced
	Nonce   []byte      // the content of the memory that Handle identifies
	Handle  []byte      // empty if other processes cannot open this rank's memory
	Trouble string      // why other ranks cannot open this rank's memory, or this rank theirs; empty if they can
	NCCL    *ncclRecord `json:",omitempty"` // nil if this rank does not want NCCL
}

// meet exchanges the ranks' records, tests whether they can open each other's memory, and makes the
// backend that they choose.
func (d *Device) meet(ctx context.Context, g *collective.Group) (backend, error) {
	probe, err := Alloc[byte](d, nonceSize)
	if err != nil {
		return nil, err
	}
	seen, has := openedMemory{opener: d}, d.offerNCCL(g)
	defer has.withdraw()
	all, err := d.exchangeRecords(ctx, g, probe, &seen, has.record)
	if err = errors.Join(err, seen.closeAll()); err == nil {
		err = collective.Barrier(ctx, g)
	}
	// The next meeting frees the probe: after an error other ranks may still read it, and freeing
	// it now would wait for the device.
	d.mu.Lock()
	d.owned.remove(probe.address)
	d.deferredFrees = append(d.deferredFrees, probe.address)
	d.mu.Unlock()
	if err != nil {
		return nil, err
	}
	name, why, err := choose(all)
	if err != nil {
		return nil, err
	}
	if name == BackendNCCL {
		return d.newNCCLBackend(ctx, g, all, has)
	}
	return d.make(ctx, name, why, g, all)
}

// make makes a backend other than NCCL's, and reports it.
func (d *Device) make(ctx context.Context, name, why string, g *collective.Group, all []record) (b backend, err error) {
	switch name {
	case BackendIPC:
		b, err = newIPCBackend(d, g, all)
	case BackendHosts:
		b, err = newHostsBackend(ctx, d, g, all)
	default:
		b = &stagingBackend{d, g}
	}
	if err != nil {
		return nil, err
	}
	g.TellBackend(name, why)
	return b, nil
}

// exchangeRecords returns the records of all ranks. If the choice of the backend depends on it,
// every rank first tries to read memory of the others on its host, and reports a failure as its
// Trouble.
func (d *Device) exchangeRecords(ctx context.Context, g *collective.Group, probe *Slice[byte], seen *openedMemory, lib *ncclRecord) ([]record, error) {
	own := record{Host: d.config.host, Device: d.info.UUID, Wish: d.config.Backend, Nonce: make([]byte, nonceSize), NCCL: lib}
	if own.Host == "" {
		own.Host = thisHost()
	}
	if a := g.Algorithm(); a != collective.Auto {
		own.Forced = a.String()
	}
	rand.Read(own.Nonce)
	if err := probe.CopyFrom(ctx, own.Nonce); err != nil {
		return nil, err
	}
	if own.Wish != BackendStaging {
		var handle ipcHandle
		err := d.call("cuIpcGetMemHandle", func(a *api) result { return a.ipcGetMemHandle(&handle, probe.address) })
		switch {
		case errors.Is(err, ErrSticky):
			return nil, err
		case err != nil:
			own.Trouble = trouble(err)
		default:
			own.Handle = handle.bytes[:]
		}
	}
	text, err := json.Marshal(own)
	if err != nil {
		return nil, err
	}
	texts, err := collective.AllGather(ctx, g, text)
	if err != nil {
		return nil, err
	}
	all := make([]record, len(texts))
	for rank, text := range texts {
		if len(text) > maxRecord {
			return nil, fmt.Errorf("cuda: the description of rank %d has %d bytes", rank, len(text))
		}
		if err := json.Unmarshal(text, &all[rank]); err != nil {
			return nil, fmt.Errorf("cuda: the description of rank %d: %w", rank, err)
		}
	}
	if name, _, err := choose(all); err != nil || name == BackendStaging {
		return all, nil
	}
	err = seen.openAll(ctx, g.Rank(), all)
	var refused *Error
	if err != nil && !errors.Is(err, errOtherMemory) && (!errors.As(err, &refused) || errors.Is(err, ErrSticky)) {
		return nil, err
	}
	found, err := collective.AllGather(ctx, g, []byte(trouble(err)))
	for rank, text := range found {
		all[rank].Trouble = string(text[:min(len(text), maxTrouble)])
	}
	return all, err
}

// trouble returns the text of an error for a record, at most maxTrouble bytes; "" for nil.
func trouble(err error) string {
	if err == nil {
		return ""
	}
	text := strings.TrimPrefix(err.Error(), "cuda: ")
	return strings.ToValidUTF8(text[:min(len(text), maxTrouble)], "")
}

// choose returns the backend for ranks with these records, and the reason why no better one is
// used.
func choose(all []record) (name, why string, err error) {
	by := slices.IndexFunc(all, func(r record) bool { return r.Wish != "" })
	if by >= 0 {
		name = all[by].Wish
		for rank, r := range all {
			if r.Wish != "" && r.Wish != name {
				return "", "", &BackendError{rank, r.Wish, fmt.Sprintf("rank %d wants %s", by, name)}
			}
		}
	}
	var reasons []string
	for _, possible := range backends {
		obstacle := obstacles[possible](all)
		switch {
		case name == possible && obstacle != "":
			return "", "", &BackendError{by, name, obstacle}
		case name == possible:
			return name, fmt.Sprintf("rank %d wants it", by), nil
		case name != "":
		case obstacle == "":
			return possible, strings.Join(reasons, "; "), nil
		default:
			reasons = append(reasons, fmt.Sprintf("not %s: %s", possible, obstacle))
		}
	}
	return "", "", &BackendError{max(by, 0), name, "no backend has that name"}
}

// obstacles has, for each backend, the function that returns the reason why ranks cannot use it, or
// "" if they can.
var obstacles = map[string]func(all []record) string{
	BackendNCCL: noNCCL,
	BackendIPC: func(all []record) string {
		for rank, r := range all {
			if r.Host != all[0].Host {
				return fmt.Sprintf("rank %d is on another host than rank 0", rank)
			}
		}
		return ipcObstacle(all)
	},
	BackendHosts: func(all []record) string {
		count, wanted := map[string]int{}, false
		for rank, r := range all {
			if r.Forced != "" {
				return fmt.Sprintf("the algorithm of rank %d is %s", rank, r.Forced)
			}
			count[r.Host]++
			wanted = wanted || r.Wish == BackendHosts
		}
		if len(count) == len(all) && !wanted {
			return "every rank is on a different host"
		}
		return ipcObstacle(all)
	},
	BackendStaging: func([]record) string { return "" },
}

// ipcObstacle returns the reason why ranks of a host cannot open each other's memory, or "" if they
// can.
func ipcObstacle(all []record) string {
	count := map[string]int{}
	for rank, r := range all {
		if r.Trouble != "" {
			return fmt.Sprintf("rank %d: %s", rank, r.Trouble)
		}
		if count[r.Host]++; count[r.Host] > places {
			return fmt.Sprintf("there are more than %d ranks on the host of rank %d", places, rank)
		}
	}
	return ""
}

// openedMemory is memory of other processes that this one has opened.
type openedMemory struct {
	opener *Device
	opened map[string]uint64 // by handle
}

// open maps memory of another process and returns its address in this one.
func (o *openedMemory) open(handle []byte) (uint64, error) {
	if address, there := o.opened[string(handle)]; there {
		return address, nil
	}
	var h ipcHandle
	copy(h.bytes[:], handle)
	var address uint64
	err := o.opener.call("cuIpcOpenMemHandle_v2", func(a *api) result { return a.ipcOpenMemHandle(&address, h, ipcLazyPeerAccess) })
	if err == nil {
		if o.opened == nil {
			o.opened = map[string]uint64{}
		}
		o.opened[string(handle)] = address
	}
	return address, err
}

// openAll opens the memory whose handles the other ranks of this host have sent, and verifies its
// content.
func (o *openedMemory) openAll(ctx context.Context, own int, all []record) error {
	for rank, r := range all {
		if rank == own || r.Host != all[own].Host {
			continue
		}
		address, err := o.open(r.Handle)
		if err != nil {
			return fmt.Errorf("memory of rank %d: %w", rank, err)
		}
		seen := make([]byte, nonceSize)
		if err := (&Slice[byte]{device: o.opener, address: address, n: nonceSize}).CopyTo(ctx, seen); err != nil {
			return fmt.Errorf("memory of rank %d: %w", rank, err)
		}
		if !bytes.Equal(seen, r.Nonce) {
			return fmt.Errorf("memory of rank %d: %w", rank, errOtherMemory)
		}
	}
	return nil
}

var errOtherMemory = errors.New("its handle opens other memory in this process")

// closeAll closes all opened memory.
func (o *openedMemory) closeAll() error {
	return o.opener.do(func() error {
		var errs []error
		for handle, address := range o.opened {
			errs = append(errs, o.opener.api.check("cuIpcCloseMemHandle", o.opener.api.ipcCloseMemHandle(address)))
			delete(o.opened, handle)
		}
		return errors.Join(errs...)
	})
}

// thisHost returns a text that identifies the running system: all containers of a machine have the
// same.
var thisHost = sync.OnceValue(func() string {
	if id, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err == nil {
		return strings.TrimSpace(string(id))
	}
	return rand.Text()
})
