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
 * Results. Functions return 0, or a number above 0 that is documented, on success. Otherwise they return one of the negative numbers HVD_FAILED to HVD_INTERRUPTED, and
 * hvd_error returns the reason as a text.
 *
 * Threads. Every function may be called by every thread, except after fork: a child of a process
 * that has loaded the library must not call it, since threads of the library are not in the child.
 * Load the library after the last fork without exec, or load it in the children alone.
 *
 * Memory is the caller's: data is used where it lies, without a copy. It must be aligned for its
 * type, and nothing else may touch it from the beginning of a call until its end.
 *
 * Order. The calls on a group are performed one after the other, in the order in which they come,
 * whether they block or are started; all ranks make the same calls in the same order. Subsets have
 * an order of their own, and so have the messages to each rank and those from each rank.
 *
 * Failures. The death of a rank, or its hvd_close or hvd_abort, ends the calls of all ranks with
 * HVD_ABORTED. After any call that has failed the group is of no use, except to hvd_close it, and
 * data has undefined contents; nothing of the library touches it any more. Arguments that this rank
 * can see to be wrong are HVD_FAILED before anything has begun, and the group is as before.
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
	HVD_ABORTED = -2,     /* a rank is lost, has left or has given up: connect to another world */
	HVD_MISMATCH = -3,    /* two ranks have made calls that do not fit together */
	HVD_TIMEOUT = -4,     /* a call has taken longer than hvd_limit allows */
	HVD_INTERRUPTED = -5, /* the function of hvd_on_wait has asked for it */
};

/* Types of elements. Half-precision numbers are given as their 16 bits. */
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
	HVD_ADASUM, /* all_reduce of floating point numbers */
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
 * hvd_error returns text, which holds at most room bytes with the final 0, after writing there why
 * the last call of this thread that returned a negative number has failed; "" if none has.
 */
char *hvd_error(char *text, int64_t room);

/*
 * hvd_on_wait sets a function that blocking calls run while they wait, on the thread that has made
 * the call, about every 50 ms; NULL: no function. It is for callers whose signal handlers run on that
 * thread. When it returns something other than 0, the call ends with HVD_INTERRUPTED, and the group
 * with it. It must not call the library, except hvd_abort and hvd_close, which end the call, too, if
 * its group is given to them: then they return at once, and the call when it has ended.
 */
typedef int32_t (*hvd_check)(void);
void hvd_on_wait(hvd_check check);

/*
 * hvd_listen opens an endpoint and returns its number, which is above 0. Options are a JSON object,
 * or NULL for none of them:
 *
 *     run           the id of the job, the same in all processes that connect
 *     listen        host:port to listen on (port 0: a free one); absent: the addresses of interfaces
 *     interfaces    list of names; absent: all
 *     only_sockets  true: ranks of one host share no memory
 *     algorithm     of all_reduce between hosts, as HVD_COLLECTIVE_ALGORITHM
 *     connections   that share large messages between two ranks of different hosts
 *
 * A process needs one endpoint for its life, over all generations.
 */
int64_t hvd_listen(const char *options);

/*
 * hvd_addresses writes where other ranks reach an endpoint, each as host:port, with a newline between
 * two, and a final 0. It returns the length of the text without that 0, also if room is too small;
 * then nothing is written.
 */
int64_t hvd_addresses(int64_t endpoint, char *text, int64_t room);

/*
 * hvd_widen has an endpoint that listens on one address listen on those of its interfaces too, which
 * hvd_addresses returns from then on: the message "widen" of the worker's socket asks for it.
 */
int32_t hvd_widen(int64_t endpoint);

/*
 * hvd_connect connects to a world and returns the number of its group, above 0. World is a JSON
 * object with these fields; the message "world" of the worker's socket is one, and other fields are
 * ignored:
 *
 *     generation  number of the world, higher than those before on this endpoint
 *     rank        of this process
 *     members     list, by rank, of objects: host (ranks of one host share memory), addresses
 *     data_key    64 hexadecimal digits, the same for all members, and secret
 *
 * It blocks until the ranks are connected, for at most ms milliseconds; if ms is not positive, until
 * no connection has come for 30 seconds. HVD_ABORTED: a rank is dead, or has not come.
 */
int64_t hvd_connect(int64_t endpoint, const char *world, int64_t ms);

/* hvd_rank and hvd_size return this process's rank in a group, and the number of ranks. */
int32_t hvd_rank(int64_t group);
int32_t hvd_size(int64_t group);

/* hvd_limit sets the maximum duration of a call, in milliseconds; 0, the default: no limit. */
int32_t hvd_limit(int64_t group, int64_t ms);

/*
 * hvd_run performs one operation and blocks until it has ended on this rank. The functions below,
 * such as hvd_all_reduce, say what its arguments mean for each.
 */
int32_t hvd_run(int64_t group, int32_t operation, void *data, void *result, int64_t count, int32_t type,
                int32_t arg, const int64_t *counts);

