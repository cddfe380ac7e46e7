"""The base class of containers, the index of a file, element types, and first bytes.

A container is a `Container`, which the rest of the package finds by its entry in `CONTAINERS`. No
other code depends on which container it has: files are found, read, laid out and checksummed
through this class alone.

Data are opaque here: a type is a label with an item size. Int4 counts bytes, two values in
each; ``str`` is the UTF-32 text of an `append_dict` entry, ``bytes`` what is no tensor and is
carried as it is between checkpoints of one form. Types that MindSpore does not have
are called as in safetensors, and are carried from one such file to another.

First bytes of well-known files tell what a file is that cannot be indexed, so that a message says
what is there instead of what is not.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from math import prod
from typing import Any

from rankxform.errors import FormatError
from rankxform.geometry.box import Shape
from rankxform.values import NamedTuple, Registry, blake2b, crc32, dataclass

INT4, TEXT, BYTES = "Int4", "str", "bytes"

_TYPES = (
    # MindSpore, safetensors, bytes
    ("Bool", "BOOL", 1),
    ("Int8", "I8", 1),
    ("UInt8", "U8", 1),
    ("Int16", "I16", 2),
    ("UInt16", "U16", 2),
    ("Int32", "I32", 4),
    ("UInt32", "U32", 4),
    ("Int64", "I64", 8),
    ("UInt64", "U64", 8),
    ("Float16", "F16", 2),
    ("BFloat16", "BF16", 2),
    ("Float32", "F32", 4),
    ("Float64", "F64", 8),
    (INT4, None, 1),
    (TEXT, None, 1),
    ("F8_E4M3", "F8_E4M3", 1),
    ("F8_E5M2", "F8_E5M2", 1),
    ("F8_E8M0", "F8_E8M0", 1),
)
FLOATS = ("Float16", "BFloat16", "Float32", "Float64")
FLOAT8 = ("F8_E4M3", "F8_E5M2", "F8_E8M0")
NOT_MINDSPORES = FLOAT8
ITEM_SIZE = {name: size for name, _, size in _TYPES}
TO_SAFETENSORS = {**{name: code for name, code, _ in _TYPES if code}, INT4: "I8"}
FROM_SAFETENSORS = {code: name for name, code, _ in _TYPES if code}


def item_size(dtype: str) -> int:
    """Return the bytes of one element. Raises FormatError for a type MindSpore does not have."""
    try:
        return 1 if dtype == BYTES else ITEM_SIZE[dtype]
    except KeyError:
        raise FormatError(
            f"element type {dtype!r} is not one of MindSpore's ({', '.join(ITEM_SIZE)})"
        ) from None


def content_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes that a parameter of `shape` takes.

    >>> content_bytes("BFloat16", (3, 4)), content_bytes("Float64", ())
    (24, 8)
    """
    return prod(shape) * item_size(dtype)


ReadAt = Callable[[int, int], bytes]
"""``read_at(offset, nbytes)`` of one file; shorter only where the file ends."""

Blocks = Callable[["Iterable[Span]"], Iterator[memoryview]]
"""The bytes of spans of one file, in order; a block is gone when the next is asked for."""

CrcOf = Callable[["Iterable[Span]", int], int]
"""The CRC-32 of spans of one file, continued from another."""

Patch = tuple[int, bytes]
"""Bytes to be written into a file, and the offset at which."""

REDUNDANCY_KEY = "remove_redundancy"
"""The metadata entry by which MindSpore marks a file that lacks some of its rank's parameters."""


class Span(NamedTuple):
    """One byte interval of a file."""

    offset: int
    nbytes: int


class TensorSpec(NamedTuple):
    """A tensor of a file: `shape` is that of the slice which the file holds, in elements."""

    name: str
    dtype: str
    shape: Shape


