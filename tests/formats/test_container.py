"""Indexes found from headers, and headers as MindSpore and safetensors write them."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy

from rankxform.formats import safetensors as ours
from rankxform.formats.container import Span, folder_signature


def reader(data):
    return lambda offset, nbytes: data[offset : offset + nbytes]


def test_safetensors_headers_load_in_the_library(tmp_path):
    listed = [("b", "Float64", (2,)), ("a", "Int16", (3, 1)), ("s", "Bool", ())]
    head, offsets = ours.header(listed, {"format": "ms", "mine": "kept"})
    body = bytes(range(16)) + bytes(range(6)) + b"\1"
    (tmp_path / "x.safetensors").write_bytes(head + body)
    loaded = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    assert {n: a.shape for n, a in loaded.items()} == {"b": (2,), "a": (3, 1), "s": ()}
    assert loaded["a"].tobytes() == body[16:22]
    assert len(head) % 8 == 0
    index = ours.read_index(reader(head + body), len(head + body))
    assert index.metadata == {"format": "ms", "mine": "kept"}
    assert index.spans("a") == (Span(offsets[1], 6),)


def test_a_safetensors_file_of_the_library_is_indexed(tmp_path):
    arrays = {
        f"p{i}": np.arange(i * 3, dtype=t).reshape(3, i) for i, t in enumerate(("i1", "f4", "f8"))
    }
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors", {"who": "me"})
    data = (tmp_path / "x.safetensors").read_bytes()
    index = ours.read_index(reader(data), len(data))
    for name, array in arrays.items():
        span = index.spans(name)[0]
        assert index.shape(name) == array.shape
        assert data[span.offset : span.offset + span.nbytes] == array.tobytes()


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("training_args.bin", "PyTorch pickles"), ("weights.npz", "arrays of NumPy"),
        ("model.pdparams", "a checkpoint of Paddle"), ("model.h5", "weights of another framework"),
    ],
)  # fmt: skip
def test_a_folder_is_known_by_a_file_s_name(name, title):
    found, signature = folder_signature(["readme", name])
    assert found == name and signature.title.startswith(title)
