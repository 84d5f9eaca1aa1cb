/*
 * libhvdrun: the collectives of hvdrun for C, and for languages that call C.
 *
 * A process listens, tells the others its addresses, and connects to the world of a generation: the
 * ranks that compute together. The worker's socket of hvdrun carries the addresses and brings the
 * worlds; programs without hvdrun exchange both themselves.
 *
 *     int64_t endpoint = hvd_listen("{\"run\": \"job-7\", \"listen\": \"127.0.0.1:0\"}");
 *     hvd_addresses(endpoint, text, sizeof text);        // to be told to the other ranks
 *     int64_t group = hvd_connect(endpoint, world, -1);  // one line of JSON, see below
 *     if (hvd_all_reduce(group, data, 1000, HVD_FLOAT32, HVD_SUM) < 0)
 *         fprintf(stderr, "%s\n", hvd_error(text, sizeof text));
 *     hvd_close(group);
 *
 * Results. On success, functions return 0 or a documented number above 0. On failure they return
 * one of the negative numbers HVD_FAILED to HVD_INTERRUPTED, and hvd_error returns the reason as
 * text.
 *
 * Threads. Any thread may call any function. After a fork, the child must not call the library if
 * the parent has loaded it, because the child does not have the library's threads. Load the library
 * after the last fork without exec, or only in the children.
 *
 * Memory belongs to the caller. The library reads and writes data in place, without a copy. Data
 * must be aligned for its type, and nothing else may read or write it from the start of a call
 * until its end.
 *
 * Order. The library performs the calls on a group one after another, in the order in which they
 * are made, whether they block or run in the background. All ranks must make the same calls in the
 * same order. Calls on different groups, subsets included, are not ordered with each other. Nor are
 * messages: only those to the same rank, and those from the same rank, keep their order.
 *
 * Failures. If a rank dies, or calls hvd_close or hvd_abort, the calls of all ranks end with
 * HVD_ABORTED. After a failed call, the only use of the group is hvd_close, the contents of data
 * are undefined, and the library no longer uses data. If this rank alone can tell that arguments
 * are wrong, the call returns HVD_FAILED before it begins, and the group remains usable.
 */
#ifndef HVDRUN_H
#define HVDRUN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HVD_VERSION 1 /* of this interface; hvd_version returns that of the library */

enum {
	HVD_DONE = 0,
	HVD_PENDING = 1,      /* hvd_wait: the call has not ended yet */
	HVD_FAILED = -1,      /* wrong arguments, or another failure */
	HVD_ABORTED = -2,     /* a rank died, left or aborted: connect to another world */
	HVD_MISMATCH = -3,    /* two ranks made different calls */
	HVD_TIMEOUT = -4,     /* a call took longer than hvd_limit allows */
	HVD_INTERRUPTED = -5, /* the function of hvd_on_wait ended the call */
};

/* Types of elements. Half-precision numbers are passed as their 16 bits. */
enum {
	HVD_FLOAT32 = 1,
	HVD_FLOAT64,
	HVD_FLOAT16,  /* IEEE 754 */
	HVD_BFLOAT16, /* the upper half of a float32 */
	HVD_INT8,
	HVD_INT16,
	HVD_INT32,
	HVD_INT64,
	HVD_UINT8,
	HVD_UINT16,
	HVD_UINT32,
	HVD_UINT64,
};

/* Reductions. Results have the same bits on all ranks. */
enum {
	HVD_SUM = 1, /* integers wrap around */
	HVD_AVERAGE, /* the sum divided by the number of ranks; of integers, towards zero */
	HVD_MIN,
	HVD_MAX,
	HVD_PRODUCT,
	HVD_ADASUM, /* only hvd_all_reduce of floating-point numbers */
};

/* Operations of hvd_run and hvd_start. */
enum {
	HVD_ALL_REDUCE = 1,
	HVD_REDUCE_SCATTER,
	HVD_ALL_GATHER,
	HVD_BROADCAST,
	HVD_ALL_TO_ALL,
	HVD_BARRIER,
	HVD_REDUCE_TREE,
	HVD_SEND,
	HVD_RECV,
};

/* hvd_version returns the HVD_VERSION of the library. */
int32_t hvd_version(void);

/*
 * hvd_error writes to text why the last failed call of this thread failed, or "" if none has
 * failed, and returns text. It writes at most room bytes, the final 0 included.
 */
char *hvd_error(char *text, int64_t room);

