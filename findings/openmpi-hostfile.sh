#!/bin/bash
# Host files of mpirun in Open MPI 6.0.0rc2: several lines of a host without slots= give one slot each, a second line with slots=
# for a host is refused, and a single line without slots= gives as many slots as the host has cores.
# Guess: the slots of all lines are added up, and a line without slots= is one slot.
. "$(dirname "$0")/debian.bash"
packages openmpi-bin
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
starts() { printf "$1" > hosts; sid mpirun.openmpi --map-by :oversubscribe --bind-to none --hostfile hosts true > said 2>&1; status=$?
  n=$(sid mpirun.openmpi --map-by :oversubscribe --bind-to none --hostfile hosts echo here 2>/dev/null | grep -c here); echo "$(echo "$1" | tr '\n' ' '): status $status, $n processes, $(grep -o 'multiple definitions.*' said | head -1)"; }
cores=$(nproc); starts 'localhost\n' | tee one; starts 'localhost\nlocalhost\nlocalhost\nlocalhost\nlocalhost\n' | tee five; starts 'localhost slots=2\nlocalhost slots=3\n' | tee two
grep -q "status 0, $cores processes" one && grep -q "status 0, 5 processes" five && grep -q "status [1-9][0-9]*, 0 processes, multiple definitions" two
