"""Hostfiles from rank tables in the four documented forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankxform.errors import UsageError
from rankxform.transport import mpirun
from rankxform.transport.hostfile import Host, format_hostfile, parse_hostfile, parse_rank_table


def server(number, ranks, **more):
    devices = [
        {"device_id": str(i), "device_ip": f"192.168.{number}.{i}", "rank_id": str(r)}
        for i, r in enumerate(ranks)
    ]
    return {"server_id": f"10.0.0.{number}", "device": devices, "host_nic_ip": "reserve", **more}


def table(servers, version="1.0", status="completed", **more):
    return {
        "version": version,
        "server_count": str(len(servers)),
        "server_list": servers,
        "status": status,
        **more,
    }


VERSION_1_0 = table([server(2, range(8, 16)), server(1, range(8))])
VERSION_1_2 = table(
    [
        server(1, range(4), super_device_id="1", host_ip="10.9.0.1"),
        server(2, range(4, 8), host_ip="10.9.0.2"),
    ],
    version="1.2",
    super_pod_list=[{"super_pod_id": "0", "server_list": [{"server_id": "10.0.0.1"}]}],
)
CLUSTERS = table(
    [
        {**server(1, range(4)), "server_id": "server_0", "server_ip": "", "pod_ip": "10.7.0.1"},
        {**server(2, range(4, 8)), "server_id": "server_1", "server_ip": "", "pod_ip": "10.7.0.2"},
    ],
    cluster_list=[{"cluster_id": "cluster_0", "server_list": [{"server_id": "server_0"}]}],
)
VERSION_0 = {
    "status": "completed",
    "group_count": "1",
    "group_list": [
        {
            "group_name": "worker",
            "device_count": "4",
            "instance_count": "2",
            "instance_list": [
                {
                    "pod_name": "job-worker-1",
                    "server_id": "10.5.0.2",
                    "devices": [{"device_id": "0"}, {"device_id": "1"}],
                },
                {
                    "pod_name": "job-worker-0",
                    "server_id": "10.5.0.1",
                    "devices": [{"device_id": "0"}, {"device_id": "1"}],
                },
            ],
        }
    ],
}


@pytest.mark.parametrize(
    ("document", "hosts"),
    [
        (VERSION_1_0, [Host("10.0.0.1", 8), Host("10.0.0.2", 8)]),
        (VERSION_1_2, [Host("10.9.0.1", 4), Host("10.9.0.2", 4)]),
        (CLUSTERS, [Host("10.7.0.1", 4), Host("10.7.0.2", 4)]),
        (VERSION_0, [Host("10.5.0.1", 2), Host("10.5.0.2", 2)]),
    ],
    ids=["1.0", "1.2", "clusters", "0"],
)
def test_hosts_come_in_rank_order(document, hosts):
    assert parse_rank_table(json.dumps(document).encode(), "table.json") == hosts


def test_the_two_styles():
    hosts = [Host("a", 8), Host("b", 4)]
    assert format_hostfile(hosts) == "a slots=8\nb slots=4"
    assert format_hostfile(hosts, "mpich") == "a:8\nb:4"
    assert format_hostfile(hosts, "openmpi", 2) == "a slots=2\nb slots=2"


@pytest.mark.parametrize(
    "data",
    [
        b"a slots=2\r\nb slots=3\r\n", b"a:2 # two\n\nb:3", b"a slots = 2\nb SLOTS=3 max_slots=9",
        b"\xef\xbb\xbfa:2\nb max_slots=9 slots=3\n",
    ],
)  # fmt: skip
def test_what_one_mpirun_does_not_read_is_given_as_options(data, tmp_path):
    (tmp_path / "hosts").write_bytes(data)
    hosts = parse_hostfile(data, "hosts")
    assert hosts == [Host("a", 2), Host("b", 3)]
    for slots in (rb"(:\d+)?", rb"( +slots=\d+)?"):
        words = mpirun._as_options("hosts", data, hosts, slots, "-f", "-hosts")
        assert words == ["-hosts", "a:2,b:3"]
    assert mpirun._as_options("hosts", b"a:2\n", hosts, rb"(:\d+)?", "-f", "") == ["-f", "hosts"]


HOSTFILES = Path(__file__).parents[2] / "hostfiles"
SHAPES = [(style, hosts) for style in ("openmpi", "mpich") for hosts in (1, 2, 16)]


def test_there_is_a_hostfile_for_each_shape():
    names = {f"{style}-{hosts}x8" for style, hosts in SHAPES}
    assert {path.name for path in HOSTFILES.iterdir()} == {*names, "README.md"}


@pytest.mark.parametrize(("style", "hosts"), SHAPES)
def test_the_hostfiles_are_those_of_rank_tables(style, hosts):
    servers = [
        {**server(n, range(8 * n - 8, 8 * n)), "server_id": f"10.1.0.{n}"}
        for n in range(1, hosts + 1)
    ]
    made = format_hostfile(
        parse_rank_table(json.dumps(table(servers)).encode(), "table.json"), style
    )
    comment, *lines = (HOSTFILES / f"{style}-{hosts}x8").read_text().splitlines()
    assert comment.startswith("#") and "\n".join(lines) == made


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (table([server(1, [0])], status="initializing"), "status is 'initializing'"),
        (table([{**server(1, [0]), "server_id": "10.*.*.*"}]), "masked"),
        (table([server(1, [0]), server(1, [1])]), "listed twice"),
        (table([server(1, [0]), server(2, [0])]), "rank 0 is listed twice"),
        (table([server(1, [0])], version="3.0"), "version '3.0' is not"),
        (table([{"device": [{"rank_id": "0"}]}]), "'server_id' is missing"),
        (table([]), "lists no host"),
        (table([server(1, [0, 2]), server(2, [1, 3])]), "ranks 0 to 2 of 10.0.0.1 are not all its"),
        (table([server(1, [0, 1]), server(2, [3])]), "rank 2 is missing"),
        (table([server(1, [1, 2])]), "rank 0 is missing"),
        ({**table([server(1, [0])]), "server_count": "2"}, "server_count is 2, and 1 servers are"),
        ({"version": "1.0"}, "not a rank table"),
        ({"group_list": [{"instance_list": [{"pod_name": "x"}]}]}, "not a rank table"),
        ([1], "not a rank table"),
    ],
)
def test_tables_that_do_not_tell_the_hosts(document, words):
    with pytest.raises(UsageError, match=f"table.json: (?s:.*){words}"):
        parse_rank_table(json.dumps(document).encode(), "table.json")


def test_what_is_not_json():
    with pytest.raises(UsageError, match="table.json: is not JSON"):
        parse_rank_table(b"\xff{", "table.json")