@dataclass(frozen=True)
class Schema:
    """What a file holds, without the where: the same for most ranks of a stage.

    Three parallel tuples, in file order; `shapes` are slice shapes, in elements.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.names, self.dtypes, self.shapes))

    @cached_property
    def position(self) -> Mapping[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def of(self, names: Sequence[str]) -> Schema:
        """Return what a file holds of some tensors."""
        rows = [self.position[name] for name in names]
        dtypes, shapes = (tuple(column[i] for i in rows) for column in (self.dtypes, self.shapes))
        return Schema(tuple(names), dtypes, shapes)  # type: ignore[arg-type]

    def nbytes(self, i: int) -> int:
        """Bytes that the shape and type of entry `i` call for."""
        return content_bytes(self.dtypes[i], self.shapes[i])


BOX_MARK = " at ("
"""What stands between a tensor's name and the place of one of its boxes, in a view's name."""


class EntryView(NamedTuple):
    """An entry of a file's own table of contents, or a part of it, under another name."""

    entry: str  # its own name
    # The shape that it is stated to have, in elements; None if only where a part of it lies is
    # stated.
    entry_shape: Shape | None
    # name, shape: as it is known.
    name: str
    shape: Shape
    first: int = 0  # the element at which a part begins
    raw: bool = False  # what is stated is all of its bytes, whatever they are

    def unplaced(self) -> EntryView:
        """Return the same of a box under its tensor's name."""
        return self._replace(name=self.name.partition(BOX_MARK)[0])


class DeclaredFile(NamedTuple):
    """What a checkpoint states of a file: views of its entries, and how many bytes it has at least;
    source: what states it, for messages."""

    views: tuple[EntryView, ...] = ()
    nbytes: int = 0
    source: str = ""


