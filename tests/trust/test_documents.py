"""Documents that somebody has changed: whatever they say, one clear message, and never a traceback.

Each kind of document that is read is changed in one place, or damaged as a file, and then used by the
command or call that reads it. RANKXFORM_DOCUMENTS: how many changes of all kinds; 20,000 at night.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import signal
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest

import rankxform
from rankxform.cli.main import main
from rankxform.errors import RankxformError
from rankxform.publish import journal, lock, records
from rankxform.transport.hostfile import parse_hostfile, parse_rank_table
from tests import reference
from tests.derivation.test_inputs import CONFIG
from tests.mpi.test_maps import write_ranks
from tests.operations.test_lora import write_pair
from tests.place import Place
from tests.reference_maps import Model
from tests.trust import test_lies
from tests.trust.test_resume import make_place, stop_after

COUNT = int(os.environ.get("RANKXFORM_DOCUMENTS", "300"))
SECONDS = 20
LONG = ("Z" * 5000, "Z z " * 1500, "/" + "Z" * 5000, "Z' \" " * 1000, "Z/" * 2500)
ODD = (
    None, True, False, 0, -1, 1, 2, 3.5, -0.0, 1e400, float("nan"), 2**31, 2**63, 2**64, 10**30, 10**400,
    "", "x", "1", "..", "/", "a\nb", "\0", "\ud800", *LONG, [], {}, [[]], [{}], {"": None}, ["x"],
    [0] * 3000, {"x": 1}, [[[[[]]]]],
)  # fmt: skip
DEEP = "[" * 100_000


def places(value, path=()):
    """Yield the place of each value of a document: the keys that lead to it."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:20])
    for key, part in items:
        if isinstance(part, (dict, list)):
            yield from places(part, (*path, key))
        else:
            yield (*path, key)


def changed(document, rng):
    """Return a document with one value that is another, gone, twice, or under another name."""
    document = copy.deepcopy(document)
    path = rng.choice([*places(document)])
    if not path:
        return rng.choice(ODD)
    here = document
    for key in path[:-1]:
        here = here[key]
    key, how = path[-1], rng.random()
    if how < 0.7:
        here[key] = rng.choice(ODD)
    elif how < 0.8:
        del here[key]
    elif isinstance(here, list):
        here.append(here[key])
    else:
        here[rng.choice(("x", "..", "a/b", "\ud800", *LONG))] = here.pop(key)
    return document


def damaged(data, rng):
    """Return the bytes of a file that was cut off, or has other bytes."""
    how = rng.randrange(6)
    if how == 0:
        return data[: rng.randrange(len(data) + 1)]
    if how == 1:
        return data.decode(errors="replace").encode("utf-16")
    if how == 2:
        at = rng.randrange(len(data))
        return data[:at] + DEEP.encode() + data[at:]
    at, more = rng.randrange(len(data)), rng.randbytes(rng.choice((0, 1, 3)))
    return data[:at] + more + data[at + rng.choice((0, 1, 9)) :]


def json_change(data, rng):
    if rng.random() < 0.15:
        return damaged(data, rng)
    text = json.dumps(changed(json.loads(data), rng))
    return text.replace("Infinity", "1e400").encode()


def toml_change(data, rng):
    """Change a value behind an equals sign."""
    lines = data.split(b"\n")
    numbers = [n for n, line in enumerate(lines) if b" = " in line]
    if rng.random() < 0.15 or not numbers:
        return damaged(data, rng)
    number = rng.choice(numbers)
    name = lines[number].split(b" = ")[0]
    values = ('""', "1", "true", "[]", "{}", '["x"]', "1.5", "inf", "9" * 30, "0x" + "f" * 5000,
              json.dumps("Z" * 5000), '[[["x"]]]', "{x = 1}", '"..\\n"')  # fmt: skip
    lines[number] = name + b" = " + rng.choice(values).encode()
    return b"\n".join(lines)


def yaml_change(data, rng):
    lines = data.split(b"\n")
    number = rng.choice([n for n, line in enumerate(lines) if b": " in line])
    aliases = b"a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + b"".join(
        b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 10)) for n in range(1, 10)
    )
    values = (
        b"[]",
        b"{}",
        b"x",
        b"-1",
        b"1.5",
        b"9" * 30,
        b"*a9",
        b"1:" * 200 + b"1.0",
        b"~",
        b"[*a9]",
    )
    lines[number] = lines[number].split(b": ")[0] + b": " + rng.choice(values)
    return aliases + b"\n".join(lines)


