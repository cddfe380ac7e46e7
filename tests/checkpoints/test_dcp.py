"""Distributed checkpoints of other frameworks: PyTorch's DCP, HyperParallel's, Megatron-Core's.

The samples were saved by the frameworks themselves; others are made here, in boxes at random.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest

import rankxform
from rankxform.errors import RankxformError
from rankxform.request import Request
from rankxform.transport import SerialTeam
from rankxform.verbs.check import compare_replicas
from tests import reference, reference_dcp, reference_megatron
from tests.reference_dcp import read_items, write_dcp, write_dcp_safetensors

DATA = Path(__file__).parents[1] / "data" / "formats"
SAMPLES = sorted(path.parent.name for path in DATA.glob("dcp_*/ckpt"))
SEEDS = int(os.environ.get("RANKXFORM_BOXES", "6"))
"""Checkpoints in random boxes: 200 at night."""


RANDOM_MASTERS = "(?s)optimizer.*do not round"
"""What is said of samples whose values are random."""
pytestmark = pytest.mark.filterwarnings("ignore:optimizer[^/]*do not round")


def whole(folder):
    """Return what files of whole tensors hold: {name: (type, shape, bytes)}."""
    found = {}
    for path in sorted(Path(folder).rglob("*.safetensors")):
        found |= reference.read_safetensors(path)
    return found


def expected(sample):
    """Return what a sample holds, under the names that it is converted to."""
    stored = reference.read_safetensors(DATA / sample / "expected.safetensors")
    return {reference_megatron.local(name): tensor for name, tensor in stored.items()}


def items(folder):
    """Return the whole tensors of a distributed checkpoint as `whole` does, and its other items."""
    tensors, rest = read_items(folder)
    return {n: (d, words.shape, words.tobytes()) for n, (d, words) in tensors.items()}, rest


def transformed(src, dst, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", RANDOM_MASTERS)
        return rankxform.transform(src, dst, fsync=False, **options)


class TestSamples:
    @pytest.mark.sampled
    @pytest.mark.parametrize("form", ["dcp", "hyperparallel"])
    @pytest.mark.parametrize("sample", SAMPLES)
    def test_become_another_framework_s_and_whole_tensors_again(self, tmp_path, sample, form):
        src, dst = DATA / sample / "ckpt", tmp_path / "dst"
        transformed(src, dst, dst_form=form, max_part=300)
        tensors, rest = items(dst)
        assert tensors == expected(sample)
        if form != rankxform.inspect(src)["form"]:
            assert not rest
        elif (src / ".metadata").exists():
            assert rest == read_items(src, tensors=False)[1]
        assert rankxform.verify(src, dst, dst_form=form)
        transformed(dst, tmp_path / "back", dst_form="huggingface")
        assert whole(tmp_path / "back") == expected(sample)

    @pytest.mark.parametrize("sample", ["dcp_torch_mesh2x2", "dcp_hyperparallel", "dcp_mcore"])
    def test_become_ranks_by_a_strategy_and_boxes_again(self, tmp_path, sample):
        full = expected(sample)
        stage = {
            name: ([2], [0] + [-1] * (len(shape) - 1), 0, 0)
            for name, (_, shape, _) in full.items()
            if shape and shape[0] % 2 == 0
        }
        strategy = reference.write_strategy(tmp_path / "b.ckpt", [stage])
        src, ranks = DATA / sample / "ckpt", tmp_path / "ranks"
        transformed(src, ranks, dst_strategy=strategy, unmatched="replicate")
        assert {path.suffix for path in ranks.rglob("rank_*/*")} == {".safetensors"}
        for rank in range(2):
            held = whole(ranks / f"rank_{rank}")
            for name, (dtype, shape, data) in full.items():
                if name.endswith(".step"):  # a state that the strategy does not list is left out
                    continue
                words = np.frombuffer(data, reference.WORD[reference.ITEM[dtype]]).reshape(shape)
                own = np.split(words, 2)[rank] if name in stage else words
                assert held[name] == (dtype, own.shape, own.tobytes()), name
        more = {"dst_strategy": strategy, "unmatched": "replicate"}
        transformed(ranks, tmp_path / "boxes", dst_form="dcp", **more)
        tensors, _ = items(tmp_path / "boxes")
        assert tensors == {n: one for n, one in full.items() if not n.endswith(".step")}

    def test_a_checkpoint_of_2026_03(self, tmp_path):
        src = tmp_path / "src"
        shutil.copytree(DATA / "hyper_parallel_2026_03", src)
        transformed(src, tmp_path / "dst", dst_form="huggingface")
        held = [reference.read_safetensors(path) for path in sorted(src.glob("*.safetensors"))]
        assert {n for some in held for n in some} == {*whole(tmp_path / "dst")}
        path = next(src.glob("*.safetensors"))
        path.write_bytes(b"PK\3\4" + bytes(path.stat().st_size))
        with pytest.raises(RankxformError, match=r"is a PyTorch pickle \(torch.save\)"):
            transformed(src, tmp_path / "other", dst_form="huggingface")


TYPES = sorted(reference_dcp.TORCH)


def model(seed):
    rng = random.Random(seed)
    found = {}
    for number in range(rng.randint(3, 12)):
        dtype = rng.choice(TYPES)
        shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(0, 3)))
        words = reference.full_tensor(f"{seed} {number}", shape, dtype)
        found[f"layers.{number}.{dtype}"] = dtype, words  # a kind has one type in all files
    return found


class TestBoxesAtRandom:
    @pytest.mark.parametrize("seed", range(SEEDS))
    def test_of_dcp(self, tmp_path, seed):
        tensors, data = model(seed), {"lr": reference_dcp.saved(0.1), "x": reference_dcp.saved("")}
        src = write_dcp(tmp_path / "src", tensors, ranks=1 + seed % 4, seed=seed, items=data)
        want = {n: (d, words.shape, words.tobytes()) for n, (d, words) in tensors.items()}
        assert items(src)[0] == want
        transformed(src, tmp_path / "hf", dst_form="huggingface", check_crc=True)
        assert whole(tmp_path / "hf") == want
        transformed(src, tmp_path / "dcp", dst_form="dcp", max_part=1000)
        assert items(tmp_path / "dcp") == (want, data)
        transformed(tmp_path / "dcp", tmp_path / "hyper", dst_form="hyperparallel")
        assert items(tmp_path / "hyper")[0] == want
        assert rankxform.verify(src, tmp_path / "hyper", dst_form="hyperparallel")

    @pytest.mark.parametrize("seed", range(SEEDS))
    def test_of_safetensors(self, tmp_path, seed):
        tensors = model(seed)
        src = write_dcp_safetensors(tmp_path / "src", tensors, ranks=1 + seed % 4, seed=seed)
        transformed(src, tmp_path / "dcp", dst_form="dcp")
        assert items(tmp_path / "dcp")[0] == {
            n: (d, words.shape, words.tobytes()) for n, (d, words) in tensors.items()
        }


WORDS = np.arange(24, dtype="<u4").reshape(6, 4)


class TestRefused:
    """One short message each, and nothing is written."""

    def refused(self, src, tmp_path, text, **options):
        with pytest.raises(RankxformError, match=text) as caught:
            transformed(src, tmp_path / "dst", dst_form="huggingface", **options)
        assert len(str(caught.value)) < 500
        assert not [*(tmp_path / "dst").rglob("*.safetensors")]

    @pytest.fixture
    def src(self, tmp_path):
        boxes = {"w": [((0, 0), (3, 4)), ((3, 0), (6, 4))]}
        return Path(write_dcp(tmp_path / "src", {"w": ("Float32", WORDS)}, boxes=boxes))

    @pytest.mark.parametrize("end", [0, 1, 100, -1])
    def test_a_torn_table(self, src, tmp_path, end):
        path = src / ".metadata"
        path.write_bytes(path.read_bytes()[:end])
        self.refused(src, tmp_path, r"\.metadata is torn")

    def test_a_table_that_is_not_there(self, src, tmp_path):
        (src / ".metadata").rename(src / ".metadata.tmp")
        self.refused(src, tmp_path, "of a save that was interrupted")

    @pytest.mark.parametrize(
        ("boxes", "text"),
        [
            ([((0, 0), (4, 4)), ((2, 0), (6, 4))], r"w: boxes at \(0, 0\) and \(2, 0\) overlap"),
            ([((0, 0), (2, 4)), ((4, 0), (6, 4))], "w: boxes cover 16 of 24 elements"),
        ],
    )
    def test_boxes_that_do_not_tile(self, tmp_path, boxes, text):
        tensors = {"w": ("Float32", WORDS), "good": ("Float32", WORDS + 1)}
        src = write_dcp(tmp_path / "src", tensors, boxes={"w": boxes})
        self.refused(src, tmp_path, text)
        with pytest.raises(RankxformError) as refusal:
            transformed(src, tmp_path / "dst", dst_form="huggingface")
        tries = refusal.value.parts.tries
        assert "copy it again" not in tries and tries[0] == "--exclude '^w$' leaves it out"
        transformed(src, tmp_path / "dst", dst_form="huggingface", exclude=("^w$",))
        made = whole(tmp_path / "dst")
        assert made == {"good": ("Float32", WORDS.shape, (WORDS + 1).tobytes())}

    def test_a_box_that_is_nowhere_stored(self, tmp_path):
        def change(table):
            places = table["storage_data"]
            del places[next(iter(places))]

        boxes = {"w": [((0, 0), (3, 4)), ((3, 0), (6, 4))]}
        src = write_dcp(
            tmp_path / "src", {"w": ("Float32", WORDS)}, boxes=boxes, change=change, ranks=1
        )
        self.refused(src, tmp_path, r"w: box at \(0, 0\) is described and nowhere stored")

    def test_bytes_that_are_not_those_of_the_checksum(self, src, tmp_path):
        path = sorted(src.glob("*.distcp"))[-1]
        data = bytearray(path.read_bytes())
        at = data.find(struct.pack("<I", 23)) if b"\x17\0\0\0" in data else 0
        assert at > 0
        data[at] ^= 1
        path.write_bytes(data)
        self.refused(src, tmp_path, r"w at \(3, 0\): CRC-32 is \w+, the file says", check_crc=True)

    def test_what_is_no_tensor_and_is_damaged(self, tmp_path):
        shutil.copytree(DATA / "dcp_torch_fsdp4" / "ckpt", tmp_path / "src")
        for path in (tmp_path / "src").glob("*.distcp"):
            path.write_bytes(path.read_bytes().replace(b"\0test", b"\0rest"))
        text = r"/data.pkl: CRC-32 is \w+, the file"
        self.refused(tmp_path / "src", tmp_path, text, check_crc=True)
        (row,) = (
            r for r in rankxform.check(tmp_path / "src", full=True).rows if r.state == "wrong"
        )
        assert row.check == "checksums" and "/data.pkl" in row.text

    def test_the_smallest_members_of_items_are_compared_too(self, tmp_path):
        """Of an item in the middle of a file, too large for samples to have all of it."""
        shapes = dict.fromkeys("abc", ((400, 300), "Float32"))
        src = reference.write_checkpoint(tmp_path / "src", None, shapes)
        transformed(src, tmp_path / "dst", dst_form="dcp", verify=True)
        (path,) = (tmp_path / "dst").glob("*.distcp")
        data = path.read_bytes()
        for member, words in (("version", b"/version3\n"), ("data.pkl", b"cpu")):
            at = data.find(words, len(data) // 2) + len(words) - 2
            path.write_bytes(data[:at] + b"4" + data[at + 1 :])
            for verdict in (
                rankxform.verify(tmp_path / "dst"),
                rankxform.verify(src, tmp_path / "dst", None, None),
                rankxform.check(tmp_path / "dst", full=True),
            ):
                assert verdict.same is False, member
                assert f"/{member}: CRC-32" in str(verdict.as_dict())

    @pytest.mark.parametrize(
        ("member", "data", "text"),
        [
            ("byteorder", b"big", "w: big-endian item"),
            ("data.pkl", b"\x80\x02cposix\nsystem\nX\x02\0\0\0ls\x85R.", "names posix.system"),
        ],
    )
    def test_what_an_item_says_of_itself(self, tmp_path, member, data, text, monkeypatch):
        own = reference_dcp.item

        def changed(words, dtype, stand):
            return own(words, dtype, stand, lambda members: members.update({member: data}))

        monkeypatch.setattr(reference_dcp, "item", changed)
        src = write_dcp(tmp_path / "src", {"w": ("Float32", WORDS)})
        self.refused(src, tmp_path, text)

    def test_strides_that_are_not_row_by_row(self, tmp_path, monkeypatch):
        own = reference_dcp.item

        def changed(words, dtype, stand):
            return own(
                words, dtype, stand,
                lambda members: members.update(
                    {"data.pkl": members["data.pkl"].replace(b"K\x04K\x01", b"K\x01K\x06")}
                ),
            )  # fmt: skip

        monkeypatch.setattr(reference_dcp, "item", changed)
        boxes = {"w": [((0, 0), (6, 4))]}
        src = write_dcp(tmp_path / "src", {"w": ("Float32", WORDS)}, boxes=boxes)
        self.refused(src, tmp_path, r"w: stored with strides \(1, 6\), not row by row")

    def test_a_table_that_would_execute_something(self, src, tmp_path):
        ran = tmp_path / "ran"

        class Evil:
            def __reduce__(self):
                return os.system, (f"touch {ran}",)

        (src / ".metadata").write_bytes(pickle.dumps(Evil()))
        self.refused(src, tmp_path, r"\.metadata names posix\.system")
        assert not ran.exists()

    def test_transforms(self, tmp_path):
        def change(table):
            for info in table["storage_data"].values():
                info.transform_descriptors = ["zstd"]

        src = write_dcp(tmp_path / "src", {"w": ("Float32", WORDS)}, change=change)
        self.refused(src, tmp_path, r"w: stored through transforms \['zstd'\]")

    def test_two_boxes_under_one_key(self, tmp_path):
        shutil.copytree(DATA / "dcp_torch_safetensors" / "ckpt", tmp_path / "src")
        (tmp_path / "src").chmod(0o755)
        path = tmp_path / "src" / ".metadata"
        path.chmod(0o644)
        data = path.read_bytes().replace(b"__1_0.distcp", b"__0_0.distcp")
        data = data.replace(b"M\xda\x09", b"M\0\0")  # the safetensors file begins at byte 0
        path.write_bytes(data)
        self.refused(tmp_path / "src", tmp_path, "two boxes of a tensor in one SAFETENSORS file")

    def test_a_gap_among_ranks_tables(self, tmp_path):
        shutil.copytree(DATA / "dcp_hyperparallel_local" / "ckpt", tmp_path / "src")
        (tmp_path / "src" / "0.metadata").unlink()
        self.refused(tmp_path / "src", tmp_path, "tables of ranks 1, and none of rank 0")

    @pytest.mark.parametrize(
        ("key", "value"), [("sharded_backend", "zarr"), ("sharded_backend_version", 2)]
    )
    def test_another_backend_of_megatrons(self, tmp_path, key, value):
        import json

        shutil.copytree(DATA / "dcp_mcore" / "ckpt", tmp_path / "src")
        path = next((tmp_path / "src").rglob("metadata.json"))
        document = json.loads(path.read_text())
        path.write_text(json.dumps({**document, key: value}))
        self.refused(tmp_path / "src", tmp_path, f"{key} is {value!r}")


def trained(layers=2, hidden=8, seed=0):
    """Return a small model with Adam's states, under MindSpore's names: {name: (type, words)}."""
    rng = np.random.default_rng(seed)
    shapes = {"embed.weight": (16, hidden), "head.weight": (16, hidden)}
    for n in range(layers):
        shapes |= {f"layers.{n}.w": (hidden, 4 * hidden), f"layers.{n}.norm": (hidden,)}
    found = {"global_step": ("Int32", np.array([7], "<i4").view("<u4"))}
    for name, shape in shapes.items():
        for state in ("", "adam_m.", "adam_v."):
            found[state + name] = "Float32", rng.random(shape, np.float32).view("<u4")
    return found


class TestNames:
    @pytest.mark.parametrize("names", ["torch", "hyperparallel"])
    def test_moments_and_their_step_go_and_come_back(self, tmp_path, names):
        model = trained()
        stage = {
            n: ([2, 2], [0, -1] if w.ndim > 1 else [-1], 0, 0)
            for n, (_, w) in model.items()
            if n != "global_step"
        }
        params = {n: (w.shape, d) for n, (d, w) in model.items()}
        src = reference.write_checkpoint(
            tmp_path / "src", [stage], {n: params[n] for n in stage},
            {"global_step": model["global_step"]}, "safetensors",
            make=lambda name, shape, dtype: model[name][1],
        )  # fmt: skip
        strategy = reference.write_strategy(tmp_path / "a.ckpt", [stage])
        form = "dcp" if names == "torch" else "hyperparallel"
        transformed(src, tmp_path / "dst", src_strategy=strategy, dst_form=form, names=names)
        told = {"src_strategy": strategy, "dst_form": form, "names": names}
        assert rankxform.verify(src, tmp_path / "dst", **told)
        (table,) = (tmp_path / "dst").rglob(".metadata")
        found, _ = items(table.parent)
        transformed(src, tmp_path / "cut", dst_strategy=strategy, unmatched="replicate", **told)
        (cut,) = (tmp_path / "cut").rglob(".metadata")
        assert items(cut.parent)[0] == found and len([*cut.parent.iterdir()]) == 4
        want = {}
        for name, (dtype, words) in model.items():
            if name == "global_step":
                continue
            weight = name.removeprefix("adam_m.").removeprefix("adam_v.")
            own = {"adam_m": f"optimizer.state.{weight}.exp_avg",
                   "adam_v": f"optimizer.state.{weight}.exp_avg_sq"}  # fmt: skip
            key = own.get(name.partition(".")[0], f"model.{name}")
            want[key] = dtype, words.shape, words.tobytes()
            step = np.array(7, "<f4")
            want[f"optimizer.state.{weight}.step"] = "Float32", (), step.tobytes()
        assert found == want
        transformed(tmp_path / "dst", tmp_path / "back", dst_form="huggingface", names="mindspore")
        assert whole(tmp_path / "back") == {
            n: (d, w.shape, w.tobytes()) for n, (d, w) in model.items()
        }

    def test_weights_only_keeps_the_model_alone(self, tmp_path):
        src = DATA / "dcp_torch_fsdp4" / "ckpt"
        transformed(src, tmp_path / "dst", dst_form="huggingface", weights_only=True)
        assert {*whole(tmp_path / "dst")} == {
            n for n in expected("dcp_torch_fsdp4") if n.startswith("model.")
        }

    def test_masters_of_hyperparallel(self, tmp_path):
        src, full = DATA / "dcp_hyperparallel" / "ckpt", expected("dcp_hyperparallel")
        transformed(src, tmp_path / "dst", dst_form="huggingface", masters=True, weights_only=True)
        prefix = "optimizer._mixed_precision_optimizer.fp32_from_fp16_params."
        masters = {n.removeprefix(prefix): v for n, v in full.items() if n.startswith(prefix)}
        assert masters
        found = whole(tmp_path / "dst")
        for name, one in masters.items():
            assert found[f"model.{name}"] == one

    def test_steps_that_differ_are_not_one(self, tmp_path):
        model = {"model.a": ("Float32", WORDS), "model.b": ("Float32", WORDS)}
        for name, step in (("a", 7), ("b", 8)):
            model[f"optimizer.state.{name}.exp_avg"] = "Float32", WORDS
            model[f"optimizer.state.{name}.step"] = "Float32", np.array(step, "<f4").view("<u4")
        src = write_dcp(tmp_path / "src", model)
        with pytest.raises(RankxformError, match="--accept step"):
            transformed(src, tmp_path / "dst", dst_form="huggingface", names="mindspore")


class TestMegatron:
    @pytest.fixture
    def src(self, tmp_path):
        src = tmp_path / "root" / "iter_0000007"
        stacked = np.arange(48, dtype="<u4").reshape(2, 6, 4)
        tensors = {
            "decoder.layers.mlp.linear_fc2.weight": ("Float32", stacked),
            "decoder.layers.0.mlp.linear_fc1.weight_w": ("Float32", WORDS),
            "decoder.layers.0.mlp.linear_fc1.weight_v": ("Float32", WORDS + 1),
            "output_layer.weight": ("Float32", WORDS),
        }
        if "raw" in tmp_path.name:
            tensors["optimizer.distributed.dp_group_idx_0.gbuf"] = "Float32", WORDS
        write_dcp(src, tensors)
        (src / "metadata.json").write_text(
            '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
        )
        (src.parent / "latest_checkpointed_iteration.txt").write_text("7")
        return src.parent

    def check(self, folder):
        found = whole(folder)
        stacked = np.arange(48, dtype="<u4").reshape(2, 6, 4)
        for layer in range(2):
            name = f"decoder.layers.{layer}.mlp.linear_fc2.weight"
            assert found.pop(name) == ("Float32", (6, 4), stacked[layer].tobytes())
        joined = np.concatenate([WORDS, WORDS + 1])
        name = "decoder.layers.0.mlp.linear_fc1.weight"
        assert found.pop(name) == ("Float32", (12, 4), joined.tobytes())
        assert [*found] == ["output_layer.weight"]

    def test_layers_are_taken_apart_and_halves_joined(self, src, tmp_path):
        assert rankxform.inspect(src)["form"] == "torch_dist"
        transformed(src, tmp_path / "dst", dst_form="huggingface")
        self.check(tmp_path / "dst")
        transformed(src / "iter_0000007", tmp_path / "c2", dst_form="checkpoint2")
        assert (tmp_path / "c2" / "iteration_00000007").is_dir(), "the step goes along"

    def test_raw_buffers_are_left_out_or_refused(self, src, tmp_path):
        with pytest.raises(RankxformError, match="flat buffer.*--weights-only"):
            transformed(src, tmp_path / "dst", dst_form="huggingface")
        transformed(src, tmp_path / "dst", dst_form="huggingface", weights_only=True)
        self.check(tmp_path / "dst")


class TestFoundByReview:
    def test_other_frameworks_names_for_each_others(self, tmp_path):
        src, full = DATA / "dcp_torch_fsdp4" / "ckpt", expected("dcp_torch_fsdp4")
        transformed(src, tmp_path / "hyper", dst_form="hyperparallel", names="hyperparallel")
        (table,) = (tmp_path / "hyper").rglob(".metadata")
        assert items(table.parent)[0] == full
        transformed(src, tmp_path / "dcp", dst_form="dcp", names="torch")
        assert items(tmp_path / "dcp") == (full, read_items(src, tensors=False)[1])

    def test_checksums_of_stacked_layers(self, tmp_path):
        src = tmp_path / "src"
        shutil.copytree(DATA / "dcp_mcore" / "ckpt", src)
        name = "decoder.layers.0.input_layernorm.weight"
        data = expected("dcp_mcore")[name][2]
        for path in src.rglob("*.distcp"):
            content = path.read_bytes()
            if data in content:
                path.write_bytes(content.replace(data, bytes([data[0] ^ 1, *data[1:]]), 1))
                break
        with pytest.raises(RankxformError, match="CRC-32"):
            transformed(src, tmp_path / "dst", dst_form="huggingface", check_crc=True)

    def test_models_whose_keys_stand_bare(self, tmp_path):
        weights = {"model.layers.0.w": ("Float32", WORDS), "lm_head.weight": ("Float32", WORDS)}
        states = {f"optimizer.state.{n}.exp_avg": ("Float32", WORDS + 1) for n in weights}
        src = write_dcp(tmp_path / "src", {**weights, **states})
        transformed(src, tmp_path / "w", dst_form="huggingface", weights_only=True)
        assert {*whole(tmp_path / "w")} == {*weights}
        transformed(src, tmp_path / "all", dst_form="huggingface", names="mindspore")
        assert {*whole(tmp_path / "all")} == {*weights, *(f"adam_m.{n}" for n in weights)}

    def test_what_is_no_tensor_may_be_pickled_tensors(self, tmp_path):
        with reference_dcp.Stand() as stand:
            data = reference_dcp.item(WORDS, "Float32", stand)
        src = write_dcp(tmp_path / "src", {"w": ("Float32", WORDS)}, items={"extra": data})
        transformed(src, tmp_path / "dst", dst_form="dcp")
        assert items(tmp_path / "dst")[1] == {"extra": data}

    def test_replicas_in_ranks_own_tables(self, tmp_path):
        src = tmp_path / "src"
        shutil.copytree(DATA / "dcp_hyperparallel_local" / "ckpt", src)
        assert compare_replicas(Request(str(src), None), SerialTeam()).same
        path = src / "_rank1_.safetensors"
        entries = reference.read_safetensors(path)
        name = "model.model.norm.weight"
        data = entries[name][2]
        path.write_bytes(path.read_bytes().replace(data, bytes([data[0] ^ 1, *data[1:]])))
        assert compare_replicas(Request(str(src), None), SerialTeam()).same is False

    def test_boxes_in_files_of_any_name(self, tmp_path):
        src = tmp_path / "src"
        shutil.copytree(DATA / "dcp_hf_sharded" / "ckpt", src)
        for number, path in enumerate(sorted(src.iterdir())):
            path.rename(src / f"model-{number}.safetensors")
        transformed(src, tmp_path / "dst", dst_form="huggingface")
        assert whole(tmp_path / "dst") == expected("dcp_hf_sharded")

    def test_a_tracker_that_lies(self, tmp_path):
        for step in (100, 200):
            write = reference_dcp.write_hyperparallel
            write(tmp_path / f"global_step_{step}", {"w": ("Float32", WORDS)}, seed=step)
        for text in ("100", "300", "nothing"):
            (tmp_path / "latest_checkpoint_iteration.txt").write_text(text)
            found = rankxform.inspect(tmp_path)
            assert any("complete are 100, 200" in one for one in found["warnings"]), text
            assert found["step"] == ("100" if text == "100" else "200")


class TestVerifyOfWhatIsOnlyRead:
    """A destination that another tool sharded is no whole tensors that differ."""

    @pytest.mark.parametrize(
        ("sample", "text"),
        [
            ("dcp_torch_mesh2x2/ckpt", "no --dst-strategy says how"),
            ("megatron/llama/legacy", "as a source alone"),
        ],
    )
    def test_is_refused(self, sample, text, tmp_path):
        src = DATA / sample
        transformed(src, tmp_path / "whole", dst_form="huggingface")
        with pytest.raises(rankxform.UsageError, match=text):
            rankxform.verify(tmp_path / "whole", src)
