// NCCL without devices, for tests of how the real library is called: the prototypes are those of its header. It goes with fakecuda.c, from the
// same folder, whose device memory it reads and writes. It checks its arguments; ranks, processes or threads of one, meet in a file of that
// folder. Errors of the program are written into the file "wrong" there; the file "fault" there names the calls that fail. Functions that the
// version VERSION does not have are left out.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#ifndef VERSION
#define VERSION 23007
#endif

typedef enum { SUCCESS, UNHANDLED_CUDA, SYSTEM, INTERNAL, INVALID_ARGUMENT, INVALID_USAGE, REMOTE, IN_PROGRESS } ncclResult_t;
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { size_t size; unsigned magic, version; int blocking, pad; } ncclConfig_t;
typedef struct comm *ncclComm_t;

enum { CHUNK = 1 << 16, RANKS = 16, COMM = 0xc0ffeecc };
enum { ALL_REDUCE = 1, BROADCAST, ALL_GATHER, REDUCE_SCATTER };

// What the ranks of a communicator share: a file, named by its id.
struct shared {
	atomic_int joined, left;
	struct {
		atomic_ullong steps;
		int version;
		unsigned long long count;
		int kind, type, op, root;
		char data[CHUNK] __attribute__((aligned(64)));
	} ranks[RANKS];
};

struct operation {
	struct operation *next;
	struct comm *comm;
	const char *from;
	char *to;
	size_t count;
	int kind, type, op, root;
	void *stream;
	unsigned long long number;
};

struct comm {
	unsigned magic;
	int rank, size;
	unsigned long long id;
	struct comm **place; // where its creator wants it
	struct comm *parent; // that it is shrunk from; 0: none
	struct shared *shared;
	pthread_t joining, *threads;
	int n_threads;
	pid_t thread;          // the one that may use it
	atomic_int inside;     // a call
	atomic_int result;     // of making it
	atomic_int stop;       // the current operation must end
	atomic_int fault;      // since then
	int asked;             // how often the state of the current operation was queried
	struct operation *waiting, *last; // begun, not started
	unsigned long long started;
	atomic_ullong finished;
	unsigned long long steps;
	int children, revoked, finalized, revoking;
	struct comm *shrunk; // the communicator that is being made from this one, which is stored nowhere else
	char live[512];
};

static int (*has_memory)(const void *, size_t);
static int (*has_context)(void);
static void (*stream_begin)(void *);
static void (*stream_end)(void *);
static _Thread_local int group;
static char last[256];
static atomic_int names;

static const char *folder(void)
{
	static char path[256];
	static atomic_int known;
	if (!known) {
		Dl_info info;
		dladdr((void *)folder, &info);
		char copy[256];
		snprintf(copy, sizeof copy, "%s", info.dli_fname);
		*strrchr(copy, '/') = 0;
		strcpy(path, copy);
		known = 1;
	}
	return path;
}

static ncclResult_t wrong(const char *format, ...)
{
	char path[512], text[256];
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);
	snprintf(path, sizeof path, "%s/wrong", folder());
	FILE *f = fopen(path, "a");
	fprintf(f, "%d: %s\n", getpid(), text);
	fclose(f);
	snprintf(last, sizeof last, "%s", text);
	return INVALID_USAGE;
}

// fault tells whether the test wants something to go wrong here: a line of the file has its name and a rank.
static int fault(const char *name, int rank)
{
	char path[512], have[64] = "";
	int at, found = 0;
	snprintf(path, sizeof path, "%s/fault", folder());
	FILE *f = fopen(path, "r");
	if (!f)
		return 0;
	while (!found && fscanf(f, "%63s %d", have, &at) == 2)
		found = at == rank && !strcmp(have, name);
	fclose(f);
	return found;
}

