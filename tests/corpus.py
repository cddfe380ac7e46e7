"""What many conversions write and what wrong inputs are told, as digests, to compare two versions.

``python tests/corpus.py --package FOLDER OUT.json`` runs the package that lies in FOLDER (a clone);
``mpirun -n 3 python tests/corpus.py ...`` runs the same conversions by three processes. Two such
files are compared by ``python tests/corpus.py --compare A.json B.json``, which prints what differs.
``--against COMMIT`` does all three for this folder and a worktree of that commit.
The inputs come from `tests.cases` and `tests.reference`, which import nothing of the package.

Of a conversion the digest of every file is kept, its manifest without times and places, and its
warnings and notices; of a refusal the class and the text, without the folder's path. ``messages``
runs the tests of `MESSAGE_TESTS` and keeps the same of every call that they make.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READ_METHODS = ("auto", "ranges", "sieving", "two-phase")
SEEDS = 6


def digests(folder):
    """Return a digest of each file below a folder, but of the manifest and the records."""
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "rankxform.json" and ".rankxform" not in path.parts
    }


def records(folder):
    """Return the manifest and the job of a folder, without what no two runs share."""
    place = str(folder.parents[1])
    return {
        path.name: plain(json.loads(path.read_text().replace(place, "TMP")))
        for path in (folder / "rankxform.json", folder / ".rankxform" / "job.json")
        if path.exists()
    }


class Runner:
    """Runs conversions on all processes of a world, and keeps on process 0 what they come to."""

    def __init__(self, world, tmp):
        self.world, self.tmp, self.found = world, tmp, {}
        self.first = world is None or world.Get_rank() == 0

    def make(self, write):
        """Let process 0 write inputs."""
        if self.first:
            write()
        if self.world is not None:
            self.world.Barrier()

    def run(self, key, src, a=None, b=None, **options):
        import rankxform
        from rankxform.errors import RankxformError

        dst = self.tmp / "out" / "dst"
        try:
            report = rankxform.transform(src, dst, a, b, comm=self.world, fsync=False, **options)
            outcome = {"read": report.bytes_read if self.world is None else None}
            for kind in ("warnings", "notices"):
                outcome[kind] = [self.without_place(text) for text in getattr(report, kind)]
        except RankxformError as error:
            outcome = {"error": type(error).__name__, "text": self.without_place(error)}
        self.keep(key, outcome, dst)

    def without_place(self, text):
        return str(text).replace(str(self.tmp), "TMP")

    def keep(self, key, outcome, dst):
        if self.world is not None:
            self.world.Barrier()
        if self.first:
            if dst.exists():
                outcome |= {"files": digests(dst), "records": records(dst)}
            assert key not in self.found, key
            self.found[key] = outcome
            shutil.rmtree(self.tmp / "out", ignore_errors=True)
        if self.world is not None:
            self.world.Barrier()


def forms(runner):
    """Every form to every other, by every read method."""
    from tests import reference, reference_forms
    from tests.cases import random_case

    seed = made = 0
    while made < SEEDS:
        seed += 1
        case = random_case(seed, mindspore_agrees=False, whole=False)
        stages = (case.src, case.dst)
        if not all(reference_forms.can_be_2(some, case.params) for some in stages):
            continue
        for name in list(case.params)[::2]:
            for state in ("adam_m.", "adam_v."):
                case.params[state + name] = case.params[name]
                for stage in (*case.src, *case.dst):
                    if name in stage and seed % 2:
                        stage[state + name] = stage[name]
        here = runner.tmp / f"forms{seed}"

        def write(here=here, case=case, seed=seed):
            for form in reference_forms.FORMS:
                reference_forms.write_any(form, here / form, case, seed)
            reference.write_stage_files(here / "a", case.src)
            reference.write_stage_files(here / "b", case.dst)

        runner.make(write)
        for number, (src, dst) in enumerate(product(reference_forms.FORMS, repeat=2)):
            a = str(here / "a") if src == "ranks" else None
            b = str(here / "b") if dst in ("ranks", "checkpoint2") else None
            options = {
                "huggingface": {"max_shard": 5000},
                "unified": {"max_part": 5000},
                "checkpoint2": {"dedup": seed % 2 == 1, "prefix": "llm"},
                "ranks": {"format": ("ckpt", "safetensors")[seed % 2]},
            }.get(dst, {})
            method = READ_METHODS[(number + seed) % 4]
            runner.run(
                f"forms {seed} {src} {dst}", here / src, a, b, dst_form=dst, read_method=method,
                memory=(1 << 20, 64 << 20)[seed % 2], **options,
            )  # fmt: skip
        made += 1


def ranks(runner):
    """Rank folders under many strategies, some uneven, with the options that choose and rename."""
    from tests import reference
    from tests.cases import random_case, unevenly_sharded

    options = (
        {}, {"read_method": "two-phase"}, {"read_method": "sieving"}, {"read_method": "ranges"},
        {"rename": (r"^net\.=model.",), "unmatched": "replicate"},
        {"exclude": ("layer0",)}, {"include": ("layer[01]",)}, {"ranks": (0, 1)},
        {"format": "safetensors"}, {"dtype": "bf16"}, {"weights_only": True}, {"crc": True},
        {"link": "none"}, {"verify": True},
    )  # fmt: skip
    for seed in range(60):
        case = random_case(1000 + seed, mindspore_agrees=False, whole=seed % 5 == 0)
        if seed % 3 == 0:
            case = unevenly_sharded(case, seed)
        here = runner.tmp / f"ranks{seed}"
        chosen = options[seed % len(options)]
        renamed = case.dst
        if "rename" in chosen and case.dst is not None:
            renamed = [
                {n.replace("net.", "model."): one for n, one in some.items()} for some in case.dst
            ]

        def write(here=here, case=case, renamed=renamed):
            reference.write_checkpoint(here / "src", case.src, case.params, case.extras)
            for name, stages in (("a", case.src), ("b", renamed)):
                if stages is not None:
                    reference.write_stage_files(here / name, stages)

        runner.make(write)
        a = str(here / "a") if case.src is not None else None
        b = str(here / "b") if case.dst is not None else None
        runner.run(f"ranks {seed}", here / "src", a, b, memory=1 << 20, **chosen)


def statistics(runner):
    """Values of each rank: listed running statistics that differ, and counters."""
    import numpy as np

    from tests import reference

    here = runner.tmp / "statistics"
    params = {f"bn{i}.moving_mean": ((8,), "Float32") for i in range(4)}
    params |= {f"w{i}": ((16, 8), "Float32") for i in range(4)}
    whole = ([4], [-1], 0, 0)
    stages = [{n: whole if "bn" in n else ([4], [0, -1], 0, 0) for n in params}]
    other = [{n: ([2], [-1], 0, 0) if "bn" in n else ([2], [0, -1], 0, 0) for n in params}]

    def extras(rank):
        return {"step": ("Int32", np.array([rank], "<i4"))}

    def write():
        reference.write_checkpoint(here / "src", stages, params, extras)
        reference.write_strategy(here / "a.ckpt", stages)
        reference.write_strategy(here / "b.ckpt", other)

    runner.make(write)
    a, b = str(here / "a.ckpt"), str(here / "b.ckpt")
    runner.run("statistics", here / "src", a, b)
    runner.run("statistics same", here / "src", a, a)


def maps(runner):
    """Models under another naming, both ways, whole and sharded, with casts and a vocabulary."""
    from tests import reference, reference_forms
    from tests.reference_maps import KINDS, Model, random_strategy

    for number, kind in enumerate(sorted(KINDS)):
        model = Model(kind, number)
        here = runner.tmp / f"maps{number}"
        layouts = {
            side: random_strategy(model.params(side), 4, 2 - number % 2, number)
            for side in ("mf", "hf")
        }

        def write(here=here, model=model, layouts=layouts):
            for side in ("mf", "hf"):
                tensors = model.tensors(side)
                reference.write_checkpoint(
                    here / side, layouts[side], model.params(side), None, "safetensors",
                    make=lambda n, s, d, tensors=tensors: tensors[n][1],
                )  # fmt: skip
                reference.write_stage_files(here / f"{side}_strategy", layouts[side])
            (here / "config.json").write_text(json.dumps(model.config))
            reference_forms.write_huggingface(here / "whole", model.tensors("hf"), files=2)

        runner.make(write)
        told = {"map": kind, "config": str(here / "config.json")}
        a, b = str(here / "mf_strategy"), str(here / "hf_strategy")
        key = f"maps {kind}"
        method = READ_METHODS[number % 4]
        runner.run(f"{key} to hf", here / "mf", a, dst_form="huggingface", **told)
        runner.run(
            f"{key} cast", here / "mf", a, dst_form="huggingface", dtype="fp32", vocab=64, **told
        )
        runner.run(
            f"{key} from hf", here / "whole", None, a, format="safetensors", read_method=method,
            memory=1 << 20, **told,
        )  # fmt: skip
        runner.run(f"{key} sharded", here / "mf", a, b, read_method=method, **told)


def adapters(runner):
    """A low-rank adapter that is added to its matrices."""
    from tests import reference

    here = runner.tmp / "adapters"
    params = {f"layers.{i}.w.weight": ((16, 8), "Float32") for i in range(3)}
    pairs = {}
    for name in params:
        pairs[name.replace(".weight", ".mindpet_delta_lora_a")] = ((4, 8), "Float32")
        pairs[name.replace(".weight", ".mindpet_delta_lora_b")] = ((16, 4), "Float32")
    stages = [dict.fromkeys(params, ([4], [0, -1], 0, 0))]
    other = [dict.fromkeys(params, ([2], [-1, 0], 0, 0))]

    def write():
        reference.write_checkpoint(here / "src", stages, params)
        reference.write_checkpoint(here / "lora", None, pairs)
        reference.write_strategy(here / "a.ckpt", stages)
        reference.write_strategy(here / "b.ckpt", other)

    runner.make(write)
    a, b = str(here / "a.ckpt"), str(here / "b.ckpt")
    runner.run(
        "adapter", here / "src", a, b, lora=str(here / "lora"), lora_alpha=8.0, lora_rank=4,
        lora_strategy="none",
    )  # fmt: skip


def derived(runner):
    """Strategies that are derived, of real compiled files."""
    from tests import reference

    here = runner.tmp / "derived"
    data = ROOT / "tests" / "data" / "derive"
    stages = [reference.read_strategy(data / "dp2mp4.ckpt")]

    def write():
        params = {n: (_full(one), "Float32") for n, one in _plain(stages[0]).items()}
        reference.write_checkpoint(here / "src", [_plain(stages[0])], params)

    with contextlib.suppress(Exception):
        runner.make(write)
    for sizes in ("dp=4,mp=2", "dp=1,mp=8", "same", "dp=2,mp=2"):
        runner.run(
            f"derived {sizes}", here / "src", str(data / "dp2mp4.ckpt"), None,
            dst_parallel=sizes, **({} if sizes == "same" else {"src_parallel": "dp=2,mp=4"}),
        )  # fmt: skip


def _plain(layouts):
    return {n: tuple(one) for n, one in layouts.items()}


def _full(layout):
    return tuple(64 for _ in layout[1])


SOURCES = ("src_a", "src_c", "lost", "cut", "foreign", "type", "shape", "extra", "steps", "twice",
           "not there", "a")  # fmt: skip
STRATEGIES = (None, "none", "a", "b", "c", "d", "other")


def write_wrong(here):
    """Write `SOURCES`, checkpoints in which one thing is wrong, and `STRATEGIES`."""
    from tests import reference

    params = {f"layers.{i}.w": ((16, 16), "Float32") for i in range(4)}
    params |= {f"adam_m.layers.{i}.w": ((16, 16), "Float32") for i in range(4)}
    names = list(params)

    def stages(count, ranks, axis):
        layout = ([ranks], [0, -1] if axis == 0 else [-1, 0], 0, 0)
        parts = [[n for n in names if int(n.split(".")[-2]) % count == s] for s in range(count)]
        return [dict.fromkeys(some, layout) for some in parts]

    kinds = {"a": stages(1, 4, 0), "b": stages(1, 2, 1), "c": stages(2, 2, 0), "d": stages(1, 3, 0)}
    other = [{"else.w": ([2], [0], 0, 0)}]

    for name, some in kinds.items():
        reference.write_stage_files(here / name, some)
    reference.write_stage_files(here / "other", other)
    for name in ("a", "c"):
        reference.write_checkpoint(here / f"src_{name}", kinds[name], params)
    for kind in ("lost", "cut", "foreign", "type", "shape", "extra", "steps", "twice"):
        shutil.copytree(here / "src_a", here / kind)
    shutil.rmtree(here / "lost" / "rank_2")
    path = here / "cut" / "rank_1" / "checkpoint_1.ckpt"
    path.write_bytes(path.read_bytes()[:500])
    (here / "foreign" / "rank_1" / "checkpoint_1.ckpt").write_bytes(b"not a checkpoint")
    small = {n: (s, "Float16") for n, (s, _) in params.items()}
    reference.write_checkpoint(here / "small", kinds["a"], small)
    shutil.copy(here / "small/rank_3/checkpoint_3.ckpt", here / "type/rank_3/checkpoint_3.ckpt")
    wide = {n: ((16, 32), d) for n, (_, d) in params.items()}
    reference.write_checkpoint(here / "wide", kinds["a"], wide)
    shutil.copy(here / "wide/rank_3/checkpoint_3.ckpt", here / "shape/rank_3/checkpoint_3.ckpt")
    shutil.copytree(here / "wide" / "rank_3", here / "extra" / "rank_4")
    for rank in range(4):
        (here / f"steps/rank_{rank}/checkpoint_{rank}.ckpt").rename(
            here / f"steps/rank_{rank}/net-1_{1 + rank % 2}.ckpt"
        )
        shutil.copy(
            here / f"twice/rank_{rank}/checkpoint_{rank}.ckpt",
            here / f"twice/rank_{rank}/other_{rank}.ckpt",
        )


def wrong(runner):
    """Inputs that are refused: the first line of each message."""
    here = runner.tmp / "wrong"
    runner.make(lambda: write_wrong(here))
    strategies = [one if one in (None, "none") else str(here / one) for one in STRATEGIES]
    for src in SOURCES:
        for a, b in product(strategies, strategies):
            key = " ".join(Path(str(one)).name for one in (a, b))
            runner.run(f"wrong {src} {key}", here / src, a, b)
    options = (
        {"step": "7"}, {"step": "1_1"}, {"include": ("nothing",)}, {"exclude": (".",)},
        {"rename": ("x",)}, {"rename": (".*=y",)}, {"dtype": "fp16"}, {"ranks": (5,)},
        {"dst_form": "huggingface"}, {"dst_form": "checkpoint2"}, {"dst_form": "unified"},
        {"map": "qwen3"}, {"lora": str(here / "b")}, {"vocab": 3}, {"masters": True},
        {"src_form": "checkpoint2"}, {"src_form": "huggingface"}, {"src_pattern": "x_{rank}/*"},
        {"suffix": "_x"}, {"memory": 5}, {"dst_parallel": "dp=2"}, {"check_crc": True},
    )  # fmt: skip
    for number, one in enumerate(options):
        for src in ("src_a", "steps", "lost"):
            runner.run(
                f"wrong option {number} {src}", here / src, strategies[2], strategies[3], **one
            )


def operations(runner):
    """Stages, optimizer states and counters: renamed, cast, chosen, under another framework's names."""
    import numpy as np

    from tests import reference

    here = runner.tmp / "operations"
    params = {f"layers.{i}.w": ((16, 8), "Float32") for i in range(4)}
    params |= {f"layers.{i}.b": ((16,), "BFloat16") for i in range(4)}
    params |= {f"{state}.{n}": (s, "Float32") for state in ("adam_m", "adam_v") for n, (s, _)
               in [*params.items()]}  # fmt: skip

    def stages(ranks, axis, new=""):
        return [
            {
                n.replace("layers", new or "layers"):
                ([ranks], [0] if len(s) == 1 else [0, -1] if axis == 0 else [-1, 0], 0, 0)
                for n, (s, _) in params.items()
                if int(n.split(".")[-2]) // 2 == stage
            }
            for stage in (0, 1)
        ]  # fmt: skip

    def extras(rank):
        return {"global_step": ("Int32", np.array([7], "<i4"))}

    def write():
        reference.write_checkpoint(here / "src", stages(2, 0), params, extras)
        for name, some in (("a", stages(2, 0)), ("b", stages(4, 1)), ("c", stages(4, 1, "h"))):
            reference.write_stage_files(here / name, some)

    runner.make(write)
    a, b, c = (str(here / name) for name in "abc")
    for number, (dst, options) in enumerate((
        (c, {"rename": (r"^layers=h",)}), (b, {"dtype": "fp16"}),
        (b, {"dtype": "bf16", "cast_states": ("adam_m",)}), (b, {"weights_only": True}),
        (b, {"dtype": "fp16", "keep_dtype": ("b$",)}), (b, {"exclude": ("adam_v",)}),
        (None, {"dst_form": "dcp", "names": "torch"}), (None, {"dst_form": "huggingface"}),
        (None, {"dst_form": "hyperparallel", "names": "hyperparallel"}),
    )):  # fmt: skip
        runner.run(f"operations {number}", here / "src", a, dst, **options)


