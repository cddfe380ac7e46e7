#!/bin/bash
# Convert a checkpoint as a PBS job.
#
#   qsub -v ARGUMENTS="transform SRC DST --src-strategy A --dst-strategy B" launch/pbs.sh
#
# Change: the lines below, and by environment variables (qsub -v):
#   PYTHON   the Python that has rankxform (default: python3)
#   MPIRUN   the mpirun of its MPI library (default: see mpirun.sh)
# Processes are bound by disks and memory, not by accelerators: 4 to 16 on a node are plenty.
# Words of ARGUMENTS are parted at blanks.
#PBS -N rankxform
#PBS -l select=2:ncpus=8:mpiprocs=8
#PBS -l walltime=04:00:00
#PBS -j oe
set -eu

cd "${PBS_O_WORKDIR:-.}"
launch=$(cd "${LAUNCH:-launch}" && pwd)
export HOSTFILE=${TMPDIR:-/tmp}/rankxform-hosts.$$
trap 'rm -f "$HOSTFILE"' EXIT
if "${MPIRUN:-mpirun}" --version 2>&1 | grep -q -i -e "open mpi" -e prrte; then form=" slots="; else form=":"; fi
sort "$PBS_NODEFILE" | uniq -c | while read -r count host; do echo "$host$form$count"; done >"$HOSTFILE"
PROCESSES=$(wc -l <"$PBS_NODEFILE")
export PROCESSES
set -f  # no names are put in the place of patterns
# shellcheck disable=SC2086  # its words are arguments
"$launch/mpirun.sh" $ARGUMENTS
