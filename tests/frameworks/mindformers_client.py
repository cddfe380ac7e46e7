"""MindFormers' own Checkpoint 2.0 code, of an unpacked wheel, for ranks that take turns.

    mindformers_client.py WHEEL JOBS.json

does one job after another and prints a JSON list of what became of each. A job has `do` ("save",
"load"), `where`, `sizes` ([dp, mp, pp]), `optimizer` (whether it shards), and `kind`, a list of
"dedup", "pynative", "muon" (a state that no metadata lists), "adapter", "group" (a bias whose
layout is over the ranks of one tensor-parallel group) and "plain" (a tensor without a layout).

MindFormers is not installed: none of what its packages import is needed for its checkpoints. What
is replaced is `STUBS` and `REPLACED`, and nothing else.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import os
import re
import sys
import types
from pathlib import Path

os.environ.setdefault("GLOG_v", "3")

import mindspore
import mindspore.parallel.strategy
import numpy as np
from mindspore import Parameter, Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from mindformers_model import GROUP, STEP, WHOLE, Sizes, type_of, whole

STUBS = {
    "mindformers.core.context": "asked for nothing that matters here",
    "mindformers.core.context.build_context": "get_context, is_legacy_model",
    "mindformers.tools.register": "registers classes for configurations",
    "mindformers.tools.hub": "downloads",
    "hyper_parallel": "not on the package index; DTensor, get_global_layout, get_current_layout",
}
"""Modules that are replaced as a whole, and why."""


class Job(Sizes):
    """The job whose ranks take turns, with what MindSpore and MindFormers know of it."""

    rank = 0
    is_saving = False

    def is_mine(self, name):
        return self.is_here(name, self.rank)

    def layout(self, name, rank):
        """Return MindSpore's layout of a parameter on the ranks of a rank's stage."""
        shape, cut = self.every[name]
        axes = ["None"] * len(shape)
        if cut == WHOLE:
            return None
        if cut == GROUP:
            first = rank // self.mp * self.mp
            ranks = list(range(first, first + self.mp))
            return mindspore.Layout((self.mp,), ("tp",), ranks)(*axes)
        first = rank // self.stage_ranks * self.stage_ranks
        ranks = list(range(first, first + self.stage_ranks))
        if cut is not None:
            axes[cut] = "mp"
        if self.optimizer:
            axes[0] = "dp" if axes[0] == "None" else (axes[0], "dp")
        return mindspore.Layout((self.dp, self.mp), ("dp", "mp"), ranks)(*axes)

    def layouts(self, *_, **__):
        """Return what `get_strategy_metadata` does: by rank and name layout, type and shape.

        Up to 2.0.0 it forgets Muon's states of all stages but the last.
        """
        last = self.pp - 1
        return {
            rank: {
                name: [self.layout(name, rank), TYPES[type_of(name)], tuple(shape)]
                for name, (shape, _) in self.every.items()
                if self.is_here(name, rank)
                and not (
                    self.is_saving and name.startswith("muon_m.") and self.stage_of(name) < last
                )
            }
            for rank in range(self.ranks)
        }

    def raw_layouts(self, net):
        """Return what `hyper_parallel.get_global_layout` does."""
        names = {*net.parameters_dict(), *getattr(net, "everywhere", ())}
        found = {}
        for rank, layouts in self.layouts().items():
            found[str(rank)] = {}
            for name, (layout, dtype, shape) in layouts.items():
                if name in names:
                    facts = {"type": dtype, "full_shape": list(shape)}
                    keys = ("device_matrix", "alias_name", "rank_list", "tensor_map")
                    stated = layout.to_dict() if layout is not None else {}
                    found[str(rank)][name] = facts | {key: stated[key] for key in keys if stated}
        return found

    def cells(self, rank, *, empty=False):
        """Return a rank's network and its optimizer."""
        step = np.array([0 if empty else STEP], np.int32)
        counters = [("global_step", step), ("learning_rate", np.linspace(0, 1, 7, dtype="f4"))]
        found = []
        for names, more in ((self.parameters, []), (self.states, counters)):
            cell = nn.Cell()
            cell.everywhere = tuple(names) if self.is_pynative else ()
            own = [name for name in names if self.is_here(name, rank)]
            rest = () if self.is_pynative or empty else [n for n in names if n not in own]
            arrays = [(name, self.part(name, rank)) for name in own]
            arrays += [(name, whole(name, names[name][0])) for name in rest]
            for name, words in [*arrays, *more]:
                value = Tensor(np.zeros_like(words) if empty else words)
                cell.insert_param_to_cell(
                    "p" + re.sub(r"\W", "_", name), Parameter(value, name=name)
                )
            found.append(cell)
        return found