static int bind(void)
{
	if (has_context)
		return 1;
	char path[512];
	snprintf(path, sizeof path, "%s/libfakecuda.so.1", folder());
	void *cuda = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
	if (!cuda)
		return 0;
	has_memory = dlsym(cuda, "fakeHasMemory");
	stream_begin = dlsym(cuda, "fakeStreamBegin");
	stream_end = dlsym(cuda, "fakeStreamEnd");
	has_context = dlsym(cuda, "fakeHasContext");
	return has_memory && stream_begin && stream_end && has_context;
}

__attribute__((unused)) static unsigned long long hash(unsigned long long h, unsigned long long x)
{
	for (int i = 0; i < 8; i++, x >>= 8)
		h = (h ^ (x & 255)) * 1099511628211ull;
	return h;
}

static void name(ncclUniqueId *id, unsigned long long number)
{
	for (int i = 0; i < 128; i++)
		id->internal[i] = i * 7 + 3;
	memcpy(id->internal, "FAKENCCL", 8);
	memcpy(id->internal + 8, &number, 8);
	memcpy(id->internal + 120, &number, 8);
}

static int number(const ncclUniqueId *id, unsigned long long *number)
{
	ncclUniqueId want;
	memcpy(number, id->internal + 8, 8);
	name(&want, *number);
	return !memcmp(id, &want, sizeof want);
}

// enter begins a call that uses a communicator.
static ncclResult_t enter(struct comm *c, const char *call)
{
	if (!c || c->magic != COMM)
		return wrong("%s of what is no communicator", call), INVALID_ARGUMENT;
	if (atomic_exchange(&c->inside, 1))
		return wrong("%s while another call is in the communicator", call);
	if (c->thread != gettid())
		return wrong("%s on another thread", call);
	if (!has_context())
		return wrong("%s on a thread without a context", call);
	return SUCCESS;
}
#define ENTER(c) do { ncclResult_t r = enter(c, __func__); if (r) return r; } while (0)

static ncclResult_t leave(struct comm *c, ncclResult_t r) { c->inside = 0; return r; }

static void pause_(void) { usleep(50); }

// join waits for the others.
static void *join(void *of)
{
	struct comm *c = of;
	if (fault("init-fails", c->rank)) {
		snprintf(last, sizeof last, "the fake has no route");
		c->result = SYSTEM;
		return 0;
	}
	while (fault("init-hangs", c->rank) && !c->stop)
		pause_();
	if (c->stop)
		return 0;
	c->shared->ranks[c->rank].version = VERSION;
	c->shared->joined++;
	while (c->shared->joined < c->size && !c->stop)
		pause_();
	if (c->stop)
		return 0;
	for (int i = 0; i < c->size; i++)
		if (c->shared->ranks[i].version != VERSION)
			wrong("version %d and %d", VERSION, c->shared->ranks[i].version);
	if (*c->place != (c->parent ? 0 : c))
		wrong("the place of a communicator has changed while it was being made");
	if (c->parent)
		*c->place = c;
	char path[512];
	snprintf(path, sizeof path, "%s/comm.%llx", folder(), c->id);
	unlink(path);
	c->result = SUCCESS;
	return 0;
}

