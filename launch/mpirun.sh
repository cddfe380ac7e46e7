#!/bin/sh
# Run rankxform on one machine, or on the hosts of a hostfile.
#
#   launch/mpirun.sh transform SRC DST --src-strategy A --dst-strategy B
#
# Change by environment variables:
#   PROCESSES  how many to start (default: one for each core of this machine)
#   HOSTFILE   hosts to use (see hostfiles/); every host must see the same files and this Python
#   PYTHON     the Python that has rankxform (default: .venv/bin/python if it is there, else python3)
#   MPIRUN     the mpirun of that Python's MPI library (default: the one beside it, else in PATH)
set -eu

home=$(dirname "$0")/..
if [ -z "${PYTHON:-}" ]; then
    if [ -x "$home/.venv/bin/python" ]; then PYTHON=$home/.venv/bin/python; else PYTHON=python3; fi
fi
python=$(command -v "$PYTHON") || { echo "$0: no such Python: $PYTHON; set PYTHON" >&2; exit 2; }
if [ -z "${MPIRUN:-}" ]; then
    MPIRUN=$(dirname "$python")/mpirun
    [ -x "$MPIRUN" ] || MPIRUN=$(command -v mpirun) || {
        echo "$0: no mpirun beside $python nor in PATH; set MPIRUN or PYTHON" >&2
        exit 2
    }
fi
PROCESSES=${PROCESSES:-$(nproc)}

export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
set -- "$python" -m rankxform "$@"
if "$MPIRUN" --version 2>&1 | grep -q -i -e "open mpi" -e prrte; then
    if [ -n "${HOSTFILE:-}" ]; then
        for name in PATH PYTHONPATH LD_LIBRARY_PATH; do
            if printenv "$name" >/dev/null; then set -- -x "$name" "$@"; fi
        done
        set -- --hostfile "$HOSTFILE" "$@"
    elif [ "$PROCESSES" -gt "$(nproc)" ]; then
        set -- --oversubscribe "$@"
    fi
    if [ "$(id -u)" = 0 ]; then set -- --allow-run-as-root "$@"; fi
    set -- --bind-to none "$@"
elif [ -n "${HOSTFILE:-}" ]; then
    set -- -f "$HOSTFILE" "$@"
fi
exec "$MPIRUN" -n "$PROCESSES" "$@"
