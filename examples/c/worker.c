/* A worker of an elastic job in C, without a library: docs/reference/worker-protocol.md.
 *
 *   cc -o worker worker.c && hvdrun -np 4 --min-np 2 ./worker stop
 *
 * All workers count, until the file that the argument names exists. If a worker dies, the others continue
 * in the next world; a newcomer continues from the count of the world's root, which is its handle. */
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int hvdrun;           /* the socket */
static char line[1 << 24];   /* the newest line from it */
static char input[1 << 24];  /* what follows */
static size_t have;
static volatile sig_atomic_t asked; /* to leave, by SIGTERM */

static void ask(int signal) { asked = signal; }

/* hear reads the next line, waiting at most that many milliseconds. It returns 0 if no line came, or after a signal. */
static int hear(int milliseconds) {
	for (;;) {
		char *end = memchr(input, '\n', have);
		if (end) {
			size_t n = (size_t)(end - input);
			memcpy(line, input, n);
			line[n] = 0;
			have -= n + 1;
			memmove(input, end + 1, have);
			return 1;
		}
		struct pollfd p = {hvdrun, POLLIN, 0};
		if (poll(&p, 1, milliseconds) <= 0) return 0;
		ssize_t n = read(hvdrun, input + have, sizeof input - have);
		if (n <= 0) exit(1); /* hvdrun has ended */
		have += (size_t)n;
	}
}

static int is(const char *kind) { return strncmp(line, "{\"is\":\"", 7) == 0 && strncmp(line + 7, kind, strlen(kind)) == 0; }

/* number returns a field of the line, or an element of an array of texts that are numbers. */
static long number(const char *field, long element) {
	char *at = strstr(line, field);
	if (!at) return 0;
	for (at += strlen(field); element > 0; element--) at = strchr(at, ',') + 1;
	return atol(at + strspn(at, "[\""));
}

int main(int argc, char **argv) {
	const char *fd = getenv("HVD_WORKER_SOCKET"), *stop = argc > 1 ? argv[1] : "stop";
	if (!fd) return fprintf(stderr, "worker: hvdrun has not started this process\n"), 2;
	hvdrun = atoi(fd);
	fcntl(hvdrun, F_SETFD, FD_CLOEXEC); /* processes that this one starts are not part of the job */
	unsetenv("HVD_WORKER_SOCKET"), unsetenv("HVD_CREDENTIALS");
	signal(SIGTERM, ask);
	long count = 0, state = 0;
	dprintf(hvdrun, "{\"do\":\"hello\",\"version\":1,\"program\":\"worker.c\"}\n");
	for (;;) {
		dprintf(hvdrun, "{\"do\":\"join\",\"handle\":\"%ld\",\"commits\":%ld,\"holds_state\":%s}\n", count, count, state ? "true" : "false");
		do {
			while (!hear(-1)) continue;
			if (is("dismissed")) return 0;
			if (is("error")) return fprintf(stderr, "worker: %s\n", line), 1;
		} while (!is("world"));
		long generation = number("\"generation\":", 0), seq = number("\"seq\":", 0), rank = number("\"rank\":", 0);
		count = number("\"handles\":", number("\"root\":", 0));
		printf("world %ld: rank %ld of %ld, from %ld\n", generation, rank, number("\"size\":", 0), count);
		fflush(stdout);
		for (long first = count, go_on = 1; go_on;) {
			if (!hear(10)) { /* a step of training */
				state = ++count;
				dprintf(hvdrun, "{\"do\":\"beat\",\"phase\":\"training\",\"commits\":%ld}\n", count);
				if (count == first + 1) dprintf(hvdrun, "{\"do\":\"report\",\"what\":\"committed\",\"commits\":%ld}\n", count);
				if (access(stop, F_OK) == 0) return dprintf(hvdrun, "{\"do\":\"report\",\"what\":\"done\",\"commits\":%ld}\n", count), 0;
			} else if (is("lost")) {
				go_on = number("\"generation\":", 0) != generation;
			} else if (is("updated")) {
				go_on = number("\"seq\":", 0) <= seq || strstr(line, "\"change\":[]");
			}
			if (asked) dprintf(hvdrun, "{\"do\":\"report\",\"what\":\"draining\"}\n"), asked = 0;
		}
	}
}