// make begins a communicator; how is written into the file "made".
static ncclResult_t make(const char *how, struct comm *parent, struct comm **place, unsigned long long id, int size, int rank,
	const ncclConfig_t *config)
{
	if (!bind())
		return wrong("no driver that goes with the fake");
	if (!has_context())
		return wrong("a communicator is made on a thread without a context");
	if (!place || size < 1 || size > RANKS || rank < 0 || rank >= size)
		return wrong("rank %d of %d", rank, size), INVALID_ARGUMENT;
	if (!config || config->size != 24 || config->magic != 0xcafebeef || config->version != 21400 || config->blocking || config->pad)
		return wrong("an invalid configuration"), INVALID_ARGUMENT;
	char path[512];
	snprintf(path, sizeof path, "%s/comm.%llx", folder(), id);
	int file = open(path, O_RDWR | O_CREAT, 0600);
	if (file < 0 || ftruncate(file, sizeof(struct shared)))
		return SYSTEM;
	struct comm *c = calloc(1, sizeof *c);
	c->shared = mmap(0, sizeof *c->shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	close(file);
	c->magic = COMM, c->rank = rank, c->size = size, c->id = id, c->thread = gettid(), c->place = place;
	c->result = IN_PROGRESS;
	snprintf(c->live, sizeof c->live, "%s/live.%d.%d", folder(), getpid(), names++);
	close(open(c->live, O_CREAT | O_WRONLY, 0600));
	snprintf(path, sizeof path, "%s/made", folder());
	file = open(path, O_CREAT | O_WRONLY | O_APPEND, 0600);
	int n = snprintf(path, sizeof path, "%s %d/%d\n", how, rank, size);
	if (write(file, path, n) != n)
		return SYSTEM;
	close(file);
	*place = parent ? 0 : c;
	c->parent = parent;
	if (parent)
		parent->shrunk = c;
	pthread_create(&c->joining, 0, join, c);
	return IN_PROGRESS;
}

// halt ends the current operation.
static void halt(struct comm *c)
{
	c->stop = 1;
	for (struct operation *o = c->waiting, *next; o; o = next) {
		next = o->next;
		free(o);
	}
	c->waiting = c->last = 0;
	for (int i = 0; i < c->n_threads; i++)
		pthread_join(c->threads[i], 0);
	c->n_threads = 0;
}

static void end(struct comm *c)
{
	if (c->shrunk)
		end(c->shrunk);
	halt(c);
	pthread_join(c->joining, 0);
	if (c->result) { // it was never completed
		char path[512];
		snprintf(path, sizeof path, "%s/comm.%llx", folder(), c->id);
		unlink(path);
	}
	munmap(c->shared, sizeof *c->shared);
	free(c->threads);
	unlink(c->live);
	c->magic = 0; // the memory stays, so that its further use is detected
}

ncclResult_t ncclGetVersion(int *version) { *version = VERSION; return SUCCESS; }
const char *ncclGetErrorString(ncclResult_t r)
{
	return r == SYSTEM ? "unhandled system error" : r == REMOTE ? "remote process exited" : r == INVALID_USAGE ? "invalid usage" : "?";
}
const char *ncclGetLastError(ncclComm_t c) { return last; }

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
	unsigned long long n;
	if (getrandom(&n, sizeof n, 0) != sizeof n)
		return SYSTEM;
	name(id, n);
	return SUCCESS;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *place, int size, ncclUniqueId id, int rank, ncclConfig_t *config)
{
	unsigned long long n;
	if (!number(&id, &n))
		return wrong("an invalid id by value"), INVALID_ARGUMENT;
	return make("init", 0, place, n, size, rank, config);
}

#if VERSION >= 22300
ncclResult_t ncclCommInitRankScalable(ncclComm_t *place, int size, int rank, int ids, ncclUniqueId *id, ncclConfig_t *config)
{
	unsigned long long n;
	if (ids != 1 || !number(id, &n))
		return wrong("%d ids, or an invalid one", ids), INVALID_ARGUMENT;
	return make("init", 0, place, n, size, rank, config);
}
#endif

static void barrier(struct comm *c)
{
	if (c->stop)
		return; // the others wait until they are stopped too
	c->shared->ranks[c->rank].steps = ++c->steps;
	for (int i = 0; i < c->size; i++)
		while (c->shared->ranks[i].steps < c->steps && !c->stop)
			pause_();
}

static size_t size_of(int type) { return (int[]){1, 1, 4, 4, 8, 8, 2, 4, 8, 2}[type]; }

static float brain(uint16_t x) { uint32_t b = (uint32_t)x << 16; float f; memcpy(&f, &b, 4); return f; }
static uint16_t rounded(float f) { uint32_t b; memcpy(&b, &f, 4); return (b + 0x7fff + (b >> 16 & 1)) >> 16; }

