/*
 * Ranks that add vectors by libhvdrun, until a rank dies. Each rank is a process:
 *
 *     make lib
 *     cc -I bin/lib -o bin/all_reduce examples/c/all_reduce.c -L bin/lib -lhvdrun -Wl,-rpath,$PWD/bin/lib
 *     mkdir /tmp/ranks; for r in 0 1 2 3; do bin/all_reduce $r 4 /tmp/ranks 1000 & done; wait
 *
 * The ranks exchange their addresses by files in the folder. Under hvdrun they use the worker's socket
 * instead, which also announces a new world when a rank is lost.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hvdrun.h"

static void fail(const char *what, int64_t code) {
	char text[1024];
	fprintf(stderr, "%s: %s\n", what, hvd_error(text, sizeof text));
	exit(code == HVD_ABORTED ? 3 : 1);
}

/* tell writes this rank's addresses to its file, in one step. */
static void tell(const char *folder, int rank, const char *addresses) {
	char name[1024], temporary[1100];
	snprintf(name, sizeof name, "%s/%d", folder, rank);
	snprintf(temporary, sizeof temporary, "%s.new", name);
	FILE *f = fopen(temporary, "w");
	if (f == NULL || fputs(addresses, f) < 0 || fclose(f) != 0 || rename(temporary, name) != 0) {
		perror(name);
		exit(1);
	}
}

/* member reads the addresses of a rank, once they are there, as a member of a world in JSON. */
static void member(const char *folder, int rank, char *text, size_t room) {
	char name[1024], addresses[4096], *line, *rest;
	snprintf(name, sizeof name, "%s/%d", folder, rank);
	FILE *f;
	while ((f = fopen(name, "r")) == NULL)
		usleep(10000);
	addresses[fread(addresses, 1, sizeof addresses - 1, f)] = 0;
	fclose(f);
	int n = snprintf(text, room, "%s{\"host\": \"here\", \"addresses\": [", rank == 0 ? "" : ", ");
	for (line = strtok_r(addresses, "\n", &rest); line != NULL; line = strtok_r(NULL, "\n", &rest))
		n += snprintf(text + n, room - n, "\"%s\"%s", line, *rest == 0 ? "" : ", ");
	snprintf(text + n, room - n, "]}");
}

int main(int argc, char **argv) {
	if (argc != 5) {
		fprintf(stderr, "usage: %s RANK SIZE FOLDER STEPS\n", argv[0]);
		return 2;
	}
	int rank = atoi(argv[1]), size = atoi(argv[2]);
	long steps = atol(argv[4]);

	int64_t endpoint = hvd_listen("{\"run\": \"example\", \"listen\": \"127.0.0.1:0\"}");
	if (endpoint < 0)
		fail("listen", endpoint);
	char text[4096], *world = malloc(1000 + 5000 * (size_t)size);
	if (hvd_addresses(endpoint, text, sizeof text) >= (int64_t)sizeof text)
		return 1;
	tell(argv[3], rank, text);
	/* The key is secret in a real job. */
	int n = sprintf(world, "{\"generation\": 1, \"rank\": %d, \"data_key\": \"%064d\", \"members\": [", rank, 7);
	for (int r = 0; r < size; r++) {
		member(argv[3], r, world + n, 5000);
		n += (int)strlen(world + n);
	}
	strcpy(world + n, "]}");
	int64_t group = hvd_connect(endpoint, world, -1);
	if (group < 0)
		fail("connect", group);

	float data[1000];
	for (long step = 0; step < steps; step++) {
		for (int i = 0; i < 1000; i++)
			data[i] = (float)(rank + 1);
		int64_t code = hvd_all_reduce(group, data, 1000, HVD_FLOAT32, HVD_SUM);
		if (code < 0)
			fail("all_reduce", code);
		if (data[0] != (float)(size * (size + 1) / 2) || data[999] != data[0]) {
			fprintf(stderr, "the sum is %g\n", data[0]);
			return 1;
		}
		/* The same in the background. */
		int64_t ticket = hvd_start(group, HVD_ALL_REDUCE, data, NULL, 1000, HVD_FLOAT32, HVD_AVERAGE, NULL);
		while ((code = ticket < 0 ? ticket : hvd_wait(group, ticket, 100)) == HVD_PENDING)
			;
		if (code < 0)
			fail("all_reduce in the background", code);
		if (step == 0)
			printf("rank %d of %d: the sum is %g\n", hvd_rank(group), hvd_size(group), data[0]), fflush(stdout);
	}
	hvd_close(group);
	hvd_close(endpoint);
	return 0;
}