/*
 * hvd_on_wait sets a function that blocking calls run about every 50 ms while they wait, on the
 * thread that made the call; NULL: no function. It is for callers whose signal handlers run on that
 * thread. If the function returns a value other than 0, the call ends with HVD_INTERRUPTED, and its
 * group fails. Of the library, the function may call only hvd_abort and hvd_close. On the group of
 * the call that waits, they return at once and end that call.
 */
typedef int32_t (*hvd_check)(void);
void hvd_on_wait(hvd_check check);

/*
 * hvd_listen opens an endpoint and returns its number, which is above 0. Options is a JSON object
 * with these fields, all optional, or NULL:
 *
 *     run           the id of the job, the same in all processes that connect
 *     listen        host:port to listen on (port 0: any); absent: the addresses of interfaces
 *     interfaces    names of network interfaces; absent: all
 *     only_sockets  true: ranks of one host use sockets instead of shared memory
 *     algorithm     of hvd_all_reduce between hosts, as HVD_COLLECTIVE_ALGORITHM
 *     connections   number of connections for large messages between two ranks of different hosts
 *
 * A process needs only one endpoint, which serves all generations.
 */
int64_t hvd_listen(const char *options);

/*
 * hvd_addresses writes the addresses of an endpoint for other ranks, as host:port, separated by
 * newlines, with a final 0. It returns the length of the text without that 0. If room is too small,
 * it writes nothing, and returns the length.
 */
int64_t hvd_addresses(int64_t endpoint, char *text, int64_t room);

/*
 * hvd_widen makes an endpoint that listens on one address listen on those of its interfaces too;
 * hvd_addresses then returns these. Call it after the message "widen" from the worker's socket.
 */
int32_t hvd_widen(int64_t endpoint);

/*
 * hvd_connect connects to a world and returns the number of its group, above 0. World is a JSON
 * object with these fields; the message "world" of the worker's socket is one, and other fields are
 * ignored:
 *
 *     generation  number of the world, higher than that of earlier worlds of this endpoint
 *     rank        rank of this process
 *     members     list by rank of objects with host (ranks of one host share memory) and addresses
 *     data_key    secret of all members, 64 hexadecimal digits
 *
 * It blocks until the ranks are connected, for at most ms milliseconds. If ms is not positive, it
 * gives up when no connection was made for 30 seconds. It returns HVD_ABORTED if a rank is dead or
 * does not connect.
 */
int64_t hvd_connect(int64_t endpoint, const char *world, int64_t ms);

/* hvd_rank and hvd_size return this process's rank in a group, and the number of ranks. */
int32_t hvd_rank(int64_t group);
int32_t hvd_size(int64_t group);

/* hvd_limit sets the maximum duration of a call, in milliseconds; 0, the default, is no limit. */
int32_t hvd_limit(int64_t group, int64_t ms);

/*
 * hvd_run performs one operation and blocks until it has ended on this rank. The functions below,
 * such as hvd_all_reduce, document the arguments of each operation.
 */
int32_t hvd_run(int64_t group, int32_t operation, void *data, void *result, int64_t count, int32_t type,
                int32_t arg, const int64_t *counts);

/*
 * hvd_start starts an operation with the arguments of hvd_run in the background, and at once
 * returns its ticket, which is above 0. It copies counts. Operations run in the order of their
 * calls.
 */
int64_t hvd_start(int64_t group, int32_t operation, void *data, void *result, int64_t count, int32_t type,
                  int32_t arg, const int64_t *counts);

/*
 * hvd_wait waits until the operation of a ticket has ended, for at most ms milliseconds, or without
 * a limit if ms is negative. While the group is open, any thread may wait for a ticket at any time,
 * also more than once. When an operation has ended, so have those that it is ordered after.
 */
int32_t hvd_wait(int64_t group, int64_t ticket, int64_t ms);

/* hvd_all_reduce combines data of all ranks, element by element, in place. */
static inline int32_t hvd_all_reduce(int64_t group, void *data, int64_t count, int32_t type, int32_t reduction) {
	return hvd_run(group, HVD_ALL_REDUCE, data, NULL, count, type, reduction, NULL);
}

/*
 * hvd_reduce_scatter combines data of all ranks, and writes this rank's part of the result to part.
 * A part has count divided by the number of ranks elements; if there is a remainder, each of the
 * first ranks has one more. Data is not changed, and must not overlap with part.
 */
