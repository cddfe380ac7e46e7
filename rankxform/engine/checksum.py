"""Fingerprints, and the integrity check.

The fingerprint of a region is the sum, modulo 2**64, of every 4-byte word times a key that belongs
to the word's place in the full tensor; so the fingerprints of regions that tile a larger one add up
to its own. The tensor is seen as rows of words; a key is the product of three odd numbers, one for
the row, one for the place in the row by units of 65,536 words, one for the place in the unit. They
are drawn from a seed that is new for each conversion.

What is detected: a change within one word, always, because an odd number times a change that is
not zero is never zero. Any other change, of whatever size and kind, escapes with a probability,
over the seeds, below 2**-22: among its words one has a difference that is no multiple of 2**32, so
the innermost sum is a multiple of 2**t with probability at most 2**(31 - t), and each further level
lets that grow by a factor of 33 at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from math import gcd, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from rankxform.errors import DifferenceError
from rankxform.formats.container import item_size
from rankxform.geometry.box import Box, Shape, first_element
from rankxform.geometry.tiling import split_into_tiles
from rankxform.planning.transfers import Transfer
from rankxform.storage.posix import Buffer
from rankxform.transport.team import OnProgress
from rankxform.values import blake2b

from .cast import cast_function, transport_dtype, word_type
from .schedule import CHECKSUM_BYTES, Region, TileWork, typed

if TYPE_CHECKING:
    import numpy.typing as npt

    from rankxform.storage.source_reader import SourceReader

    from .copier import Copier
    from .helper_thread import HelperThread
    from .sinks import ExpectedSlice

    Bytes = npt.NDArray[np.uint8]
    _Keys = npt.NDArray[np.uint64]


MODULUS = 1 << 64
_WORD = 4
_UNIT = 1 << 16
_SMALL = 16 << 10
_WORTH_HELP = 128 << 10
"""Bytes from which on another thread sums, as to wake it takes time; above `_SMALL`, for what is
kept of small regions is no other thread's."""

_KEPT = 16 << 20
_BLOCK = 4 << 20


_Places = list[tuple[dict[Any, int], object]]
"""Sums by key to which a fingerprint is to be added, each with its key."""


