package queue

func (s *sim) chase(id ID, deep int) {
	t := s.q.tasks[id]
	if t == nil {
		s.t.Logf("%*s%v: unknown", deep, "", id)
		return
	}
	s.t.Logf("%*s%v %v missing %d again %v attempt %d old %v users %d", deep, "", id, t.state, t.missing, t.again, t.attempt&0xffff, t.more != nil && t.old != nil, t.users)
	if t.state.Over() {
		if o := s.q.objects[t.result.Object]; t.result.Size > 0 {
			s.t.Logf("%*s  obj %+v", deep, "", o)
		}
		return
	}
	for _, n := range t.Needs {
		s.chase(n, deep+1)
	}
}