def nodes(runner):
    """Processes of several nodes, each of which sees a part of the source."""
    import pytest

    from tests.cases import random_case

    if runner.world is None:
        return
    from tests.mpi.conftest import as_nodes, prepare

    for seed in range(4):
        case = random_case(2000 + seed, mindspore_agrees=False, whole=False)
        here = runner.tmp / f"nodes{seed}"
        src, a, b = prepare(case, here)
        with pytest.MonkeyPatch.context() as patch:
            as_nodes(patch, 2 + seed % 2, seed)
            runner.run(f"nodes {seed}", src, str(a), str(b), memory=1 << 20)


VOLATILE = {
    "bytes_fetched", "bytes_free", "changed", "digest", "host", "inode", "modified", "move_seconds",
    "peak_memory_bytes", "phases", "predicted_seconds", "process_seconds", "sample", "seconds", "seed",
    "written_at",
}  # fmt: skip
"""Keys of documents whose values no two runs share."""
_SIGN_OF_LIFE = re.compile(r"rankxform: (?:at work|reading .*) \(.*\)\n?")
"""What a command says while a busy machine lets it wait."""
_NUMBER = re.compile(
    r"\d[\d,.]* ?(?:[kMGT]i?B(?:/s)?|B/s|[mu]?s|min|%)(?!\w)|\d{4}-\d\d-\d\d \d\d:\d\d"
)


