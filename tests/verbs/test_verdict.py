"""What a verdict shows of its findings."""

from __future__ import annotations

import json

from rankxform.cli.main import main
from tests.verbs.test_verify_folder import converted, src

__all__ = ["src"]


def documents(capfd, *words):
    code = main(["verify", *map(str, words), "--json"])
    return code, json.loads(capfd.readouterr().out)["differences"]


def test_a_companion_and_a_stray_are_named_as_themselves(src, capfd):
    dst = converted(src, "hf")
    index, stray = dst / "model.safetensors.index.json", dst / "other.safetensors"
    index.write_text(index.read_text() + "\n")
    stray.write_bytes(next(dst.glob("model-00001*")).read_bytes())
    code, differences = documents(capfd, dst)
    assert code == 6
    assert [(one["rule"], one["file"], one["rank"]) for one in differences] == [
        ("nothing_else_is_there", stray.name, None),
        ("companions_are_as_written", index.name, None),
    ]
    assert main(["verify", str(dst)]) == 6
    text = capfd.readouterr().out
    assert "DIFFERENT: 2 files" in text
    assert f"{index.name} " in text and "model-00001" not in text.split("to repair")[0]


def test_two_files_are_two(src, capfd):
    dst = converted(src, "hf")
    for path in dst.glob("model-*.safetensors"):
        path.write_bytes(path.read_bytes()[:-4] + b"\1\2\3\4")
    _, differences = documents(capfd, dst)
    assert len({one["file"] for one in differences}) == len(differences) == 2
    assert main(["verify", str(dst)]) == 6 and "DIFFERENT: 2 files" in capfd.readouterr().out


def test_ranks_are_told_where_files_are_ranks(src, capfd):
    dst = converted(src, "ranks")
    (dst / "rank_1/checkpoint_1.safetensors").unlink()
    extra = dst / "rank_7/checkpoint_7.safetensors"
    extra.parent.mkdir()
    extra.write_bytes((dst / "rank_0/checkpoint_0.safetensors").read_bytes())
    _, differences = documents(capfd, dst)
    assert [(one["rank"], one["file"]) for one in differences] == [
        (1, "rank_1/checkpoint_1.safetensors"), (7, "rank_7/checkpoint_7.safetensors"),
    ]  # fmt: skip