def header_change(data, rng):
    """Change the header of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    header = json_change(data[8 : 8 + length], rng)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def journal_change(data, rng):
    """Change what a line says, and its digest with it."""
    lines = data.split(b"\n")[:-1]
    number = rng.randrange(len(lines))
    text = json_change(lines[number].partition(b" ")[2], rng).replace(b"\n", b" ")
    lines[number] = records._digest(text) + b" " + text
    return b"\n".join([*lines, b""])


class Kind:
    """A document in a folder, how it is changed, and what reads it."""

    def __init__(self, path, change, use, keep=()):
        self.path, self.change, self.use = Path(path), change, use
        self.data = self.path.read_bytes()
        self.kept = [(folder, folder.with_name(folder.name + ".kept")) for folder in keep]
        for folder, kept in self.kept:
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(folder, kept)

    def try_one(self, rng):
        for folder, kept in self.kept:
            shutil.rmtree(folder)
            shutil.copytree(kept, folder)
        data = self.change(self.data, rng)
        self.path.write_bytes(data)
        try:
            self.use()
        except RankxformError as error:
            assert error.exit_code != 70, (data, error)
            check_message(str(error), data)
        finally:
            if self.path.parent.is_dir():
                self.path.write_bytes(self.data)


def check_message(text, data):
    """A message quotes little of a document."""
    assert text.count("Z") + text.count("z") < 600 and len(text) < 3000, (data[:300], text)


def command(*words):
    """Return a call of the command that fails with what it prints."""

    def call():
        assert main([*map(str, words)]) != 70

    return call


def model_kinds(tmp):
    model = Model("llama", 1, "Float32")
    write_ranks(tmp, model, "mf", 2, 1, 1)
    config = tmp / "config.json"
    config.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **model.config}))
    shutil.copy(Path(rankxform.__file__).parent / "maps/llama.toml", tmp / "m.toml")
    for name in ("_mcore", "_attention", "_mlp"):
        shutil.copy(Path(rankxform.__file__).parent / f"maps/{name}.toml", tmp)
    options = {"dst_form": "huggingface", "config": str(config), "fsync": False, "overwrite": True}

    def convert(table):
        return lambda: rankxform.transform(
            tmp / "src", tmp / "hf", tmp / "strategy", map=table, **options
        )

    yield "config", Kind(config, json_change, convert("llama"))
    yield "map", Kind(tmp / "m.toml", toml_change, convert(str(tmp / "m.toml")))


def record_kinds(tmp, monkeypatch):
    monkeypatch.setattr(journal, "JOURNAL_SECONDS", 0)
    monkeypatch.setattr(lock, "DEAD_AFTER_SECONDS", 0.05)
    monkeypatch.setattr(lock, "_LOOK_SECONDS", 0.01)
    place = make_place(tmp / "whole", "safetensors")
    place.transform(verify=True, digests="sha256", fsync=False)
    manifest, sums = place.dst / "rankxform.json", place.dst / "SHA256SUMS"
    yield "manifest", Kind(manifest, json_change, lambda: rankxform.verify(place.dst))
    yield "manifest of a source", Kind(
        manifest, json_change,
        lambda: rankxform.transform(place.dst, tmp / "o", None, None, overwrite=True, fsync=False),
    )  # fmt: skip
    yield (
        "manifest again",
        Kind(manifest, json_change, lambda: place.transform(verify=True, fsync=False), [place.dst]),
    )
    words = ["verify", place.src, place.dst, *place.strategies, "--keep-fingerprints"]
    yield "manifest kept", Kind(manifest, json_change, command(*words), [place.dst])
    yield "sums", Kind(sums, damaged, command("inspect", "--check", "--full", place.dst))
    begun = make_place(tmp / "begun", "safetensors")
    stop_after(monkeypatch, 5)
    with pytest.raises(rankxform.StoppedError):
        begun.transform(fsync=False)
    own = begun.dst / ".rankxform"
    (lines,) = own.glob("journal-*")
    (own / "lock").write_bytes(json.dumps({**records_lock(), "token": "x"}).encode())
    for name, path, change in (
        ("job", own / "job.json", json_change),
        ("journal", lines, journal_change),
        ("lock", own / "lock", json_change),
    ):
        yield name, Kind(path, change, lambda: begun.transform(fsync=False), [begun.dst])
    src = tmp / "steps"
    for rank in range(4):
        (src / f"rank_{rank}").mkdir(parents=True)
        shutil.copy(place.shard(rank), src / f"rank_{rank}" / "net-1_7.safetensors")
    rankxform.follow(src, tmp / "followed", place.a, place.b, fsync=False)
    yield "follow", Kind(
        tmp / "followed/rankxform-follow.json", json_change,
        lambda: rankxform.follow(src, tmp / "followed", place.a, place.b, keep=1, fsync=False),
    )  # fmt: skip


def records_lock():
    return {"host": "gone", "boot": "another", "namespace": "x", "pid": 1, "start": 1}


def form_kinds(tmp):
    for form in ("checkpoint2", "unified", "huggingface"):
        place = test_lies.Place(tmp / form, form, own=False)
        document = place.document(
            "metadata.json", "param_name_map.json", "model.safetensors.index.json"
        )
        yield form, Kind(
            document, json_change,
            lambda place=place: rankxform.transform(
                place.src, place.folder / "dst", place.strategy, None, overwrite=True, fsync=False
            ),
        )  # fmt: skip


def plain_kinds(tmp):
    params = {"w": ((8, 6), "Float32"), "v": ((8,), "Float32")}
    src = [{"w": ([4], [0, -1], 0, 0), "v": ([4], [0], 0, 0)}]
    place = Place(
        tmp / "plain", src, [dict.fromkeys(params, ([1], [-1], 0, 0))], params, "safetensors"
    )

    def convert(strategy=place.a, **options):
        return lambda: rankxform.transform(
            place.src, place.dst, strategy, None, overwrite=True, fsync=False, **options
        )

    layouts = [(name, src[0][name]) for name in params]
    strategy = tmp / "a.json"
    strategy.write_bytes(
        reference.json_strategy(layouts, shapes={n: s for n, (s, _) in params.items()})
    )
    yield "strategy", Kind(strategy, json_change, convert(strategy))
    yield "strategy file", Kind(place.a, damaged, convert())
    yield "header", Kind(place.shard(2), header_change, convert())
    shapes = tmp / "shapes.json"
    shapes.write_text(
        json.dumps({n: {"shape": list(s), "dtype": d} for n, (s, d) in params.items()})
    )
    yield (
        "shapes",
        Kind(shapes, json_change, command("plan", "--shapes", shapes, "--src-strategy", place.a)),
    )
    options = tmp / "rankxform.toml"
    options.write_text('[transform]\nmemory = "1G"\nverify = true\nranks = "0"\nexclude = ["x"]\n')
    words = "transform", place.src, place.dst, *place.strategies, "--dry-run"
    yield "options", Kind(options, toml_change, command(*words))
    config = tmp / "job.yaml"
    config.write_text(CONFIG)
    words = "strategy", "derive", "--shapes", shapes, "--dst-config", config, "-o", tmp / "d.ckpt"
    yield "yaml", Kind(config, yaml_change, command(*words))
    table = tmp / "table.json"
    table.write_text(json.dumps({
        "version": "1.0", "server_count": "1", "status": "completed",
        "server_list": [{"server_id": "a", "device": [{"device_id": "0", "rank_id": "0"}]}],
    }))  # fmt: skip
    yield (
        "rank table",
        Kind(table, json_change, lambda: parse_rank_table(table.read_bytes(), "table")),
    )
    hosts = tmp / "hosts"
    hosts.write_text("a slots=2\nb:4\n# c\n")
    yield "hosts", Kind(hosts, damaged, lambda: parse_hostfile(hosts.read_bytes(), "hosts"))


def adapter_kinds(tmp):
    src, path = write_pair(tmp), tmp / "lora/adapter_config.json"
    stated = {**json.loads(path.read_text()), "rank_pattern": {"x": 2}, "target_modules": ["m"]}
    path.write_text(json.dumps(stated))
    yield "adapter", Kind(path, json_change, command("plan", src, "--lora", tmp / "lora"))


@contextmanager
def alarm():
    """Fail where a document keeps its reader longer than anybody waits."""

    def late(*_):
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


MAKERS = {"plain": plain_kinds, "models": model_kinds, "forms": form_kinds, "adapters": adapter_kinds,
          "records": record_kinds}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", MAKERS)
def test_no_document_leads_to_a_traceback(group, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    wants = [monkeypatch] if group == "records" else []
    kinds = [*MAKERS[group](tmp_path, *wants)]
    share = {"plain": 8, "models": 2, "forms": 3, "adapters": 1, "records": 9}
    each = max(1, COUNT * share[group] // sum(share.values()) // len(kinds))
    for name, kind in kinds:
        rng = random.Random(f"{name} {COUNT}")
        for number in range(each):
            with warnings.catch_warnings(), alarm():
                warnings.simplefilter("ignore")
                try:
                    kind.try_one(rng)
                except BaseException as error:
                    raise AssertionError(f"{name}, change {number}: {error!r}"[:3000]) from error
            check_message(capfd.readouterr().err.rpartition("error:")[2][:2900], b"")
