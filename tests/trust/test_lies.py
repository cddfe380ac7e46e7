"""Lies, one at a time and two: each is refused, or warned of, or changes no byte.

A valid checkpoint of every form is told of, or given, wrongly in one of many ways. What comes out
is compared with what went in, by a reader of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import rankxform
from rankxform import api
from rankxform.request import all_options
from rankxform.statements import STATEMENT_KINDS
from rankxform.target.resolve import resolve
from rankxform.transport import SerialTeam
from rankxform.transport.mpi import MpiTeam
from rankxform.verbs.evidence import with_evidence
from tests import reference
from tests.local_world import run_world

WEIGHTS = {
    "embed.weight": ((32, 16), "Float32"),
    "layers.0.wq": ((16, 16), "Float32"),
    "layers.0.wo": ((16, 16), "Float32"),
    "layers.1.wq": ((16, 16), "Float32"),
    "layers.1.wo": ((16, 16), "Float32"),
}
PARAMS = {**WEIGHTS, **{f"adam_m.{n}": one for n, one in WEIGHTS.items()}}
STEPS = {
    n: ("Int32", np.array([v], "<i4").view("<u4"))
    for n, v in (("global_step", 100), ("step_num", 100), ("epoch_num", 1))
}
PAIRS = int(os.environ.get("RANKXFORM_LIES", "40"))
"""Pairs of lies that are told together: 2,000 at night."""


def layouts(dp_first=True):
    axis = 0 if dp_first else 1
    return [{n: ([2, 2], [-1, axis] if n.endswith("wo") else [axis, -1], 0, 0) for n in PARAMS}]


FORMS = ("ckpt", "safetensors", "checkpoint2", "unified", "huggingface")
RANKED = ("ckpt", "safetensors")
WHOLE = ("unified", "huggingface")


@dataclass
class Place:
    """A checkpoint of a form, and how it is converted to whole tensors."""

    folder: Path
    form: str
    own: bool
    options: dict = field(default_factory=dict)
    strategy: str | None = None

    def __post_init__(self):
        src = reference.write_checkpoint(
            self.folder / "first", layouts(), PARAMS, STEPS, name="net_{rank}-1_100",
            kind=self.form if self.form in RANKED else "ckpt",
        )  # fmt: skip
        given = reference.write_strategy(self.folder / "a.ckpt", layouts())
        self.src = self.folder / "src"
        if self.form in RANKED and not self.own:
            self.src, self.strategy = Path(src), given
            return
        form = "ranks" if self.form in RANKED else self.form
        wanted = None if self.form in WHOLE else given
        more = {"max_part": 8000} if form == "unified" else {}
        more |= {"max_shard": 8000} if form == "huggingface" else {}
        rankxform.transform(src, self.src, given, wanted, dst_form=form, fsync=False, **more)
        if not self.own:
            for path in self.src.rglob("rankxform.json"):
                path.unlink()

    def files(self):
        return sorted(
            path
            for path in self.src.rglob("*")
            if path.suffix in (".ckpt", ".safetensors") and path.is_file()
        )

    def document(self, *names):
        """Return a small file of the checkpoint, by one of its names."""
        return next((path for path in self.src.rglob("*.json") if path.name in names), None)

    def edit(self, path, change):
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    def rewrite(self, path, change):
        """Change a file's entries, of which a name has type and words."""
        entries = {
            n: [d, np.frombuffer(data, reference.WORD[reference.ITEM[d]]).reshape(shape).copy()]
            for n, (d, shape, data) in reference.read_any(path).items()
        }
        change(entries)
        write = reference.write_ckpt if path.suffix == ".ckpt" else reference.write_safetensors
        path.unlink()
        write(path, {n: tuple(one) for n, one in entries.items()})

    def outcome(self):
        """Return "refused", "warned", or "right"; "WRONG" is what must not be."""
        dst = self.folder / "dst"
        shutil.rmtree(dst, ignore_errors=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                rankxform.transform(
                    self.src,
                    dst,
                    self.strategy,
                    None,
                    fsync=False,
                    **{"format": "ckpt", **self.options},
                )
            except rankxform.RankxformWarning:
                return "warned"
            except rankxform.RankxformError:
                assert not [p for p in dst.rglob("*.ckpt") if "rankxform" not in str(p.parent)]
                return "refused"
        (file,) = dst.glob("rank_0/*")
        found = reference.read_ckpt(file)
        right = all(
            n in found and found[n][2] == reference.full_tensor(n, shape, dtype).tobytes()
            for n, (shape, dtype) in PARAMS.items()
        )
        return "right" if right else "WRONG"


LIES = {}
"""By name: of which kind of facts, if of one; in which forms; whether a manifest is needed; how."""


def lie(*forms, fact=None, own=None):
    def note(function):
        LIES[function.__name__] = fact, forms or FORMS, own, function
        return function

    return note


# -- statements --------------------------------------------------------------------------------


@lie(*RANKED, fact="step")
def another_global_step_in_one_file(place):
    place.rewrite(
        place.files()[2], lambda e: e["global_step"].__setitem__(1, e["global_step"][1] + 1)
    )


@lie("checkpoint2", fact="step", own=False)
def another_global_step_in_common_json(place):
    place.edit(place.document("common.json"), lambda d: d.update(global_step=90))


@lie("checkpoint2", fact="iteration", own=False)
def another_number_of_the_iteration(place):
    folder = next(place.src.glob("iteration_*"))
    folder.rename(folder.with_name("iteration_00000090"))
    (place.src / "latest_checkpointed_iteration.txt").write_text("90")


@lie(*RANKED, fact="named-step", own=False)
def names_of_a_later_epoch(place):
    for path in place.files():
        path.rename(path.with_name(path.name.replace("-1_100", "-7_100")))


@lie(*RANKED, fact="shape")
def shapes_of_another_network_in_the_strategy(place):
    shapes = {n: (2 * s[0], s[1] // 2) for n, (s, _) in PARAMS.items()}
    place.strategy = reference.write_strategy(place.folder / "b.json", layouts(), "json", shapes)


@lie("checkpoint2", fact="shape", own=False)
def another_shape_in_metadata_json(place):
    def change(document):
        document["state_dict_metadata"]["embed.weight"]["global_shape"] = [64, 8]

    place.edit(place.document("metadata.json"), change)


@lie(*RANKED, fact="type")
def another_type_in_one_file(place):
    place.rewrite(place.files()[1], lambda e: e["layers.0.wq"].__setitem__(0, "Int32"))


@lie(*RANKED, fact="type", own=True)
def another_type_in_the_manifest(place):
    def change(document):
        for stage in document["stages"].values():
            stage["kinds"] = [["BFloat16", *rest] for _, *rest in stage["kinds"]]

    place.edit(place.document("rankxform.json"), change)


@lie("huggingface", fact="commit", own=False)
def two_commits(place):
    """A download that was broken off, and continued after the model was changed."""
    for number, path in enumerate(place.files()):
        noted = path.parent / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
        noted.parent.mkdir(parents=True, exist_ok=True)
        noted.write_text(f"{'ab'[number > 0] * 40}\netag\n1700000000.0\n")


@lie(*WHOLE, fact="bytes", own=False)
def more_bytes_in_the_index(place):
    path = place.document("model.safetensors.index.json", "param_name_map.json")
    place.edit(path, lambda d: d["metadata"].update(total_size=10**9))


@lie("huggingface", fact="size", own=False)
def heads_of_another_model(place):
    (place.src / "config.json").write_text(json.dumps({"num_attention_heads": 8}))
    (place.folder / "c.json").write_text(json.dumps({"num_attention_heads": 4}))
    place.options = {"map": "llama", "config": str(place.folder / "c.json")}


@lie(*RANKED, fact="boxes", own=True)
def another_strategy_than_the_manifests(place):
    place.strategy = reference.write_strategy(place.folder / "b.ckpt", layouts(False))


@lie(fact="files", own=True)
def one_byte_of_a_file(place):
    path = place.files()[-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@lie(own=True)
def a_file_of_the_manifest_is_gone(place):
    place.files()[-1].unlink()


@lie("checkpoint2", *WHOLE, own=True)
def a_companion_is_gone(place):
    place.document("metadata.json", "model.safetensors.index.json", "param_name_map.json").unlink()


# -- what is given -----------------------------------------------------------------------------


@lie(*RANKED)
def a_strategy_of_as_many_ranks(place):
    place.strategy = reference.write_strategy(place.folder / "b.ckpt", layouts(False))


@lie(*RANKED)
def a_strategy_of_fewer_ranks(place):
    stage = {n: ([2], [0, -1], 0, 0) for n in PARAMS}
    place.strategy = reference.write_strategy(place.folder / "b.ckpt", [stage])


@lie(*RANKED, fact="layers")
def a_layer_that_is_sharded_otherwise(place):
    stages = [{**layouts()[0], "layers.1.wq": ([2, 2], [1, 0], 0, 0)}]
    place.strategy = reference.write_strategy(place.folder / "b.ckpt", stages)


@lie(*RANKED, fact="outputs", own=False)
def a_bias_of_another_length(place):
    for path in place.files():
        place.rewrite(path, lambda e: e.update({"embed.bias": ("Float32", np.ones(5, "<u4"))}))
    stages = [{**layouts()[0], "embed.bias": ([4], [-1], 0, 0)}]
    place.strategy = reference.write_strategy(place.folder / "b.ckpt", stages)


@lie(*RANKED)
def no_strategy_at_all(place):
    place.strategy = "none"


@lie(*RANKED)
def two_ranks_exchanged(place):
    first, second, *_ = place.files()
    data = first.read_bytes(), second.read_bytes()
    second.write_bytes(data[0])
    first.write_bytes(data[1])


@lie(*RANKED)
def one_rank_copied_onto_another(place):
    shutil.copyfile(place.files()[0], place.files()[3])


@lie(*RANKED)
def one_rank_linked_for_another(place):
    first, *_, last = place.files()
    last.unlink()
    os.link(first, last)


def _older(entries):
    for name, (_, words) in entries.items():
        if name not in STEPS:
            words ^= 1


@lie(*RANKED)
def an_older_file_with_the_same_step(place):
    place.rewrite(place.files()[3], _older)


@lie(*RANKED)
def a_weight_that_is_in_no_file(place):
    for path in place.files():
        place.rewrite(path, lambda e: e.pop("layers.1.wq"))


@lie(*RANKED, own=False)
def ranks_beyond_the_strategys(place):
    for rank in range(4, 8):
        target = place.src / f"rank_{rank}"
        shutil.copytree(place.src / f"rank_{rank - 4}", target)
        for path in target.iterdir():
            path.rename(path.with_name(path.name.replace(str(rank - 4), str(rank), 1)))
            place.rewrite(target / path.name.replace(str(rank - 4), str(rank), 1), _older)


@lie()
def a_file_that_ends_early(place):
    path = place.files()[0]
    os.truncate(path, path.stat().st_size - 100)


@lie("checkpoint2", *WHOLE)
def a_file_that_is_gone(place):
    place.files()[0].unlink()


@lie("checkpoint2", own=False)
def files_exchanged_in_metadata_json(place):
    def change(document):
        storage = document["storage_data"]
        keys = [key for key in storage if "embed.weight" in key and "adam" not in key]
        storage[keys[0]], storage[keys[1]] = storage[keys[1]], storage[keys[0]]

    place.edit(place.document("metadata.json"), change)


@lie(*WHOLE, own=False)
def a_tensor_that_the_index_lists_elsewhere(place):
    def change(document):
        names = document["weight_map"]
        first, *_, last = sorted(names)
        names[first] = names[last]
        names["ghost"] = names[last]

    place.edit(place.document("model.safetensors.index.json", "param_name_map.json"), change)


@lie()
def a_check_of_checksums_that_are_not_there(place):
    place.options = {"check_crc": True}


HARMLESS = {"a_file_that_is_gone": "copies are in other files, or it held counters"}
"""Lies after which the bytes may be right."""


def cases():
    for name, (_, forms, own, _) in LIES.items():
        for form, with_manifest in itertools.product(forms, (False, True)):
            if own in (None, with_manifest):
                yield name, form, with_manifest


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "form", "own"), [*cases()])
def test_a_lie_is_refused_or_warned_of(tmp_path, name, form, own):
    place = Place(tmp_path, form, own)
    LIES[name][-1](place)
    allowed = ("refused", "warned", *(["right"] if name in HARMLESS else []))
    assert place.outcome() in allowed


NOT_OF_ONE_FOLDER = {
    "heads_of_another_model": "--config says it",
    "a_check_of_checksums_that_are_not_there": "it is an option",
}
NOTHING_TELLS = {("a_file_that_is_gone", "unified", False): "its counters, which no map lists"}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "form", "own"),
    [one for one in cases() if one[0] not in NOT_OF_ONE_FOLDER and one not in NOTHING_TELLS],
)
def test_the_checker_sees_a_lie(tmp_path, name, form, own):
    place = Place(tmp_path, form, own)
    LIES[name][-1](place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            states = {row.state for row in rankxform.check(place.src, place.strategy).rows}
        except rankxform.RankxformError:
            return
    assert states & {"wrong", "doubtful"}


def noticed(place, team):
    """Return what one process notices of a conversion, or the error that refuses it."""
    options = {"format": "ckpt", **place.options}
    names = frozenset(option.name for option in all_options())
    try:
        request = api._request(
            place.src, place.folder / "dst", place.strategy, None, options, names
        )
        target = with_evidence(resolve(request, team), team).target
    except rankxform.RankxformError as error:
        return type(error).__name__, error.parts, error.fault, error.rule
    return [(finding.severity, finding.rule, finding.text) for finding in target.findings]


def noticed_by_three(place):
    """Return by process what each of three notices."""

    def work(comm):
        team = MpiTeam.over(comm)
        found = noticed(place, team)
        team.free()
        return found

    return run_world(3, work)


ONCE = {name: (name, form, own) for name, form, own in reversed([*cases()])}
"""Each lie in the first of its forms; all of them are told to three processes at night."""


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "form", "own"), [*cases()] if PAIRS > 40 else [*ONCE.values()])
def test_three_processes_notice_what_one_does(tmp_path, name, form, own):
    place = Place(tmp_path, form, own)
    LIES[name][-1](place)
    assert noticed_by_three(place) == [noticed(place, SerialTeam())] * 3


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_the_truth_is_believed(tmp_path, form, own):
    place = Place(tmp_path, form, own)
    assert not {"wrong", "doubtful"} & {r.state for r in rankxform.check(place.src).rows}
    assert place.outcome() == "right"


@pytest.mark.parametrize("seed", range(PAIRS))
def test_two_lies_are_no_truth(tmp_path, seed):
    rng = random.Random(seed)
    first, form, own = rng.choice([*cases()])
    second = rng.choice([n for n, f, o in cases() if (f, o) == (form, own) and n != first])
    place = Place(tmp_path, form, own)
    LIES[first][-1](place)
    gone = (OSError, AttributeError, KeyError, StopIteration, ValueError, IndexError)
    with suppress(*gone):  # what it is about is not there any more
        LIES[second][-1](place)
    assert place.outcome() != "WRONG", (first, second)


def test_every_kind_of_facts_is_lied_about():
    assert {fact for fact, *_ in LIES.values() if fact} == {*STATEMENT_KINDS}
