#!/bin/sh
# Run rankxform on one machine, or on the hosts of a hostfile.
#
#   launch/mpirun.sh transform SRC DST --src-strategy A --dst-strategy B
#
# This is `rankxform transform -n PROCESSES --hostfile HOSTFILE ...`, which finds the mpirun of its own
# MPI library, knows its options, and asks each host first whether it can take part. Change by
# environment variables:
#   PROCESSES  how many to start (default: all slots of HOSTFILE, or one for each core of this machine)
#   HOSTFILE   hosts to use (see hostfiles/); every host must see the same files and this Python
#   PYTHON     the Python that has rankxform (default: .venv/bin/python if it is there, else python3)
#   MPIRUN     the mpirun of that Python's MPI library (default: the one beside it, else in PATH)
set -eu

home=$(dirname "$0")/..
if [ -z "${PYTHON:-}" ]; then
    if [ -x "$home/.venv/bin/python" ]; then PYTHON=$home/.venv/bin/python; else PYTHON=python3; fi
fi
python=$(command -v "$PYTHON") || { echo "$0: no such Python: $PYTHON; set PYTHON" >&2; exit 2; }
if [ -n "${MPIRUN:-}" ]; then PATH=$(dirname "$MPIRUN"):$PATH; export PATH; fi
case ${1:-} in
    transform | verify) verb=$1; shift ;;
    --*) verb=transform ;;
    *) echo "$0: transform or verify, please; follow takes -n itself, and launch is started by mpirun or srun" >&2; exit 2 ;;
esac
if [ -n "${HOSTFILE:-}" ]; then set -- "--hostfile=$HOSTFILE" "$@"; else : "${PROCESSES:=$(nproc)}"; fi
if [ -n "${PROCESSES:-}" ]; then set -- -n "$PROCESSES" "$@"; fi
exec "$python" -m rankxform "$verb" "$@"
