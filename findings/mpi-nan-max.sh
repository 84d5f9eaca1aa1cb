#!/bin/bash
# MPI_Allreduce with MPI_MAX over four ranks, of which one has a NaN: MPICH 5.0.2 gives the ranks of one call different results;
# Open MPI 6.0.0rc2 gives all ranks one result, which depends on the rank that has the NaN and on the number of elements.
# Guess: a result that the order of the operands determines, the same on all ranks, as MPI requires of predefined operations.
. "$(dirname "$0")/debian.bash"
packages gcc libc6-dev mpich libmpich-dev openmpi-bin libopenmpi-dev
cat > m.c <<'C'
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv) {
	int rank, size;
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank); MPI_Comm_size(MPI_COMM_WORLD, &size);
	int counts[] = {1, 5, 100000};
	for (int c = 0; c < 3; c++) for (int special = 0; special < size; special++) {
		double *x = malloc(counts[c] * sizeof *x), *all = malloc(size * sizeof *all);
		for (int i = 0; i < counts[c]; i++) x[i] = rank == special ? NAN : rank + 1;
		MPI_Allreduce(MPI_IN_PLACE, x, counts[c], MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
		MPI_Gather(x, 1, MPI_DOUBLE, all, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
		if (rank == 0) {
			printf("%d elements, NaN at rank %d: ranks have", counts[c], special);
			for (int r = 0; r < size; r++) printf(" %g", all[r]);
			printf("\n");
		}
		free(x); free(all);
	}
	MPI_Finalize();
}
C
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
for mpi in mpich openmpi; do
  sid mpicc.$mpi -o $mpi m.c -lm || exit 2
  echo "== $mpi"; sid mpirun.$mpi -n 4 ./$mpi 2>err | grep ^[0-9] | sed 's/-nan/nan/g' | tee out.$mpi; [ -s out.$mpi ] || { cat err; exit 2; }
done
differ() { grep -cvE 'have (\S+) \1 \1 \1$' "$1"; }
values() { sed 's/.*have \(\S*\).*/\1/' "$1" | sort -u | wc -l; }
echo "calls whose ranks have different results: mpich $(differ out.mpich), openmpi $(differ out.openmpi); different results of openmpi: $(values out.openmpi)"
[ "$(differ out.mpich)" -gt 0 ] && [ "$(differ out.openmpi)" = 0 ] && [ "$(values out.openmpi)" -gt 1 ]