class Fingerprint:
    """Fingerprints under one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._tables: dict[int, _Keys] = {}
        self._weights: dict[object, npt.NDArray[Any]] = {}
        self._kept = 0
        self.name_key = lru_cache(maxsize=None)(self._name_key)
        self._row_keys = lru_cache(maxsize=32)(self._make_row_keys)
        self._columns = lru_cache(maxsize=256)(self._make_columns)

    def _name_key(self, name: str) -> int:
        """Return a parameter's factor, an odd number, in the fingerprint of a file."""
        state = blake2b(f"{self._seed} {name}".encode(), digest_size=8)
        return int.from_bytes(state.digest(), "little") | 1

    def of(self, shape: Shape, item: int, data_box: Box, data: Bytes, part: Box) -> int:
        """Return the fingerprint of `part` of a tensor of `shape`, with `item` bytes an element.

        `data` are the elements of the box `data_box`, row-major; `part` lies in it.
        """
        if not shape:
            shape, data_box, part = (1,), Box((0,), (1,)), Box((0,), (1,))
        if not part.size:
            return 0
        if part.size * item <= _SMALL:
            return _weighted_sum(*self.words_and_keys(shape, item, data_box, data, part))
        word = _word(shape, item, data_box, part)
        view = _view(data, data_box, part, item, word)
        axis = _row_axis(shape, item)
        rows = self._row_keys(shape[:axis], part.start[:axis], part.stop[:axis])
        table = view.reshape(len(rows), -1)
        if axis < len(shape) - 1 or shape[-1] * item <= _UNIT * _WORD:
            columns = self._columns(
                shape[axis:], item, Box(part.start[axis:], part.stop[axis:]), word
            )
            return _total(table, columns, rows)
        return self._long_rows(table, rows, part.start[-1] * item // word, word)

    def of_bytes(self, data: Bytes) -> int:
        """Return the fingerprint of bytes as a row of their own."""
        word = gcd(_WORD, len(data))
        row = data.view(f"u{word}").reshape(1, -1)
        return self._long_rows(row, np.ones(1, np.uint64), 0, word)

    def words_and_keys(
        self, shape: Shape, item: int, data_box: Box, data: Bytes, part: Box
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the words of a small region, as a view of `data`, and the key of each."""
        if not shape:
            shape, data_box, part = (1,), Box((0,), (1,)), Box((0,), (1,))
        word = _word(shape, item, data_box, part)
        view = _view(data, data_box, part, item, word)
        return view, self._small(shape, item, part, word).reshape(view.shape)

    def _small(self, shape: Shape, item: int, part: Box, word: int) -> npt.NDArray[Any]:
        """Return the key of every word of a small region."""
        key = shape, item, part, word
        if key not in self._weights:
            axis = _row_axis(shape, item)
            rows = self._row_keys(shape[:axis], part.start[:axis], part.stop[:axis])
            if axis < len(shape) - 1 or shape[-1] * item <= _UNIT * _WORD:
                inner = Box(part.start[axis:], part.stop[axis:])
                columns = self._columns(shape[axis:], item, inner, word)
            else:
                first, stop = (n[-1] * item // word for n in (part.start, part.stop))
                columns = self._keys_at(np.arange(first, stop), word)
            if self._kept > _KEPT:
                self._weights.clear()
                self._kept = 0
            self._weights[key] = np.multiply.outer(rows, columns).reshape(-1)
            self._kept += self._weights[key].nbytes
        return self._weights[key]

    def _make_row_keys(self, shape: Shape, start: Shape, stop: Shape) -> _Keys:
        """Return the keys of the rows in a box of the leading axes, in order."""
        numbers = np.zeros(1, np.uint64)
        for extent, a, b in zip(shape, start, stop):
            inner = np.arange(a, b, dtype=np.uint64)
            numbers = (numbers[:, None] * np.uint64(extent) + inner).reshape(-1)
        return _odd_keys(numbers, self._seed, 1)

    def _make_columns(self, shape: Shape, item: int, box: Box, word: int) -> _Keys:
        """Return the keys of a box of the trailing axes, which all are within one unit."""
        words = np.arange(prod(shape) * item // word).reshape(*shape[:-1], -1)
        places = words[_words(box, item, word)]
        return self._keys_at(places.reshape(-1), word)

    def _keys_at(self, places: npt.NDArray[Any], word: int) -> _Keys:
        unit = _UNIT * _WORD // word
        scale = _odd_keys((places // unit).astype(np.uint64), self._seed, 2)
        keys: _Keys = self._table(word)[places % unit] * scale
        return keys

    def _long_rows(self, table: npt.NDArray[Any], rows: _Keys, first: int, word: int) -> int:
        """Return the fingerprint of rows that are longer than a unit, from word `first` on."""
        unit, total, column = _UNIT * _WORD // word, 0, 0
        while column < table.shape[1]:
            number, position = divmod(first + column, unit)
            count = min(unit - position, table.shape[1] - column)
            part = table[:, column : column + count]
            scale = _odd_keys(np.array([number], np.uint64), self._seed, 2)
            total += _total(part, self._table(word)[position : position + count], rows * scale)
            column += count
        return total % MODULUS

    def _table(self, word: int) -> _Keys:
        """Return the keys of a unit's words, or of the halves or bytes that they are made of."""
        if word not in self._tables:
            keys = _odd_keys(np.arange(_UNIT, dtype=np.uint64), self._seed, 3)
            shifts = np.arange(0, 8 * _WORD, 8 * word, dtype=np.uint64)
            self._tables[word] = np.left_shift.outer(keys, shifts).reshape(-1)
        return self._tables[word]


def _row_axis(shape: Shape, item: int) -> int:
    """Return the first axis of a row; a row takes as many axes as fit in a unit, at least one."""
    axis = len(shape) - 1
    while axis and prod(shape[axis - 1 :]) * item <= _UNIT * _WORD:
        axis -= 1
    return axis


def _word(shape: Shape, item: int, data_box: Box, part: Box) -> int:
    """Return the largest of 4, 2, 1 bytes that divides every position on the last axis."""
    places = (shape[-1], data_box.start[-1], data_box.shape[-1], part.start[-1], part.shape[-1])
    return gcd(_WORD, *(n * item for n in places))


def _view(data: Bytes, data_box: Box, part: Box, item: int, word: int) -> npt.NDArray[Any]:
    words = data.view(f"u{word}").reshape(*data_box.shape[:-1], data_box.shape[-1] * item // word)
    return words[_words(part.relative_to(data_box), item, word)]


def _weighted_sum(words: npt.NDArray[Any], keys: npt.NDArray[Any]) -> int:
    """Return the sum of words times their keys, of a region that is small: views are copied."""
    return int(np.vdot(words, keys))


def _words(box: Box, item: int, word: int) -> tuple[slice, ...]:
    *outer, inner = box.slices()
    return (*outer, slice(inner.start * item // word, inner.stop * item // word))


def _total(table: npt.NDArray[Any], columns: _Keys, rows: _Keys) -> int:
    sums = np.einsum("ij,j->i", table, columns)
    return int(np.multiply(sums, rows).sum(dtype=np.uint64))


def _odd_keys(numbers: _Keys, seed: int, level: int) -> _Keys:
    """Return an odd number for each of `numbers` (SplitMix64's finaliser; Steele et al., 2014)."""
    offset = (seed + level * 0x9E3779B97F4A7C15) % MODULUS
    x = numbers * np.uint64(0xD1342543DE82EF95) + np.uint64(offset)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys: _Keys = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return keys


class IntegrityChecker:
    """Compares what one process reads with what it assembles.

    For every parameter the fingerprints of all regions that were read for some destination slice
    are summed before they are assembled, and those of the slices afterwards, from the buffers
    that are written. Both sums must agree. What is written from where it was read is summed once,
    when it is read: a fault of memory after that is found in the file, by its fingerprint. The
    slices' sums are kept, by destination file. A message to
    another process gets a checksum of its own, under a seed that all processes know.
    """

    def __init__(self, seed: int, helper: HelperThread | None = None) -> None:
        """`helper` sums large regions while they are assembled and written."""
        self._prints, self._messages = Fingerprint(seed), Fingerprint(0)
        self._helper = helper
        # Of what it was given: what waits for it, and where it is added.
        self._due: list[tuple[Callable[[], int], _Places]] = []
        self._before: dict[int, int] = {}  # by the id of a transfer that is under way
        self._after: dict[int, dict[Any, int]] = {}
        self._ready: dict[tuple[int, int], Any] = {}
        self._kept = 0
        # Of the tile under way, if it is written where it was read.
        self._in_place: list[int | _Places] = []
        self.sums: dict[int, int] = {}

    def read(self, transfer: Transfer, work: TileWork, repeat: int, copy: Copier) -> None:
        """Add what was read for a tile, and lies in the arena."""
        self._in_place = []
        if _is_in_place(transfer, work):
            self._in_place = [self._begin(transfer, work, repeat, r) for r in work.targets]
            for fingerprint in self._in_place:
                self._add(fingerprint, self._before, id(transfer))
            return
        for source in work.sources:
            if transfer.parameter.composed_sharding is not None:
                self._add(
                    self._sum_of_piece(transfer, work, source, copy), self._before, id(transfer)
                )
            else:
                self._add(self._begin(transfer, work, repeat, source), self._before, id(transfer))
        self._add(self._sum_of_value(transfer, work), self._before, id(transfer))

    def put(self, transfer: Transfer, work: TileWork, repeat: int, number: int) -> None:
        """Add what was assembled for the tile's write of this number."""
        if not work.targets:  # slices without elements
            return
        if self._in_place:
            fingerprint = self._in_place[number]
        else:
            fingerprint = self._begin(transfer, work, repeat, work.targets[number])
        cell, sums = work.writes[number].cell, self._after.setdefault(id(transfer), {})
        self._add(fingerprint, sums, cell)

    def wait(self) -> None:
        """Add what the helper sums; only then may memory that was read or put change."""
        for result_of, places in self._due:
            fingerprint = result_of()
            for sums, key in places:
                self._add(fingerprint, sums, key)
        self._due.clear()

    def _begin(
        self, transfer: Transfer, work: TileWork, repeat: int, region: Region
    ) -> int | _Places:
        """Return the fingerprint of a region; or where to add it, if the helper works it out."""
        nbytes = region.part.size * item_size(transfer.parameter.dtype)
        if self._helper is None or nbytes < _WORTH_HELP:
            return self._sum(transfer, work, repeat, region)
        places: _Places = []
        call = partial(self._sum, transfer, work, repeat, region)
        self._due.append((self._helper.start(call), places))
        return places

    def _add(self, fingerprint: int | _Places, sums: dict[Any, int], key: object) -> None:
        if isinstance(fingerprint, int):
            sums[key] = sums.get(key, 0) + fingerprint
        else:
            fingerprint.append((sums, key))

    def append_checksum(self, message: Buffer, name: str) -> None:
        """Write its checksum at the end of a message with content of `name`."""
        message[-CHECKSUM_BYTES:] = self._checksum_of(message, name)

    def check_message(self, message: Buffer, sender: int, name: str) -> None:
        """Compare a message of `sender`, with content of `name`. Raises DifferenceError."""
        if message[-CHECKSUM_BYTES:] != self._checksum_of(message, name):
            raise DifferenceError(
                f"what process {sender} sent is not what arrived",
                "run again: nothing was given a final name",
                where=f"{name!r}",
                details="the network or memory is at fault",
            )

    def _checksum_of(self, message: Buffer, name: str) -> bytes:
        content = np.frombuffer(message, np.uint8)[:-CHECKSUM_BYTES]
        checksum = self._messages.of_bytes(content) + self._messages.name_key(name)
        return (checksum % MODULUS).to_bytes(CHECKSUM_BYTES, "little")

    def _sum(self, transfer: Transfer, work: TileWork, repeat: int, region: Region) -> int:
        """Return the fingerprint of a region's part, in the destination's type.

        Of small regions that parameters share, the views and keys are kept.
        """
        ready = self._ready.get((id(region), repeat))
        if ready is not None:
            return _weighted_sum(ready[1], ready[2])
        parameter = transfer.parameter
        shape, item = parameter.shape, item_size(parameter.dtype)
        data_box, part = work.at(repeat, region.box), work.at(repeat, region.part)
        data = region.data
        converts = region.raw and parameter.dtype != parameter.src_dtype
        if converts:
            values = typed(region, region.part, word_type(parameter.src_dtype))
            converted = np.empty(values.shape, word_type(parameter.dtype))
            cast_function(parameter.src_dtype, parameter.dtype)(converted, values)
            data_box, data = part, converted.reshape(-1).view(np.uint8)
        if converts or not 0 < part.size * item <= _SMALL:
            return self._prints.of(shape, item, data_box, data, part)
        words, keys = self._prints.words_and_keys(shape, item, data_box, data, part)
        if self._kept > _KEPT:
            self._ready.clear()
            self._kept = 0
        self._ready[id(region), repeat] = region, words, keys  # `region` keeps its id
        self._kept += keys.nbytes
        return _weighted_sum(words, keys)

    def _sum_of_piece(
        self, transfer: Transfer, work: TileWork, region: Region, copy: Copier
    ) -> int:
        """Return the fingerprint of what elements of a piece become, in their places."""
        from .piece_schedule import PieceRegion, source_indices

        assert isinstance(region, PieceRegion)
        assert region.piece is not None
        parameter, piece = transfer.parameter, region.piece
        box, kind = piece.dst_box(region.part), transport_dtype(parameter.dtype)
        composed = np.zeros(box.shape, kind)
        index = tuple(slice(None, None, step or 1) for step in piece.dst_step)
        values = region.values(transport_dtype(parameter.src_dtype))
        places = [source_indices(piece, region.part)]
        copy(parameter, work.convert, [(composed[index] if index else composed, values)], places)
        data = composed.reshape(-1).view(np.uint8)
        return self._prints.of(parameter.shape, item_size(parameter.dtype), box, data, box)

    def _sum_of_value(self, transfer: Transfer, work: TileWork) -> int:
        """Return the fingerprint of elements that come from no file."""
        parameter = transfer.parameter
        value, total = parameter.value, 0
        if value is None:
            return 0
        for region in work.targets:
            data = np.full(region.part.shape, value, transport_dtype(parameter.dtype))
            content, item = data.reshape(-1).view(np.uint8), item_size(parameter.dtype)
            total += self._prints.of(parameter.shape, item, region.part, content, region.part)
        return total

    def check(self, transfer: Transfer) -> None:
        """Compare, when all tiles of `transfer` are put. Raises DifferenceError."""
        sums = self._after.pop(id(transfer), {})
        before, after = self._before.pop(id(transfer), 0) % MODULUS, sum(sums.values()) % MODULUS
        key = self._prints.name_key(transfer.parameter.name)
        for cell, fingerprint in sums.items():
            for file in transfer.targets[cell]:
                self.sums[file] = (self.sums.get(file, 0) + key * fingerprint) % MODULUS
        if before != after:
            files = sorted(file for cell_files in transfer.targets.values() for file in cell_files)
            shown = ", ".join(map(str, files[:8])) + (", ..." if files[8:] else "")
            raise DifferenceError(
                f"what was assembled for destination file {shown} is not what was read",
                "run again: nothing was given a final name",
                details="memory is at fault, or rankxform",
                where=f"{transfer.parameter.name!r}",
            )

    def take(self) -> dict[int, int]:
        """Return the sums since the last call, by file."""
        sums, self.sums = self.sums, {}
        return sums


def _is_in_place(transfer: Transfer, work: TileWork) -> bool:
    """Tell whether what a tile writes is what was read, where it was read: it has one sum."""
    if transfer.parameter.composed_sharding is not None or work.convert is not None:
        return False
    return not any(write.copies for write in work.writes)


def file_fingerprint(
    prints: Fingerprint,
    source: SourceReader,
    file: int,
    slices: Mapping[str, tuple[Shape, ExpectedSlice]],
    on_progress: OnProgress,
) -> int:
    """Return the fingerprint of a file of `source`, read in bounded pieces.

    slices: by name the full shape, and the type and box of what the file holds of it.
    """
    room, total = np.empty(_BLOCK, np.uint8), 0
    for name, (shape, expected) in slices.items():
        item, fingerprint = item_size(expected.dtype), 0
        for tile_run in (
            split_into_tiles(shape, expected.box, [[expected.box]], _BLOCK // item)
            if expected.box.size
            else ()
        ):
            for tile in tile_run:
                piece = tile.intersect(expected.box)
                assert piece is not None
                start = first_element(piece.relative_to(expected.box), expected.box.shape) * item
                data = room[: piece.size * item]
                source.read(file, name, start, data.data)
                fingerprint += prints.of(shape, item, piece, data, piece)
                on_progress(len(data))
        total += prints.name_key(name) * fingerprint
    return total % MODULUS
