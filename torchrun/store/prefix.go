package store

import "context"

// WithPrefix returns a store whose keys are those of s that begin with the prefix.
func WithPrefix(s Store, prefix string) Store { return prefixed{s, prefix} }

type prefixed struct {
	store  Store
	prefix string
}

func (p prefixed) Get(ctx context.Context, key string) (Entry, error) {
	return p.store.Get(ctx, p.prefix+key)
}

func (p prefixed) CompareAndSet(ctx context.Context, key string, version uint64, value []byte) (Entry, bool, error) {
	return p.store.CompareAndSet(ctx, p.prefix+key, version, value)
}

func (p prefixed) Wait(ctx context.Context, key string, version uint64) (Entry, error) {
	return p.store.Wait(ctx, p.prefix+key, version)
}
