"""``mpirun -n N python transform_by_rank.py SRC DST SRC_STRATEGY DST_STRATEGY``

What a script of the model transformation tutorial does on each of N ranks, with
`rankxform.mindspore` in MindSpore's place.
"""

from __future__ import annotations

import os
import sys

import rankxform.mindspore as ms
from rankxform.transport.launcher import launched_rank

src, dst, src_strategy, dst_strategy = sys.argv[1:]
rank = launched_rank()
files = {
    int(needed): os.path.join(src, f"rank_{needed}", f"checkpoint_{needed}.ckpt")
    for needed in ms.rank_list_for_transform(rank, src_strategy, dst_strategy)
}
target = os.path.join(dst, f"rank_{rank}", f"checkpoint_{rank}.ckpt")
ms.transform_checkpoint_by_rank(rank, files, target, src_strategy, dst_strategy)