static inline int32_t hvd_reduce_scatter(int64_t group, void *data, int64_t count, void *part, int32_t type,
                                         int32_t reduction) {
	return hvd_run(group, HVD_REDUCE_SCATTER, data, part, count, type, reduction, NULL);
}

/* hvd_all_gather copies count elements of each rank to all, by rank. Data may be this rank's part of all. */
static inline int32_t hvd_all_gather(int64_t group, void *data, int64_t count, void *all, int32_t type) {
	return hvd_run(group, HVD_ALL_GATHER, data, all, count, type, 0, NULL);
}

/* hvd_broadcast copies data of rank root to data on every rank. */
static inline int32_t hvd_broadcast(int64_t group, void *data, int64_t count, int32_t type, int32_t root) {
	return hvd_run(group, HVD_BROADCAST, data, NULL, count, type, root, NULL);
}

/*
 * hvd_all_to_all sends count elements of data to each rank, and receives count elements from each
 * rank into result; both are sorted by rank. Counts is NULL, or the numbers of elements to send to
 * each rank, followed by those to receive from each rank; then count is ignored.
 */
static inline int32_t hvd_all_to_all(int64_t group, void *data, void *result, int64_t count, int32_t type,
                                     const int64_t *counts) {
	return hvd_run(group, HVD_ALL_TO_ALL, data, result, count, type, 0, counts);
}

/* hvd_barrier returns when every rank has called it. */
static inline int32_t hvd_barrier(int64_t group) {
	return hvd_run(group, HVD_BARRIER, NULL, NULL, 0, 0, 0, NULL);
}

/*
 * hvd_reduce_tree combines the values of the leaves of a binary tree in an order that depends only
 * on their number: with the same leaves, sums have the same bits for any number of ranks. Firsts
 * has the first leaf of each rank, ascending from 0, and then the number of leaves: rank r has the
 * leaves from firsts[r] up to, but without, firsts[r + 1]. These leaves are divided into the fewest
 * aligned ranges of 2^k leaves. Data has, for each range in turn, count elements: the leaves of the
 * range, combined by the same rule (the lower half with the upper half; a half beyond the last leaf
 * is left out). Every rank gets the root's value in result. HVD_AVERAGE divides by the number of
 * leaves; it does not support half-precision numbers, since their sums may not fit the type.
 */
static inline int32_t hvd_reduce_tree(int64_t group, void *data, void *result, int64_t count, int32_t type,
                                      int32_t reduction, const int64_t *firsts) {
	return hvd_run(group, HVD_REDUCE_TREE, data, result, count, type, reduction, firsts);
}

/*
 * hvd_send sends data to another rank, which receives it by hvd_recv with the same count and type.
 * Messages from one rank to another arrive in the order in which they were sent. While few messages
 * are under way, a message of up to 64 KiB does not wait for its receiver; a larger one does. So
 * two ranks that both send before they receive must use hvd_start.
 */
static inline int32_t hvd_send(int64_t group, void *data, int64_t count, int32_t type, int32_t to) {
	return hvd_run(group, HVD_SEND, data, NULL, count, type, to, NULL);
}

/* hvd_recv receives a message from rank from. */
static inline int32_t hvd_recv(int64_t group, void *data, int64_t count, int32_t type, int32_t from) {
	return hvd_run(group, HVD_RECV, data, NULL, count, type, from, NULL);
}

/*
 * hvd_subset makes a group of n ranks of a group, and returns its number, or 0 on ranks that are
 * not in it. All ranks of the group must call it with the same list. A rank in the subset is the
 * position in the list. If the group fails, so do its subsets, and the reverse.
 */
int64_t hvd_subset(int64_t group, const int32_t *ranks, int64_t n);

/* hvd_failed returns HVD_DONE while a group is usable, and otherwise the error of its calls. */
int32_t hvd_failed(int64_t group);

/*
 * hvd_abort ends a group on all ranks: calls under way and later ones return HVD_ABORTED, and
 * hvd_error returns the cause. It returns when the library no longer uses the caller's memory.
 */
int32_t hvd_abort(int64_t group, const char *cause);

/*
 * hvd_close leaves a group, after the others have received what this rank has sent, or closes an
 * endpoint. Calls that have not ended fail on all ranks. An endpoint may be closed before its
 * groups. Numbers are not used again.
 */
int32_t hvd_close(int64_t number);

#ifdef __cplusplus
}
#endif
#endif