@dataclass
class Index:
    """Table of contents of one checkpoint file."""

    schema: Schema
    offsets: array[int]  # for each entry the byte at which its content begins
    pieces: dict[int, tuple[Span, ...]]  # position -> spans of content that lies in several places
    size: int  # bytes of the file
    modified: int = 0  # modification time when it was read, in nanoseconds
    inode: int = 0  # its inode then; 0: not known
    changed: int = 0  # its time of change (ctime) then, in nanoseconds; 0: not known
    checksum_at: int | None = None  # byte at which a checksum behind the content begins
    has_checksum: bool = False  # whether the file has a checksum, there or elsewhere
    # Texts that the container keeps beside tensors.
    metadata: Mapping[str, str] = field(default_factory=dict)
    # Name -> why an entry's bytes are not its elements in row-major order.
    wrong: Mapping[str, str] = field(default_factory=dict)
    # Position -> CRC-32 that is declared of an entry's content.
    sums: Mapping[int, int] = field(default_factory=dict)
    # For each entry the byte at which all that belongs to it begins; empty: at its content.
    starts: array[int] | None = None
    views: tuple[EntryView, ...] = ()  # names that entries got

    def __contains__(self, name: str) -> bool:
        return name in self.schema.position

    def dtype(self, name: str) -> str:
        return self.schema.dtypes[self.schema.position[name]]

    def shape(self, name: str) -> Shape:
        return self.schema.shapes[self.schema.position[name]]

    def nbytes(self, name: str) -> int:
        i = self.schema.position[name]
        pieces = self.pieces.get(i)
        return sum(p.nbytes for p in pieces) if pieces else self.schema.nbytes(i)

    def with_schema(self, schema: Schema) -> Index:
        """Return the table of contents without what is not in `schema`, which has no pieces."""
        offsets = array("q", (self.offsets[self.schema.position[name]] for name in schema.names))
        return replace(self, schema=schema, offsets=offsets, pieces={})

    def viewed(self, views: tuple[EntryView, ...]) -> Index:
        """Return the table of contents under the names that a checkpoint has for its entries.

        What nobody speaks of is left out. Raises FormatError where an entry is not what is stated.
        """
        if not views:
            return self
        file_schema, offsets, sums, pieces = self.schema, array("q"), {}, {}
        kinds = []
        for number, (entry, entry_shape, name, shape, first, raw) in enumerate(views):
            position = file_schema.position.get(entry)
            if position is None:
                raise FormatError("does not lie there", "copy the file again", where=name)
            if entry_shape is not None and file_schema.shapes[position] != entry_shape and not raw:
                if entry in self.wrong:
                    tensor, at_box, box = name.partition(BOX_MARK)
                    where = f" (at ({box})" if at_box else ""
                    raise FormatError(f"{self.wrong[entry]}{where}", where=tensor)
                raise FormatError(
                    f"is {file_schema.dtypes[position]} {list(file_schema.shapes[position])}, and "
                    f"{list(entry_shape)} is stated; the files are not of one checkpoint",
                    where=name,
                )
            if first + prod(shape) > prod(file_schema.shapes[position]) and not raw:
                raise FormatError(
                    f"ends at {first + prod(shape):,}, beyond the file's end", where=name
                )
            kinds.append(BYTES if raw else file_schema.dtypes[position])
            if raw and self.starts is not None:
                offsets.append(self.starts[position])
                continue
            offsets.append(
                self.offsets[position] + content_bytes(file_schema.dtypes[position], (first,))
            )
            if position in self.pieces:
                start, nbytes = (content_bytes(kinds[-1], (n,)) for n in (first, prod(shape)))
                pieces[number] = tuple(spans_of_range(self.pieces[position], start, nbytes))
            if position in self.sums and prod(shape) == prod(file_schema.shapes[position]):
                sums[number] = self.sums[position]
        schema = Schema(
            tuple(view.name for view in views), tuple(kinds), tuple(view.shape for view in views)
        )
        return replace(
            self, schema=schema, offsets=offsets, metadata={}, wrong={}, sums=sums, starts=None,
            views=views, pieces=pieces,
        )  # fmt: skip

    def emptied(self) -> Index:
        """Return the table of contents of a file of which nothing is read."""
        return replace(self.with_schema(self.schema.of(())), metadata={}, wrong={}, sums={})

    def unplaced(self) -> Index:
        """Return the table of contents with each box under its tensor's name."""
        names = tuple(name.partition(BOX_MARK)[0] for name in self.schema.names)
        schema = Schema(names, self.schema.dtypes, self.schema.shapes)
        return replace(self, schema=schema, views=tuple(map(EntryView.unplaced, self.views)))

    def spans(self, name: str) -> tuple[Span, ...]:
        """Return where the content of `name` lies, in order."""
        i = self.schema.position[name]
        return self.pieces.get(i) or (Span(self.offsets[i], self.schema.nbytes(i)),)

    @property
    def is_partial(self) -> bool:
        """Whether the file states that it holds only some of its rank's parameters."""
        return self.metadata.get(REDUNDANCY_KEY) == "True"


class ContentTail(NamedTuple):
    """Bytes behind a tensor's content, and where in them its CRC-32 goes, in four bytes each."""

    data: bytes
    crc_at: tuple[int, ...]

    def with_crc(self, crc: int) -> bytes:
        """Return the bytes, of content with this CRC-32."""
        tail_bytes = bytearray(self.data)
        for offset in self.crc_at:
            tail_bytes[offset : offset + 4] = crc.to_bytes(4, "little")
        return bytes(tail_bytes)


