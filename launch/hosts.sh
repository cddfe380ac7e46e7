#!/bin/sh
# Run rankxform on several machines without a scheduler, after looking whether they can.
#
#   HOSTFILE=hostfiles/openmpi-2x8 launch/hosts.sh transform SRC DST --src-strategy A --dst-strategy B
#
# Change by environment variables:
#   HOSTFILE   hosts to use, with "slots=N" (Open MPI) or ":N" (MPICH) behind each (see hostfiles/)
#   PROCESSES  how many to start (default: all slots)
#   PYTHON     the Python that has rankxform, the same path on every host (default: see mpirun.sh)
#   SSH        how to reach a host (default: ssh -o BatchMode=yes)
# Every host must be reachable without a password, have this Python, and see this folder.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
: "${HOSTFILE:?name the file of hosts in HOSTFILE (see hostfiles/)}"
: "${PYTHON:=$(if [ -x "$here/../.venv/bin/python" ]; then echo "$here/../.venv/bin/python"; else command -v python3; fi)}"
: "${SSH:=ssh -o BatchMode=yes}"
export HOSTFILE PYTHON

hosts=$(awk '{ sub(/#.*/, "") } NF { sub(/:.*/, "", $1); print $1 }' "$HOSTFILE")
: "${PROCESSES:=$(awk '{ sub(/#.*/, "") } !NF { next }
    match($0, /slots=[0-9]+/) { n += substr($0, RSTART + 6, RLENGTH - 6); next }
    match($1, /:[0-9]+$/) { n += substr($1, RSTART + 1); next }
    { n += 1 }
    END { print n }' "$HOSTFILE")}"
export PROCESSES
for host in $hosts; do
    # shellcheck disable=SC2086  # SSH is a command with options
    $SSH "$host" "cd '$PWD' && '$PYTHON' -c 'import rankxform'" </dev/null || {
        echo "$0: $host: cannot be reached without a password, does not see $PWD, or has no $PYTHON with rankxform" >&2
        exit 2
    }
done
exec "$here/mpirun.sh" "$@"
