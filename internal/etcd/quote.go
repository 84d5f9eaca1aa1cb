package etcd

import (
	"context"
	"errors"
	"fmt"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// quote makes the errors of requests for keys and leases say why etcd is unreachable: the client
// retries a request until its context ends, and then returns only the error of the context.
func (w *watcher) quote(client *clientv3.Client) error {
	client.KV = clientv3.NewKVFromKVClient(keys{clientv3.RetryKVClient(client), w}, client)
	first := client.Lease
	client.Lease = clientv3.NewLeaseFromLeaseClient(leases{clientv3.RetryLeaseClient(client), w}, client, lostAfter)
	return first.Close()
}

// attempt is an interceptor that records why an attempt does not reach etcd.
func (w *watcher) attempt(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	err := invoke(ctx, method, req, reply, cc, opts...)
	s := status.Convert(err)
	failure := s.Message()
	if s.Code() == codes.DeadlineExceeded { // gRPC waited for a connection until the deadline
		_, failure, _ = strings.Cut(failure, "latest balancer error: ")
	}
	if failure != "" || err == nil {
		w.mu.Lock()
		w.failure = failure
		w.mu.Unlock()
	}
	return err
}

// asking calls ask. If ctx has reached its deadline, the error quotes the last failed attempt.
func asking[Q, R any](ctx context.Context, w *watcher, ask func(context.Context, Q, ...grpc.CallOption) (R, error), q Q, opts []grpc.CallOption) (R, error) {
	r, err := ask(ctx, q, opts...)
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		w.mu.Lock()
		failure := w.failure
		w.mu.Unlock()
		if failure != "" {
			err = fmt.Errorf("%w, the last attempt: %s", ctx.Err(), failure)
		}
	}
	return r, err
}

type keys struct {
	pb.KVClient
	w *watcher
}

func (k keys) Range(ctx context.Context, q *pb.RangeRequest, opts ...grpc.CallOption) (*pb.RangeResponse, error) {
	return asking(ctx, k.w, k.KVClient.Range, q, opts)
}

func (k keys) Put(ctx context.Context, q *pb.PutRequest, opts ...grpc.CallOption) (*pb.PutResponse, error) {
	return asking(ctx, k.w, k.KVClient.Put, q, opts)
}

func (k keys) DeleteRange(ctx context.Context, q *pb.DeleteRangeRequest, opts ...grpc.CallOption) (*pb.DeleteRangeResponse, error) {
	return asking(ctx, k.w, k.KVClient.DeleteRange, q, opts)
}

func (k keys) Txn(ctx context.Context, q *pb.TxnRequest, opts ...grpc.CallOption) (*pb.TxnResponse, error) {
	return asking(ctx, k.w, k.KVClient.Txn, q, opts)
}

type leases struct {
	pb.LeaseClient
	w *watcher
}

func (l leases) LeaseGrant(ctx context.Context, q *pb.LeaseGrantRequest, opts ...grpc.CallOption) (*pb.LeaseGrantResponse, error) {
	return asking(ctx, l.w, l.LeaseClient.LeaseGrant, q, opts)
}

func (l leases) LeaseRevoke(ctx context.Context, q *pb.LeaseRevokeRequest, opts ...grpc.CallOption) (*pb.LeaseRevokeResponse, error) {
	return asking(ctx, l.w, l.LeaseClient.LeaseRevoke, q, opts)
}