def plain(value):
    """Return a document without what no two runs share."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return round(value, 2) if isinstance(value, float) else value


@contextlib.contextmanager
def captured():
    """Yield a mapping that has, in the end, what was printed, also below Python's streams."""
    texts = {}
    with contextlib.ExitStack() as stack:
        streams = {}
        for name, stream, number in (("text", sys.stdout, 1), ("error", sys.stderr, 2)):
            stream.flush()
            streams[name] = stack.enter_context(tempfile.TemporaryFile("w+"))
            kept = os.dup(number)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, number)
            os.dup2(streams[name].fileno(), number)
        yield texts
        sys.stdout.flush()
        sys.stderr.flush()
        for name, stream in streams.items():
            stream.seek(0)
            texts[name] = _SIGN_OF_LIFE.sub("", stream.read())


def commands(runner):
    """Every command of tests/cli/test_json.py: exit code, document, text at 80 columns, files."""
    if runner.world is not None:
        return
    from rankxform.cli.main import main as command
    from tests.cli.test_json import COMMANDS, write_inputs

    for kind in ("json", "text"):
        here = runner.tmp / f"commands-{kind}"
        here.mkdir()
        write_inputs(here)
        with contextlib.chdir(here):
            for words in COMMANDS:
                with captured() as texts:
                    code = command([*words.split(), *(["--json"] if kind == "json" else [])])
                document = texts["text"].replace(str(runner.tmp), "TMP")
                texts = {
                    name: _NUMBER.sub("N", text.replace(str(runner.tmp), "TMP"))
                    for name, text in texts.items()
                }
                if kind == "json" and document:
                    texts["text"] = plain(json.loads(document))
                runner.found[f"{kind} {words.replace(str(ROOT), 'ROOT')}"] = {"code": code, **texts}
        runner.found[f"{kind} files"] = {
            "files": {n: d for n, d in digests(here).items() if not n.endswith(("html", "json"))}
        }


