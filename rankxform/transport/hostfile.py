"""Hostfiles for mpirun, made from HCCL rank tables.

A rank table lists the hosts of a training job and their devices. Four documented forms are
read: version 1.0 and 1.2 (``server_list``, also with a ``cluster_list`` beside it), and the
version 0 of ModelArts and Kubernetes (``group_list`` with ``instance_list``).
"""

from __future__ import annotations

import re
from typing import Any

from rankxform.errors import FormatError, UsageError
from rankxform.statements import quote
from rankxform.values import dataclass, decode_json


@dataclass(frozen=True)
class Host:
    """One host and the number of devices that the job has there."""

    address: str
    devices: int


def parse_rank_table(data: bytes, label: str) -> list[Host]:
    """Return the hosts of a rank table, in rank order. Raises UsageError that names `label`."""
    try:
        document = decode_json(data)
    except FormatError as error:
        raise UsageError(error.what, where=label) from None
    if not isinstance(document, dict):
        raise UsageError("not a rank table; expected a JSON object", where=label)
    status = document.get("status", "completed")
    if status != "completed":
        raise UsageError(
            f"the rank table's status is {status!r}, not 'completed'; the job's hosts "
            "are not known yet, wait until they are",
            where=label,
        )
    try:
        hosts = _version_0(document) if "group_list" in document else _version_1(document)
    except UsageError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise UsageError(f"not a rank table: {reason}", where=label) from None
    return _check_hosts(hosts, label)


def _version_1(document: dict[str, Any]) -> list[Host]:
    if str(document.get("version", "1.0")) not in ("1.0", "1.2"):
        raise ValueError(f"version {document['version']!r} is not 0, 1.0 or 1.2")
    servers = []
    seen: set[int] = set()
    counted = document.get("server_count", len(document["server_list"]))
    if int(counted) != len(document["server_list"]):
        listed = len(document["server_list"])
        raise ValueError(f"server_count is {counted}, and {listed} servers are listed")
    for server in document["server_list"]:
        ranks = sorted(int(device["rank_id"]) for device in server["device"])
        if seen.intersection(ranks):
            raise ValueError(f"rank {min(seen.intersection(ranks))} is listed twice")
        seen.update(ranks)
        if ranks[-1] - ranks[0] >= len(ranks):
            raise ValueError(
                f"ranks {ranks[0]} to {ranks[-1]} of {_address(server)} are not all its own, and a "
                "hostfile places ranks host by host"
            )
        servers.append((ranks[0], Host(_address(server), len(ranks))))
    if seen and max(seen) != len(seen) - 1:
        raise ValueError(f"rank {min(set(range(len(seen))) - seen)} is missing")
    return [host for _, host in sorted(servers, key=lambda item: item[0])]


def _address(server: dict[str, Any]) -> str:
    """Return the address by which mpirun reaches a server.

    ``server_id`` is the host's address in most tables; where it is a made-up name (clusters,
    superpods) the address stands beside it.
    """
    for field in ("host_ip", "server_ip", "pod_ip"):
        if server.get(field):
            return str(server[field])
    return str(server["server_id"])


def _version_0(document: dict[str, Any]) -> list[Host]:
    instances = [i for group in document["group_list"] for i in group["instance_list"]]
    instances.sort(key=lambda i: int(re.findall(r"\d+", str(i["pod_name"]))[-1]))
    return [Host(str(i["server_id"]), len(i["devices"])) for i in instances]


def _check_hosts(hosts: list[Host], label: str) -> list[Host]:
    if not hosts:
        raise UsageError("lists no host", where=label)
    seen: set[str] = set()
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9_.:\-]+", host.address):
            raise UsageError(
                f"{host.address!r} is no address",
                where=label,
                details="rank tables in documents have theirs masked; take the one that the job "
                "was started with",
            )
        if host.address in seen:
            raise UsageError(f"host {host.address} is listed twice", where=label)
        seen.add(host.address)
    return hosts


def parse_hostfile(data: bytes, label: str) -> list[Host]:
    r"""Return the hosts of a hostfile, of either kind of mpirun. Raises UsageError.

    >>> parse_hostfile(b"a slots=2  # first\nb:4\nc\n", "hosts")[:2]
    [Host(address='a', devices=2), Host(address='b', devices=4)]
    """
    if data.lstrip()[:1] == b"{":
        conversion = f"rankxform hostfile {quote(label)} > hosts"
        raise UsageError("is a rank table, and no hostfile", conversion, where=label)
    hosts = []
    for number, line in enumerate(data.decode("utf-8-sig", "replace").splitlines(), 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if not words:
            continue
        match = re.fullmatch(r"(\[[^\]]+\]|[^:=]+)(?::(\d+))?", words[0])
        slots = [word[6:] for word in words[1:] if word.lower().startswith("slots=")]
        counts = [*slots, match[2] or "1"] if match else []
        if not match or not all(re.fullmatch("0*[1-9][0-9]{,8}", count) for count in counts):
            raise UsageError(f"{label}:{number}: no host of a hostfile: {line.strip()!r}")
        hosts.append(Host(match[1].strip("[]"), int((slots or [match[2] or "1"])[0])))
    return _check_hosts(hosts, label)


def format_hostfile(hosts: list[Host], style: str = "openmpi", slots: int | None = None) -> str:
    """Write a hostfile: ``host slots=N`` for Open MPI, ``host:N`` for MPICH.

    >>> print(format_hostfile([Host("10.1.2.3", 8)], "mpich", slots=2))
    10.1.2.3:2
    """
    form = "{}:{}" if style == "mpich" else "{} slots={}"
    return "\n".join(form.format(h.address, slots or h.devices) for h in hosts)
