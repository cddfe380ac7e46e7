"""Digests that other programs check: written beside the manifest, compared by `verify DST`, and by
`inspect --check --full` whoever wrote them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

import rankxform
from rankxform.display.text import as_text
from rankxform.errors import FormatError, StorageError, UsageError
from rankxform.publish.digests import WrittenDigest, digest_of, format_sums, parse_sums
from rankxform.publish.options import SUMS
from tests import reference
from tests.checkpoints import DATA
from tests.mpi_launch import world

PARAMS = {f"{n}.w": ((8, 12), "Float32") for n in range(4)}
SRC = [{name: ([4], [0, -1], 0, 0) for name in PARAMS}]
DST = [{name: ([6], [-1, 0], 0, 0) for name in PARAMS}]
HF = DATA / "hf_qwen3/hf"
PROGRAMS = {"sha256": "sha256sum", "xxh3": "xxhsum"}


def make_job(tmp, kind="safetensors"):
    """Return what `transform` is called with."""
    src = reference.write_checkpoint(tmp / "src", SRC, PARAMS, kind=kind)
    sides = (("a.ckpt", SRC), ("b.ckpt", DST))
    return src, tmp / "dst", *(reference.write_strategy(tmp / n, side) for n, side in sides)


@pytest.fixture
def job(tmp_path):
    return make_job(tmp_path)


def agrees(folder, kind):
    """Return whether the program that people have agrees with a document, and how many files it
    lists."""
    document = folder / SUMS[kind]
    count = len(document.read_text().splitlines())
    if shutil.which(PROGRAMS[kind]) is None:
        pytest.skip(f"{PROGRAMS[kind]} is not installed")
    done = subprocess.run([PROGRAMS[kind], "-c", document.name], cwd=folder, capture_output=True)
    return done.returncode == 0, count


def flip(path, at=-1):
    """Change a byte, and neither size nor time."""
    before, data = path.stat(), bytearray(path.read_bytes())
    data[at] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("kind", SUMS)
@pytest.mark.world(sizes=(1, 3))
def test_the_program_that_people_have_agrees(kind, tmp):
    if world().rank == 0:
        make_job(tmp)
    world().Barrier()
    paths = tmp / "src", tmp / "dst", tmp / "a.ckpt", tmp / "b.ckpt"
    report = rankxform.transform(*paths, comm=world(), digests=kind, fsync=False)
    how = "summed while written" if world().size == 1 else "3.22 kB were read back for it"
    assert f"{SUMS[kind]}: {how}" in report.notices
    if world().rank == 0:
        assert agrees(tmp / "dst", kind) == (True, 6)
        verdict = rankxform.verify(tmp / "dst")
        assert verdict.same and verdict.checked == "digests"


@pytest.mark.parametrize("options", [{"crc": True}, {"ranks": [1]}])
@pytest.mark.world(sizes=(2, 5))
def test_what_is_not_written_in_order_by_one_process_is_read_back(options, tmp):
    """A checksum that comes later, one file that all write."""
    if world().rank == 0:
        make_job(tmp, "ckpt" if "crc" in options else "safetensors")
    world().Barrier()
    paths = tmp / "src", tmp / "dst", tmp / "a.ckpt", tmp / "b.ckpt"
    report = rankxform.transform(
        *paths, comm=world(), digests="sha256", fsync=False, read_method="two-phase", **options
    )
    assert any("were read back" in notice for notice in report.notices)
    if world().rank == 0:
        assert agrees(tmp / "dst", "sha256") == (True, 1 if "ranks" in options else 6)


def test_bytes_that_do_not_follow_on_the_last_ones_end_a_digest():
    def summed(*writes):
        digest = WrittenDigest("sha256")
        for offset, data in writes:
            digest.add(offset, [memoryview(data)])
        return digest.of_file(4)

    whole = digest_of("sha256", b"abcd")
    assert summed((0, b"ab"), (2, b""), (2, b"cd")) == whole
    assert summed((0, b"abcd"), (9, b"")) == whole
    for writes in (
        [(0, b"ab")], [(0, b"ab"), (3, b"cd")], [(1, b"abcd")], [(0, b"ab"), (0, b"ab"), (2, b"cd")],
        [(0, b"abcd"), (0, b"abcd")], [(2, b"cd"), (0, b"ab"), (2, b"cd")],
    ):  # fmt: skip
        assert summed(*writes) is None


def test_replicas_that_are_made_together_are_summed_once(tmp_path, monkeypatch):
    def add(digest, offset, buffers, add=WrittenDigest.add):
        summed.extend(map(len, buffers))
        return add(digest, offset, buffers)

    summed = []
    monkeypatch.setattr(WrittenDigest, "add", add)
    rows = [{name: ([2, 3], [-1, 0], 0, 0) for name in PARAMS}]  # each slice in two files
    src, dst, a, _ = make_job(tmp_path)
    b = reference.write_strategy(tmp_path / "rows.ckpt", rows)
    report = rankxform.transform(src, dst, a, b, digests="sha256", fsync=False)
    assert "SHA256SUMS: summed while written" in report.notices
    assert agrees(dst, "sha256") == (True, 6)
    sizes = [path.stat().st_size for path in dst.rglob("*.safetensors")]
    assert sum(summed) == sum(sizes) / 2


@pytest.mark.parametrize("kind", SUMS)
def test_all_small_files_but_the_manifest_are_listed(kind, tmp_path):
    dst = tmp_path / "dst"
    rankxform.transform(HF, dst, None, None, dst_form="huggingface", max_shard="10kB", digests=kind)
    names = {str(path.relative_to(dst)) for path in dst.rglob("*") if path.is_file()}
    count = len(names - {"rankxform.json", SUMS[kind]})
    assert count > 3
    assert agrees(dst, kind) == (True, count)


def test_files_that_share_their_bytes_and_files_that_were_there_are_listed_too(job):
    src, dst, a, _ = job
    rankxform.transform(src, dst, a, a, link="hard", fsync=False)
    rankxform.transform(src, dst, a, a, link="hard", fsync=False, digests="sha256")
    assert agrees(dst, "sha256") == (True, 4)
    (dst / "rank_2/checkpoint_2.safetensors").unlink()
    rankxform.transform(src, dst, a, a, link="hard", fsync=False, digests="sha256")
    assert agrees(dst, "sha256") == (True, 4)
    rankxform.transform(src, dst, a, a, link="hard", fsync=False)  # nothing is made
    assert agrees(dst, "sha256") == (True, 4) and rankxform.verify(dst).same


def test_ranks_of_other_runs_are_listed_too(job):
    """Each manifest has one, which lists what it lists."""
    dst = job[1]
    rankxform.transform(*job, ranks=[0, 1], digests="sha256", fsync=False)
    assert agrees(dst, "sha256") == (True, 2)
    report = rankxform.transform(*job, ranks=[2, 3, 4, 5], digests="sha256", fsync=False)
    assert agrees(dst, "sha256") == (True, 6)
    assert any("were read back" in notice for notice in report.notices)  # the other two
    (dst / "rank_3/checkpoint_3.safetensors").unlink()
    rankxform.transform(*job, ranks=[3], digests="sha256", fsync=False)
    assert agrees(dst, "sha256") == (True, 6)
    verdict = rankxform.verify(dst)
    assert verdict.same and verdict.checked == "digests"


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_changed_file_of_an_earlier_run_is_not_vouched_for(is_gone, job):
    dst = job[1]
    rankxform.transform(*job, digests="sha256", fsync=False)
    path = dst / "rank_3/checkpoint_3.safetensors"
    data = path.read_bytes()
    path.unlink()
    if not is_gone:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.warns(rankxform.RankxformWarning, match="does not list rank_3/checkpoint_3"):
        rankxform.transform(*job, ranks=[0, 1], digests="sha256", overwrite=True, fsync=False)
    assert agrees(dst, "sha256") == (True, 5)
    assert "rank_3" in str(rankxform.verify(dst).differences)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_document_that_a_killed_run_was_about_to_write_is_not_listed(is_there, job):
    """Its job knew the name before; a run without --digests goes on."""
    dst = job[1]
    rankxform.transform(*job, fsync=False)
    manifest = json.loads((dst / "rankxform.json").read_text())
    manifest["companions"] = {"SHA256SUMS": ""}
    (dst / "rankxform.json").write_text(json.dumps(manifest))
    if is_there:
        (dst / "SHA256SUMS").write_text("some of it")
    rankxform.transform(*job, fsync=False)
    assert rankxform.verify(dst).differences == ()
    assert not (dst / "SHA256SUMS").exists()


def test_a_document_goes_with_the_files_that_it_lists(job):
    dst = job[1]
    rankxform.transform(*job, digests="sha256", fsync=False)
    rankxform.transform(*job, overwrite=True, fsync=False)
    assert not (dst / "SHA256SUMS").exists()
    assert rankxform.verify(dst).differences == ()


def test_somebody_elses_document_is_not_replaced(job):
    dst = job[1]
    dst.mkdir()
    (dst / "SHA256SUMS").write_text("mine")
    with pytest.raises(StorageError, match="already there"):
        rankxform.transform(*job, digests="sha256", fsync=False)
    rankxform.transform(*job, fsync=False)
    assert (dst / "SHA256SUMS").read_text() == "mine"
    rankxform.transform(*job, digests="sha256", overwrite=True, fsync=False)
    assert agrees(dst, "sha256") == (True, 6)


@pytest.mark.parametrize("kind", SUMS)
def test_a_changed_byte_is_found_by_it_and_so_is_a_changed_document(kind, job):
    dst = job[1]
    rankxform.transform(*job, digests=kind, fsync=False)
    path = dst / "rank_4/checkpoint_4.safetensors"
    flip(path)
    (found,) = rankxform.verify(dst).differences
    assert found.file == str(path)
    flip(path)
    assert rankxform.verify(dst).same
    flip(dst / SUMS[kind], 3)
    found = rankxform.verify(dst)
    assert found.same is False
    assert any(SUMS[kind] in (f.file or "") for f in found.differences)


def test_shares_read_every_byte_once(job):
    dst = job[1]
    rankxform.transform(*job, verify=True, fsync=False)
    for count in (1, 2, 4, 9):
        verdicts = [rankxform.verify(dst, subset=f"{n}/{count}") for n in range(1, count + 1)]
        assert sum(verdict.files_compared for verdict in verdicts) == 6
        assert {verdict.same for verdict in verdicts} == {None}  # not all was read
        assert {verdict.exit_code for verdict in verdicts} == {0}
        assert sum(v.bytes_compared for v in verdicts) == rankxform.verify(dst).bytes_compared
    path = dst / "rank_4/checkpoint_4.safetensors"
    flip(path)
    # Samples of a file so small are all of it, which the other shares compare too.
    assert [rankxform.verify(dst, subset=f"{n}/3").same for n in (1, 2, 3)] == [False] * 3
    flip(path)
    text = as_text(rankxform.verify(dst, subset="2/6"))
    assert "share 2/6" in text and "the same: every byte compared" in text
    (dst / "rankxform.json").write_text(
        re.sub(r',"digest":"[0-9a-f]+"', "", (dst / "rankxform.json").read_text())
    )
    unknown = rankxform.verify(dst, subset="2/6")
    assert unknown.exit_code == 6 and "NOT VERIFIED" in as_text(unknown)
    assert rankxform.verify(dst, subset="1000/999999").exit_code == 0  # of no file
    for text in ("0/3", "4/3", "3", "a/b", "-1/3", f"1/{'9' * 5000}"):
        with pytest.raises(UsageError, match="expected a share"):
            rankxform.verify(dst, subset=text)
    with pytest.raises(UsageError, match="one folder"):
        rankxform.verify(*job, subset="1/3")


@pytest.mark.parametrize("kind", SUMS)
def test_a_source_is_compared_with_a_document_that_lies_beside_it(kind, tmp_path):
    """Whoever wrote it: as a download's."""
    src = tmp_path / "hf"
    shutil.copytree(HF, src)
    names = sorted(path.name for path in src.iterdir())
    program = {"sha256": ["sha256sum"], "xxh3": ["xxhsum", "-H3"]}[kind]
    if shutil.which(program[0]) is None:
        pytest.skip(f"{program[0]} is not installed")
    done = subprocess.run([*program, *names], cwd=src, capture_output=True, check=True)
    (src / SUMS[kind]).write_bytes(done.stdout)
    assert "as the digests beside them state" in checked(src)
    path = next(src.glob("*.safetensors"))
    flip(path)
    assert f"is not what {SUMS[kind]} states" in checked(src)
    (src / SUMS[kind]).write_text("nonsense\n")
    assert "line 1 states no" in checked(src)