#define COMBINE(T, IN, OUT) \
	for (size_t i = 0; i < n; i++) { \
		__typeof__(IN(((T *)0)[0])) r = IN(((T *)c->shared->ranks[0].data)[i]); \
		for (int k = 1; k < c->size; k++) { \
			__typeof__(r) x = IN(((T *)c->shared->ranks[k].data)[i]); \
			r = op == 0 || op == 4 ? r + x : op == 1 ? r * x : op == 2 ? (x > r ? x : r) : (x < r ? x : r); \
			r = IN(OUT(r)); \
		} \
		((T *)to)[i] = OUT((op == 4 ? r / c->size : r)); \
	}
#define SAME(x) (x)
#define HALF(x) ((_Float16)(x))

// combine stores the combination of all ranks' data at a place.
static void combine(struct comm *c, char *to, size_t n, int type, int op)
{
	switch (type) {
	case 0: COMBINE(int8_t, SAME, (int8_t)) break;
	case 1: COMBINE(uint8_t, SAME, (uint8_t)) break;
	case 2: COMBINE(int32_t, SAME, SAME) break;
	case 3: COMBINE(uint32_t, SAME, SAME) break;
	case 4: COMBINE(int64_t, SAME, SAME) break;
	case 5: COMBINE(uint64_t, SAME, SAME) break;
	case 6: COMBINE(_Float16, (float), HALF) break;
	case 7: COMBINE(float, SAME, SAME) break;
	case 8: COMBINE(double, SAME, SAME) break;
	case 9: COMBINE(uint16_t, brain, rounded) break;
	}
}

// exchange does a chunk of an operation: the elements that a rank gives, and what it does with those of all ranks.
static void give(struct comm *c, const char *from, size_t bytes)
{
	barrier(c); // all have taken the previous data
	if (!c->stop)
		memcpy(c->shared->ranks[c->rank].data, from, bytes);
	barrier(c);
}

static void perform(struct operation *o)
{
	struct comm *c = o->comm;
	size_t size = size_of(o->type), each = CHUNK / size;
	int targets = o->kind == REDUCE_SCATTER ? c->size : 1;
	for (int target = 0; target < targets; target++)
		for (size_t at = 0; at < o->count && !c->stop; at += each) {
			size_t n = o->count - at < each ? o->count - at : each;
			give(c, o->from + (target * o->count + at) * size, o->kind == BROADCAST && c->rank != o->root ? 0 : n * size);
			if (c->stop)
				return;
			if (o->kind == ALL_REDUCE || (o->kind == REDUCE_SCATTER && target == c->rank))
				combine(c, o->to + at * size, n, o->type, o->op);
			else if (o->kind == BROADCAST)
				memcpy(o->to + at * size, c->shared->ranks[o->root].data, n * size);
			else if (o->kind == ALL_GATHER)
				for (int k = 0; k < c->size; k++)
					memcpy(o->to + (k * o->count + at) * size, c->shared->ranks[k].data, n * size);
		}
}

static void *run(void *of)
{
	struct operation *o = of;
	struct comm *c = o->comm;
	char path[512];
	snprintf(path, sizeof path, "%s/running.%d", folder(), c->rank);
	close(open(path, O_CREAT | O_WRONLY, 0600));
	while (c->finished != o->number && !c->stop)
		pause_();
	while (fault("hangs", c->rank) && !c->stop)
		pause_();
	if (fault("breaks", c->rank)) {
		snprintf(last, sizeof last, "the fake's network is gone");
		c->fault = REMOTE;
		while (!c->stop)
			pause_();
	}
	__typeof__(c->shared->ranks[0]) *mine = &c->shared->ranks[c->rank];
	mine->count = o->count, mine->kind = o->kind, mine->type = o->type, mine->op = o->op, mine->root = o->root;
	barrier(c);
	for (int i = 0; i < c->size && !c->stop; i++) {
		__typeof__(mine) r = &c->shared->ranks[i];
		if (r->count != o->count || r->kind != o->kind || r->type != o->type || r->op != o->op || r->root != o->root)
			wrong("ranks %d and %d do different operations", c->rank, i);
	}
	perform(o);
	barrier(c);
	c->finished++;
	stream_end(o->stream);
	free(o);
	return 0;
}