/*
 * hvd_start begins an operation with the arguments of hvd_run, and returns its ticket, above 0, at
 * once. Counts are copied. The operation is performed in the background, after those before it.
 */
int64_t hvd_start(int64_t group, int32_t operation, void *data, void *result, int64_t count, int32_t type,
                  int32_t arg, const int64_t *counts);

/*
 * hvd_wait waits until the operation of a ticket has ended, at most ms milliseconds; negative: without
 * a limit. A ticket may be waited for at any time, several times and by several threads, while the
 * group is open. When it has ended, so have those of the same order that were started before.
 */
int32_t hvd_wait(int64_t group, int64_t ticket, int64_t ms);

/* hvd_all_reduce combines data of all ranks, element by element, in place. */
static inline int32_t hvd_all_reduce(int64_t group, void *data, int64_t count, int32_t type, int32_t reduction) {
	return hvd_run(group, HVD_ALL_REDUCE, data, NULL, count, type, reduction, NULL);
}

/*
 * hvd_reduce_scatter combines data of all ranks, and puts this rank's part into part: count divided by
 * the number of ranks, where the first ranks have one more if there is a remainder. Data stays as it
 * is, and does not overlap with part.
 */
static inline int32_t hvd_reduce_scatter(int64_t group, void *data, int64_t count, void *part, int32_t type,
                                         int32_t reduction) {
	return hvd_run(group, HVD_REDUCE_SCATTER, data, part, count, type, reduction, NULL);
}

/* hvd_all_gather puts count elements of each rank into all, by rank. Data may lie at its place in all. */
static inline int32_t hvd_all_gather(int64_t group, void *data, int64_t count, void *all, int32_t type) {
	return hvd_run(group, HVD_ALL_GATHER, data, all, count, type, 0, NULL);
}

/* hvd_broadcast sets data on every rank to that of rank root. */
static inline int32_t hvd_broadcast(int64_t group, void *data, int64_t count, int32_t type, int32_t root) {
	return hvd_run(group, HVD_BROADCAST, data, NULL, count, type, root, NULL);
}

/*
 * hvd_all_to_all sends count elements to each rank, from data, and receives as many of each into
 * result, both by rank. With counts, which are the elements for each rank and then those of each
 * rank, lengths differ, and count does not matter.
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
 * hvd_reduce_tree combines the values of the leaves of a binary tree in an order that their number
 * alone determines: with the same leaves, sums have the same bits for any number of ranks. Firsts
 * has the first leaf of each rank, which begin with 0 and ascend, and the number of leaves at last:
 * rank r has those from firsts[r] up to, but without, firsts[r + 1]. Data has count elements for each
 * of the fewest aligned ranges of 2^k leaves that make these up, one behind the other: the combination
 * of the leaves of the range, by the same rule (the lower half with the upper half; a half that is
 * beyond the last leaf does not count). Every rank gets the root's value in result. HVD_AVERAGE
 * divides by the number of leaves; not for half-precision numbers, whose sums need not fit the type.
 */
static inline int32_t hvd_reduce_tree(int64_t group, void *data, void *result, int64_t count, int32_t type,
                                      int32_t reduction, const int64_t *firsts) {
	return hvd_run(group, HVD_REDUCE_TREE, data, result, count, type, reduction, firsts);
}

/*
 * hvd_send sends data to another rank, which receives it by hvd_recv; count and type are the same there.
 * Messages from one rank to another arrive in the order in which they were sent. Those of up to 64 KiB
 * do not wait for their receiver, as long as few are under way; larger ones do, so two ranks that both
 * send first use hvd_start.
 */
static inline int32_t hvd_send(int64_t group, void *data, int64_t count, int32_t type, int32_t to) {
	return hvd_run(group, HVD_SEND, data, NULL, count, type, to, NULL);
}

/* hvd_recv receives a message that rank from has sent to this one. */
static inline int32_t hvd_recv(int64_t group, void *data, int64_t count, int32_t type, int32_t from) {
	return hvd_run(group, HVD_RECV, data, NULL, count, type, from, NULL);
}

/*
 * hvd_subset makes a group of n of the ranks of a group, and returns its number, or 0 on the ranks
 * that are not in it. All ranks of the group call it with the same list. A rank of the subset is a
 * position in the list. Subsets fail with their group, and it with them.
 */
int64_t hvd_subset(int64_t group, const int32_t *ranks, int64_t n);

/* hvd_failed returns HVD_DONE while a group works, and otherwise why its calls fail. */
int32_t hvd_failed(int64_t group);

/*
 * hvd_abort ends a group on all ranks: calls under way and later ones are HVD_ABORTED, with the cause
 * as their text. It returns when nothing of the library touches the caller's memory any more.
 */
int32_t hvd_abort(int64_t group, const char *cause);

/*
 * hvd_close leaves a group, once the others have what this rank has sent, or closes an endpoint. Calls
 * that have not ended fail on all ranks. Groups outlive their endpoint. The number is not used again.
 */
int32_t hvd_close(int64_t number);

#ifdef __cplusplus
}
#endif
#endif