JOB: Job


TYPES = {
    "Int32": mindspore.int32, "Float32": mindspore.float32, "Float16": mindspore.float16,
}  # fmt: skip


# -- MindFormers without its packages' __init__ -----------------------------------------------------


def _anything(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **options: None


class Packages:
    """Finds the wheel's modules, and runs none of its packages' __init__."""

    def __init__(self, root):
        self.root = root

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != "mindformers":
            return None
        folder = os.path.join(self.root, *name.split("."))
        is_package = os.path.isdir(folder)
        if is_package or name in STUBS:
            return importlib.machinery.ModuleSpec(name, self, is_package=is_package)
        return importlib.machinery.PathFinder.find_spec(name, [os.path.dirname(folder)])

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        name = module.__name__
        module.__path__ = [os.path.join(self.root, *name.split("."))]
        if name == "mindformers":
            module.__version__ = "0"
        if name == "mindformers.tools":
            utils = "mindformers.tools.utils"
            module.__getattr__ = lambda key: getattr(importlib.import_module(utils), key)
        if name in STUBS:
            module.__getattr__ = _anything
        if name.endswith("build_context"):
            module.get_context, module.is_legacy_model = lambda key: None, lambda: False


def stub_hyper_parallel():
    class DTensor:
        pass

    def current(net):
        return {str(JOB.rank): JOB.raw_layouts(net)[str(JOB.rank)]}

    for name, facts in {
        "hyper_parallel": {},
        "hyper_parallel.core": {},
        "hyper_parallel.core.dtensor": {},
        "hyper_parallel.core.dtensor.dtensor": {"DTensor": DTensor},
        "hyper_parallel.core.distributed_checkpoint": {
            "get_global_layout": lambda net: JOB.raw_layouts(net), "get_current_layout": current,
        },
    }.items():  # fmt: skip
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__.update(facts)
        sys.modules[name] = module


SCATTERED = []


def scatter(out, data, src=0, group=None):
    """Give each rank its part; the first to call brings the data of all."""
    if JOB.rank == src:
        SCATTERED.append((list(data), set()))
    values, taken = next(one for one in SCATTERED if JOB.rank not in one[1])
    taken.add(JOB.rank)
    out[0] = values[JOB.rank]


REPLACED = {
    "get_real_rank": lambda: JOB.rank,
    "get_rank": lambda *args: JOB.rank,
    "get_real_group_size": lambda: JOB.ranks,
    "get_group_size": lambda *args: JOB.ranks,
    "barrier_world": lambda *args, **options: None,
    "barrier": lambda *args, **options: None,
    "synchronize": lambda: None,
    "scatter_object_list": scatter,
    "get_strategy_metadata": lambda *args, **options: JOB.layouts(),
    "get_current_strategy_metadata": lambda *args, **options: {0: JOB.layouts()[JOB.rank]},
}
"""Functions that need devices, other processes, or a compiled network."""


class MindFormers:
    """The checkpoint code of one version."""

    def __init__(self, root):
        sys.meta_path.insert(0, Packages(root))
        stub_hyper_parallel()
        self.code = importlib.import_module("mindformers.checkpoint.checkpoint")
        own = [module for name, module in sys.modules.items() if name.startswith("mindformers.")]
        for module in (*own, mindspore.parallel.strategy):
            for name, function in REPLACED.items():
                if hasattr(module, name):
                    setattr(module, name, function)
        adapter = sys.modules.get("mindformers.checkpoint.layout_adapter")
        self.layouts = getattr(adapter, "LayoutAdapter", None)  # since 2.0.0
        if self.layouts is not None:
            self.layouts.is_pynative_mode = staticmethod(lambda: JOB.is_pynative)
        self.is_gathering = hasattr(self.layouts, "get_all_layouts_on_rank0")  # since 2.1.0
        if self.is_gathering:
            self.layout_of_all = self.layouts.get_all_layouts_on_rank0
        parallel = sys.modules["mindformers.checkpoint.fully_parallel"]
        self.code.ms_save_checkpoint = self._of_stage(self.code.ms_save_checkpoint)
        parallel.save_checkpoint = self._of_stage(parallel.save_checkpoint)

    def _of_stage(self, save):
        """Leave out what a rank's stage has not, as it is in a job."""

        def of_stage(cell, path, *args, choice_func=None, **options):
            def is_saved(name):
                is_counter = name in ("global_step", "learning_rate")
                wanted = choice_func is None or choice_func(name)
                return wanted and (is_counter or JOB.is_mine(name))

            return save(cell, path, *args, choice_func=is_saved, **options)

        return of_stage

    def _gather(self, cells):
        """Have 2.1.0 gather the layouts of PyNative from ranks that take turns."""
        if not self.is_gathering:
            return
        if not JOB.is_pynative:
            self.layouts.get_all_layouts_on_rank0 = self.layout_of_all
            return

        def gathered(network):
            if JOB.rank:
                return None
            parts = []
            for rank in range(JOB.ranks):
                JOB.rank = rank
                raw = self.layouts._get_raw_current_layout_from_pynative(cells[rank])
                parts.append(self.layouts._build_local_layout_contribution(raw))
            JOB.rank = 0
            return self.layouts._merge_layout_contributions(parts)

        self.layouts.get_all_layouts_on_rank0 = staticmethod(gathered)

    def _metas(self, cells):
        """Return what is stated of the tensors of all ranks."""
        module = sys.modules["mindformers.checkpoint.sharded_tensor"]
        if self.is_gathering:
            more = {} if JOB.is_pynative else {"optimizer": cells[0][1], "saved_cells": cells[0]}
            parallel = sys.modules["mindformers.checkpoint.fully_parallel"]
            strategy = parallel.BalancedSaveStrategy
            strategy._gather_written_params = lambda self, file, found: None
            return module.get_all_sharded_tensor_on_rank0(network=cells[0], **more)
        return module.get_all_sharded_tensor(cells[0] if JOB.is_pynative else cells[0][0])

    def save(self, where):
        cells = [JOB.cells(rank) for rank in range(JOB.ranks)]
        self._gather(cells)
        metas = self._metas(cells)
        for rank in range(JOB.ranks):
            JOB.rank = rank
            net, optimizer = cells[rank]
            common = self.code.CommonInfo()
            common.epoch_num, common.step_num, common.global_step = 0, STEP, STEP
            common.global_batch_size = 32
            more = {}
            if self.is_gathering:
                common.consumed_samples = 32 * STEP
                names = {*JOB.parameters} if rank == 0 else None
                more = {"global_model_keys": names, "balanced_plan_cache": None}
                if "adapter" in JOB.kind:
                    more["model_choice_func"] = lambda name: name.endswith((".lora_a", ".lora_b"))
            self.code.save_checkpoint(
                iteration=STEP, network=[net] if JOB.is_pynative else net, optimizer=optimizer,
                common_info=common, keep_max_num=3, user_prefix="llm", save_checkpoint_path=where,
                remove_redundancy="dedup" in JOB.kind,
                sharded_tensor_metas=metas if rank == 0 or not self.is_gathering else None, **more,
            )  # fmt: skip
        return sorted(os.listdir(f"{where}/iteration_{STEP:08}"))

    def load(self, where):
        """Return how many slices are as they should be, and which are not."""
        good, bad = 0, []
        for rank in range(JOB.ranks):
            JOB.rank = rank
            cells = JOB.cells(rank, empty=True)
            self._gather([cells] * JOB.ranks)
            self.code.load_checkpoint(where, *cells)
            for parameter in (one for cell in cells for one in cell.get_parameters()):
                name, found = parameter.name, parameter.asnumpy()
                if name == "learning_rate" or ("adapter" in JOB.kind and name in JOB.parameters
                                               and "lora" not in name):  # fmt: skip
                    continue
                step = np.array([STEP], np.int32)
                want = step if name == "global_step" else JOB.part(name, rank)
                if found.shape == want.shape and np.array_equal(found, want):
                    good += 1
                else:
                    bad.append([rank, name])
        return {"good": good, "bad": bad}


def main():
    global JOB
    root, jobs = sys.argv[1:]
    partner = MindFormers(root)
    found = []
    with open(jobs) as file:
        todo = json.load(file)
    for job in todo:
        JOB = Job(job["sizes"], job["optimizer"], job["kind"])
        JOB.is_saving = job["do"] == "save"
        SCATTERED.clear()
        try:
            found.append(getattr(partner, job["do"])(job["where"]))
        except Exception as error:  # what its code makes of a checkpoint is a result too
            found.append({"error": f"{type(error).__name__}: {error}"})
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