// start begins the operations that wait.
static void start(struct comm *c)
{
	for (struct operation *o; (o = c->waiting); ) {
		c->waiting = o->next;
		o->number = c->started++;
		stream_begin(o->stream);
		c->threads = realloc(c->threads, (c->n_threads + 1) * sizeof *c->threads);
		pthread_create(&c->threads[c->n_threads++], 0, run, o);
	}
	c->last = 0;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *r)
{
	ENTER(c);
	*r = c->result;
	if (!*r && c->shrunk && (*r = c->shrunk->result) != IN_PROGRESS) {
		if (*r)
			end(c->shrunk);
		c->shrunk = 0;
	}
	if (*r)
		return leave(c, SUCCESS);
	if (c->revoking && c->asked++ > 1) {
		halt(c);
		c->revoking = 0, c->revoked = 1, c->stop = 0;
	}
	if (!*r)
		*r = c->revoking ? IN_PROGRESS : c->fault;
	if (!*r && c->waiting) {
		*r = IN_PROGRESS;
		if (c->asked++ > 1) {
			start(c);
			*r = SUCCESS;
		}
	}
	if (!*r && c->finalized == 1) {
		*r = IN_PROGRESS;
		if (c->asked++ > 1)
			c->finalized = 2, *r = SUCCESS;
	}
	return leave(c, SUCCESS);
}

static ncclResult_t begin(struct comm *c, const void *from, void *to, size_t count, size_t sends, size_t receives, int kind, int type,
	int op, int root, void *stream)
{
	if (type < 0 || type > 9 || op < 0 || op > 4 || root < 0 || root >= c->size || !count)
		return leave(c, wrong("type %d, operation %d, root %d, %zu elements", type, op, root, count));
	if (c->result || c->finalized || c->revoking)
		return leave(c, wrong("an operation on a communicator that is not ready"));
	if (c->revoked)
		return leave(c, INVALID_USAGE);
	size_t size = size_of(type);
	if ((sends && !has_memory(from, sends * size)) || !has_memory(to, receives * size))
		return leave(c, wrong("an operation on memory that is not on the device"));
	struct operation *o = calloc(1, sizeof *o);
	o->comm = c, o->from = from, o->to = to, o->count = count, o->kind = kind, o->type = type, o->op = op, o->root = root, o->stream = stream;
	if (c->last)
		c->last->next = o;
	else
		c->waiting = o;
	c->last = o;
	c->asked = 0;
	return leave(c, IN_PROGRESS);
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t n, int type, int op, ncclComm_t c, void *stream)
{
	ENTER(c);
	return begin(c, from, to, n, n, n, ALL_REDUCE, type, op, 0, stream);
}
ncclResult_t ncclBroadcast(const void *from, void *to, size_t n, int type, int root, ncclComm_t c, void *stream)
{
	ENTER(c);
	return begin(c, from, to, n, c->rank == root ? n : 0, n, BROADCAST, type, 0, root, stream);
}
ncclResult_t ncclAllGather(const void *from, void *to, size_t n, int type, ncclComm_t c, void *stream)
{
	ENTER(c);
	return begin(c, from, to, n, n, n * c->size, ALL_GATHER, type, 0, 0, stream);
}
ncclResult_t ncclReduceScatter(const void *from, void *to, size_t n, int type, int op, ncclComm_t c, void *stream)
{
	ENTER(c);
	return begin(c, from, to, n, n * c->size, n, REDUCE_SCATTER, type, op, 0, stream);
}
ncclResult_t ncclGroupStart(void) { group++; return SUCCESS; }
ncclResult_t ncclGroupEnd(void) { return group-- > 0 ? SUCCESS : wrong("a group that has not begun"); }

