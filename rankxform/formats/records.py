"""The records that rankxform keeps of its own work: JSON documents, and journals of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

VERSION = 1
MANIFEST, JOB = "rankxform manifest", "rankxform job"
MODULUS = 1 << 64


class RecordError(ValueError):
    """A record is not what it should be."""


def document(kind: str, content: Mapping[str, Any]) -> bytes:
    """Return a JSON document of `kind`, for people to read too."""
    return (json.dumps({"kind": kind, "version": VERSION, **content}, indent=1) + "\n").encode()


def parse(kind: str, data: bytes) -> dict[str, Any]:
    """Read a document of `kind`. Raises RecordError."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not JSON ({error})") from error
    if not isinstance(found, dict) or found.get("kind") != kind:
        raise RecordError(f"not a {kind}")
    if found.get("version") != VERSION:
        raise RecordError(f"of version {found.get('version')!r}, this is version {VERSION}")
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Name what differs between two identities, in words.

    The source files of both are compared; those that only one has are of ranks that the other
    did not need.

    >>> differences({"options": {"crc": False}}, {"options": {"crc": True}})
    ['crc was False, is True']
    """
    found = []
    for key, value in new.get("options", {}).items():
        was = old.get("options", {}).get(key)
        if was != value:
            found.append(f"{key} was {was}, is {value}")
    for side in ("source", "destination"):
        if old.get(f"{side} strategy") != new.get(f"{side} strategy"):
            found.append(f"the {side} strategy is another")
    was = old.get("source files", {})
    for rank, facts in new.get("source files", {}).items():
        if rank in was and was[rank] != facts:
            found.append(f"source file {facts['file']} of rank {rank} was changed or is another")
    return found


@dataclass
class Progress:
    """What journals say is on the device.

    inodes: of the part file of each destination rank. done: names whose slices are complete in
    it. sums: fingerprints of these, by rank, modulo 2**64. durable: whether all was synced.
    """

    inodes: dict[int, int] = field(default_factory=dict)
    done: dict[int, set[str]] = field(default_factory=dict)
    sums: dict[int, int] = field(default_factory=dict)
    durable: bool = True

    def only(self, ranks: Iterable[int]) -> Progress:
        """Return what is said of `ranks`."""
        kept = set(ranks)
        return Progress(
            {rank: inode for rank, inode in self.inodes.items() if rank in kept},
            {rank: names for rank, names in self.done.items() if rank in kept},
            {rank: value for rank, value in self.sums.items() if rank in kept},
            self.durable,
        )


def started(inodes: Mapping[int, int], durable: bool, boot: str, replaces: Sequence[str]) -> bytes:
    """Return the first line of a journal.

    Without `durable` it counts only while the machine is not started anew. It stands for the
    journals that it `replaces`.
    """
    facts = {"inodes": inodes, "durable": durable, "boot": boot, "replaces": list(replaces)}
    return _line(facts)


def moved(done: Iterable[tuple[Sequence[int], Sequence[str]]], sums: Mapping[int, int]) -> bytes:
    """Return a line that says which slices have come to be complete: (ranks, names) of each."""
    return _line({"done": [[list(r), list(n)] for r, n in done], "sums": sums})


def _line(facts: Mapping[str, Any]) -> bytes:
    return (json.dumps(facts, separators=(",", ":")) + "\n").encode()


def progress(journals: Mapping[str, bytes], boot: str) -> Progress:
    """Put journals, by name, together. A line that was cut off, and what follows it, is dropped."""
    lines = {name: _lines(data) for name, data in journals.items()}
    replaced = {old for some in lines.values() if some for old in some[0].get("replaces", ())}
    found = Progress()
    for name, some in lines.items():
        if name in replaced or not some or not (some[0]["durable"] or some[0]["boot"] == boot):
            continue
        found.durable &= bool(some[0]["durable"])
        found.inodes.update((int(rank), inode) for rank, inode in some[0]["inodes"].items())
        for line in some[1:]:
            for ranks, names in line["done"]:
                for rank in ranks:
                    found.done.setdefault(rank, set()).update(names)
            for rank, value in line["sums"].items():
                found.sums[int(rank)] = (found.sums.get(int(rank), 0) + value) % MODULUS
    return found


def _lines(data: bytes) -> list[dict[str, Any]]:
    found = []
    for line in data.split(b"\n")[:-1]:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    if found and not {"inodes", "durable", "boot"} <= set(found[0]):
        return []
    return found
