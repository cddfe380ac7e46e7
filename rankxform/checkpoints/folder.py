"""What forms of one folder have in common: their files by name, an index of them, whole tensors."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from rankxform.errors import CheckpointError, FormatError, UsageError
from rankxform.formats.base import suffixes
from rankxform.formats.dtype import INT4
from rankxform.formats.json_stream import load
from rankxform.layout.names import natural
from rankxform.planning.description import Description
from rankxform.storage.posix import read_bytes

from .base import Listing, Shards, Wish
from .rank_folders import LATEST

SUFFIX = ".safetensors"
_LARGEST_INDEX = 1 << 30
_FEW = 5


def look(where: Path, below: Iterable[str] = ()) -> Listing:
    """List the files of a folder, and of those folders `below` it that are there."""
    if where.is_file():
        return Listing(is_file=True)
    if not where.is_dir():
        return Listing()
    named = {path.name: path for path in where.iterdir() if path.is_file()}
    for name in below:
        folder = where / name
        if folder.is_dir():
            named |= {f"{name}/{path.name}": path for path in folder.iterdir() if path.is_file()}
    return Listing(is_folder=True, named=dict(sorted(named.items())))


def tensor_files(names: Iterable[str]) -> list[str]:
    """Return the safetensors files among names of one folder, as a person would number them."""
    return sorted((n for n in names if n.endswith(SUFFIX) and "/" not in n), key=natural)


def in_folder(name: object, source: str) -> str:
    """Return the name of a file that `source` names. Raises CheckpointError if it leaves the
    folder."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise CheckpointError(f"{source}: names {name!r}, which is no file")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name:
        raise CheckpointError(f"{source}: names {name!r}, which is not below its folder")
    if not name.endswith(SUFFIX):
        raise CheckpointError(f"{source}: names {name!r}, which is no safetensors file")
    return name


def read_own(path: Path, searched: str) -> bytes:
    """Return a small file of the checkpoint, which process 0 must see. Raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError(
            f"{path}: process 0 does not see it, and another node does{searched}; copy it to the "
            "first node"
        )
    if path.stat().st_size > _LARGEST_INDEX:
        raise CheckpointError(f"{path}: has over {_LARGEST_INDEX} bytes, and is no index")
    return read_bytes(path)


def weight_map(path: Path, searched: str) -> dict[str, str]:
    """Read an index: by parameter its file. Raises CheckpointError.

    The members may be those of the document itself, as MindFormers' own conversion leaves them.
    """
    try:
        found = load(read_own(path, searched))
        if isinstance(found, dict):
            found = found.get("weight_map", found)
        if not isinstance(found, dict) or not found:
            raise FormatError("holds no weight_map")
    except FormatError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return {name: in_folder(file, str(path)) for name, file in found.items()}


def whole_tensors(
    where: Path,
    there: Listing,
    index: Path | None,
    searched: str,
    loose: str | None = None,
) -> Shards:
    """Return the files of a folder of whole tensors, each in one file, as `index` lists them.

    Without an index these are all safetensors files. `loose` is one with values that the index
    does not list.
    """
    if there.is_file:
        return Shards({0: where}, said=Description(str(where)))
    listed: dict[str, list[str]] = {}
    if index is None:
        names = [name for name in tensor_files(there.named) if name != loose]
    else:
        for parameter, file in weight_map(index, searched).items():
            listed.setdefault(file, []).append(parameter)
        names = sorted(listed, key=natural)
    if not names:
        raise CheckpointError(f"{where}: holds no safetensors file{searched}")
    gone = [name for name in names if name not in there.named]
    if gone:
        assert index is not None
        raise CheckpointError(
            f"{where / gone[0]}: is not there, and {index.name} lists {len(listed[gone[0]])} "
            f"parameters in it, such as {listed[gone[0]][0]!r}{searched}{more(gone, 'file')}; "
            "copy the missing files into the folder"
        )
    others = [n for n in tensor_files(there.named) if n not in names and n != loose]
    notices: tuple[str, ...] = ()
    if others:
        assert index is not None
        notices = (
            f"{where / others[0]}{more(others, 'file')}: {index.name} does not list it, and it was "
            "not used",
        )
    paths = {number: there.named[name] for number, name in enumerate(names)}
    if loose is not None and loose in there.named:
        paths[len(names)] = there.named[loose]
    return Shards(
        paths,
        said=Description(
            str(index or where),
            listed={number: tuple(listed[n]) for number, n in enumerate(names) if n in listed},
            loose=len(names) if len(paths) > len(names) else None,
            notices=notices,
        ),
    )


def more(names: Sequence[object], what: str) -> str:
    """Say how many there are beside the first."""
    rest = len(names) - 1
    return f", and {rest} {what}{'s' if rest > 1 else ''} more" if rest > 0 else ""


def index_document(files: Mapping[str, Collection[str]], total: int, **style: object) -> bytes:
    """Return an index: by file the parameters in it, and the bytes of all."""
    content = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    return json.dumps(content, ensure_ascii=False, **style).encode()  # type: ignore[arg-type]


def strangers(own: Iterable[Path]) -> list[Path]:
    """Return other checkpoint files beside a destination's own: loaders read all that is there."""
    mine = set(own)
    folders = dict.fromkeys(path.parent for path in mine)
    return [
        path
        for folder in folders
        for path in (sorted(folder.iterdir()) if folder.is_dir() else ())
        if path.suffix in suffixes() and path not in mine
    ]


def check_whole(what: str, ranks: int) -> None:
    """Raise UsageError where a form of whole tensors is to be sharded."""
    if ranks > 1:
        raise UsageError(
            f"{what} holds whole tensors; leave out --dst-strategy, or choose another --dst-form"
        )


def check_no_step(form: str, wish: Wish) -> None:
    """Raise UsageError for a choice among steps, of which the form has but one: the latest."""
    if wish.step not in (None, LATEST) or wish.suffix is not None:
        raise UsageError(f"--step and --suffix choose among files; a {form} folder holds one step")


def plain_metadata(source: Mapping[str, str], kind: str) -> Mapping[str, str]:
    """Return metadata that say which library's tensors these are, and no more of the source's."""
    return {"format": kind} | {k: v for k, v in source.items() if v == INT4}