@dataclass(frozen=True)
class FileLayout:
    """The bytes of a destination file, planned; the same for all ranks with slices of one shape."""

    # (offset, bytes) of everything that is not tensor content, ascending. Each is followed by the
    # content of some tensor, and written with it.
    headers: tuple[tuple[int, bytes], ...]
    spans: Mapping[str, tuple[Span, ...]]  # where the content of each tensor goes, in order
    size: int  # the bytes of the complete file; the last `trailer` of them are a checksum
    trailer: int = 0
    # By tensor what stands right behind its content, and is written with it.
    tails: Mapping[str, ContentTail] = field(default_factory=dict)

    @cached_property
    def heads(self) -> Mapping[int, memoryview]:
        """By the byte at which content starts, what comes right before it."""
        return {offset + len(head): memoryview(head) for offset, head in self.headers}

    @cached_property
    def digest(self) -> str:
        """A digest that differs between layouts that differ."""
        state = blake2b(b"".join(head for _, head in self.headers), digest_size=8)
        places = (
            (name, *(n for span in spans for n in span)) for name, spans in self.spans.items()
        )
        state.update(repr(([offset for offset, _ in self.headers], *places)).encode())
        state.update(b"".join(tail.data for tail in self.tails.values()))
        return state.hexdigest()


def crc_of(blocks: Blocks, spans: Iterable[Span], crc: int = 0) -> int:
    """Return the crc32 over `spans` of a file, continued from `crc`."""
    for part in blocks(spans):
        crc = crc32(part, crc)
    return crc


class Container(ABC):
    """One container. Pure but for the functions it is given; it knows no paths.

    The defaults are those of a file that keeps its tensors in the order in which they come, and has
    no checksum of the whole.
    """

    name: str  # what ``--format`` calls it, and the suffix of its files
    # Whether a file of it can be a checkpoint, or a rank's; otherwise an index must name it.
    alone: bool
    has_equal_headers: bool = True  # whether most files of a checkpoint differ in content alone

    @abstractmethod
    def read_index(self, read_at: ReadAt, size: int) -> Index:
        """Find every tensor of a file of `size` bytes from its headers; read no content.

        Raises FormatError that names the byte where the file stops making sense.
        """

    def order(self, name: str, dtype: str) -> Any:
        """Return a key by which tensors of a file are sorted; one key for all keeps their order."""
        return 0

    @abstractmethod
    def lay_out(
        self,
        tensors: Sequence[TensorSpec],
        metadata: Mapping[str, str],
        checksum: bool,
        begins: int = 0,
    ) -> FileLayout:
        """Plan a file of `tensors`. Raises RequestError for a tensor that it cannot hold.

        `metadata`: kept where the container has room for them.
        `checksum`: whether room is left for one.
        `begins`: at which byte of a block of the file system content should begin, where the
        container leaves a choice.
        """

    def checksum(self, layout: FileLayout, crc_of_spans: CrcOf, blocks: Blocks) -> Patch:
        """Return the checksum of a complete file that was laid out with one, and where it goes.

        blocks: is asked for tensors without an axis alone.
        """
        return 0, b""

    def checksums(
        self, index: Index, read_at: ReadAt, blocks: Blocks
    ) -> Sequence[tuple[str, str, str]]:
        """Return the checksums that a file declares: of what, the declared, the actual value."""
        return ()


_PACKAGE = "rankxform.formats"
CONTAINERS: Registry[Container] = Registry(
    {
        "ckpt": f"{_PACKAGE}.ckpt:Ckpt",
        "safetensors": f"{_PACKAGE}.safetensors:Safetensors",
        "distcp": f"{_PACKAGE}.dcp_containers:Distcp",
        "bytes": f"{_PACKAGE}.dcp_containers:Raw",
        "bin": f"{_PACKAGE}.torch_file:TorchFile",
        "pt": f"{_PACKAGE}.torch_file:PtFile",
        "pth": f"{_PACKAGE}.torch_file:PthFile",
    },
    {
        "ckpt": {"alone": True},
        "safetensors": {"alone": True},
        "distcp": {"alone": False},
        "bytes": {"alone": False},
        "bin": {"alone": False},
        "pt": {"alone": False},
        "pth": {"alone": False},
    },
)
"""All containers by name, which is their files' suffix too."""

DEFAULT_CONTAINER = "ckpt"

FILE_CHECKSUM = "its checksum"
"""What a checksum of a whole file is called."""

