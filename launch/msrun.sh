#!/bin/sh
# Make a checkpoint fit, then train with msrun: two commands, for msrun's workers are not MPI's.
#
#   SRC=ckpt SRC_STRATEGY=a.ckpt DST_STRATEGY=b.ckpt WORKERS=8 launch/msrun.sh train.py --load_checkpoint
#
# starts msrun with train.py and its words, the folder of the fitting checkpoint behind them. A
# program that calls rankxform.mindspore.load_into needs none of this: it reads what it needs.
# Change by environment variables:
#   SRC, SRC_STRATEGY, DST_STRATEGY   the checkpoint, how it is sharded, how the job wants it
#   OUTPUT      where transformed_checkpoint/ is made (default: output)
#   WORKERS     of the job, and LOCAL_WORKERS on this machine (default: all of them)
#   MSRUN       msrun and its options (default: msrun on this machine)
#   PYTHON, PROCESSES, HOSTFILE   of the conversion (see mpirun.sh); on several machines run this on
#               each, and CONVERT=no on all but one after that one is done
set -eu

here=$(cd "$(dirname "$0")" && pwd)
: "${SRC:?name the checkpoint in SRC}" "${SRC_STRATEGY:=none}" "${DST_STRATEGY:=none}"
: "${WORKERS:=8}" "${OUTPUT:=output}"
: "${MSRUN:=msrun --worker_num=$WORKERS --local_worker_num=${LOCAL_WORKERS:-$WORKERS} --join=True}"
checkpoint=$OUTPUT/transformed_checkpoint
if [ "${CONVERT:-yes}" = yes ]; then
    case $SRC in -*) SRC=./$SRC ;; esac
    case $checkpoint in -*) checkpoint=./$checkpoint ;; esac
    "$here/mpirun.sh" transform "$SRC" "$checkpoint" \
        "--src-strategy=$SRC_STRATEGY" "--dst-strategy=$DST_STRATEGY"
fi
[ -e "$checkpoint/rankxform.json" ] || { echo "$0: $checkpoint is not complete" >&2; exit 4; }
set -f  # no names are put in the place of patterns
# shellcheck disable=SC2086  # MSRUN is a command with options
exec $MSRUN "$@" "$checkpoint"
