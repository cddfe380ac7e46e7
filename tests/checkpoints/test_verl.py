"""FSDP's files of ranks, as verl saves them: DTensors, and tensors that are none."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import rankxform
from rankxform.errors import RankxformError
from tests import reference
from tests import reference_torch as torch
from tests.checkpoints import DATA
from tests.checkpoints.test_dcp import transformed, whole

JOBS = "fsdp1", "fsdp2", "hsdp", "tp", "fsdp_tp", "old_mesh"
WHOLE = np.arange(24, dtype="<f4").reshape(6, 4)


def write(folder, parts, name="w"):
    """Write a plain tensor of each rank."""
    folder.mkdir()
    for rank, part in enumerate(parts):
        path = folder / f"model_world_size_{len(parts)}_rank_{rank}.pt"
        torch.save(path, {name: ("Float32", np.ascontiguousarray(part))})
    return folder


@pytest.fixture
def sample(tmp_path):
    return shutil.copytree(DATA / "verl/fsdp2/ckpt", tmp_path / "src")


@pytest.mark.parametrize("job", JOBS)
def test_what_torch_saved_is_whole_again(job, tmp_path):
    src = DATA / "verl" / job / "ckpt"
    transformed(src, tmp_path / "dst", dst_form="huggingface")
    expected = reference.read_safetensors(DATA / "verl" / job / "expected.safetensors")
    assert whole(tmp_path / "dst") == expected
    assert rankxform.verify(src, tmp_path / "dst").same


class TestPlainTensors:
    """Nothing in the file says how they make a whole; verl's own merger joins rows."""

    def test_of_equal_bytes_are_replicas(self, tmp_path):
        found = rankxform.load(write(tmp_path / "src", [WHOLE, WHOLE]))
        assert found["w"].tobytes() == WHOLE.tobytes()

    @pytest.mark.parametrize("at", [3, 4])
    def test_of_other_bytes_are_rows(self, at, tmp_path):
        found = rankxform.load(write(tmp_path / "src", [WHOLE[:at], WHOLE[at:]]))
        assert found["w"].tobytes() == WHOLE.tobytes()

    def test_of_one_rank_are_whole(self, tmp_path):
        assert rankxform.load(write(tmp_path / "src", [WHOLE]))["w"].shape == (6, 4)

    def test_of_other_columns_are_refused(self, tmp_path):
        src = write(tmp_path / "src", [WHOLE, WHOLE[:, :3]])
        with pytest.raises(RankxformError, match="'w' is no DTensor"):
            rankxform.load(src)

    def test_that_only_some_ranks_have_are_refused(self, tmp_path):
        src = write(tmp_path / "src", [WHOLE, WHOLE])
        torch.save(src / "model_world_size_2_rank_1.pt", {"v": ("Float32", WHOLE)})
        with pytest.raises(RankxformError, match="is not there, on some ranks alone"):
            rankxform.load(src)


def test_a_rank_that_lacks_is_named(sample):
    (sample / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(RankxformError, match=r"rank_1\.pt.*is missing; of 2 ranks 0 are there"):
        rankxform.load(sample)


def test_files_of_two_jobs_are_refused(sample):
    shutil.copy(sample / "model_world_size_2_rank_1.pt", sample / "model_world_size_3_rank_2.pt")
    with pytest.raises(RankxformError, match="files of jobs of 2 and 3 ranks"):
        rankxform.load(sample)


def test_files_of_two_models_are_refused(sample, tmp_path):
    sizes, placements = (2,), [("Shard", 0)]
    part = torch.dtensor(torch.tensor("w", "Float32", (2, 4)), (4, 4), sizes, (1,), placements)
    stored = {"lm_head.weight": part, "model.embed_tokens.weight": part, "model.norm.weight": part}
    path = sample / "model_world_size_2_rank_1.pt"
    torch.archive(path, stored, {"w": bytes(32), "ranks": bytes(8)})
    with pytest.raises(RankxformError, match="not of one checkpoint"):
        rankxform.load(sample)


def test_the_optimizers_states_are_said_not_to_be_read(sample):
    shutil.copy(sample / "model_world_size_2_rank_1.pt", sample / "optim_world_size_2_rank_1.pt")
    assert any("optim_world_size_" in text for text in rankxform.inspect(sample)["notices"])
