"""Kinds of storage: listings, documents, byte ranges; and POSIX folders, one of them.

Forms see plain names relative to a checkpoint's place, and never a path: a listing may be merged of
what several nodes have, and a store need be no file system. Whatever is read is named by its
address: a path, or ``scheme://...`` of a kind of storage in `STORAGE`.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import field
from functools import reduce
from pathlib import Path
from posixpath import join
from typing import Any, Protocol

from rankxform.errors import CheckpointError, StorageError, UsageError, raising_storage_errors
from rankxform.formats.container import ReadAt, Span
from rankxform.transport.team import OnProgress
from rankxform.values import NamedTuple, Registry, dataclass

from .posix import (
    Buffer,
    Descriptors,
    Position,
    advise,
    open_for_reading,
    range_reader,
    read_bytes,
    read_into,
)

NOTHING, FILE, FOLDER = "nothing", "file", "folder"
RANK = "{rank}"


@dataclass(frozen=True)
class Listing:
    """What lies at a place: a file, a folder with entries, or nothing."""

    path: str  # of the place, for messages
    kind: str = NOTHING
    files: tuple[str, ...] = ()  # names relative to a folder, of those that were asked for
    # Names that lie directly in it, and those of them that are folders.
    entries: tuple[str, ...] = ()
    folders: frozenset[str] = frozenset()
    searched: str = ""  # for messages, which nodes were searched
    # If no file matches: folder -> number of its files that would, if it were the place.
    inside: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The last part of the place's own name."""
        return os.path.basename(self.path)

    def at(self, name: str) -> str:
        """Return the path of a file, for messages; "" is the place itself."""
        return address_of(self.path, name)

    def joined(self, other: Listing) -> Listing:
        """Return this listing merged with that of the same place on another node."""
        kind = max(self.kind, other.kind, key=(NOTHING, FOLDER, FILE).index)
        files = sorted({*self.files, *other.files}, key=lambda name: name.split("/"))
        entries = tuple(sorted({*self.entries, *other.entries}))
        folders = self.folders | other.folders
        inside = {**other.inside, **self.inside}
        return Listing(self.path, kind, tuple(files), entries, folders, self.searched, inside)


class FileVersion(NamedTuple):
    """What tells a version of a file from another one: `size` and `modified`."""

    size: int  # bytes
    modified: int  # its time in nanoseconds, or another number that no later version has
    inode: int = 0
    changed: int = 0  # when its content, name or mode changed last, in nanoseconds


class HeaderReader(NamedTuple):
    """A file whose headers are read, and which version of it this is."""

    read_at: ReadAt
    version: FileVersion
    # Begins to fetch what is read next; None where the system reads ahead.
    expect: Callable[[Iterable[Span]], None] | None = None


class Store(ABC):
    """Lists a place, and reads small documents there. Names are relative to the place."""

    @abstractmethod
    def list(self, pattern: str) -> Listing:
        """Return what lies at the place, with the files that match a pattern.

        In each part of the pattern ``*`` stands for any text, and ``{rank}`` for a rank's number.
        One that begins with ``**/`` matches in the place itself, and in every folder there.
        """

    @abstractmethod
    def read(self, name: str, searched: str = "") -> bytes:
        """Return a small document. Raises CheckpointError, StorageError.

        `searched`: for messages, which nodes were searched for it.
        """

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether this process sees the file."""

    @abstractmethod
    def version(self, name: str) -> FileVersion | None:
        """Return which version of a file is there; None if there is none."""

    @abstractmethod
    def open(self, name: str) -> AbstractContextManager[HeaderReader]:
        """Yield a file, to read what is not its tensors' content; "" is the place itself."""


