package scaler

import "container/list"

// store keeps objects for later tasks. If it has more than limit bytes, it removes objects that no
// task uses, least recently used first.
type store struct {
	limit   int64
	bytes   int64
	objects map[string]*object
	idle    *list.List // *object values without users, least recently used first
}

type object struct {
	id      string
	content []byte
	users   int
	place   *list.Element // element in idle
	deleted bool          // to be removed with its last user
}

func newStore(limit int64) *store {
	return &store{limit: limit, objects: make(map[string]*object), idle: list.New()}
}

// put adds an object, unless it is already stored.
func (s *store) put(id string, content []byte) {
	if o := s.objects[id]; o != nil {
		o.deleted = false
		return
	}
	o := &object{id: id, content: content}
	o.place = s.idle.PushBack(o)
	s.objects[id] = o
	s.bytes += int64(len(content))
}

// use returns an object, or nil. The object stays in the store until it is released.
func (s *store) use(id string) *object {
	o := s.objects[id]
	if o == nil {
		return nil
	}
	if o.users++; o.place != nil {
		s.idle.Remove(o.place)
		o.place = nil
	}
	return o
}

func (s *store) release(o *object) {
	if o.users--; o.users > 0 {
		return
	}
	if o.deleted {
		s.drop(o)
		return
	}
	o.place = s.idle.PushBack(o)
	s.trim()
}

// delete removes an object once nobody uses it.
func (s *store) delete(id string) {
	o := s.objects[id]
	if o == nil {
		return
	}
	if o.deleted = true; o.users == 0 {
		s.drop(o)
	}
}

func (s *store) trim() {
	for s.bytes > s.limit && s.idle.Len() > 0 {
		s.drop(s.idle.Front().Value.(*object))
	}
}

func (s *store) drop(o *object) {
	if o.place != nil {
		s.idle.Remove(o.place)
		o.place = nil
	}
	delete(s.objects, o.id)
	s.bytes -= int64(len(o.content))
}
