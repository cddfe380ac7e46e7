"""Checkpoints that are read from a bucket, by the command in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from rankxform.errors import CheckpointError, StorageError
from rankxform.storage.objects.access import _bucket
from rankxform.storage.store import storage_of, store_at
from tests import reference, reference_forms
from tests.checkpoints import DATA
from tests.checkpoints.test_dcp import whole
from tests.conformance.test_stores import StoreTests
from tests.storage.objects import servers

FORMS = {
    "unified": "unified/out", "checkpoint2": "checkpoint2", "dcp": "dcp_torch_fsdp4/ckpt",
    "torch_dist": "megatron/llama/torch_dist", "megatron": "megatron/llama/legacy",
    "verl": "verl/fsdp2/ckpt", "meta": "meta/llama3", "huggingface": "hf_qwen3/hf",
}  # fmt: skip


def command(*words, environ=(), processes=1):
    launch = ["-n", str(processes)] if processes > 1 else []
    line = [sys.executable, "-m", "rankxform", words[0], *launch, *map(str, words[1:])]
    return subprocess.run(
        line, env={**os.environ, **dict(environ)}, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip


def converted(src, dst, *options, **how):
    done = command("transform", src, dst, "--no-fsync", *options, **how)
    assert done.returncode == 0, done.stderr
    return done


class TestObjects(StoreTests):
    """The laws of a kind of storage."""

    @pytest.fixture(autouse=True)
    def in_bucket(self, bucket):
        _bucket.cache_clear()
        self.bucket = bucket

    def put(self, folder, name, content):
        self.bucket.put(name, content)

    def place(self, folder):
        return self.bucket.at()

    def test_one_object_is_a_file(self, store):
        listing = store_at(self.bucket.at("index.json")).list("*")
        assert listing.kind == "file"
        assert store_at(self.bucket.at("index.json")).read("") == b"{}"

    def test_folders_below_are_searched(self, store):
        assert sorted(store.list("**/a.ckpt").files) == [
            f"rank_{n}/a.ckpt" for n in ("0", "1", "x")
        ]

    def test_what_is_announced_is_read_in_order(self, store):
        data = np.arange(5 << 20, dtype="<u4").tobytes()
        self.bucket.put("big", data)
        address = self.bucket.at("big")
        ranges = storage_of(address).ranges()
        asked = [(start, 9 << 20) for start in range(0, 20 << 20, 5 << 20)][:3]
        for start, nbytes in asked:
            ranges.announce(address, start, nbytes)
        for start, nbytes in asked[1:]:
            room = bytearray(nbytes)
            ranges.read(address, start, memoryview(room))
            assert room == data[start : start + nbytes]
        ranges.close()

    def test_an_object_that_is_replaced_is_not_mixed(self, store):
        address = self.bucket.at("rank_1/a.ckpt")
        ranges = storage_of(address).ranges()
        ranges.version(address)
        place = store_at(self.bucket.at())
        assert place.has("rank_1/a.ckpt")
        self.bucket.put("rank_1/a.ckpt", b"SECOND")
        with pytest.raises(StorageError, match="was replaced while it was read"):
            ranges.read(address, 0, memoryview(bytearray(6)))
        with pytest.raises(StorageError, match="was replaced while it was read"):
            place.read("rank_1/a.ckpt")
        ranges.close()

    def test_a_missing_object_is_no_version(self, store):
        address = self.bucket.at("nowhere")
        ranges = storage_of(address).ranges()
        with pytest.raises((CheckpointError, StorageError), match="not there"):
            ranges.read(address, 0, memoryview(bytearray(1)))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_as_from_a_disk(form, bucket, tmp_path):
    src = DATA / FORMS[form]
    bucket.put_folder(src, "src")
    options = ["--dst-form", "huggingface"]
    converted(src, tmp_path / "a", *options)
    converted(bucket.at("src"), tmp_path / "b", *options)
    assert whole(tmp_path / "a") == whole(tmp_path / "b") != {}


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_ranks_are_read_by_several_processes(processes, bucket, tmp_path):
    params = {f"{n}.w": ((512, 512), "Float32") for n in range(4)}
    layout = [{name: ([4], [0, -1], 0, 0) for name in params}]
    src = reference.write_checkpoint(tmp_path / "src", layout, params, kind="safetensors")
    a = reference.write_strategy(tmp_path / "a.ckpt", layout)
    b = reference.write_strategy(tmp_path / "b.ckpt", [{n: ([2], [-1, 0], 0, 0) for n in params}])
    bucket.put_folder(src, "src")
    strategies = ["--src-strategy", a, "--dst-strategy", b]
    converted(src, tmp_path / "x", *strategies)
    converted(bucket.at("src"), tmp_path / "y", *strategies, "--verify", processes=processes)
    for path in sorted((tmp_path / "x").rglob("*.safetensors")):
        assert (tmp_path / "y" / path.relative_to(tmp_path / "x")).read_bytes() == path.read_bytes()


@pytest.fixture
def published(bucket, tmp_path):
    """A small model in the bucket."""
    words = np.arange(12, dtype="<u4").reshape(3, 4) + 0x3F800000
    tensors = {"model.w": ("Float32", words)}
    bucket.put_folder(reference_forms.write_huggingface(tmp_path / "hf", tensors, 1), "hf")
    return bucket.at("hf")


def refused(*words, environ=()):
    done = command(*words, environ=environ)
    assert done.returncode and "Traceback" not in done.stderr, done.stderr
    assert servers.SECRET not in done.stderr + done.stdout
    first, *rest = done.stderr.strip().splitlines()
    assert any(line.startswith("  try ") for line in rest), done.stderr
    return first


class TestRefusals:
    def test_a_wrong_secret(self, published):
        first = refused("inspect", published, environ={"AWS_SECRET_ACCESS_KEY": "wrong"})
        assert first.endswith(f"{published}: cannot list it: SignatureDoesNotMatch")

    def test_a_wrong_key(self, published):
        assert "InvalidAccessKeyId" in refused(
            "inspect", published, environ={"AWS_ACCESS_KEY_ID": "another"}
        )

    def test_a_missing_bucket(self, published):
        assert "NoSuchBucket" in refused("inspect", "s3://nowhere/hf")

    def test_an_endpoint_where_nothing_answers(self, published):
        text = refused("inspect", published, environ={"AWS_ENDPOINT_URL": "http://127.0.0.1:9"})
        assert text.endswith("nothing answers there")

    def test_no_credentials(self, published, monkeypatch):
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        assert "there are no credentials for it" in refused("inspect", published)

    def test_a_profile_that_is_not_there(self, published):
        assert "AWS_PROFILE is mine" in refused(
            "inspect", published, environ={"AWS_PROFILE": "mine"}
        )

    def test_a_prefix_where_nothing_is(self, bucket, tmp_path):
        done = command("transform", bucket.at("nothing"), tmp_path / "dst")
        assert "no such checkpoint file or folder" in done.stderr and done.returncode == 2

    @pytest.mark.parametrize(
        "address", ["s3://", "s3:///x", "s3://models/a//b", "s3://models/../b"]
    )
    def test_addresses_that_are_none(self, published, address):
        assert "no address of a bucket" in refused("inspect", address)


def test_a_profile_has_keys_and_an_endpoint(published, bucket, tmp_path, monkeypatch):
    aws = tmp_path / "home/.aws"
    aws.mkdir(parents=True)
    endpoint = f"http://127.0.0.1:{bucket.port}"
    (aws / "config").write_text(f"[profile mine]\nregion = us-east-1\nendpoint_url = {endpoint}\n")
    keys = f"aws_access_key_id = {servers.KEY}\naws_secret_access_key = {servers.SECRET}\n"
    (aws / "credentials").write_text(f"[mine]\n{keys}")
    for name in servers.environment(0):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert command("inspect", published).returncode == 0
    (aws / "credentials").write_text("aws_access_key_id\n")
    assert "cannot be read" in refused("inspect", published)


def test_what_moreover_says_who_one_is(published, bucket, monkeypatch):
    """MindFormers' and ModelArts' names."""
    for name, value in (("ACCESS_KEY_ID", servers.KEY), ("SECRET_ACCESS_KEY", servers.SECRET)):
        monkeypatch.delenv(f"AWS_{name}")
        monkeypatch.setenv(f"S3_{name}", value)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("S3_ENDPOINT", f"http://127.0.0.1:{bucket.port}")
    assert command("inspect", published).returncode == 0


def test_a_bucket_of_obs_has_a_host_of_its_own():
    from rankxform.storage.objects.access import Bucket

    keys = {"OBS_ACCESS_KEY_ID": "a", "OBS_SECRET_ACCESS_KEY": "b"}
    for said in (
        {"OBS_ENDPOINT": "obs.cn-north-4.myhuaweicloud.com"},
        {"AWS_ENDPOINT_URL": "https://mine.obs.cn-north-4.myhuaweicloud.com"},
        {"OBS_REGION": "cn-north-4"},
    ):
        options = Bucket("obs", "mine", keys | said)._options
        assert options["endpoint"] == "https://mine.obs.cn-north-4.myhuaweicloud.com"
        assert options["region"] == "cn-north-4" and options["virtual_hosted_style_request"]


def test_secrets_are_nowhere(published, bucket, tmp_path):
    """Neither in what is printed, nor in any file of the destination."""
    done = converted(published, tmp_path / "dst", "--dst-form", "huggingface", "-v", "--json")
    assert json.loads(done.stdout)
    texts = [done.stdout, done.stderr]
    texts += [
        path.read_text(errors="replace") for path in tmp_path.glob("dst/**/*") if path.is_file()
    ]
    assert texts[2:] and not any(servers.SECRET in text or servers.KEY in text for text in texts)


def test_a_model_s_small_files_come_along_from_a_bucket(bucket, tmp_path):
    sample = DATA / "hf_qwen3/hf"
    bucket.put_folder(sample, "hf")
    options = ["--dst-form", "huggingface", "--dtype", "bf16"]
    converted(sample, tmp_path / "a", *options)
    converted(bucket.at("hf"), tmp_path / "b", *options)
    names = {path.name for path in tmp_path.glob("a/*")}
    assert "config.json" in names and names == {path.name for path in tmp_path.glob("b/*")}
    for name in names - {"rankxform.json"}:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    named = ["--map", "qwen3", "--config", bucket.at("hf/config.json")]
    ranks = ["--dst-strategy", "shard:linear_proj=1@2", "--unmatched", "replicate"]
    converted(bucket.at("hf"), tmp_path / "ranks", *named, *ranks)
    named = ["--map", "qwen3", "--like", bucket.at("hf"), "--src-strategy", ranks[1]]
    converted(tmp_path / "ranks", tmp_path / "again", *named, "--dst-form", "huggingface")
    assert whole(tmp_path / "again") == whole(sample)


def test_strategies_and_maps_lie_in_a_bucket_too(bucket, tmp_path):
    bucket.put_folder(DATA / "unified/src", "src")
    bucket.put("strategy.ckpt", (DATA / "unified/strategy.ckpt").read_bytes())
    words = ["--src-strategy", DATA / "unified/strategy.ckpt"]
    converted(DATA / "unified/src", tmp_path / "a", *words)
    converted(bucket.at("src"), tmp_path / "b", "--src-strategy", bucket.at("strategy.ckpt"))
    names = sorted(path.relative_to(tmp_path / "a") for path in tmp_path.glob("a/rank_*/*"))
    assert names and all(
        (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        for name in names
    )
    assert "no such file or folder" in command(
        "transform", bucket.at("src"), tmp_path / "c", "--src-strategy", bucket.at("none.ckpt")
    ).stderr  # fmt: skip


def test_one_object_is_inspected(published):
    done = command("inspect", f"{published}/model.safetensors")
    assert done.returncode == 0 and "model.w" in done.stdout
    assert "no such file or folder" in command("inspect", f"{published}/nowhere").stderr


class TestOptions:
    """`--endpoint-url` and `--storage-option`."""

    @pytest.fixture
    def words(self, published, bucket, tmp_path, monkeypatch):
        for name in servers.environment(0):
            monkeypatch.delenv(name)
        (tmp_path / "secret").write_text(f"{servers.SECRET}\n")
        monkeypatch.setenv("MY_KEY", servers.KEY)
        url = ["--endpoint-url", f"http://127.0.0.1:{bucket.port}"]
        keys = [f"secret_access_key=@{tmp_path / 'secret'}", "access_key_id=$MY_KEY"]
        options = [word for key in keys for word in ("--storage-option", key)]
        return [published, tmp_path / "dst", "--dst-form", "huggingface", *url, *options]

    @pytest.mark.parametrize("processes", [1, 2])
    def test_say_how_a_bucket_is_reached(self, processes, words, bucket, tmp_path):
        done = converted(*words, "--verify", processes=processes)
        texts = [done.stdout, done.stderr]
        texts += [p.read_text(errors="replace") for p in tmp_path.glob("dst/**/*") if p.is_file()]
        assert len(texts) > 3
        for secret in (
            servers.SECRET,
            servers.KEY,
            str(bucket.port),
            "MY_KEY",
            "secret_access_key",
        ):
            assert not any(secret in text for text in texts), secret

    def test_a_secret_is_refused_on_the_command_line(self, words):
        words[-3] = "secret_access_key=hush"
        done = command("transform", *words)
        assert done.returncode == 2 and "hush" not in done.stderr + done.stdout
        assert "--storage-option secret_access_key=@FILE" in done.stderr

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("region", "expected KEY=VALUE"), ("region=$NOWHERE", "no variable NOWHERE"),
            ("token=@/nowhere", "/nowhere"),
        ],
    )  # fmt: skip
    def test_options_that_are_none(self, text, message, words):
        words[-1] = text
        done = command("transform", *words)
        assert done.returncode and message in done.stderr and "Traceback" not in done.stderr

    def test_an_option_that_the_client_does_not_know(self, words):
        done = command("transform", *words, "--storage-option", "nonsense=1")
        assert done.returncode and "nonsense" in done.stderr and "Traceback" not in done.stderr


class TestFoundByReview:
    def test_a_folder_with_an_empty_object_says_so(self, published, bucket, tmp_path):
        bucket.put("hf/model.safetensors", b"")
        for words in (("inspect", published), ("transform", published, tmp_path / "dst")):
            done = command(*words)
            assert "InvalidRange" not in done.stderr + done.stdout
            assert "empty" in done.stderr + done.stdout

    @pytest.mark.parametrize("url", ["http://[::", "ftp://x", "garbage://", "http://"])
    def test_an_endpoint_that_is_no_url(self, url, published):
        first = refused("inspect", published, environ={"AWS_ENDPOINT_URL": url})
        assert "is no URL" in first

    def test_keys_in_an_address_are_not_repeated(self, published):
        done = command("inspect", f"s3://{servers.KEY}:{servers.SECRET}@models/hf")
        assert done.returncode == 2 and servers.SECRET not in done.stderr + done.stdout
        assert "no address of a bucket" in done.stderr

    def test_a_forked_process_is_refused(self, published):
        """Its requests would never be answered."""
        program = """if True:
            import os, sys, rankxform
            rankxform.load(sys.argv[1], progress=False)
            if os.fork() == 0:
                try:
                    rankxform.load(sys.argv[1], progress=False)
                except rankxform.UsageError as error:
                    os._exit(7 if "forked" in str(error) else 1)
                os._exit(2)
            sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))"""
        line = [sys.executable, "-W", "ignore", "-c", program, published]
        assert subprocess.run(line, timeout=60, check=False).returncode == 7

    def test_a_slash_at_the_end_is_none(self, published):
        done = command("inspect", f"{published}/")
        assert done.returncode == 0 and "hf//" not in done.stdout


def test_an_adapter_is_added_wherever_it_lies(bucket, tmp_path):
    base, factors = (
        {"a.weight": ((8, 6), "Float32")},
        {"a.lora_A.weight": (2, 6), "a.lora_B.weight": (8, 2)},
    )
    src = reference.write_checkpoint(tmp_path / "src", [{"a.weight": ([1], [-1, -1], 0, 0)}], base)
    tensors = {
        f"base_model.model.{name}": ("Float32", np.ones(shape, "<f4").view("<u4"))
        for name, shape in factors.items()
    }
    reference.write_safetensors(tmp_path / "lora" / "adapter_model.safetensors", tensors)
    (tmp_path / "lora" / "adapter_config.json").write_text(
        '{"lora_alpha": 4, "r": 2, "peft_type": "LORA"}'
    )
    bucket.put_folder(tmp_path / "lora", "lora")
    converted(src, tmp_path / "of-folder", "--lora", tmp_path / "lora")
    converted(src, tmp_path / "of-bucket", "--lora", bucket.at("lora"))
    name = "rank_0/checkpoint_0.ckpt"
    merged = (tmp_path / "of-bucket" / name).read_bytes()
    assert (
        merged
        == (tmp_path / "of-folder" / name).read_bytes()
        != (tmp_path / "src" / name).read_bytes()
    )
    twice = command(
        "transform", tmp_path / "of-bucket", tmp_path / "c", "--lora", bucket.at("lora")
    )
    assert twice.returncode and "was added to these tensors already" in twice.stderr
