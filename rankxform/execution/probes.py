"""What tells files and folders of several nodes apart, or that they are the same."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from rankxform.formats.index import Span

from .files import Tick, blocks, create, opened, remove

Identity = tuple[int, int, int]
"""Of a file or folder: size in bytes, time of modification in nanoseconds, inode."""

_SECOND = 10**9


def identity(path: Path) -> Identity | None:
    """Return what tells a file or folder from another, or None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def are_one(a: Identity, b: Identity) -> bool:
    """Tell whether two nodes' views of one name are of one file, or of exact copies.

    A shared file has one inode number and time on all nodes, though device numbers differ. A
    copy that keeps times is taken for the same where these count in less than seconds.
    """
    return a[:2] == b[:2] and (a[2] == b[2] or a[1] % _SECOND != 0)


def digest(path: Path, tick: Tick) -> bytes:
    """Return a digest of all bytes of a file."""
    state = blake2b(digest_size=16)
    with opened(path) as (fd, status):
        for block in blocks(fd, path, [Span(0, status.st_size)]):
            state.update(block)
            tick(0)
    return state.digest()


class Probe:
    """An empty file by which nodes find out whether a folder is one for all of them."""

    def __init__(self, folder: Path, token: str, node: int) -> None:
        """Leave one where `folder` is, or will be made."""
        while not folder.is_dir():
            folder = folder.parent
        self._folder, self._token = folder, token
        self._own = self._path(node)
        create(self._own)

    def _path(self, node: int) -> Path:
        return self._folder / f".rankxform-{self._token}-{node}.part"

    def seen(self, nodes: int) -> tuple[int, ...]:
        """Return the nodes whose probes are here."""
        return tuple(node for node in range(nodes) if self._path(node).exists())

    def remove(self) -> None:
        remove(self._own)


def own_addresses(hosts: Iterable[str], name: str) -> frozenset[str]:
    """Return those of `hosts`, names or addresses, that mean this host, called `name`."""
    return frozenset(
        host for host in hosts if _short(host) == _short(name) or host == name or _is_local(host)
    )


def _short(host: str) -> str:
    return host if host.replace(".", "").isdigit() else host.split(".")[0]


def _is_local(host: str) -> bool:
    """Tell whether an address is one of this host's, which only then can be bound."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as one:
                one.bind(address)
                return True
    return False


def differing(found: Mapping[int, Identity]) -> list[list[int]]:
    """Group nodes by whose file is the same.

    >>> differing({0: (1, 5, 7), 1: (1, 5, 7), 2: (2, 9, 7)})
    [[0, 1], [2]]
    """
    groups: list[list[int]] = []
    for node, one in found.items():
        for group in groups:
            if are_one(found[group[0]], one):
                group.append(node)
                break
        else:
            groups.append([node])
    return groups
