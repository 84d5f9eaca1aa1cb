package elastictest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/hvdrun/hvdrun/plan"
)

// Undisturbed checks that the result of a job does not depend on its workers, as elastic.Steps
// promises if it does all training. It runs train twice: as the only worker of an undisturbed job,
// and as the workers of a job with the given config, whose Worker is ignored. It calls disturb,
// which may be nil, with the second job. train runs like a Config's Worker, and returns a digest of
// its result, such as a hash of the weights.
//
// It blocks until both jobs have ended. It returns an error if a job fails, if no worker of the
// second one finishes, or if a digest differs from that of the first.
func Undisturbed(cfg Config, train func(ctx context.Context) (digest uint64, err error), disturb func(*Job) error) error {
	var want uint64
	alone := Start(Config{
		Hosts: []plan.Host{{Name: "alone", Slots: 1}}, Limit: cfg.Limit, network: cfg.network,
		Worker: func(ctx context.Context) (err error) {
			want, err = train(ctx)
			return err
		},
	})
	if err := alone.Wait(); err != nil {
		return fmt.Errorf("elastictest: undisturbed: %w", err)
	}
	var mu sync.Mutex
	var digests []uint64
	cfg.Worker = func(ctx context.Context) error {
		digest, err := train(ctx)
		if err == nil {
			mu.Lock()
			defer mu.Unlock()
			digests = append(digests, digest)
		}
		return err
	}
	job := Start(cfg)
	var failed error
	if disturb != nil {
		failed = disturb(job)
	}
	if err := errors.Join(failed, job.Wait()); err != nil {
		return fmt.Errorf("elastictest: disturbed: %w", err)
	}
	if len(digests) == 0 {
		return errors.New("elastictest: no worker of the disturbed job has come to the end")
	}
	for _, got := range digests {
		if got != want {
			return fmt.Errorf("elastictest: the digest is %016x; undisturbed it is %016x", got, want)
		}
	}
	return nil
}
