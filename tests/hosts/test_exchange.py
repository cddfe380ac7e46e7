"""Shards on every node's own disk: converted without a shared folder, each remote byte sent once."""

from __future__ import annotations

import shutil
import sys

import pytest

from tests import reference
from tests.cases import random_case
from tests.hosts.machines import LOCAL, Hosts, require

P_ON_3_HOSTS = {3: 1, 4: [1, 1, 2], 7: [3, 2, 2]}


@pytest.fixture(scope="module")
def hosts():
    require()
    with Hosts(3) as made:
        yield made


@pytest.fixture
def clean(hosts):
    yield hosts
    for name in hosts.names:
        for folder in hosts.disk(name).iterdir():
            shutil.rmtree(folder)


def spread(hosts, case, kind="ckpt"):
    """Put the shards of a case on the hosts' own disks, neighbours together; return options."""
    made = hosts.shared / "made"
    shutil.rmtree(made, ignore_errors=True)
    reference.write_checkpoint(made / "src", case.src, case.params, case.extras, kind)
    folders = sorted((made / "src").iterdir(), key=lambda path: int(path.name[5:]))
    for number, folder in enumerate(folders):
        home = hosts.names[number * len(hosts.names) // len(folders)]
        target = hosts.disk(home) / "src" / folder.name
        target.parent.mkdir(exist_ok=True)
        shutil.copytree(folder, target)
    options = []
    for side, stages in (("src", case.src), ("dst", case.dst)):
        if stages:
            reference.write_stage_files(made / f"{side}_strategy", stages)
            options += [f"--{side}-strategy", made / f"{side}_strategy"]
    return [*map(str, options), "--no-fsync"]


def gathered(hosts, name="dst"):
    """Bring the parts of a destination together that are on the hosts' own disks."""
    target = hosts.shared / "gathered"
    shutil.rmtree(target, ignore_errors=True)
    for host in hosts.names:
        for folder in (hosts.disk(host) / name).glob("rank_*"):
            shutil.copytree(folder, target / folder.name)
    return target


def transform(hosts, per_host, options, verb="transform", **more):
    return hosts.mpirun(
        per_host, sys.executable, "-m", "rankxform", verb, LOCAL / "src", LOCAL / "dst",
        *options, **more,
    )  # fmt: skip


@pytest.mark.parametrize("processes", [3, 4, 7])
@pytest.mark.parametrize("seed", range(8))
def test_spread_shards_become_spread_shards(seed, processes, clean):
    kind = ("ckpt", "safetensors")[seed % 2]
    case = random_case(seed, mindspore_agrees=False, whole=False)
    options = spread(clean, case, kind)
    code, output = transform(clean, P_ON_3_HOSTS[processes], options)
    assert code == 0, output
    assert reference.wrong_slices(gathered(clean), case.dst, case.params, kind) == []
