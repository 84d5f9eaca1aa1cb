/* The collectives of an MPI library.  mpicc -O2 mpi.c; mpirun -n N ./a.out OP SECONDS SIZES */
#include <mpi.h>

#include "measure.h"

static struct {
  enum op op;
  int rank, n;
  float *x, *y; /* the whole tensor; a second one where the operation is not in place */
  int count, *counts, *starts;
} t;

static void run(void) {
  switch (t.op) {
  case ALLREDUCE: MPI_Allreduce(MPI_IN_PLACE, t.x, t.count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
  case BROADCAST: MPI_Bcast(t.x, t.count, MPI_FLOAT, 0, MPI_COMM_WORLD); break;
  case ALLGATHER:
    MPI_Allgatherv(t.x + t.starts[t.rank], t.counts[t.rank], MPI_FLOAT, t.y, t.counts, t.starts, MPI_FLOAT,
                   MPI_COMM_WORLD);
    break;
  case REDUCESCATTER: MPI_Reduce_scatter(t.x, t.y, t.counts, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
  case ALLTOALL: {
    /* part `rank` of every other rank's tensor, one after the other, all of one length */
    int own = t.counts[t.rank], lengths[t.n], places[t.n];
    for (int r = 0; r < t.n; r++) lengths[r] = own, places[r] = own * r;
    MPI_Alltoallv(t.x, t.counts, t.starts, MPI_FLOAT, t.y, lengths, places, MPI_FLOAT, MPI_COMM_WORLD);
    break;
  }
  default: MPI_Barrier(MPI_COMM_WORLD);
  }
}

static int verify(void) {
  size_t own = (size_t)t.counts[t.rank], start = (size_t)t.starts[t.rank];
  int good = 1;
  run();
  switch (t.op) {
  case ALLREDUCE: return check(t.x, (size_t)t.count, 0, t.n, -1);
  case BROADCAST: return check(t.x, (size_t)t.count, 0, t.n, 0);
  case REDUCESCATTER: return check(t.y, own, start, t.n, -1);
  case ALLGATHER:
    for (int r = 0; r < t.n; r++)
      good &= check(t.y + t.starts[r], (size_t)t.counts[r], (size_t)t.starts[r], t.n, r);
    return good;
  case ALLTOALL:
    for (int r = 0; r < t.n; r++) good &= check(t.y + own * (size_t)r, own, start, t.n, r);
    return good;
  default: return 1;
  }
}

static void prepare(size_t bytes) {
  size_t count = bytes / sizeof(float);
  int both = t.op == ALLGATHER || t.op == REDUCESCATTER || t.op == ALLTOALL;
  t.count = (int)count;
  t.x = malloc(bytes + 1);
  t.y = both ? calloc(count + (size_t)t.n, sizeof(float)) : NULL;
  for (size_t i = 0; i < count; i++) t.x[i] = sample_of(t.rank, i);
  for (int r = 0; r < t.n; r++) {
    t.starts[r] = (int)part_start(count, t.n, r);
    t.counts[r] = (int)part_start(count, t.n, r + 1) - t.starts[r];
  }
}

static void measure(size_t bytes, double seconds, int64_t *ns) {
  prepare(bytes);
  if (!verify()) MPI_Abort(MPI_COMM_WORLD, 1);
  memset(t.x, 0, bytes);
  int n = 0;
  for (int batch = 3; n == 0; batch *= 2) {
    int64_t took = now_ns();
    for (int i = 0; i < batch; i++) run();
    took = now_ns() - took;
    MPI_Bcast(&took, 1, MPI_INT64_T, 0, MPI_COMM_WORLD);
    n = samples_for(seconds, took, batch);
  }
  memset(ns, 0, (size_t)n * sizeof *ns);
  MPI_Barrier(MPI_COMM_WORLD);
  for (int i = 0; i < n; i++) {
    int64_t begun = now_ns();
    run();
    ns[i] = now_ns() - begun;
  }
  MPI_Allreduce(MPI_IN_PLACE, ns, n, MPI_INT64_T, MPI_MAX, MPI_COMM_WORLD);
  if (t.rank == 0) print_line(bytes, ns, n);
  free(t.x);
  free(t.y);
}

int main(int argc, char **argv) {
  struct plan p = {0};
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &t.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &t.n);
  if (argc != 4 || !read_plan(&p, argv + 1)) MPI_Abort(MPI_COMM_WORLD, 2);
  t.op = p.op;
  t.counts = calloc((size_t)t.n, sizeof(int));
  t.starts = calloc((size_t)t.n, sizeof(int));
  int64_t *ns = malloc(MAX_SAMPLES * sizeof *ns);
  for (int s = 0; s < p.nsizes; s++) measure(p.sizes[s], p.seconds, ns);
  free(ns);
  free(t.counts);
  free(t.starts);
  MPI_Finalize();
  return 0;
}