def checked(src):
    line = [sys.executable, "-m", "rankxform", "inspect", str(src), "--check", "--full"]
    return subprocess.run(line, capture_output=True, text=True).stdout


def test_remarks_and_tagged_lines_are_read_as_programs_do():
    digest = "0" * 64
    text = f"# a remark\n\nSHA256 (a) = {digest}\n\\SHA256 (b\\nc) = {digest}\r\n{digest} *./d\n"
    assert parse_sums("sha256", text.encode()) == dict.fromkeys(("a", "b\nc", "d"), digest)


NAMES = [
    "a\x85b\u2028",
    "a.ckpt",
    "rank_0/a b.ckpt",
    "back\\slash",
    "new\nline",
    "größe",
    " leading",
]


def test_names_of_any_characters_are_read_as_they_were_written():
    digests = {name: digest_of("sha256", name.encode()) for name in NAMES}
    assert parse_sums("sha256", format_sums("sha256", digests)) == digests
    digests = {name: digest_of("xxh3", name.encode()) for name in NAMES}
    plain = {n: d for n, d in digests.items() if "\\" not in n and "\n" not in n}
    assert parse_sums("xxh3", format_sums("xxh3", digests)) == plain


@pytest.mark.parametrize("text", ["", "abc  a", f"{'0' * 64} a", f"{'g' * 64}  a", "\0", "{}"])
def test_what_is_no_document_is_said(text):
    if not text:
        assert parse_sums("sha256", b"") == {}
        return
    with pytest.raises(FormatError, match="line 1 states no sha256"):
        parse_sums("sha256", text.encode())


def test_a_library_that_is_not_installed_is_named_first(job, monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(UsageError, match="pip install xxhash"):
        rankxform.transform(*job, digests="xxh3")
    assert not job[1].exists()


def test_what_is_written_is_known_of_in_json(job):
    rankxform.transform(*job, digests="sha256", fsync=False)
    manifest = json.loads((job[1] / "rankxform.json").read_text())
    assert [*manifest["companions"]] == ["SHA256SUMS"]
