// A driver of CUDA without a device, for tests of how the real library is called: the prototypes are those of its header. It checks
// its arguments; device memory is a file that other processes open by its name. Kernels are run as their PTX says.
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct { char bytes[16]; } CUuuid;
typedef struct { char reserved[64]; } CUipcMemHandle;
typedef struct object {
	unsigned magic;
	int queries;              // of an event: how often it has answered that it is not complete
	struct object *stream;    // of an event: where it was recorded,
	unsigned long long after; // and the number of operations that had begun there
	atomic_ullong begun, done; // of a stream: operations outside of the fake, such as those of fakenccl.c
} object;
typedef object *CUcontext, *CUstream, *CUevent;
typedef struct { unsigned magic; char text[1 << 20]; } *CUmodule;

enum { INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_PTX = 218, INVALID_HANDLE = 400, NOT_FOUND = 500,
	NOT_READY = 600, ILLEGAL_ADDRESS = 700 };
enum { CONTEXT = 0xc0ffee01, STREAM, EVENT, MODULE, FUNCTION };

static int started;
static object context = {CONTEXT};
static _Thread_local CUcontext current;
static struct { char *at; size_t size; int mine; char path[128]; } memory[4096];
static struct { char *at; size_t size; } pinned[64];
static atomic_int names;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; // of memory and pinned

#define NEED(condition, result) do { if (!(condition)) return result; } while (0)
#define READY do { NEED(started, NOT_INITIALIZED); NEED(current == &context, INVALID_CONTEXT); } while (0)

static int find(CUdeviceptr p, size_t n)
{
	int found = -1;
	pthread_mutex_lock(&lock);
	for (int i = 0; i < 4096 && found < 0; i++)
		if (memory[i].at && p >= (CUdeviceptr)memory[i].at && p + n <= (CUdeviceptr)memory[i].at + memory[i].size)
			found = i;
	pthread_mutex_unlock(&lock);
	return found;
}

// find_near is find, which looks at one place first.
static int find_near(int i, CUdeviceptr p, size_t n)
{
	char *at = memory[i].at;
	return at && p >= (CUdeviceptr)at && p + n <= (CUdeviceptr)at + memory[i].size ? i : find(p, n);
}

#include "ptx.h"
typedef struct { unsigned magic; ptx_kernel kernel; } *CUfunction;

static int host(const void *p, size_t n)
{
	int found = 0;
	pthread_mutex_lock(&lock);
	for (int i = 0; i < 64; i++)
		found |= pinned[i].at && (char *)p >= pinned[i].at && (char *)p + n <= pinned[i].at + pinned[i].size;
	pthread_mutex_unlock(&lock);
	return found;
}

static CUresult map(CUdeviceptr *out, const char *path, size_t size, int mine)
{
	int file = open(path, mine ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, 0600);
	NEED(file >= 0, INVALID_VALUE);
	if (mine && ftruncate(file, size))
		return 2;
	if (!mine)
		size = lseek(file, 0, SEEK_END);
	void *at = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	close(file);
	NEED(at != MAP_FAILED, 2);
	pthread_mutex_lock(&lock);
	int slot = 0;
	while (slot < 4095 && memory[slot].at)
		slot++;
	memory[slot].at = at, memory[slot].size = size, memory[slot].mine = mine;
	snprintf(memory[slot].path, sizeof memory[slot].path, "%s", path);
	pthread_mutex_unlock(&lock);
	*out = (CUdeviceptr)at;
	return 0;
}

static void give_back(int slot)
{
	pthread_mutex_lock(&lock);
	munmap(memory[slot].at, memory[slot].size);
	memory[slot].at = 0;
	pthread_mutex_unlock(&lock);
}

CUresult cuInit(unsigned flags) { NEED(flags == 0, INVALID_VALUE); started = 1; return 0; }
CUresult cuDriverGetVersion(int *version) { *version = 12040; return 0; }
CUresult cuGetErrorName(CUresult r, const char **name)
{
	NEED(r == INVALID_VALUE || r == ILLEGAL_ADDRESS, INVALID_VALUE);
	*name = r == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_ILLEGAL_ADDRESS";
	return 0;
}
CUresult cuGetErrorString(CUresult r, const char **text) { *text = "as the fake says"; return 0; }
CUresult cuDeviceGetCount(int *n) { NEED(started, NOT_INITIALIZED); *n = 1; return 0; }
CUresult cuDeviceGet(CUdevice *d, int ordinal) { NEED(ordinal == 0, INVALID_DEVICE); *d = 7; return 0; }
CUresult cuDeviceGetName(char *name, int n, CUdevice d) { NEED(d == 7, INVALID_DEVICE); snprintf(name, n, "Fake in C"); return 0; }
CUresult cuDeviceGetUuid_v2(CUuuid *u, CUdevice d) { NEED(d == 7, INVALID_DEVICE); memset(u, 0x42, sizeof *u); return 0; }
CUresult cuDeviceGetPCIBusId(char *id, int n, CUdevice d) { NEED(d == 7, INVALID_DEVICE); snprintf(id, n, "0000:1b:00.0"); return 0; }
CUresult cuDeviceGetAttribute(int *v, int attribute, CUdevice d)
{
	NEED(d == 7, INVALID_DEVICE);
	*v = attribute == 16 ? 4 : attribute == 75 ? 9 : 0;
	return 0;
}
CUresult cuDeviceTotalMem_v2(size_t *n, CUdevice d) { NEED(d == 7, INVALID_DEVICE); *n = (size_t)5 << 32; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { NEED(d == 7, INVALID_DEVICE); *c = &context; return 0; }
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice d) { NEED(d == 7, INVALID_DEVICE); return 0; }
CUresult cuCtxSetCurrent(CUcontext c) { NEED(c == &context, INVALID_CONTEXT); current = c; return 0; }
CUresult cuCtxPushCurrent_v2(CUcontext c) { NEED(c == &context && !current, INVALID_CONTEXT); current = c; return 0; }
CUresult cuCtxPopCurrent_v2(CUcontext *c) { NEED(current, INVALID_CONTEXT); *c = current; current = 0; return 0; }

CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n)
{
	READY;
	NEED(n > 0, INVALID_VALUE);
	char path[128];
	snprintf(path, sizeof path, "%s/%d.%d", getenv("FAKECUDA_FOLDER"), getpid(), names++);
	return map(p, path, n, 1);
}
CUresult cuMemFree_v2(CUdeviceptr p)
{
	READY;
	int i = find(p, 1);
	NEED(i >= 0 && (CUdeviceptr)memory[i].at == p && memory[i].mine, INVALID_VALUE);
	unlink(memory[i].path);
	give_back(i);
	return 0;
}
CUresult cuMemGetInfo_v2(size_t *available, size_t *total)
{
	READY;
	*available = (size_t)3 << 32, *total = (size_t)5 << 32;
	DIR *folder = opendir(getenv("FAKECUDA_FOLDER"));
	NEED(folder, INVALID_VALUE);
	for (struct dirent *e; (e = readdir(folder));) { // the memory of all processes that live
		char path[512];
		struct stat s;
		int pid = atoi(e->d_name);
		snprintf(path, sizeof path, "%s/%s", getenv("FAKECUDA_FOLDER"), e->d_name);
		if (pid > 0 && !kill(pid, 0) && !stat(path, &s))
			*available -= s.st_size;
	}
	closedir(folder);
	return 0;
}
CUresult cuMemHostRegister_v2(void *p, size_t n, unsigned flags)
{
	READY;
	NEED(flags == 1, INVALID_VALUE);
	pthread_mutex_lock(&lock);
	int i = 0;
	while (i < 64 && pinned[i].at)
		i++;
	if (i < 64)
		pinned[i].at = p, pinned[i].size = n;
	pthread_mutex_unlock(&lock);
	return i < 64 ? 0 : 2;
}
CUresult cuMemHostUnregister(void *p)
{
	READY;
	pthread_mutex_lock(&lock);
	int i = 0;
	while (i < 64 && pinned[i].at != p)
		i++;
	if (i < 64)
		pinned[i].at = 0;
	pthread_mutex_unlock(&lock);
	return i < 64 ? 0 : INVALID_VALUE;
}
CUresult cuMemHostAlloc(void **p, size_t n, unsigned flags)
{
	*p = malloc(n);
	CUresult r = cuMemHostRegister_v2(*p, n, flags);
	if (r)
		free(*p);
	return r;
}
CUresult cuMemFreeHost(void *p)
{
	CUresult r = cuMemHostUnregister(p);
	if (!r)
		free(p);
	return r;
}

#define IS(what, kind) do { NEED((what) && (what)->magic == (kind), INVALID_HANDLE); } while (0)

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t n, CUstream s)
{
	READY;
	IS(s, STREAM);
	NEED(find(to, n) >= 0 && host(from, n), ILLEGAL_ADDRESS);
	memcpy((void *)to, from, n);
	return 0;
}
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t n, CUstream s)
{
	READY;
	IS(s, STREAM);
	NEED(find(from, n) >= 0 && host(to, n), ILLEGAL_ADDRESS);
	memcpy(to, (void *)from, n);
	return 0;
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream s)
{
	READY;
	IS(s, STREAM);
	NEED(find(from, n) >= 0 && find(to, n) >= 0, ILLEGAL_ADDRESS);
	memmove((void *)to, (void *)from, n);
	return 0;
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n, CUstream s)
{
	READY;
	IS(s, STREAM);
	NEED(find(to, n) >= 0, ILLEGAL_ADDRESS);
	memset((void *)to, value, n);
	return 0;
}

static void *made(unsigned magic, size_t n)
{
	object *o = calloc(1, n);
	o->magic = magic;
	return o;
}
static CUresult gone(object *o) { o->magic = 0; free(o); return 0; }

