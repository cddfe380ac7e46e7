"""What goes over the line: bytes and requests, and answers that are broken on the way."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests import reference
from tests.storage.objects import proxy
from tests.storage.objects.test_places import command, converted

PARAMS = {f"{n}.w": ((1024, 1024), "Float32") for n in range(4)}
LAYOUT = [{name: ([4], [0, -1], 0, 0) for name in PARAMS}]
CONTENT = sum(4 * np.prod(shape) for shape, _ in PARAMS.values())


@pytest.fixture
def line(bucket, monkeypatch):
    with proxy.before(bucket.port) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{found.port}")
        yield found


@pytest.fixture
def ranks(bucket, line, tmp_path):
    """16 MB of four ranks in the bucket; returns the words for a conversion to two."""
    src = reference.write_checkpoint(tmp_path / "src", LAYOUT, PARAMS, kind="safetensors")
    a = reference.write_strategy(tmp_path / "a.ckpt", LAYOUT)
    b = reference.write_strategy(tmp_path / "b.ckpt", [{n: ([2], [-1, 0], 0, 0) for n in PARAMS}])
    bucket.put_folder(src, "src")
    words = ["--src-strategy", a, "--dst-strategy", b]
    converted(src, tmp_path / "expected", *words)
    line.noted.clear()
    return [bucket.at("src"), tmp_path / "dst", *words]


def is_right(tmp_path):
    files = sorted((tmp_path / "expected").rglob("*.safetensors"))
    names = [path.relative_to(tmp_path / "expected") for path in files]
    return all(
        (tmp_path / "dst" / name).read_bytes() == path.read_bytes()
        for name, path in zip(names, files)
    )


@pytest.mark.parametrize("memory", [(), ("--memory", "64M"), ("--memory", "4M")])
def test_each_byte_comes_once_and_no_other(memory, line, ranks, tmp_path):
    done = converted(*ranks, *memory, "--json")
    assert is_right(tmp_path)
    read = json.loads(done.stdout)["bytes_read"]
    assert read == CONTENT
    gets = [n for n in line.noted if n.method == "GET" and ".safetensors" in n.path]
    assert read <= sum(n.nbytes for n in gets) <= 1.02 * read + 4 * (64 << 10)
    listings = [n for n in line.noted if "list-type=2" in n.path]
    assert len(listings) == 1, "a prefix is listed once"
    data = [n for n in gets if n.nbytes > 1 << 16]
    assert len({(n.path, n.start) for n in data}) == len(data), "no range is asked for twice"
    if "4M" not in memory:
        assert len(data) <= CONTENT / (1 << 20), "at most one request for each slice of a file"
        # And of each file its header and four samples.
        assert len(line.noted) <= len(data) + len(listings) + 4 * 6


def test_a_header_between_tensors_is_read_on_the_way(line, bucket, tmp_path):
    """Of `.ckpt` files, which have one before each tensor."""
    params = {f"{n}.w": ((64, 512), "Float32") for n in range(40)}
    layout = [{name: ([4], [0, -1], 0, 0) for name in params}]
    src = reference.write_checkpoint(tmp_path / "src", layout, params, kind="ckpt")
    a = reference.write_strategy(tmp_path / "a.ckpt", layout)
    bucket.put_folder(src, "src")
    line.noted.clear()
    converted(bucket.at("src"), tmp_path / "dst", "--src-strategy", a, "--dst-strategy", "none")
    wrong = reference.wrong_slices(
        tmp_path / "dst", [{name: ([1], [-1, -1], 0, 0) for name in params}], params, "ckpt"
    )
    assert wrong == []
    content = sum(4 * 64 * 512 for _ in params)
    asked = [n for n in line.noted if n.method == "GET" and "/rank_" in n.path]
    whole_files = [n.path for n in asked if n.nbytes > content / 4]
    assert len(whole_files) == len({*whole_files}) == 4, "tensors and what lies between them"
    assert sum(n.nbytes for n in asked) <= 1.2 * content
    of_others = [n for n in asked if "/rank_0/" not in n.path]
    assert len(of_others) <= 3 * (1 + 40 + 4), "headers where the first file has them, and samples"


def test_an_inspection_takes_one_request_for_each_file(line, ranks):
    """Its header."""
    assert command("inspect", ranks[0]).returncode == 0
    assert len(line.noted) <= 5 + 4


@pytest.mark.parametrize("action", [proxy.CUT, proxy.BUSY, proxy.SHORT])
def test_broken_answers_are_asked_for_again(action, line, ranks, tmp_path):
    line.rules = [(r"\.safetensors", action)] * 4
    converted(*ranks)
    assert not line.rules and is_right(tmp_path)


def test_a_listing_that_is_refused_once_is_asked_for_again(line, ranks, tmp_path):
    line.rules = [("list-type=2", proxy.BUSY)]
    converted(*ranks)
    assert not line.rules and is_right(tmp_path)


def test_a_prefix_is_listed_by_one_process(line, ranks, tmp_path):
    converted(*ranks, processes=2)
    assert is_right(tmp_path)
    assert len([n for n in line.noted if "list-type=2" in n.path]) == 1


def test_an_object_that_is_replaced_meanwhile_is_refused(line, ranks, bucket, tmp_path):
    path = tmp_path / "src/rank_2/checkpoint_2.safetensors"
    other = bytearray(path.read_bytes())
    other[-1] ^= 1
    seen = []

    def replace(asked):
        if "rank_2" in asked:
            seen.append(asked)
            if len(seen) == 3:
                bucket.put("src/rank_2/checkpoint_2.safetensors", bytes(other))

    line.on_get = replace
    done = command("transform", *ranks, "--no-fsync", "--memory", "4M")
    assert done.returncode == 4 and "Traceback" not in done.stderr
    assert "rank_2/checkpoint_2.safetensors" in done.stderr and "replaced" in done.stderr
    assert not [*tmp_path.glob("dst/**/*.safetensors")]


def test_headers_of_many_files_are_fetched_at_a_time(line, bucket, tmp_path):
    params = {"w": ((64, 4), "Float32")}
    layout = [{"w": ([64], [0, -1], 0, 0)}]
    src = reference.write_checkpoint(tmp_path / "src", layout, params, kind="safetensors")
    a = reference.write_strategy(tmp_path / "a.ckpt", layout)
    bucket.put_folder(src, "many")
    line.noted.clear()
    line.delay, line.peak = 0.05, 0
    done = command("plan", bucket.at("many"), "--src-strategy", a)
    assert done.returncode == 0, done.stderr
    gets = [n for n in line.noted if n.method == "GET" and ".safetensors" in n.path]
    headers = [n.path for n in gets if not n.start]  # others are samples of content
    assert len({*headers}) == 64 and len(headers) <= 64 + 2, "one request for each"
    assert line.peak >= 8
