#!/bin/sh
# Run rankxform on one machine, or on the hosts of a hostfile.
#
#   launch/mpirun.sh transform SRC DST --src-strategy A --dst-strategy B
#
# Change by environment variables:
#   PROCESSES  how many to start (default: one for each core of this machine)
#   HOSTFILE   hosts to use (see hostfiles/); every host must see the same files and this Python
#   PYTHON     the Python that has rankxform (default: python3)
#   MPIRUN     the mpirun of that Python's MPI library (default: the one beside it, else in PATH)
set -eu

PYTHON=${PYTHON:-python3}
PROCESSES=${PROCESSES:-$(nproc)}
beside=$(dirname "$(command -v "$PYTHON")")/mpirun
if [ -z "${MPIRUN:-}" ]; then
    if [ -x "$beside" ]; then MPIRUN=$beside; else MPIRUN=mpirun; fi
fi

export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
options="-n $PROCESSES"
if "$MPIRUN" --version 2>&1 | grep -q -i -e "open mpi" -e prrte; then
    options="$options --bind-to none"
    if [ "$(id -u)" = 0 ]; then options="$options --allow-run-as-root"; fi
    if [ -n "${HOSTFILE:-}" ]; then
        options="$options --hostfile $HOSTFILE -x PATH -x PYTHONPATH -x LD_LIBRARY_PATH"
    elif [ "$PROCESSES" -gt "$(nproc)" ]; then
        options="$options --oversubscribe"
    fi
elif [ -n "${HOSTFILE:-}" ]; then
    options="$options -f $HOSTFILE"
fi

# shellcheck disable=SC2086  # the options are meant to be split
exec "$MPIRUN" $options "$PYTHON" -m rankxform "$@"