def resumed(runner):
    """A conversion that is killed at work, and the same command again."""
    import signal
    import subprocess

    from tests import reference

    if runner.world is not None:
        return
    here = runner.tmp / "resumed"
    params = {f"w{i}": ((64, 64), "Float32") for i in range(40)}
    reference.write_checkpoint(here / "src", [dict.fromkeys(params, ([4], [0, -1], 0, 0))], params)
    for name, axis in (("a", [0, -1]), ("b", [-1, 0])):
        reference.write_strategy(here / name, [dict.fromkeys(params, ([4], axis, 0, 0))])
    words = ["transform", "src", "out", "--src-strategy", "a", "--dst-strategy", "b"]
    path = os.pathsep.join(sys.path[:2])
    begun = subprocess.Popen(
        [sys.executable, "-m", "tests.trust.slow", *words], cwd=here, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, "SLOW_SECONDS": "0.02"},
    )  # fmt: skip
    assert any(b"at work" in line for line in begun.stdout)
    begun.send_signal(signal.SIGTERM)
    begun.communicate()
    job = records(here / "out")
    done = subprocess.run(
        [sys.executable, "-m", "rankxform", *words], cwd=here, capture_output=True,
        env={**os.environ, "PYTHONPATH": path}, check=False,
    )  # fmt: skip
    files = digests(here / "out")
    runner.found["resumed"] = {
        "begun": begun.returncode, "code": done.returncode, "files": files, "job": sorted(job),
        "records": records(here / "out"),
    }  # fmt: skip


