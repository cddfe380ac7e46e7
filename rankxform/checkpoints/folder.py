"""What forms of one folder have in common: their files by name, an index of them, whole tensors."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from posixpath import isabs, normpath
from shlex import quote
from typing import Any

from rankxform.errors import CheckpointError, FormatError, UsageError
from rankxform.facts import ALL_TENSORS, INDEX, METADATA, STEP, TOTAL_BYTES, Statement
from rankxform.formats.base import TensorSpec
from rankxform.formats.base import container_suffixes as suffixes_of_files
from rankxform.formats.checkpoint2 import parse_common
from rankxform.formats.dtype import INT4, content_bytes
from rankxform.formats.json_stream import decode_json
from rankxform.formats.signatures import FIRST_BYTES, file_signature
from rankxform.layout.layout import Layout
from rankxform.layout.names import STEPS, natural_sort_key
from rankxform.planning.description import Description
from rankxform.planning.plan import Planner
from rankxform.storage.store import FILE, Listing, Store

from .base import CheckpointRef, SelectedFiles
from .rank_folders import LATEST

SUFFIX = ".safetensors"
COMMON = "common.json"
"""Where MindFormers looks for how far a training was."""


def tensor_files(names: Iterable[str]) -> list[str]:
    """Return the safetensors files among names of one folder, as a person would number them."""
    return sorted((n for n in names if n.endswith(SUFFIX) and "/" not in n), key=natural_sort_key)


def name_in_folder(name: object, source: str, suffixes: Collection[str] = (SUFFIX,)) -> str:
    """Return the name of a file that `source` names. Raises CheckpointError if it leaves the
    folder, or is of another kind."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise CheckpointError(f"names {name!r}, which is no file", where=source)
    name = name.removeprefix("./")  # as some tools write it
    if isabs(name) or ".." in name.split("/") or normpath(name) != name:
        raise CheckpointError(f"names {name!r}, which is not below its folder", where=source)
    if not name.endswith(tuple(suffixes)):
        kind = " or ".join(suffix[1:] for suffix in suffixes)
        raise CheckpointError(f"names {name!r}, which is no {kind} file", where=source)
    return name


def training(store: Store, name: str, path: str, searched: str = "") -> dict[str, Any]:
    """Return what a common.json states, which is `name` in a store. Raises CheckpointError.

    path, searched: for messages, where it is, and on which nodes it was searched for.
    """
    try:
        return parse_common(store.read(name, searched))
    except FormatError as error:
        raise CheckpointError.of_parts(error.at(path)) from error


def steps(members: Mapping[str, Any], path: str) -> list[Statement]:
    """Return how far a training was, as a common.json states it."""
    numbers_by_name = {name: members[name] for name in STEPS if members.get(name) is not None}
    return [
        Statement(STEP, name, number, METADATA, path) for name, number in numbers_by_name.items()
    ]


def weight_map(store: Store, listing: Listing, name: str) -> tuple[dict[str, str], Any]:
    """Read an index: by parameter its file, and the bytes of all. Raises CheckpointError.

    The members may be those of the document itself, as MindFormers' own conversion leaves them.
    """
    total, data = None, store.read(name, listing.searched)
    try:
        members = decode_json(data)
        if isinstance(members, dict):
            metadata = members.get("metadata")
            total = metadata.get("total_size") if isinstance(metadata, dict) else None
            members = members.get("weight_map", members)
        if not isinstance(members, dict) or not members:
            raise FormatError("holds no weight_map")
    except FormatError as error:
        signature = file_signature(data[:FIRST_BYTES])
        if signature is None:
            raise CheckpointError.of_parts(error.at(listing.at(name))) from error
        raise CheckpointError(
            f"expected an index, and it is {signature.title}", *signature.tries,
            where=listing.at(name),
        ) from error  # fmt: skip
    return {n: name_in_folder(file, listing.at(name)) for n, file in members.items()}, total


def whole_tensors(
    listing: Listing, store: Store, index: str | None, untracked: str | None = None, below: str = ""
) -> SelectedFiles:
    """Return the files of a folder of whole tensors, each in one file, as `index` lists them.

    Without an index these are all safetensors files. `untracked` is one with values that the index
    does not list. below: the folder, with a slash, if it is not the place itself.
    """
    if listing.kind == FILE:
        return SelectedFiles({0: ""}, description=Description(listing.path))
    present_names = files_directly_in(listing, below)
    searched, listed, facts = listing.searched, dict[str, list[str]](), tuple[Statement, ...]()
    if index is None:
        names = [name for name in tensor_files(present_names) if name != untracked]
    else:
        files_by_parameter, total = weight_map(store, listing, index)
        for parameter, file in files_by_parameter.items():
            listed.setdefault(file, []).append(parameter)
        if type(total) is int:
            facts = (Statement(TOTAL_BYTES, ALL_TENSORS, total, INDEX, listing.at(index)),)
        names = sorted(listed, key=natural_sort_key)
    if not names:
        raise CheckpointError(
            f"holds no safetensors file{searched}", where=listing.at(below.rstrip("/"))
        )
    missing = [n for n in names if n not in present_names and not store.has(below + n)]
    if missing:
        assert index is not None
        raise _missing_files(
            listing, index, missing, listed, [n for n in present_names if n not in names]
        )
    unlisted_files = [n for n in tensor_files(present_names) if n not in names and n != untracked]
    notices: tuple[str, ...] = ()
    if unlisted_files:
        assert index is not None
        notices = (
            f"{listing.at(unlisted_files[0])}{and_more(unlisted_files, 'file')}: {index} does not "
            "list "
            "it, and it was "
            "not used",
        )
    names_by_id = {number: below + name for number, name in enumerate(names)}
    if untracked is not None and untracked in present_names:
        names_by_id[len(names)] = below + untracked
    return SelectedFiles(
        names_by_id,
        description=Description(
            listing.at(index if index is not None else below.rstrip("/")),
            listed={number: tuple(listed[n]) for number, n in enumerate(names) if n in listed},
            untracked=len(names) if len(names_by_id) > len(names) else None,
            facts=facts,
            notices=notices,
        ),
    )