class JoinedStore(Store):
    """Several places as one: a document that several have is the same in all."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self._stores = stores

    def list(self, pattern: str) -> Listing:
        return reduce(Listing.joined, (store.list(pattern) for store in self._stores))

    def read(self, name: str, searched: str = "") -> bytes:
        documents = {store.read(name, searched): None for store in self._with(name)}
        if len(documents) > 1:
            raise _unequal_documents(name)
        return next(iter(documents))

    def has(self, name: str) -> bool:
        return any(store.has(name) for store in self._stores)

    def version(self, name: str) -> FileVersion | None:
        return self._with(name)[0].version(name)

    @contextmanager
    def open(self, name: str) -> Iterator[HeaderReader]:
        with ExitStack() as stack:
            stores = self._with(name)[: 1 if name.endswith(_TENSOR_FILES) else None]
            first, *others = (stack.enter_context(store.open(name)) for store in stores)
            for start in range(0, first.version.size, _BLOCK) if others else ():
                if len({reader.read_at(start, _BLOCK) for reader in (first, *others)}) > 1:
                    raise _unequal_documents(name)
            if len({reader.version.size for reader in (first, *others)}) > 1:
                raise _unequal_documents(name)
            yield first

    def _with(self, name: str) -> Sequence[Store]:
        return [store for store in self._stores if store.has(name)] or self._stores[:1]


_BLOCK = 1 << 20
_TENSOR_FILES = (".safetensors", ".distcp", ".ckpt")
"""Ends of files that are no documents: their copies are compared where they are chosen."""


def _unequal_documents(name: str) -> CheckpointError:
    return CheckpointError(
        "is not the same in all places",
        "remove the one that is not meant",
        "leave out --fallback",
        where=name,
    )


class RangeReader(ABC):
    """Files whose content is read by byte ranges, by one process; opened as they are needed.

    The defaults are those of a kind of storage that gains nothing from an announcement.
    """

    ahead: int = 0  # number of announced reads in flight, at most; 0: none is announced
    keeps_announced: bool = True  # whether what is announced takes memory until it is read
    is_memory: bool = False  # whether content lies in memory, so that `memory_of` returns it
    # Files of which only one version is read, whatever gets its name meanwhile.
    pinned: Collection[str] = ()
    on_wait: OnProgress | None = None  # called while a read takes long; may raise to stop

    @abstractmethod
    def version(self, path: str, sparse: bool = False) -> FileVersion:
        """Return which version of a file `read` reads. Raises StorageError."""

    @abstractmethod
    def version_now(self, path: str) -> FileVersion | None:
        """Return which version has this name now; None if nothing has it any more."""

    def announce(self, path: str, offset: int, nbytes: int) -> None:  # noqa: B027
        """Begin to read a range; `read` is called for it after those announced before it.

        What fails is raised when it is read. The caller bounds how much is announced and not read.
        A system that reads ahead by itself gains nothing (docs/decisions.md, "Tiles").
        """

    def announce_to_system(self, path: str, offset: int, nbytes: int) -> None:  # noqa: B027
        """Let a system that reads ahead by itself begin to read a range: a hint, for processes that
        attend to messages too."""

    def announces_within(self, nbytes: int) -> None:  # noqa: B027
        """Take note how many bytes will be announced and not read, at most."""

    def all_announced(self) -> None:  # noqa: B027
        """Take note that no more is announced for now."""

    @abstractmethod
    def read(self, path: str, offset: int, room: Buffer, sparse: bool = False) -> None:
        """Fill `room` from byte `offset` on. Raises StorageError, CheckpointError.

        `sparse`: it is read out of bytes that nobody needs.
        """

    def position(self, path: str, offset: int) -> Position | None:
        """Return where a file system can share blocks from; None where there is none."""
        return None

    def memory_of(self, entry: int) -> Any:
        """Return the content of a file's entry, by its number, as an array of bytes; None where it
        is to be read."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Let go of all files, and of what was announced and not read."""


ReadFiles = Callable[[OnProgress, Sequence[int]], None]
"""Reads some of each of several files, and reports bytes as it goes."""
ReadEach = Callable[[Sequence[int], ReadFiles, OnProgress], None]
"""Has files read at the same time; the last is called meanwhile, and may raise."""


class Storage(Protocol):
    """A kind of storage, by the scheme of its addresses, such as ``mem`` in ``mem://a/b``.

    An address with a scheme is the same for all nodes; at one path each may have other files.
    """

    buffers: int  # bytes that a process takes to read from it, unless it is told
    # Whether a file of which it knows a mark that no other content has, is known by its version
    # alone; the version has an inode then.
    has_versions: bool
    has_folders: bool  # whether it is a file system: folders, links, other names, holes in files
    is_shared: bool  # whether all nodes have the same at one address
    read_each: ReadEach | None  # None where it is not faster

    def store(self, place: str) -> Store:
        """Return the place with this address."""

    def ranges(self) -> RangeReader:
        """Return files of this kind, to be read by this process."""

    def is_reached(self, address: str) -> bool:
        """Tell whether this process gets an answer from where an address is."""


_OBJECTS = "rankxform.storage.objects:ObjectStorage"
USUAL_BUFFERS = 64 << 20
_SECRETS = "secret", "token", "password", "key"


