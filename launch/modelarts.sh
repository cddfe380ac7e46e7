#!/bin/sh
# Convert a checkpoint in a ModelArts job: the first container runs mpirun over all, the others wait.
#
#   launch/modelarts.sh transform SRC DST --src-strategy A --dst-strategy B
#
# ModelArts sets VC_WORKER_HOSTS and VC_TASK_INDEX. SRC and DST must be on storage that all
# containers see (SFS, or a mounted bucket), and they must reach each other by ssh.
# Change by environment variables:
#   SLOTS         processes in each container (default: 8)
#   WAIT_FOLDER   seen by all; where the first one tells the others that it has ended (default: .)
#   WAIT_SECONDS  how long the others wait at most (default: 14400)
#   PYTHON, MPIRUN   see mpirun.sh
set -eu

here=$(cd "$(dirname "$0")" && pwd)
: "${VC_WORKER_HOSTS:?this is not a ModelArts job of several containers: use mpirun.sh}"
: "${VC_TASK_INDEX:=0}" "${SLOTS:=8}" "${WAIT_FOLDER:=.}" "${WAIT_SECONDS:=14400}"
told=$WAIT_FOLDER/rankxform-${MA_JOB_ID:-job}.ended
if [ "$VC_TASK_INDEX" != 0 ]; then
    waited=0
    while [ ! -s "$told" ]; do
        if [ "$waited" -ge "$WAIT_SECONDS" ]; then
            echo "$0: no word from the first container in $WAIT_SECONDS s" >&2
            exit 75
        fi
        sleep 5
        waited=$((waited + 5))
    done
    exit "$(cat "$told")"
fi
rm -f "$told"
HOSTFILE=$(mktemp)
export HOSTFILE
hosts=$(echo "$VC_WORKER_HOSTS" | tr ',' '\n')
if "${MPIRUN:-mpirun}" --version 2>&1 | grep -q -i -e "open mpi" -e prrte; then form=" slots="; else form=":"; fi
echo "$hosts" | sed "s/\$/$form$SLOTS/" >"$HOSTFILE"
PROCESSES=$(($(echo "$hosts" | wc -l) * SLOTS))
export PROCESSES
code=0
"$here/mpirun.sh" "$@" || code=$?
echo "$code" >"$told.part"
mv "$told.part" "$told"
exit "$code"