CUresult cuStreamCreate(CUstream *s, unsigned flags) { READY; NEED(flags == 1, INVALID_VALUE); *s = made(STREAM, sizeof **s); return 0; }
CUresult cuStreamDestroy_v2(CUstream s) { READY; IS(s, STREAM); s->magic = 0; return 0; } // events may know it
CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned flags)
{
	READY;
	IS(s, STREAM);
	IS(e, EVENT);
	NEED(flags == 0, INVALID_VALUE);
	return 0;
}
CUresult cuEventCreate(CUevent *e, unsigned flags) { READY; NEED(flags == 2, INVALID_VALUE); *e = made(EVENT, sizeof **e); return 0; }
CUresult cuEventDestroy_v2(CUevent e) { READY; IS(e, EVENT); return gone(e); }
CUresult cuEventRecord(CUevent e, CUstream s)
{
	READY;
	IS(s, STREAM);
	IS(e, EVENT);
	e->queries = 2, e->stream = s, e->after = s->begun;
	return 0;
}
CUresult cuEventQuery(CUevent e)
{
	READY;
	IS(e, EVENT);
	return e->queries-- > 0 || (e->stream && e->stream->done < e->after) ? NOT_READY : 0;
}

// For fakenccl.c.
void fakeStreamBegin(CUstream s) { s->begun++; }
void fakeStreamEnd(CUstream s) { s->done++; }
int fakeHasMemory(const void *p, size_t n) { return find((CUdeviceptr)p, n) >= 0; }
int fakeHasContext(void) { return current == &context; }

CUresult cuModuleLoadDataEx(CUmodule *m, const void *image, unsigned n, int *options, void **values)
{
	READY;
	NEED(n == 2 && options[0] == 5 && options[1] == 6 && values[0] && (size_t)values[1] == 4095, INVALID_VALUE);
	NEED(strlen(image) < sizeof (*m)->text, INVALID_VALUE);
	if (!strstr(image, ".version 7.0\n.target sm_70\n")) {
		snprintf(values[0], (size_t)values[1], "no version that is known");
		return INVALID_PTX;
	}
	*m = made(MODULE, sizeof **m);
	strcpy((*m)->text, image);
	return 0;
}
CUresult cuModuleUnload(CUmodule m) { READY; IS(m, MODULE); return gone((object *)m); }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name)
{
	READY;
	IS(m, MODULE);
	char entry[128];
	snprintf(entry, sizeof entry, ".entry %s(", name);
	NEED(strstr(m->text, entry), NOT_FOUND);
	*f = made(FUNCTION, sizeof **f);
	return ptx_parse(&(*f)->kernel, m->text, name) && ptx_resolve(&(*f)->kernel) ? 0 : INVALID_PTX;
}

// hold waits while the file "hold" has a number that is less than that of the process's launches.
static void hold(void)
{
	static atomic_int launches;
	int number = ++launches, most = 0;
	char path[512];
	snprintf(path, sizeof path, "%s/hold", getenv("FAKECUDA_FOLDER"));
	for (;;) {
		FILE *f = fopen(path, "r");
		if (!f)
			return;
		int known = fscanf(f, "%d", &most);
		fclose(f);
		if (known != 1 || number <= most)
			return;
		usleep(1000);
	}
}

CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
	CUstream s, void **params, void **extra)
{
	READY;
	IS(f, FUNCTION);
	IS(s, STREAM);
	NEED(gx > 0 && gy == 1 && gz == 1 && bx > 0 && bx <= 1024 && by == 1 && bz == 1 && shared == 0 && params && !extra, INVALID_VALUE);
	hold();
	return ptx_run(&f->kernel, params, gx, bx) ? 0 : ILLEGAL_ADDRESS;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *h, CUdeviceptr p)
{
	READY;
	int i = find(p, 1);
	NEED(i >= 0 && (CUdeviceptr)memory[i].at == p && memory[i].mine, INVALID_VALUE);
	memset(h, 0, sizeof *h);
	snprintf(h->reserved, sizeof h->reserved, "FAKE %s", strrchr(memory[i].path, '/') + 1);
	strcpy(h->reserved + 60, "end");
	return 0;
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *p, CUipcMemHandle h, unsigned flags)
{
	READY;
	char path[128], own[16];
	NEED(flags == 1 && !strncmp(h.reserved, "FAKE ", 5) && !strcmp(h.reserved + 60, "end"), INVALID_VALUE);
	snprintf(own, sizeof own, "%d.", getpid());
	NEED(strncmp(h.reserved + 5, own, strlen(own)), INVALID_CONTEXT);
	snprintf(path, sizeof path, "%s/%s", getenv("FAKECUDA_FOLDER"), h.reserved + 5);
	return map(p, path, 0, 0);
}
CUresult cuIpcCloseMemHandle(CUdeviceptr p)
{
	READY;
	int i = find(p, 1);
	NEED(i >= 0 && (CUdeviceptr)memory[i].at == p && !memory[i].mine, INVALID_VALUE);
	give_back(i);
	return 0;
}