class Access:
    """How this process reaches object storage, as the last call said.

    options: by the name that the client has for each.
    """

    def __init__(self) -> None:
        self.options: dict[str, str] = {}

    def state(self, endpoint_url: str | None, texts: Sequence[str]) -> None:
        """Take note of what a call says, in place of what an earlier one said.

        texts: of the form ``KEY=VALUE``; ``@FILE`` is the content of a file, ``$NAME`` a
        variable's. Raises UsageError, which repeats no value.
        """
        options = {} if endpoint_url is None else {"endpoint": endpoint_url}
        for text in texts:
            key, equals, value = text.partition("=")
            key = key.strip().lower()
            if not equals or not key:
                raise UsageError(
                    "--storage-option: expected KEY=VALUE", "--storage-option region=NAME"
                )
            if value.startswith("@"):
                options[key] = read_bytes(Path(value[1:])).decode(errors="replace").strip()
            elif value.startswith("$"):
                if value[1:] not in os.environ:
                    raise UsageError(f"--storage-option {key}: there is no variable {value[1:]}")
                options[key] = os.environ[value[1:]]
            elif any(word in key for word in _SECRETS):
                raise UsageError(
                    f"--storage-option {key}: everybody on this machine can read a command line",
                    f"--storage-option {key}=@FILE",
                    f"--storage-option '{key}=$NAME', a variable of the environment",
                )
            else:
                options[key] = value
        self.options = options


ACCESS = Access()
STORAGE: Registry[Storage] = Registry(dict.fromkeys(("s3", "obs", "gs", "az"), _OBJECTS))
"""Kinds of storage, by scheme; "" are paths of a file system."""


def scheme_of(address: str) -> str:
    """Return the scheme of an address; "" of a path.

    >>> scheme_of("s3://bucket/run"), scheme_of("/data/run")
    ('s3', '')
    """
    scheme, mark, _ = address.partition("://")
    return scheme if mark else ""


def storage_of(address: str) -> Storage:
    """Return the kind of storage that an address is of.

    An address whose scheme nobody registered is a path.
    """
    return STORAGE.get(scheme_of(address), STORAGE[""])


def is_path(address: str) -> bool:
    """Tell whether an address is a path of a file system."""
    return storage_of(address) is STORAGE[""]


def absolute(address: str) -> str:
    """Return an address with which every process finds the same place, wherever it works."""
    return str(Path(address).absolute()) if is_path(address) else address.rstrip("/")


def address_of(place: str, name: str) -> str:
    """Return the address of a file at a place; "" is the place itself.

    >>> address_of("s3://bucket/run", "rank_0/a.ckpt"), address_of("a.ckpt", "")
    ('s3://bucket/run/rank_0/a.ckpt', 'a.ckpt')
    """
    return join(place, name) if name else place


def store_at(address: str) -> Store:
    """Return the place with this address."""
    return storage_of(address).store(address)


def is_litter(name: str) -> bool:
    """Tell whether an entry of a folder is nobody's weights, index, strategy or adapter.

    Copying and editing leave such files: macOS's ``._NAME``, NFS's ``.nfs...``, downloads. The
    table of a DCP, finished or not, is the one hidden file that a checkpoint has.

    >>> [is_litter(name) for name in ("._model.safetensors", "a.ckpt~", ".metadata", "a.ckpt")]
    [True, True, False, False]
    """
    return is_hidden(name) or name.endswith(_LEFT_BY_TOOLS)


def is_hidden(name: str) -> bool:
    """Tell whether an entry is no part of what a person would see in a folder."""
    if name.startswith((".metadata", _OURS)):
        return False
    return name.startswith(".") or name == "__MACOSX"


_OURS = ".rankxform"  # records and part files, which are looked for
_LEFT_BY_TOOLS = ("~", ".tmp", ".incomplete", ".lock")


def expression_of(part: str) -> re.Pattern[str] | None:
    """Return what a part of a pattern matches; None for the folder above.

    The numbers of ranks are its groups.
    """
    if part == "..":
        return None
    literal = re.escape(part).replace(re.escape(RANK), r"(\d{1,9})").replace(r"\*", ".*")
    return re.compile(literal, re.DOTALL)


ANY_FOLDER = "**/"
"""At a pattern's beginning: in the place itself, or in a folder there."""
LARGEST_DOCUMENT = 1 << 30


class PosixStorage:
    """Paths of file systems (`Storage`)."""

    buffers = USUAL_BUFFERS
    has_versions = False
    has_folders = True
    is_shared = False
    read_each: ReadEach | None = None

    def store(self, place: str) -> Store:
        return PosixStore(Path(place))

    def ranges(self) -> RangeReader:
        return PosixRangeReader()

    def is_reached(self, address: str) -> bool:
        return True


