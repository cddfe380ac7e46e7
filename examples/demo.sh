#!/bin/sh
# Eight shards of a real network become four, and every element is checked.
#
# The network is the Transformer of MindSpore's resilience tutorial (141 parameters with their
# Adam states), its two strategies are what MindSpore's compiler wrote for 8 ranks (mp4 dp2,
# optimizer shard) and for 4 ranks (mp4). The checkpoint is made here: every element names its
# place. The check shares no code with rankxform.
set -eu
cd "$(dirname "$0")/.."
bin=${1:-.venv}/bin
strategies=tests/data/tutorials/resilience_train_and_predict
rm -rf demo-data
set -x
"$bin/python" -m examples.demo make demo-data/src
"$bin/python" -m rankxform transform -n 4 demo-data/src demo-data/dst --report demo-data/report.html \
    --src-strategy $strategies/src_strategy.ckpt --dst-strategy $strategies/dst_strategy.ckpt
"$bin/python" -m rankxform verify -n 4 demo-data/src demo-data/dst \
    --src-strategy $strategies/src_strategy.ckpt --dst-strategy $strategies/dst_strategy.ckpt
"$bin/python" -m examples.demo check demo-data/dst
set +x
echo "a page with pictures of what was read from whom: $PWD/demo-data/report.html"