MESSAGE_TESTS = (
    "test_errors.py", "test_cases.py", "test_statements.py", "source/test_choose.py",
    "source/test_hints.py", "trust/test_completeness.py", "trust/test_lies.py",
    "verbs/test_check.py", "verbs/test_evidence.py", "formats/test_safetensors.py",
    "operations/test_select.py", "target/test_findings.py", "target/test_model_files.py",
    "planning/test_evidence.py", "planning/test_sampling.py", "source/test_written.py",
)  # fmt: skip


class MessageRecorder:
    """A plugin of pytest: keeps what each call of a function of rankxform comes to, by test."""

    def __init__(self, runner):
        self.runner = runner
        self.calls = []

    def recording(self, name, function):
        @functools.wraps(function)
        def recorded(*args, **options):
            try:
                result = function(*args, **options)
            except BaseException as error:
                self.calls.append([name, type(error).__name__, str(error)])
                raise
            kinds = ("warnings", "notices", "differences", "rows")
            texts = [[*getattr(result, kind, ())] for kind in kinds]
            self.calls.append([name, *([str(text) for text in kind] for kind in texts)])
            return result

        return recorded

    def pytest_sessionstart(self):
        import pytest

        import rankxform

        self.patch = pytest.MonkeyPatch()
        for name in ("transform", "verify", "load", "plan", "check", "ranks", "inspect"):
            self.patch.setattr(rankxform, name, self.recording(name, getattr(rankxform, name)))

    def pytest_sessionfinish(self):
        self.patch.undo()

    def pytest_runtest_teardown(self, item):
        place = str(item.funcargs.get("tmp_path", "TMP"))
        text = re.sub(r"/tmp/(pytest-of-\w+/pytest-\d+|tmp\w{8})", "TMP", json.dumps(self.calls)
                      .replace(place, "TMP"))  # fmt: skip
        self.runner.found[f"message {item.nodeid}"] = {"calls": json.loads(text)}
        self.calls = []


