"""The parameters of a network that MindFormers trains, of an installation with all it asks for.

    mindformers_networks.py FOLDER CLASS graph|pynative CONFIG.json

prints a JSON object, by name [shape, type]. The network is made on a CPU and is not run. What is
replaced: `hyper_parallel`, which is not on the package index, by empty classes; and
`is_legacy_model`, which asks a job's YAML.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types

os.environ.setdefault("GLOG_v", "3")
os.environ["RUN_MODE"] = "train"


class Empty(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of hyper_parallel, with a class of any name in it."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hyper_parallel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []

        def made(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return Empty(name, (), {"__init__": lambda self, *a, **k: None})

        module.__getattr__ = made
        return module

    def exec_module(self, module):
        pass


def main(folder, name, mode, config):
    pynative = mode == "pynative"
    sys.meta_path.append(Finder())
    import mindspore as ms

    ms.set_device("CPU")
    ms.set_context(mode=ms.PYNATIVE_MODE if pynative else ms.GRAPH_MODE)
    from mindformers import build_context

    context = {"mode": 1 if pynative else 0, "device_target": "CPU"}
    build_context({"use_parallel": False, "context": context, "parallel": {}, "run_mode": "train"})
    asked = sys.modules["mindformers.core.context.build_context"].is_legacy_model
    for module in list(sys.modules.values()):
        if getattr(module, "is_legacy_model", None) is asked:
            module.is_legacy_model = lambda: False
    model = importlib.import_module(f"mindformers.models.{folder}")
    with open(config, encoding="utf-8") as file:
        sizes = json.load(file)
    network = getattr(model, f"{name}ForCausalLM")(getattr(model, f"{name}Config")(**sizes))
    found = {one.name: [list(one.shape), str(one.dtype)] for one in network.get_parameters()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
