package jobdir

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/tasks"
)

// tasksPatience is how long the scheduler may take to answer.
const tasksPatience = 10 * time.Second

// AskTasks asks the scheduler of a job.
func AskTasks[T any](ctx context.Context, d *Dir, ask func(context.Context, *tasks.Pool) (T, error)) (answer T, err error) {
	ctx, cancel := context.WithTimeout(ctx, tasksPatience)
	defer cancel()
	pool, err := tasks.Connect(ctx, tasks.ConnectConfig{Dial: d.DialTasks(), Patience: time.Millisecond}) // a person can ask again
	if err != nil {
		return answer, err
	}
	defer func() { err = errors.Join(err, pool.Close()) }()
	return ask(ctx, pool)
}

// DialTasks returns connections to the scheduler of tasks of a job.
func (d *Dir) DialTasks() func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) { return wire.DialLocal(ctx, d.TasksPath()) }
}
