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

// AskTasks calls ask with a connection to the job's scheduler of tasks, and returns its answer. It
// blocks for at most tasksPatience.
func AskTasks[T any](ctx context.Context, d *Dir, ask func(context.Context, *tasks.Pool) (T, error)) (answer T, err error) {
	ctx, cancel := context.WithTimeout(ctx, tasksPatience)
	defer cancel()
	pool, err := tasks.Connect(ctx, tasks.ConnectConfig{Dial: d.DialTasks(), Patience: time.Millisecond}) // the user can repeat the command
	if err != nil {
		return answer, err
	}
	defer func() { err = errors.Join(err, pool.Close()) }()
	return ask(ctx, pool)
}

// DialTasks returns a function that connects to the job's scheduler of tasks.
func (d *Dir) DialTasks() func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) { return wire.DialLocal(ctx, d.TasksPath()) }
}