BLOCK = 4096
"""Bytes of a file system's block, on the usual machines."""


def container_suffixes() -> tuple[str, ...]:
    """Return the suffixes of files that may be checkpoints, with the dot."""
    return tuple("." + name for name in CONTAINERS if CONTAINERS.attribute(name, "alone"))


def container_of(suffix: str) -> Container:
    """Return the container of files with `suffix`; `.ckpt` if no container has that suffix."""
    return CONTAINERS.get(suffix.removeprefix("."), CONTAINERS[DEFAULT_CONTAINER])


@dataclass(frozen=True)
class ParsedEntry:
    """One tensor as a format's reader finds it."""

    name: str
    dtype: str
    shape: Shape
    spans: tuple[Span, ...]


def build_index(entries: Sequence[ParsedEntry], size: int, **index_fields: object) -> Index:
    """Check entries against their shapes and make the index. Raises FormatError."""
    for entry in entries:
        _check(entry)
    schema = Schema(
        tuple(e.name for e in entries),
        tuple(e.dtype for e in entries),
        tuple(e.shape for e in entries),
    )
    offsets = array("q", (e.spans[0].offset if e.spans else 0 for e in entries))
    pieces = {i: e.spans for i, e in enumerate(entries) if len(e.spans) != 1 and schema.nbytes(i)}
    return Index(schema, offsets, pieces, size, **index_fields)  # type: ignore[arg-type]


def _check(entry: ParsedEntry) -> None:
    if any(n < 0 for n in entry.shape):
        raise FormatError(f"{entry.name!r} has a negative dimension: {list(entry.shape)}")
    if any(n >> 48 for n in entry.shape):
        raise FormatError(f"{entry.name!r} has an axis of over 2**48; the file is damaged")
    have = sum(span.nbytes for span in entry.spans)
    want = content_bytes(entry.dtype, entry.shape)
    if want >> 63:
        text = f"{entry.name!r} has a shape of {len(entry.shape)} axes, of over 2**63 bytes"
        raise FormatError(text, "copy or save the file again")
    if have != want:
        raise FormatError(
            f"{entry.name!r} is {entry.dtype} {list(entry.shape)}, which takes {want} "
            f"bytes, but the file holds {have}",
            "copy or save the file again",
        )


def non_tensor_spans(index: Index) -> Iterator[Span]:
    """Yield the parts of a file that are not tensor content, its headers, in order.

    A checksum after the last tensor depends on the content, and is left out.
    """
    spans = sorted(
        (span for name in index.schema.names for span in index.spans(name)),
        key=lambda span: (span.offset, span.nbytes),
    )
    end = index.size if index.checksum_at is None else index.checksum_at
    position = 0
    for span in [*spans, Span(end, 0)]:
        if span.offset > position:
            yield Span(position, span.offset - position)
        position = max(position, span.offset + span.nbytes)


def spans_of_range(spans: Sequence[Span], start: int, nbytes: int) -> Iterator[Span]:
    """Yield the file intervals of ``nbytes`` content bytes from content byte `start` on.

    >>> list(spans_of_range((Span(100, 10), Span(200, 10)), 8, 4))
    [Span(offset=108, nbytes=2), Span(offset=200, nbytes=2)]
    """
    for span in spans:
        if not nbytes:
            return
        if start >= span.nbytes:
            start -= span.nbytes
            continue
        take = min(nbytes, span.nbytes - start)
        yield Span(span.offset + start, take)
        start, nbytes = 0, nbytes - take


class Signature(NamedTuple):
    """What something is, as "is ..." or "holds ..." is followed by it, and what can be done."""

    title: str
    tries: tuple[str, ...]


_LFS, _PAGE = b"version https://git-lfs", (b"<!doctype html", b"<html")
FIRST_BYTES = 64
"""Bytes of a file that tell what it is."""