def _missing_files(
    listing: Listing,
    index: str,
    missing: Sequence[str],
    listed: Mapping[str, Sequence[str]],
    present: Sequence[str],
) -> CheckpointError:
    """Say which files of an index are missing, and which lie there that it does not list."""
    unlisted_files = tensor_files(present)
    tries, details = ["copy the missing files into the folder"], ""
    if unlisted_files:
        tries.insert(0, f"mv {quote(listing.at(index))} {quote(listing.at(index) + '.old')}")
        details = (
            f"{unlisted_files[0]}{and_more(unlisted_files, 'file')} lie there, and the index does "
            "not "
            "list them; "
            "without an index all files in the folder are converted"
        )
    first = missing[0]
    return CheckpointError(
        f"is missing; {index} lists {len(listed[first])} parameters in it, such as "
        f"{listed[first][0]!r}{listing.searched}{and_more(missing, 'file')}",
        *tries,
        where=listing.at(first),
        details=details,
    )


def files_directly_in(listing: Listing, below: str = "") -> tuple[str, ...]:
    """Return the names of the files that lie directly in a folder of a listing."""
    named = (name[len(below) :] for name in listing.files if name.startswith(below))
    return tuple(name for name in named if "/" not in name)


def and_more(names: Sequence[object], noun: str) -> str:
    """Say how many there are beside the first."""
    remaining_count = len(names) - 1
    return (
        f", and {remaining_count} {noun}{'s' if remaining_count > 1 else ''} more"
        if remaining_count > 0
        else ""
    )


def index_document(files: Mapping[str, Collection[str]], total: int, **style: object) -> bytes:
    """Return an index: by file the parameters in it, and the bytes of all."""
    content = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    return json.dumps(content, ensure_ascii=False, **style).encode()  # type: ignore[arg-type]


def foreign_files(
    listing: Listing, dst_names: Collection[str], suffixes: Collection[str] = ()
) -> list[str]:
    """Return other checkpoint files beside a destination's own: loaders read all that lies there.

    suffixes: those of the form's files, if these are no checkpoints by themselves.
    """
    own_entries, ends = {*dst_names, *listing.folders}, tuple(suffixes) or suffixes_of_files()
    return [n for n in listing.entries if n.endswith(ends) and n not in own_entries]


def split_by_bytes(tensors: Iterable[TensorSpec], max_bytes: int) -> list[list[str]]:
    """Return names by file, in the order of names; one that would exceed the limit opens another.

    A tensor over the limit has a file of its own, and the open one stays open.
    """
    files: list[list[str]] = []
    current: list[str] = []
    load = 0
    for tensor in sorted(tensors, key=lambda spec: natural_sort_key(spec.name)):
        nbytes = content_bytes(tensor.dtype, tensor.shape)
        if nbytes > max_bytes:
            files.append([tensor.name])
            continue
        if current and load + nbytes > max_bytes:
            files.append(current)
            current, load = [], 0
        current.append(tensor.name)
        load += nbytes
    return [*files, current] if current else files


def refuse_sharded_strategy(form: str, ranks: int) -> None:
    """Raise UsageError where a form of whole tensors is to be sharded."""
    if ranks > 1:
        raise UsageError(
            f"{form} holds whole tensors", "leave out --dst-strategy", "choose another --dst-form"
        )


def check_no_step(form: str, where: CheckpointRef) -> None:
    """Raise UsageError for a choice among steps, of which the form has but one: the latest."""
    if where.step not in (None, LATEST) or where.suffix is not None:
        raise UsageError(f"--step and --suffix choose among files; a {form} folder holds one step")


def plain_metadata(source: Mapping[str, str], kind: str) -> Mapping[str, str]:
    """Return metadata that say which library's tensors these are, and no more of the source's."""
    return {"format": kind} | {k: v for k, v in source.items() if v == INT4}


def is_repeated_slice(
    planner: Planner, name: str, layout: Layout, rank: int, slice_keys: set[object]
) -> bool:
    """Tell whether a lower rank holds the same slice; it is known from now on."""
    key = name, planner.cell(layout, rank)
    is_repeated = key in slice_keys
    slice_keys.add(key)
    return is_repeated
