package scaler

import "container/heap"

// queue holds jobs that have not begun: lowest priority number first, and among equal ones oldest
// first.
type queue []*job

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	if a, b := q[i].task.Flags.Priority, q[j].task.Flags.Priority; a != b {
		return a < b
	}
	return q[i].number < q[j].number
}
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].place, q[j].place = i, j
}

// Push and Pop are for package heap.
func (q *queue) Push(x any) {
	j := x.(*job)
	j.place = len(*q)
	*q = append(*q, j)
}

func (q *queue) Pop() any {
	last := len(*q) - 1
	j := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	return j
}

func (q *queue) add(j *job)    { heap.Push(q, j) }
func (q *queue) next() *job    { return heap.Pop(q).(*job) }
func (q *queue) remove(j *job) { heap.Remove(q, j.place) }