_PULL = Signature("a git-lfs pointer in place of the file", ("git lfs pull, in its folder",))
_EMPTY = Signature("empty: 0 bytes", ("copy the file again",))
_HTML = Signature("an HTML page, as a failed download leaves it", ("download the file again",))
_TORCH = Signature(
    "a PyTorch pickle (torch.save), which is read as pytorch_model.bin, or alone as .bin or .pt",
    ("save it again as safetensors; for HyperParallel, with a version after March 2026",),
)
_SAVE = ("save it with save_pretrained(..., safe_serialization=True), as safetensors",)


def file_signature(first_bytes: bytes) -> Signature | None:
    """Return what a file is by its first bytes; None if that is not known.

    >>> file_signature(b"version https://git-lfs.github.com/spec/v1").title
    'a git-lfs pointer in place of the file'
    """
    if not first_bytes:
        return _EMPTY
    if first_bytes.startswith(_LFS):
        return _PULL
    if first_bytes.lstrip().lower().startswith(_PAGE):
        return _HTML
    if first_bytes.startswith(b"GGUF"):
        return Signature("a GGUF file of llama.cpp", ("convert the model it was made of",))
    if first_bytes.startswith((b"PK\3\4", b"\x80\x02", b"\x80\x04")):
        return _TORCH
    return None


_BY_NAME: tuple[tuple[str, Signature], ...] = (
    (
        r"(bf16_|fp16_)?zero_pp_rank_\d+.*\.pt|mp_rank_\d+_model_states\.pt|global_step\d+"
        r"|zero_to_fp32\.py|latest_universal",
        Signature(
            "a checkpoint of DeepSpeed",
            ("python zero_to_fp32.py . OUT --safe_serialization, and convert OUT",),
        ),
    ),
    (
        r"model_(optim_)?rng\.pt",
        Signature("one rank's file of Megatron-LM", ("name the iteration's folder, above it",)),
    ),
    (
        r"mp_rank_\d+(_\d+)*",
        Signature("folders of ranks, as Megatron-LM and NeMo have them, without their "
                  "model_optim_rng.pt", ("save it with --ckpt-format torch_dist",)),
    ),
    (
        r"_CHECKPOINT_METADATA|manifest\.ocdbt|ocdbt\.process_\d+|_METADATA",
        Signature("a checkpoint of Orbax", ("export it as safetensors, by the job that wrote it",)),
    ),
    (
        r"common\.pt",
        Signature(
            "a checkpoint of Megatron in zarr", ("save it with --ckpt-format torch_dist",)
        ),
    ),
    (
        r"\.zarray|\.zgroup|zarr\.json|.*\.zarr",
        Signature("zarr arrays", ("save the checkpoint with --ckpt-format torch_dist",)),
    ),
    (r".*\.gguf", Signature("GGUF files of llama.cpp", ("convert the model they were made of",))),
    (
        r".*\.(pdparams|pdopt)",
        Signature("a checkpoint of Paddle", ("export it as safetensors",)),
    ),
    (r".*\.npz", Signature("arrays of NumPy", ("save them with safetensors.numpy.save_file",))),
    (
        r".*\.(bin|pt|pth)",
        Signature("PyTorch pickles; a folder of pytorch_model*.bin is read, or one file alone",
                  ("name the model's file itself", *_SAVE)),
    ),
    (
        r".*\.(h5|keras|msgpack|onnx|data-\d+-of-\d+)",
        Signature("weights of another framework", ("export them as safetensors",)),
    ),
)  # fmt: skip
"""Names of files and folders, and what a folder with one of them holds; the first one counts."""


def folder_signature(names: Collection[str]) -> tuple[str, Signature] | None:
    """Return a name in a folder, and what the folder holds by it; None if not known.

    >>> folder_signature(["config.json", "model.gguf"])[1].title
    'GGUF files of llama.cpp'
    """
    for pattern, signature in _BY_NAME:
        for name in sorted(names):
            if re.fullmatch(pattern, name):
                return name, signature
    return None
