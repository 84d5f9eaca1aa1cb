#!/bin/bash
# Open MPI 6.0.0rc2: after SIGKILL of a rank, mpirun --with-ft ulfm exits with status 0 and without a message.
# Guess: 137, as without --with-ft, or any other status but 0.
. "$(dirname "$0")/debian.bash"
packages openmpi-bin
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cat > rank.sh <<'SH'
[ "$OMPI_COMM_WORLD_RANK" != 1 ] || kill -9 $$
sleep 3; echo "rank $OMPI_COMM_WORLD_RANK ends well"
SH
try() { sid mpirun.openmpi "$@" --map-by :oversubscribe --bind-to none -n 3 sh rank.sh > said 2>&1; echo "mpirun $*: status $?, $(grep -c 'ends well' said) ranks end well, $(grep -ci 'signal\|killed' said) lines name a signal"; }
try | tee without; try --with-ft ulfm | tee with
grep -q 'status [1-9]' without && grep -q 'status 0, 2 ranks end well, 0 lines' with
