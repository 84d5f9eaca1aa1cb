/* The common part of the peers' programs: arguments, clock, samples, and the rule by which they are taken.
 *
 * Every rank calls the operation on float32 back to back. A sample is one operation, and its time the longest over the
 * ranks of end - begin by CLOCK_MONOTONIC. The result is checked before it is timed. hvdrun's own ranks keep to the same
 * rule, see internal/bench/rank.go.
 */
#ifndef MEASURE_H
#define MEASURE_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MIN_SAMPLES = 10, MAX_SAMPLES = 20000, MAX_SIZES = 64 };

enum op { ALLREDUCE, BROADCAST, ALLGATHER, REDUCESCATTER, ALLTOALL, BARRIER, OPS };
static const char *const op_names[OPS] = {"allreduce", "broadcast", "allgather", "reducescatter", "alltoall", "barrier"};

struct plan {
  enum op op;
  double seconds;
  size_t sizes[MAX_SIZES];
  int nsizes;
};

/* Reads OP SECONDS SIZE,SIZE,... */
static inline int read_plan(struct plan *p, char **args) {
  int op = 0;
  while (op < OPS && strcmp(args[0], op_names[op]) != 0) op++;
  if (op == OPS) return fprintf(stderr, "no operation %s here\n", args[0]), 0;
  p->op = (enum op)op;
  p->seconds = atof(args[1]);
  p->nsizes = 0;
  for (const char *at = args[2]; *at; at += *at == ',') {
    char *end;
    if (p->nsizes == MAX_SIZES) return fprintf(stderr, "more than %d sizes\n", MAX_SIZES), 0;
    p->sizes[p->nsizes++] = strtoull(at, &end, 10);
    if (end == at) return fprintf(stderr, "%s is no list of sizes\n", args[2]), 0;
    at = end;
  }
  return 1;
}

static inline int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Where the part of a rank begins: the first count % n parts have one element more. */
static inline size_t part_start(size_t count, int n, int rank) {
  size_t more = count % (size_t)n;
  return count / (size_t)n * (size_t)rank + ((size_t)rank < more ? (size_t)rank : more);
}

/* The value of a rank at place i, and the sum of all ranks there. */
static inline float sample_of(int rank, size_t i) { return (float)(rank + 1 + (int)(i % 7)); }
static inline float sum_of(int n, size_t i) { return (float)(n * (n + 1) / 2 + n * (int)(i % 7)); }

/* Compares the values from place at on with the sum, or, if rank is not negative, with the values of that rank. */
static inline int check(const float *got, size_t len, size_t at, int n, int rank) {
  for (size_t i = 0; i < len; i++) {
    float want = rank < 0 ? sum_of(n, at + i) : sample_of(rank, at + i);
    if (got[i] != want) {
      fprintf(stderr, "the result is wrong: element %zu is %g, not %g\n", at + i, got[i], want);
      return 0;
    }
  }
  return 1;
}

/* How many samples fit into the time, or 0 while the batch was too short to tell. */
static inline int samples_for(double seconds, int64_t took_ns, int batch) {
  if (took_ns < 1) took_ns = 1;
  if ((double)took_ns < seconds * 1e9 / 20 && batch < MAX_SAMPLES) return 0;
  double n = seconds * 1e9 * batch / (double)took_ns;
  return n < MIN_SAMPLES ? MIN_SAMPLES : n > MAX_SAMPLES ? MAX_SAMPLES : (int)n;
}

static int by_value(const void *a, const void *b) {
  int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return (x > y) - (x < y);
}

/* Sorts the samples and prints their line. */
static inline void print_line(size_t bytes, int64_t *ns, int n) {
  qsort(ns, (size_t)n, sizeof *ns, by_value);
  int last = (99 * n + 99) / 100 - 1;
  printf("%zu\t%d\t%.3f\t%.3f\t%.3f\n", bytes, n, (double)ns[0] / 1e3,
         ((double)ns[(n - 1) / 2] + (double)ns[n / 2]) / 2e3, (double)ns[last] / 1e3);
  fflush(stdout);
}

#endif