def messages(runner):
    """What the functions refuse and warn of in the tests that are about it."""
    import pytest

    if runner.world is None:
        tests = [str(ROOT / "tests" / name) for name in MESSAGE_TESTS]
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={ROOT}"]
        code = pytest.main([*options, *tests], plugins=[MessageRecorder(runner)])
        runner.found["messages"] = {"code": int(code)}


GROUPS = (
    messages, forms, ranks, statistics, maps, adapters, derived, wrong, operations, nodes, resumed,
    commands,
)  # fmt: skip


def leaves(value, at=""):
    """Return every value of a document by the place where it stands; of texts each line."""
    if isinstance(value, str) and "\n" in value:
        value = value.splitlines()
    pairs = (
        enumerate(value)
        if isinstance(value, list)
        else value.items()
        if isinstance(value, dict)
        else ()
    )
    found = {k: v for key, one in pairs for k, v in leaves(one, f"{at}/{key}").items()}
    return found if isinstance(value, (list, dict)) else {at: value}


def compare(before, after):
    """Print what differs; return how many keys do."""
    a, b = (json.loads(Path(path).read_text()) for path in (before, after))
    differing = [key for key in sorted({*a, *b}) if a.get(key) != b.get(key)]
    for key in differing:
        one, other = a.get(key, {}), b.get(key, {})
        files = {*one.get("files", {}), *other.get("files", {})}
        changed = [f for f in sorted(files)
                   if one.get("files", {}).get(f) != other.get("files", {}).get(f)]  # fmt: skip
        print(key, f"files {changed[:3]}" if changed else "")
        for at, value in sorted(leaves(one).items() ^ leaves(other).items(), key=repr):
            if not at.startswith("/files/"):
                print("   ", "<" if leaves(one).get(at) == value else ">", at, repr(value)[:2000])
    print(f"{len(differing)} of {len({*a, *b})} differ")
    return len(differing)