class PosixRangeReader(RangeReader):
    """Files of file systems; the system reads ahead of what is read in a row.

    What is sparse is read through a descriptor of its own, on which the system reads nothing ahead.
    """

    def __init__(self) -> None:
        self._files = Descriptors(os.O_RDONLY)
        self._sparse = Descriptors(os.O_RDONLY, os.POSIX_FADV_RANDOM)

    def version(self, path: str, sparse: bool = False) -> FileVersion:
        with raising_storage_errors(path, "look at"):
            return _version(os.fstat((self._sparse if sparse else self._files).get(path)))

    def version_now(self, path: str) -> FileVersion | None:
        try:
            return _version(os.stat(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError.of(error, path, "look at") from error

    def read(self, path: str, offset: int, room: Buffer, sparse: bool = False) -> None:
        read_into((self._sparse if sparse else self._files).get(path), path, offset, room)

    def announce_to_system(self, path: str, offset: int, nbytes: int) -> None:
        advise(self._files.get(path), os.POSIX_FADV_WILLNEED, offset, nbytes)

    def position(self, path: str, offset: int) -> Position | None:
        return self._files.get(path), path, offset

    def close(self) -> None:
        self._files.close()
        self._sparse.close()


class PosixStore(Store):
    """A place in a file system: a folder, or one file."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def list(self, pattern: str) -> Listing:
        root = self._root
        if root.is_file():
            return Listing(str(root), FILE)
        if not root.is_dir():
            return Listing(str(root))
        with os.scandir(root) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        entries = [entry for entry in entries if not is_hidden(entry.name)]
        folders = [entry.name for entry in entries if _is_folder(entry)]
        names = tuple(entry.name for entry in entries)
        below = pattern.removeprefix(ANY_FOLDER)
        patterns = [below] if below == pattern else [below, f"*/{below}"]
        files, inside = tuple[str, ...](), {}
        for place_pattern in patterns:
            parts = [expression_of(part) for part in os.path.normpath(place_pattern).split("/")]
            files += tuple(_walk(str(root), "", parts))
        if not files and RANK in pattern:
            with suppress(OSError):
                inside = {f: len(list(_walk(str(root / f), "", parts))) for f in folders}
        return Listing(str(root), FOLDER, files, names, frozenset(folders), inside=inside)

    def read(self, name: str, searched: str = "") -> bytes:
        path = self._root / name if name else self._root
        if not path.is_file():
            raise CheckpointError(
                f"process 0 does not see it, and another node does{searched}",
                "copy it to the first node",
                where=path,
            )
        if path.stat().st_size > LARGEST_DOCUMENT:
            raise CheckpointError(f"has over {LARGEST_DOCUMENT} bytes, and is no index", where=path)
        return read_bytes(path)

    def has(self, name: str) -> bool:
        return (self._root / name).is_file()

    def version(self, name: str) -> FileVersion | None:
        with suppress(OSError):
            return _version((self._root / name).stat())
        return None

    @contextmanager
    def open(self, name: str) -> Iterator[HeaderReader]:
        path = address_of(str(self._root), name)
        with open_for_reading(path) as (fd, status):
            yield HeaderReader(range_reader(fd, path), _version(status))


def _version(status: os.stat_result) -> FileVersion:
    return FileVersion(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)


def _walk(root: str, below: str, parts: list[re.Pattern[str] | None]) -> Iterator[str]:
    """Yield the names of files that match the parts of a pattern, folder by folder."""
    part, *deeper = parts
    if part is None:
        yield from _walk(root, below + "../", deeper)
        return
    with os.scandir(os.path.join(root, below)) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    names = {entry.name for entry in entries}
    names_hidden = part.pattern.startswith(r"\.")  # the user's pattern does
    for entry in entries:
        if not part.fullmatch(entry.name) or (is_litter(entry.name) and not names_hidden):
            continue
        if deeper and _is_folder(entry):
            yield from _walk(root, f"{below}{entry.name}/", deeper)
            continue
        is_file = entry.is_file(follow_symlinks=False) or os.path.isfile(entry.path)
        if not deeper and is_file and not _repeats(entry, names, part):
            yield below + entry.name


def _repeats(entry: os.DirEntry[str], names: Collection[str], part: re.Pattern[str]) -> bool:
    """Tell whether an entry is a link to another one of the same rank, such as ``latest``.

    A link to another rank's file is a replica that is stored once.
    """
    if not entry.is_symlink():
        return False
    target = os.readlink(entry.path)
    match, target_match = part.fullmatch(entry.name), part.fullmatch(target)
    if target not in names or is_litter(target) or match is None or target_match is None:
        return False
    return match.groups() == target_match.groups()


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path))
