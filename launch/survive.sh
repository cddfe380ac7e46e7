#!/bin/bash
# Go on without the hosts that do not answer: convert what the others hold, then start the program there.
#
#   HOSTFILE=hosts launch/survive.sh --load CKPT --src-strategy A --dst-parallel dp={dp},mp=2 -- \
#       python train.py --load_checkpoint {checkpoint}
#
# This is `rankxform launch`, on the hosts of HOSTFILE that answer, with as many ranks as they have slots.
# CKPT may be on each host's own disk: replicas on the others stand for what a lost host held, and what
# only it held is named before anything is written. In the words before --, {ranks} becomes the number of
# ranks, and {dp} that number divided by MODEL_PARALLEL. Change by environment variables:
#   HOSTFILE        hosts with their slots, in the form of MPICH's or Open MPI's mpirun (see hostfiles/)
#   MODEL_PARALLEL  ranks that hold one model (mp * pp ...); ranks are a multiple of it (default: 1)
#   OUTPUT          where each host keeps what it converts (default: /dev/shm/rankxform); another folder, or
#                   --overwrite among the words before --, when a second host is lost
#   REACH           command that a host is asked by, with its name behind it and then `true`
#                   (default: ssh -o BatchMode=yes -o ConnectTimeout=10)
#   PYTHON, MPIRUN  as for mpirun.sh
set -eu

home=$(cd "$(dirname "$0")/.." && pwd)
if [ -z "${PYTHON:-}" ]; then
    if [ -x "$home/.venv/bin/python" ]; then PYTHON=$home/.venv/bin/python; else PYTHON=python3; fi
fi
python=$(command -v "$PYTHON") || { echo "$0: no such Python: $PYTHON; set PYTHON" >&2; exit 2; }
if [ -z "${MPIRUN:-}" ]; then
    if [ -x "$(dirname "$python")/mpirun" ]; then MPIRUN=$(dirname "$python")/mpirun; else MPIRUN=mpirun; fi
fi
[ -r "${HOSTFILE:-}" ] || { echo "$0: HOSTFILE=${HOSTFILE:-} cannot be read" >&2; exit 2; }
work=$(mktemp -d "${TMPDIR:-/tmp}/rankxform-survive.XXXXXX")
trap 'rm -rf "$work"' EXIT

read -r -a reach <<<"${REACH:-ssh -o BatchMode=yes -o ConnectTimeout=10}"
"$python" -c '
import sys
from rankxform.errors import RankxformError
from rankxform.transport.hostfile import parse_hostfile
try:
    with open(sys.argv[2], "rb") as file:
        hosts = parse_hostfile(file.read(), sys.argv[2])
except (OSError, RankxformError) as error:
    sys.exit(f"{sys.argv[1]}: {error}")
for host in hosts:
    print(host.address, host.devices)
' "$0" "$HOSTFILE" >"$work/all" || exit 2
while read -r host slots; do
    (if timeout 30 "${reach[@]}" "$host" true </dev/null >/dev/null 2>&1; then touch "$work/here.$host"; fi) &
done <"$work/all"
wait
total=0 lost=""
if "$MPIRUN" --version 2>&1 | grep -q -i -e "open mpi" -e prrte; then
    form=" slots=" options=(--bind-to none) # slots may be more than cores
    [ "$(id -u)" -ne 0 ] || options+=(--allow-run-as-root)
    options+=(--hostfile)
else
    form=":" options=(-f)
fi
while read -r host slots; do
    if [ -e "$work/here.$host" ]; then
        echo "$host$form$slots" >>"$work/hosts"
        total=$((total + slots))
    else
        lost="$lost $host"
    fi
done <"$work/all"
parallel=${MODEL_PARALLEL:-1}
ranks=$((total / parallel * parallel))
[ -z "$lost" ] || echo "$0: no answer from$lost" >&2
if [ "$ranks" -eq 0 ]; then
    echo "$0: $total slots are left, and one model takes $parallel ranks" >&2
    exit 75
fi
echo "$0: $ranks ranks on $(wc -l <"$work/hosts") hosts" >&2

words=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    word=${1//"{ranks}"/$ranks}
    words+=("${word//"{dp}"/$((ranks / parallel))}")
    shift
done
"$MPIRUN" "${options[@]}" "$work/hosts" -n "$ranks" "$python" -m rankxform launch \
    --output "${OUTPUT:-/dev/shm/rankxform}" "${words[@]}" "$@" <&0 &
job=$!
trap 'kill -TERM "$job" 2>/dev/null' TERM INT HUP # the job ends, and this script with its exit code
while kill -0 "$job" 2>/dev/null; do wait "$job" || true; done
code=0
wait "$job" || code=$?
exit "$code"