def against(commit):
    """Record a commit, in a worktree of its own, and this folder; print what differs."""
    import subprocess

    with tempfile.TemporaryDirectory(prefix="corpus-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], cwd=ROOT,
            check=True,
        )  # fmt: skip
        try:
            found = []
            for package in (tree, ROOT):
                found.append(str(Path(folder) / f"{len(found)}.json"))
                words = [sys.executable, __file__, "--package", str(package), found[-1]]
                subprocess.run(words, check=True)
            return compare(*found)
        finally:
            subprocess.run(
                ["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--package", default=str(ROOT), help="the folder that holds rankxform/")
    parser.add_argument("--compare", nargs=2, metavar="FILE")
    parser.add_argument("--only", help="one group of cases")
    parser.add_argument("--against", metavar="COMMIT", help="record that commit too, and compare")
    parser.add_argument("out", nargs="?")
    given = parser.parse_args()
    if given.compare:
        sys.exit(bool(compare(*given.compare)))
    if given.against:
        sys.exit(bool(against(given.against)))
    sys.path[:0] = [str(Path(given.package).resolve()), str(ROOT)]
    import rankxform

    assert Path(rankxform.__file__).is_relative_to(Path(given.package).resolve()), rankxform
    from rankxform.transport.launcher import launched_size

    world = None
    os.environ["COLUMNS"] = "80"
    if (launched_size() or 1) > 1:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
    tmp = Path(tempfile.mkdtemp(prefix="corpus-")) if world is None or not world.rank else None
    tmp = tmp if world is None else world.bcast(tmp)
    runner = Runner(world, tmp)
    random.seed(0)
    for group in GROUPS:
        if given.only in (None, group.__name__):
            group(runner)
    if runner.first:
        text = json.dumps(runner.found, indent=1, sort_keys=True)
        Path(given.out).write_text(text) if given.out else print(text)
        shutil.rmtree(tmp)


if __name__ == "__main__":
    main()
