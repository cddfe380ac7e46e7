"""Files of torch.save, read as data: views of storages, and what is refused by name."""

from __future__ import annotations

import json
import os
import pickle
import random
import warnings
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import rankxform
from rankxform.errors import RankxformError
from tests import reference, reference_forms
from tests import reference_torch as torch

BASE = np.arange(24, dtype="<f4").reshape(6, 4)


def made(path, value, storages=None, **options):
    storages = {0: BASE.tobytes()} if storages is None else storages
    return torch.archive(path / "model.bin", value, storages, **options)


def view(shape, first, strides, dtype="Float32"):
    return torch.tensor(0, dtype, shape, 24, first, strides)


VIEWS = {  # as numpy makes them
    "whole": (view((6, 4), 0, (4, 1)), BASE),
    "rows": (view((2, 4), 8, (4, 1)), BASE[2:4]),
    "columns": (view((6, 2), 1, (4, 1)), BASE[:, 1:3]),
    "transposed": (view((4, 6), 0, (1, 4)), BASE.T),
    "a row": (view((4,), 20, (1,)), BASE[5]),
    "a number": (view((), 14, ()), BASE[3, 2]),
    "expanded": (view((3, 4), 0, (0, 1)), np.broadcast_to(BASE[:1], (3, 4))),
    "every second": (view((3, 2), 0, (8, 2)), BASE[::2, ::2]),
    "nothing": (view((0, 4), 8, (4, 1)), BASE[2:2]),
    "axes of one": (view((1, 6, 1, 4), 0, (99, 4, 7, 1)), BASE.reshape(1, 6, 1, 4)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_read_as_the_tensor_that_it_is(name, tmp_path):
    stored, wanted = VIEWS[name]
    found = rankxform.load(made(tmp_path, {"w": stored}))["w"]
    assert found.shape == wanted.shape and found.tobytes() == wanted.tobytes()


def test_storages_that_are_shared_are_read_for_each(tmp_path):
    tensors = {"embed": view((6, 4), 0, (4, 1)), "head": view((6, 4), 0, (4, 1))}
    found = rankxform.load(made(tmp_path, tensors))
    assert found["embed"].tobytes() == found["head"].tobytes() == BASE.tobytes()


@pytest.mark.parametrize("dtype", torch.STORAGES)
def test_types(dtype, tmp_path):
    size = {"64": 8, "32": 4, "16": 2}.get(dtype[-2:], 1)
    data = bytes(range(6 * size))
    path = made(tmp_path, {"w": torch.tensor("w", dtype, (2, 3))}, {"w": data})
    found = rankxform.load(path)["w"]
    assert (found.shape, found.itemsize, found.tobytes()) == ((2, 3), size, data)
    assert dtype.rstrip("0123456789").lower() in found.dtype.name


class Ordered(OrderedDict):
    """As `state_dict()` returns it: an ordered dict with an attribute."""

    def __reduce__(self):
        return (
            OrderedDict,
            (),
            {"_metadata": OrderedDict(w={"version": 1})},
            None,
            iter(self.items()),
        )


@pytest.mark.parametrize("key", [None, "state_dict", "model", "module"])
def test_the_only_level_with_tensors_is_taken(key, tmp_path):
    state = Ordered(w=view((6, 4), 0, (4, 1)), **{"layer._extra_state": None})
    value = (
        state
        if key is None
        else {key: state, "epoch": 3, "best": view((), 0, ()), "s": {"lr": [1]}}
    )
    assert {*rankxform.load(made(tmp_path, value))} == {"w"}


class Bomb:
    def __reduce__(self):
        return eval, ("print('executed')",)


REFUSED = {  # what is saved, its storages, and what the message has
    "a list": ([view((6, 4), 0, (4, 1))], None, "no tensors by name"),
    "no tensor": ({"lr": 0.1}, None, "no tensors by name, but 'lr'"),
    "two models": ({"model": {}, "module": {}}, None, "no tensors by name"),
    "a number among them": ({"w": view((6, 4), 0, (4, 1)), "n": 3}, None, "'n' is a int"),
    "what is executed": ({"w": Bomb()}, None, "names builtins.eval, which no table"),
    "a lost storage": ({"w": torch.tensor(7, "Float32", (2,))}, None, "data/7, are not in the file"),
    "a short storage": ({"w": view((6, 4), 0, (4, 1))}, {0: b"x" * 8}, "has 8 bytes, and 96 are"),
    "beyond its storage": ({"w": view((6, 4), 4, (4, 1))}, None, "ends at element 28 of 24"),
    "negative": ({"w": view((6, 4), -4, (4, 1))}, None, "'w' is made in a way"),
    "too many axes": ({"w": view((6, 4), 0, (4,))}, None, "'w' is made in a way"),
    "long columns": (
        {"w": torch.tensor(0, "Float32", (5000, 2), 10000, 0, (1, 5000))}, {0: bytes(40000)},
        "'w': is stored with strides [1, 5000], not row by row",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_plain_tensor_is_refused_by_name(kind, tmp_path, capfd):
    value, storages, text = REFUSED[kind]
    with pytest.raises(RankxformError) as caught:
        rankxform.load(made(tmp_path, value, storages))
    assert text in str(caught.value).replace("__builtin__", "builtins"), caught.value
    assert "model.bin" in str(caught.value) and "executed" not in capfd.readouterr().out


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives_that_are_something_else(tmp_path):
    good = {"w": view((6, 4), 0, (4, 1))}
    for number, (options, text) in enumerate((
        ({"order": b"big"}, "another byte order"),
        ({"more": [("constants.pkl", b"")]}, "TorchScript"),
        ({"more": [("data/0", BASE.tobytes())]}, "twice"),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(RankxformError, match=text):
            rankxform.load(made(folder, good, **options))
    path = tmp_path / "packed.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("archive/data.pkl", torch.pickled(good))
    with pytest.raises(RankxformError, match="compressed"):
        rankxform.load(path)
    path.write_bytes(pickle.dumps({"w": [1]}, 2))
    with pytest.raises(RankxformError, match="is no file of torch.save"):
        rankxform.load(path)


class TestStreams:
    """Files of torch before 1.6: pickles, and storages behind them."""

    MAGIC = 0x1950A86A20F9469CFC6C

    def write(self, path, value, storages, *, keys=None, version=1001, little=True, counts=None):
        system = {"protocol_version": 1001, "little_endian": little, "type_sizes": {}}
        parts = [self.MAGIC, version, system, value, [str(key) for key in keys or storages]]
        data = b"".join(torch.pickled(part) for part in parts)
        for key, content in storages.items():
            count = (counts or {}).get(key, len(content) // 4)
            data += count.to_bytes(8, "little", signed=True) + content
        path.write_bytes(data)
        return path

    def test_storages_are_in_the_order_of_their_list(self, tmp_path):
        other = np.arange(6, dtype="<f4")
        value = {"b": torch.tensor("b", "Float32", (6,)), "a": view((2, 4), 8, (4, 1))}
        storages = {0: BASE.tobytes(), "b": other.tobytes()}
        found = rankxform.load(self.write(tmp_path / "m.pt", value, storages))
        assert found["b"].tobytes() == other.tobytes()
        assert found["a"].tobytes() == BASE[2:4].tobytes()

    def test_pickles_may_be_longer_than_what_is_read_first(self, tmp_path):
        names = [f"layers.{n}." + "x" * 200 for n in range(8000)]
        value = {name: view((1,), n % 24, (1,)) for n, name in enumerate(names)}
        path = self.write(tmp_path / "m.pt", value, {0: BASE.tobytes()})
        assert path.stat().st_size > 1 << 20
        found = rankxform.load(path)
        assert [float(found[name][0]) for name in names[:30]] == [n % 24 for n in range(30)]

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"version": 1002}, "another version"), ({"little": False}, "another version"),
            ({"keys": [0, 1]}, "a storage '1' that no tensor is of"),
            ({"keys": [0, 0]}, "or twice"), ({"counts": {0: 25}}, "ends within storage 0"),
            ({"counts": {0: -1}}, "ends within storage 0"),
            ({"counts": {0: 1 << 62}}, "ends within storage 0"),
        ],
    )  # fmt: skip
    def test_what_makes_no_sense_is_refused(self, options, text, tmp_path):
        value = {"w": view((6, 4), 0, (4, 1))}
        path = self.write(tmp_path / "m.pt", value, {0: BASE.tobytes()}, **options)
        with pytest.raises(RankxformError, match=text):
            rankxform.load(path)

    def test_one_that_is_cut_off_is_refused(self, tmp_path):
        path = self.write(tmp_path / "m.pt", {"w": view((6, 4), 0, (4, 1))}, {0: BASE.tobytes()})
        data = path.read_bytes()
        for length in range(20, len(data), 7):
            path.write_bytes(data[:length])
            with pytest.raises(RankxformError):
                rankxform.load(path)


def test_what_else_lies_beside_a_model_is_none_of_it(tmp_path):
    tensors = {name: ("Float32", BASE + n) for n, name in enumerate("abc")}
    folder = torch.write_folder(tmp_path / "src", tensors, 2)
    torch.archive(folder / "training_args.bin", {"lr": 0.1}, {})
    torch.archive(folder / "optimizer.pt", {"state": {}}, {})
    found = rankxform.load(folder)
    assert {n: a.tobytes() for n, a in found.items()} == {
        n: w.tobytes() for n, (_, w) in tensors.items()
    }
    assert found.warnings == () and not any("training_args" in text for text in found.notices)


def test_a_changed_byte_is_found_by_its_checksum(tmp_path):
    path = made(tmp_path, {"w": view((6, 4), 0, (4, 1))})
    data = path.read_bytes()
    at = data.index(BASE.tobytes())
    path.write_bytes(data[: at + 5] + b"!" + data[at + 6 :])
    with pytest.raises(RankxformError, match="data/0: CRC-32"):
        rankxform.load(path, check_crc=True)
    at = data.index(b"FloatStorage")
    path.write_bytes(data[:at] + b"CharS" + data[at + 5 :])
    with pytest.raises(RankxformError, match="pickle with another CRC-32"):
        rankxform.load(path)


def assembled(path, storage=b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0" b"0X\3\0\0\0cpuK\x18tQ",
              shape=b"K\6K\4\x86", strides=b"K\4K\1\x86"):  # fmt: skip
    """Write a state dict of one tensor, word by word."""
    words = b"\x80\2}X\1\0\0\0wctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0" + shape
    words += strides + b"\x89ccollections\nOrderedDict\n)RtRs."
    return torch.archive(path / "model.bin", words, {0: BASE.tobytes()})


def test_words_that_make_something_else_of_a_tensor(tmp_path):
    assert rankxform.load(assembled(tmp_path))["w"].tobytes() == BASE.tobytes()
    for options in (
        {"storage": b"}Q"}, {"storage": b"K\1"}, {"shape": b"](K\6K\4e"}, {"shape": b"C\2\6\4"},
        {"strides": b"]"}, {"shape": b"N"}, {"shape": b"\x88\x89\x86"},
    ):  # fmt: skip
        with pytest.raises(RankxformError, match="'w' is made in a way"):
            rankxform.load(assembled(tmp_path, **options))


@pytest.mark.parametrize("deep", [3, 4, 6, 12])
def test_tuples_of_tuples_are_bounded(deep, tmp_path):
    """Each holds the one below 64 times: of little of a file, 64 to the power of its depth."""
    words = b"\x80\2)q\0"
    for level in range(deep):
        words += (
            b"(" + b"h" + bytes([level]) + (b"h" + bytes([level])) * 63 + b"tq" + bytes([level + 1])
        )
    with pytest.raises(RankxformError, match="nested deeper"):
        rankxform.load(torch.archive(tmp_path / "model.bin", words + b".", {}))


def test_views_of_one_storage_are_bounded(tmp_path):
    tensors = {str(n): torch.tensor(0, "Float32", (60000, 16), 16, 0, (0, 1)) for n in range(9)}
    with pytest.raises(RankxformError, match="so many tensors are not stored row by row"):
        rankxform.load(made(tmp_path, tensors, {0: bytes(64)}))


def test_two_models_in_one_folder(tmp_path):
    for name in ("pytorch_model-00001-of-00002.bin", "other_model-00002-of-00002.bin"):
        torch.save(tmp_path / name, {name[:3]: ("Float32", BASE)})
    with pytest.raises(RankxformError, match="holds files of two models"):
        rankxform.load(tmp_path)


def test_a_whole_model_beside_an_index_that_does_not_mean_it(tmp_path):
    tensors = {name: ("Float32", BASE + n) for n, name in enumerate("abc")}
    folder = torch.write_folder(tmp_path / "src", tensors, 2)
    torch.save(folder / "pytorch_model.bin", {"other": ("Float32", BASE)})
    with pytest.raises(RankxformError, match=r"holds pytorch_model.bin and an index"):
        rankxform.load(folder)
    torch.save(folder / "pytorch_model.bin", tensors)  # an earlier copy of all
    assert {*rankxform.load(folder)} == {*tensors}


def test_shards_of_which_one_is_lost_and_no_index_tells(tmp_path):
    torch.save(tmp_path / "pytorch_model-00001-of-00002.bin", {"a": ("Float32", BASE)})
    with pytest.raises(RankxformError, match="has 1 of 2 shards, and no index"):
        rankxform.load(tmp_path)


def test_an_export_beside_a_checkpoint_of_ranks_is_not_meant(tmp_path):
    params = {"w": ((6, 4), "Float32")}
    folder = reference.write_checkpoint(tmp_path / "src", None, params)
    torch.save(Path(folder) / "pytorch_model.bin", {"v": ("Float32", BASE)})
    assert {*rankxform.load(folder)} == {"w"}


def test_tied_tensors_that_an_index_does_not_count(tmp_path):
    tensors = {"embed": ("Float32", BASE), "norm": ("Float32", BASE[0])}
    folder = torch.write_folder(tmp_path / "src", tensors, 2)
    torch.archive(folder / "pytorch_model-00001-of-00002.bin",
                  {"embed": view((6, 4), 0, (4, 1)), "head": view((6, 4), 0, (4, 1))},
                  {0: BASE.tobytes()})  # fmt: skip
    index = folder / "pytorch_model.bin.index.json"
    document = json.loads(index.read_text())
    document["weight_map"] |= dict.fromkeys(
        ("head", "l._extra_state"), "pytorch_model-00001-of-00002.bin"
    )
    index.write_text(json.dumps(document))
    found = rankxform.load(folder)
    assert {*found} == {"embed", "head", "norm"} and found.warnings == ()


# -- files of torch 2.13 --------------------------------------------------------------------------------

SAMPLES = Path(__file__).parents[1] / "data" / "formats" / "torch_files"


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.pt")), ids=lambda path: path.stem)
def test_what_torch_saved_is_what_it_had(path):
    """Types, views, shared storages, parameters and tensors with attributes, a module's state."""
    wanted = reference_forms.tensors_in(path.with_suffix(".expected.safetensors"))
    found = {n: (a.shape, a.tobytes()) for n, a in rankxform.load(path).items()}
    assert found == {
        name.removeprefix("state_dict."): (words.shape, words.tobytes())
        for name, (_, words) in wanted.items()
    }


NAMED = {
    "bomb": "names posix.system", "complex": "torch.ComplexFloatStorage",
    "module": "torch.nn.modules.linear.Linear", "quantized": "_rebuild_qtensor",
    "sparse": "_rebuild_sparse_tensor", "torchscript": "a program of TorchScript",
    "wrapper_subclass": "names __main__.Sub",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_what_torch_saved_and_is_no_plain_tensor_is_refused_by_name(name):
    with pytest.raises(RankxformError) as caught:
        rankxform.load(SAMPLES / "refused" / f"{name}.pt")
    assert NAMED[name] in str(caught.value) and ("save" in caught.value.tries[0])
    assert "\n" not in str(caught.value)


MUTATIONS = int(os.environ.get("RANKXFORM_MUTATIONS", "300"))


def test_damaged_files_raise_no_other_error(tmp_path, capfd):
    """Bytes changed, cut off, doubled, anywhere in pickles and archives."""
    rng, paths = random.Random(7), sorted(SAMPLES.rglob("*.pt"))
    path = tmp_path / "model.pt"
    for _ in range(MUTATIONS):
        data = bytearray(rng.choice(paths).read_bytes())
        for _ in range(rng.randint(1, 3)):
            at, kind = rng.randrange(len(data)), rng.randrange(4)
            if kind == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[at] = rng.randrange(256)
            elif kind == 2:
                del data[at : at + rng.randint(1, 40)]
            else:
                data[at:at] = data[at : at + rng.randint(1, 40)]
            data = data or bytearray(b"P")
        path.write_bytes(data)
        with warnings.catch_warnings(), suppress(RankxformError):
            warnings.simplefilter("ignore")
            rankxform.load(path)
    assert "Traceback" not in capfd.readouterr().err