ncclResult_t ncclCommFinalize(ncclComm_t c)
{
	ENTER(c);
	if (c->revoked || c->result || c->finalized || c->waiting || c->started != c->finished)
		return leave(c, wrong("ncclCommFinalize of a communicator that is not at rest"));
	c->finalized = 1, c->asked = 0;
	return leave(c, IN_PROGRESS);
}
ncclResult_t ncclCommDestroy(ncclComm_t c)
{
	ENTER(c);
	if (c->finalized != 2 && !c->revoked)
		return leave(c, wrong("ncclCommDestroy before it is finalized"));
	end(c);
	return SUCCESS;
}
ncclResult_t ncclCommAbort(ncclComm_t c)
{
	ENTER(c);
	while (fault("abort-hangs", c->rank))
		pause_();
	end(c);
	return SUCCESS;
}

#if VERSION >= 22703
ncclResult_t ncclCommShrink(ncclComm_t c, int *without, int n, ncclComm_t *place, ncclConfig_t *config, int flags)
{
	ENTER(c);
	if (c->result || c->finalized || c->revoking || n < 1 || n >= c->size || flags < 0 || flags > 1)
		return leave(c, wrong("ncclCommShrink without %d of %d, flags %d", n, c->size, flags));
	if (!flags && (c->waiting || c->started != c->finished) && !c->revoked)
		return leave(c, wrong("ncclCommShrink of a communicator that is not at rest"));
	if (flags) {
		halt(c);
		c->stop = 0;
	}
	int rank = c->rank;
	unsigned long long id = hash(hash(c->id, 's'), c->children++);
	for (int i = 0; i < n; i++) {
		if (without[i] < 0 || without[i] >= c->size || without[i] == c->rank)
			return leave(c, wrong("ncclCommShrink of rank %d without %d", c->rank, without[i]));
		rank -= without[i] < c->rank;
		id = hash(id, without[i]);
	}
	return leave(c, make("shrink", c, place, id, c->size - n, rank, config));
}
#endif

#if VERSION >= 22807
ncclResult_t ncclCommRevoke(ncclComm_t c, int flags)
{
	ENTER(c);
	if (flags || c->result || c->finalized || c->revoked || c->revoking)
		return leave(c, wrong("ncclCommRevoke of a communicator that is not ready"));
	c->stop = 1;
	c->revoking = 1, c->asked = 0;
	return leave(c, IN_PROGRESS);
}
#endif

#if VERSION >= 22902
ncclResult_t ncclCommGetUniqueId(ncclComm_t c, ncclUniqueId *id)
{
	ENTER(c);
	name(id, hash(hash(c->id, 'g'), c->children));
	return leave(c, SUCCESS);
}
ncclResult_t ncclCommGrow(ncclComm_t c, int size, const ncclUniqueId *id, int rank, ncclComm_t *place, ncclConfig_t *config)
{
	unsigned long long n = 0;
	if (id && !number(id, &n))
		return wrong("an invalid id to grow by"), INVALID_ARGUMENT;
	if (!c)
		return id ? make("join", 0, place, n, size, rank, config) : wrong("a newcomer without an id");
	ENTER(c);
	unsigned long long want = hash(hash(c->id, 'g'), c->children++);
	if (rank != -1 || size <= c->size || (id && n != want) || c->result || c->finalized || c->waiting || c->started != c->finished)
		return leave(c, wrong("ncclCommGrow of rank %d of %d to %d, rank %d", c->rank, c->size, size, rank));
	return leave(c, make("grow", 0, place, want, size, c->rank, config));
}
#endif
